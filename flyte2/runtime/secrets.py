"""Secrets as Flyte 2 requests them: cluster.yaml has their names, and no file of this project has their
values."""

import flyte

from flytune.hardware import load_cluster
from flytune.stages.table import Stage


def of(stage: Stage) -> list[str | flyte.Secret]:
    """Return the secrets that a stage's pods get as environment variables; local runs request none."""
    keys = [secret for kind in stage.secrets for secret in getattr(load_cluster().secrets, kind)]
    return [flyte.Secret(key=secret.key, group=secret.group, as_env_var=secret.env_var) for secret in keys]
