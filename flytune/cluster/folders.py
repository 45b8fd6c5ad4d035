"""Folders that a recipe names, compared with the volumes that a cluster's pods mount."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flytune.data import sources
from flytune.hardware import Cluster
from flytune.recipe import Recipe


class _Use(NamedTuple):
    """A path of a recipe, and the pods that read it or write to it."""

    key: str
    path: str
    pods: list[str | None]
    """Names of shapes; None stands for the pods of the light tasks."""
    otherwise: str
    """The alternatives to the folder, for messages."""
    is_written: bool = False


def problems(recipe: Recipe, cluster: Cluster, shape: str, uploaded: bool = True) -> list[str]:
    """List the folders of a recipe that its pods do not have, or cannot write to, a sentence each.

    Args:
        recipe: a recipe.
        cluster: the cluster whose pods run it.
        shape: the row of shapes.yaml that trains; with "auto" only the pods of the light tasks are compared.
        uploaded: whether local paths have been uploaded; before that, paths that are read and on no volume
            are not problems.
    """
    problems = []
    for use in _uses(recipe, shape):
        if use.is_written and "://" not in use.path and not use.path.startswith(("/", "~")):
            problems.append(
                f"{use.key}: {use.path}: a relative path is a folder on a pod's own disk, lost with it; "
                f"{use.otherwise}"
            )
            continue
        path = os.path.abspath(Path(use.path.removeprefix("file://")).expanduser())
        if not use.path.startswith(("/", "~", "file://")) or not (
            uploaded or use.is_written or cluster.has_mounted(path)
        ):
            continue
        of_pods = [_problem(use, path, pods, cluster) for pods in use.pods]
        problems += [f"{use.key}: {use.path}: {problem}" for problem in of_pods if problem][:1]
    return problems


def _uses(recipe: Recipe, shape: str) -> Iterator[_Use]:
    light: list[str | None] = [None]
    trains = [*([] if shape == "auto" else [shape]), *light]
    scores = recipe.evaluation.shape or shape
    evaluates = [*([] if scores == "auto" else [scores]), *light]
    data, address = recipe.data, "name an address (s3://...)"
    yield _Use(
        "model.name_or_path",
        recipe.model.name_or_path,
        [*dict.fromkeys([*trains, *evaluates])],
        f"{address} or a model of the hub",
    )
    for key, path in (
        ("data.path", data.path),
        *((f"data.sources[{index}].path", source.path) for index, source in enumerate(data.sources)),
        ("data.heldout_path", data.heldout_path),
        ("data.chat_template", data.chat_template),
    ):
        if path is not None and not (key == "data.chat_template" and path in sources.shipped_templates()):
            yield _Use(key, path, light, address)
    if recipe.method.adapter is not None:
        yield _Use("method.adapter", recipe.method.adapter, trains, address)
    if (teacher := recipe.objective.teacher(recipe.model)) is not None:
        yield _Use("objective.teacher_model_name_or_path", teacher.name_or_path, trains, address)
    if recipe.evaluation.include_path is not None and recipe.evaluation.tasks:
        yield _Use("evaluation.include_path", recipe.evaluation.include_path, evaluates, address)
    if recipe.checkpoints.folder is not None:
        otherwise = (
            f"{address}, or leave the field out: checkpoints are then below the cluster's raw output location"
        )
        yield _Use("checkpoints.folder", recipe.checkpoints.folder, trains, otherwise, is_written=True)
    if recipe.publish.address is not None:
        otherwise = f"{address}, or leave the field out: the artifact is in Flyte's storage in any case"
        yield _Use("publish.address", recipe.publish.address, light, otherwise, is_written=True)


def _problem(use: _Use, path: str, shape: str | None, cluster: Cluster) -> str | None:
    """Return why the pods of a shape, or of the light tasks (None), cannot use a path."""
    pods = "the light tasks' pods" if shape is None else f"the pods of {shape}"
    volume = cluster.volume_at(path, shape)
    if volume is None:
        if not use.is_written and shape is None and os.path.exists(path):  # the image has it
            return None
        if others := [volume.name for volume in cluster.volumes if volume.has(path)]:
            add = "set light_tasks: true" if shape is None else f"add {shape} to its shapes"
            return f"volume {others[0]} of cluster.yaml is not mounted into {pods}; {add}, or {use.otherwise}"
        return (
            f"no volume of cluster.yaml is mounted there in {pods}; add one to volumes and register "
            f"again, {use.otherwise}"
        )
    if not use.is_written:
        return None
    if volume.read_only:
        return (
            f"volume {volume.name} of cluster.yaml is read-only; name a folder of another volume, "
            f"{use.otherwise}"
        )
    if not volume.is_shared:
        return (
            f"volume {volume.name} of cluster.yaml is another folder on each node, and what is written there "
            "would not be found from another one; if all nodes have the same file system there, write "
            f"shared: true; else {use.otherwise}"
        )
    return None
