"""Flyte as it runs stages: tasks, values, storage, pods, elastic jobs, retries, schemas, secrets."""
