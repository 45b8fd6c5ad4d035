"""Secrets as Flyte 2 requests them: cluster.yaml has their names, and no file of this project has their
values."""

import flyte

from flytune.hardware import load_cluster
from flytune.stages.table import Stage


def of(stage: Stage) -> list[str | flyte.Secret]:
    """Return the secrets that a stage's pods get as environment variables; local runs request none."""
    found = [one for kind in stage.secrets for one in getattr(load_cluster().secrets, kind)]
    return [flyte.Secret(key=one.key, group=one.group, as_env_var=one.env_var) for one in found]
