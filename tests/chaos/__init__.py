"""Chaos test of training: faults are injected, and the result must equal an undisturbed run."""
