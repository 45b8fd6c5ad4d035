"""Batch inference: prompts are split on a CPU, answered in parts on the named shape, and joined on a CPU."""

import logging
from typing import NamedTuple

from flytune.artifacts import catalog, kept, opening
from flytune.console import step_lines
from flytune.errors import ExportError, StorageError
from flytune.files import sha256_of
from flytune.inference import PromptPart, batch, prompts
from flytune.models import BaseRequest, Generation
from flytune.models import base as models_base
from flytune.recipe import Recipe
from flytune.records.contents import CONTENTS
from flytune.stages import base_model
from flytune.stages.orchestrator import File, Folder, Orchestrator
from flytune.stages.stored import local, local_file, store

log = logging.getLogger(__name__)


class SplitOutput(NamedTuple):
    """Parts of the prompts; `scratch_folder` is the address of answered parts, shared by all attempts and
    executions."""

    parts: list[PromptPart]
    folder: Folder
    scratch_folder: str
    base: BaseRequest
    """Base model of the artifact's adapter; names no commit for a fully trained model, so that nothing is
    fetched."""


def split_prompts(
    orchestrator: Orchestrator,
    questions: File,
    artifact: Folder,
    adapters: dict[str, Folder],
    shards: int,
    generation: Generation,
    scratch_folder: str,
    trust_remote_code: bool,
) -> SplitOutput:
    """Split the file into parts, each named by everything that its answers depend on."""
    base = _base(orchestrator, artifact, adapters, trust_remote_code)
    loaded = {"artifact": artifact, **adapters}
    models = catalog.fingerprint(
        {name: local_file(orchestrator, loaded_folder, CONTENTS) for name, loaded_folder in loaded.items()}
    )
    folder = orchestrator.new_folder() / "prompts"
    columns = prompts.Columns.of(Recipe.from_yaml(local_file(orchestrator, artifact, "recipe.yaml")))
    parts = prompts.split(
        local(orchestrator, questions), shards, adapters, generation, models, folder, columns
    )
    scratch_folder = scratch_folder or orchestrator.shared_address("inference") or ".checkpoints/inference"
    return SplitOutput(parts, Folder.here(folder), scratch_folder, base)


def _base(
    orchestrator: Orchestrator, artifact: Folder, adapters: dict[str, Folder], trust_remote_code: bool
) -> BaseRequest:
    recipe = Recipe.from_yaml(local_file(orchestrator, artifact, "recipe.yaml"))
    batch.check_names(adapters, is_adapter=recipe.method.name != "full")
    if recipe.model.trust_remote_code and not trust_remote_code:
        raise ExportError(
            "artifact: its recipe has model.trust_remote_code: Python files of "
            f"{recipe.model.name_or_path!r:.200} would run in pods; read them first, then give "
            "--trust_remote_code"
        )
    if recipe.method.name == "full":
        return BaseRequest(name_or_path=recipe.model.name_or_path)
    adapter = opening.read_adapter_config(local_file(orchestrator, artifact, catalog.ADAPTER).parent)
    return models_base.request(models_base.pinned(recipe.model, adapter.get("revision")))


def answer_prompts(
    orchestrator: Orchestrator,
    part: PromptPart,
    folder: Folder,
    artifact: Folder,
    adapters: dict[str, Folder],
    base: Folder,
    scratch_folder: str,
    trust_remote_code: bool,
) -> File:
    """Answer one part, unless an earlier execution has stored its answers below `scratch_folder`."""
    out = orchestrator.new_folder() / "answers.jsonl"
    # Checked before anything is fetched: an answered part needs no model.
    if not batch.find_answers(part, scratch_folder, out):
        base_model.unpack(orchestrator, base)
        others = {name: local(orchestrator, adapter) for name, adapter in adapters.items()}
        model = local(orchestrator, artifact)
        if batch.columns_in(model).with_images:
            prompts_file = local(orchestrator, folder) / part.file
        else:
            prompts_file = local_file(orchestrator, folder, part.file)
        batch.answer_part(part, prompts_file, model, others, scratch_folder, out, trust_remote_code)
    return File.here(out)


def join_answers(
    orchestrator: Orchestrator,
    parts: list[PromptPart],
    folder: Folder,
    answered: list[File],
    scratch_folder: str,
) -> Folder:
    """Join the answers in the order of the prompts, and delete the parts below `scratch_folder`."""
    out = orchestrator.new_folder() / "answers"
    prompts.join(local(orchestrator, folder), parts, [local(orchestrator, file) for file in answered], out)
    if orchestrator.is_local():
        out = kept.keep(out, f"answers-{sha256_of(out / CONTENTS)[:12]}")
    stored = store(orchestrator, out)
    step_lines.show(f"answers: {stored.address}")
    try:
        prompts.remove_answers(parts, scratch_folder)
    except StorageError as error:  # the answers are stored; the task must not fail
        log.warning("%s: the stored parts were not deleted: %s", scratch_folder, error)
    return stored
