"""Batch inference: prompts are split on a CPU, answered in parts on the named shape, and joined on a CPU.

INFER maps shapes to map tasks over the parts: one for each row of shapes.yaml, on one of its nodes.
"""

import logging
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Resources, task
from flytekit.core.array_node_map_task import array_node_map_task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.artifacts import catalog, opening
from flytune.artifacts.build import CONTENTS
from flytune.errors import ExportError, StorageError
from flytune.failures.table import RETRIES
from flytune.hardware import load_shapes
from flytune.inference import Part, batch, prompts
from flytune.models import BaseRequest, Generation
from flytune.models import base as models_base
from flytune.recipe import Recipe
from images import LIGHT
from images import TRAIN as IMAGE
from tasks.runtime.directories import fetch, fetch_file, new_folder, shared_address, unpack_base_model, upload
from tasks.runtime.pods import declare
from tasks.runtime.retries import classify_failures, record_phase
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets
from tasks.runtime.volumes import light_pod

log = logging.getLogger(__name__)


class SplitOutput(NamedTuple):
    """Parts of the prompts; `scratch_folder` is the address of answered parts, shared by all attempts and executions."""

    parts: list[Part]
    folder: FlyteDirectory
    scratch_folder: str
    base: BaseRequest
    """Base model of the artifact's adapter; names no commit for a fully trained model, so that nothing is fetched."""


def _contents(directory: FlyteDirectory) -> Path:
    """Download only the artifact.json of an artifact."""
    address = str(directory.remote_source or directory.path).rstrip("/")
    return Path(FlyteFile(f"{address}/{CONTENTS}").download())


@without_schema
@task(
    container_image=LIGHT,
    pod_template=light_pod(),
    requests=Resources(cpu="2", mem="4Gi"),
    retries=RETRIES,
    secret_requests=secrets("hub"),
)
def split_prompts(
    questions: FlyteFile,
    artifact: FlyteDirectory,
    adapters: dict[str, FlyteDirectory],
    shards: int,
    generation: Generation,
    scratch_folder: str,
    trust_remote_code: bool,
) -> SplitOutput:
    """Split the file into parts, each named by everything that its answers depend on."""
    with classify_failures():
        base = _base(artifact, adapters, trust_remote_code)
    models = catalog.fingerprint({name: _contents(found) for name, found in {"artifact": artifact, **adapters}.items()})
    folder = new_folder() / "prompts"
    parts = prompts.split(Path(questions.download()), shards, adapters, generation, models, folder)
    scratch_folder = scratch_folder or shared_address("inference") or ".checkpoints/inference"
    return SplitOutput(parts, FlyteDirectory(str(folder)), scratch_folder, base)


def _base(artifact: FlyteDirectory, adapters: dict[str, FlyteDirectory], trust_remote_code: bool) -> BaseRequest:
    recipe = Recipe.from_yaml(fetch_file(artifact, "recipe.yaml"))
    batch.check_names(adapters, is_adapter=recipe.method.name != "full")
    if recipe.model.trust_remote_code and not trust_remote_code:
        raise ExportError(
            f"artifact: its recipe has model.trust_remote_code: Python files of {recipe.model.name_or_path!r:.200} would run "
            "in pods; read them first, then give --trust_remote_code"
        )
    if recipe.method.name == "full":
        return BaseRequest(name_or_path=recipe.model.name_or_path)
    adapter = opening.read_adapter_config(fetch_file(artifact, catalog.ADAPTER).parent)
    return models_base.request(models_base.pinned(recipe.model, adapter.get("revision")))


def answer_prompts(
    part: Part,
    folder: FlyteDirectory,
    artifact: FlyteDirectory,
    adapters: dict[str, FlyteDirectory],
    base: FlyteDirectory,
    scratch_folder: str,
    trust_remote_code: bool,
) -> FlyteFile:
    """Answer one part, unless an earlier execution has stored its answers below `scratch_folder`."""
    out = new_folder() / "answers.jsonl"
    with classify_failures():
        # Checked before anything is fetched: an answered part needs no model.
        if not batch.find_answers(part, scratch_folder, out):
            with record_phase("answer"):
                unpack_base_model(base)
                others = {name: fetch(found) for name, found in adapters.items()}
                prompts_file, model = fetch_file(folder, part.file), fetch(artifact)
                batch.answer_part(part, prompts_file, model, others, scratch_folder, out, trust_remote_code)
    return FlyteFile(str(out))


@without_schema
@task(container_image=LIGHT, pod_template=light_pod(), requests=Resources(cpu="2", mem="8Gi"), retries=RETRIES)
def join_answers(parts: list[Part], folder: FlyteDirectory, answered: list[FlyteFile], scratch_folder: str) -> FlyteDirectory:
    """Join the answers in the order of the prompts, and delete the parts below `scratch_folder`."""
    out = new_folder() / "answers"
    with classify_failures():
        prompts.join(fetch(folder), parts, [Path(file.download()) for file in answered], out)
        stored = upload(out)
    try:
        prompts.remove_answers(parts, scratch_folder)
    except StorageError as error:  # the answers are stored; the task must not fail
        log.warning("%s: the stored parts were not deleted: %s", scratch_folder, error)
    return stored


INFER: dict[str, Any] = {
    shape.name: without_schema(
        array_node_map_task(
            declare(
                answer_prompts,
                f"answer_prompts_{shape.identifier}",
                shape.one_node,
                globals(),
                container_image=IMAGE,
                retries=RETRIES,
            ),
            bound_inputs={"folder", "artifact", "adapters", "base", "scratch_folder", "trust_remote_code"},
        )
    )
    for shape in load_shapes()
}
