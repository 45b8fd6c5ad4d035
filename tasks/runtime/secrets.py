"""Secrets as Flyte requests them: their names stand in cluster.yaml, their values nowhere in this project."""

from typing import Literal

from flytekit import Secret

from flytune.errors import RecipeError
from flytune.hardware.cluster import load_cluster


def secrets(kind: Literal["hub", "tracking", "notify"]) -> list[Secret]:
    """What the pods of one kind of task see as environment variables; elsewhere than in a pod nothing is asked for.

    Raises:
        RecipeError: a secret without a group, where Flyte wants one.
    """
    found = []
    for position, secret in enumerate(getattr(load_cluster().secrets, kind)):
        try:
            as_variable = Secret.MountType.ENV_VAR
            found.append(Secret(group=secret.group, key=secret.key, env_var=secret.env_var, mount_requirement=as_variable))
        except ValueError as error:
            where = f"cluster.yaml: secrets.{kind}[{position}]"
            raise RecipeError(
                f"{where}: {error}; give group: the Kubernetes secret's name (Union alone does without)"
            ) from None
    return found
