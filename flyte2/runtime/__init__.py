"""Flyte 2 as it runs stages: tasks, values, storage, pods, ranks, failures, inputs."""
