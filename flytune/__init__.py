"""Flytune: fine-tune language models on Flyte, from one recipe to an artifact that is proven, kept and used."""
