"""Batch inference: prompts dealt out on a CPU, answered part by part on the machines named, joined on a CPU.

INFER maps shapes to map tasks over the parts: one for each row of shapes.yaml, on one of its nodes.
"""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Resources, task
from flytekit.core.array_node_map_task import array_node_map_task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.artifacts import catalog
from flytune.artifacts.build import CONTENTS
from flytune.errors import StorageError
from flytune.failures.table import RETRIES
from flytune.hardware.shapes import load_shapes
from flytune.inference import batch, prompts
from flytune.inference.prompts import Part
from flytune.models import base as models_base
from flytune.models.base import BaseRequest
from flytune.models.generation import Generation
from flytune.recipe.recipe import Recipe
from images import LIGHT
from images import TRAIN as IMAGE
from tasks.runtime.directories import fetch, fetch_file, fresh, lasting, unpack, uploaded
from tasks.runtime.pods import declare
from tasks.runtime.retries import noted, retried
from tasks.runtime.schema import trimmed
from tasks.runtime.secrets import secrets

log = logging.getLogger(__name__)


class Split(NamedTuple):
    """`keep` is the address that every attempt and execution sees, where parts that are answered lie."""

    parts: list[Part]
    folder: FlyteDirectory
    keep: str
    base: BaseRequest
    """Of the artifact's adapter; nothing is fetched for a model that was trained whole."""


def _contents(directory: FlyteDirectory) -> Path:
    """An artifact's artifact.json alone: the weights stay where they are."""
    address = str(directory.remote_source or directory.path).rstrip("/")
    return Path(FlyteFile(f"{address}/{CONTENTS}").download())


@trimmed
@task(container_image=LIGHT, requests=Resources(cpu="2", mem="4Gi"), retries=RETRIES, secret_requests=secrets("hub"))
def split_prompts(
    questions: FlyteFile,
    artifact: FlyteDirectory,
    adapters: dict[str, FlyteDirectory],
    shards: int,
    generation: Generation,
    keep: str,
) -> Split:
    """Parts of the file, each named by all that its answers depend on."""
    base = _base(artifact, adapters)
    models = catalog.fingerprint({name: _contents(found) for name, found in {"artifact": artifact, **adapters}.items()})
    folder = fresh("prompts")
    parts = prompts.split(Path(questions.download()), shards, adapters, generation, models, folder)
    keep = keep or lasting("inference") or ".checkpoints/inference"
    return Split(parts, FlyteDirectory(str(folder)), keep, base)


def _base(artifact: FlyteDirectory, adapters: dict[str, FlyteDirectory]) -> BaseRequest:
    recipe = Recipe.from_yaml(fetch_file(artifact, "recipe.yaml"))
    batch.check_names(adapters, is_adapter=recipe.method.name != "full")
    if recipe.method.name == "full":
        return BaseRequest(name_or_path=recipe.model.name_or_path)
    adapter = json.loads(fetch_file(artifact, catalog.ADAPTER).read_text(encoding="utf-8"))
    return models_base.request(models_base.pinned(recipe.model, adapter.get("revision")))


def answer_prompts(
    part: Part,
    folder: FlyteDirectory,
    artifact: FlyteDirectory,
    adapters: dict[str, FlyteDirectory],
    base: FlyteDirectory,
    keep: str,
) -> FlyteFile:
    """One part's answers, or those that an earlier execution has left at `keep`."""
    out = fresh("answers.jsonl")
    with retried():
        # Before anything is fetched: a part that is done needs no model.
        if not batch.find_answers(part, keep, out):
            with noted("answer"):
                unpack(base)
                others = {name: fetch(found) for name, found in adapters.items()}
                batch.answer_part(part, fetch_file(folder, part.file), fetch(artifact), others, keep, out)
    return FlyteFile(str(out))


@trimmed
@task(container_image=LIGHT, requests=Resources(cpu="2", mem="8Gi"), retries=RETRIES)
def join_answers(parts: list[Part], folder: FlyteDirectory, answered: list[FlyteFile], keep: str) -> FlyteDirectory:
    """One file in the order of the prompts; what was kept of its parts goes."""
    out = fresh("answers")
    with retried():
        prompts.join(fetch(folder), parts, [Path(file.download()) for file in answered], out)
        stored = uploaded(out)
    try:
        prompts.remove_answers(parts, keep)
    except StorageError as error:  # the answers are stored, and must not be lost for it
        log.warning("%s: what was kept of the parts stays there: %s", keep, error)
    return stored


INFER: dict[str, Any] = {
    shape.name: trimmed(
        array_node_map_task(
            declare(
                answer_prompts,
                f"answer_prompts_{shape.identifier}",
                shape.one_node,
                globals(),
                container_image=IMAGE,
                retries=RETRIES,
            ),
            bound_inputs={"folder", "artifact", "adapters", "base", "keep"},
        )
    )
    for shape in load_shapes()
}
