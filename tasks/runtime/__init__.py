"""Shared parts of the Flyte tasks: pods, elastic jobs, retries, directories, schemas, secrets."""
