"""Secrets as Flyte requests them: cluster.yaml has their names, and no file of this project has their
values."""

from typing import Literal

from flytekit import Secret

from flytune.errors import RecipeError
from flytune.hardware import load_cluster


def secrets(kind: Literal["hub", "tracking", "notify"]) -> list[Secret]:
    """Return the secrets that pods of one kind of task get as environment variables; local runs request none.

    Raises:
        RecipeError: a secret has no group, where Flyte requires one.
    """
    secrets = []
    for position, secret in enumerate(getattr(load_cluster().secrets, kind)):
        try:
            as_variable = Secret.MountType.ENV_VAR
            secrets.append(
                Secret(
                    group=secret.group, key=secret.key, env_var=secret.env_var, mount_requirement=as_variable
                )
            )
        except ValueError as error:
            where = f"cluster.yaml: secrets.{kind}[{position}]"
            raise RecipeError(
                f"{where}: {error}; give group: the Kubernetes secret's name (only Union needs none)"
            ) from None
    return secrets
