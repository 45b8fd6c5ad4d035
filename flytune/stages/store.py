"""Storage of one artifact, complete or not at all."""

import logging
from pathlib import Path

from flytune.artifacts import build, kept, notify, publish
from flytune.console import run_lines, step_lines
from flytune.evaluation import guards
from flytune.recipe import Recipe
from flytune.records import Manifest, Metrics, Plan, TrainingResult
from flytune.registry import approval
from flytune.stages.harness import combine_scores
from flytune.stages.orchestrator import File, Folder, Listed, Orchestrator, Report
from flytune.stages.stored import local, local_without, store, with_checkpoint_folder
from flytune.storage import Storage
from flytune.training import checkpoints

log = logging.getLogger(__name__)


def store_artifact(
    orchestrator: Orchestrator,
    report: Report,
    recipe: Recipe,
    plan: Plan,
    dataset: Folder,
    trained: Folder,
    metrics: Metrics,
    answers: list[File],
    harness_data: Folder,
) -> Listed:
    """Store the artifact with its report, which is also shown; publish it if the recipe asks for that, or
    fail.

    Where a person has to approve it first, the question is stored with it, and the faces ask it
    (flytune.registry.approval).

    `answers` are the answers to the parts of the harness's tasks; `harness_data` is needed to score them.
    """
    metrics, results = combine_scores(orchestrator, recipe, metrics, answers, harness_data)
    broken = guards.broken(recipe, metrics)
    small, model = local_without(orchestrator, build.WEIGHTS, trained)
    out = orchestrator.new_folder() / recipe.name
    folder = build.store(
        recipe, plan, local(orchestrator, dataset), small, metrics, out, results, model, broken
    )
    report((folder / "report.html").read_text(encoding="utf-8"))
    name = publish.published_name(folder, recipe)
    if orchestrator.is_local() and not publish.publishes(recipe, broken):
        folder = kept.keep(folder, name)
    # 405B parameters are 811 GB: no weight passes through this pod, unless a hub is to get it.
    stored = store(orchestrator, folder, build.weight_files(folder, model) if model else None, model)

    def unpublished() -> str:
        return str(kept.keep(folder, name)) if orchestrator.is_local() else stored.address

    # An error leaves the checkpoints, so that the next run has nothing left but to publish.
    published = publish.attempt(
        folder, recipe, broken, unpublished, Storage(stored.address, "") if model else None
    )
    _clear_checkpoints(with_checkpoint_folder(orchestrator, recipe), folder)
    if recipe.publish.approval and recipe.publish.address and not broken:
        approval.ask(_absolute(orchestrator, stored.address), recipe, publish_to=recipe.publish.address)
    else:
        notify.send(
            recipe, "succeeded", notify.success_message(recipe, metrics, published or stored.address, broken)
        )
    address = published or stored.address
    if is_here := orchestrator.is_local() and "://" not in published:
        address = _absolute(orchestrator, address)
    for line in run_lines.result_lines(f"{recipe.name}: artifact", address):
        step_lines.show(line)
    # Where it is here, the last line of pyflyte is the address that a person reads.
    return _listed(address if is_here else stored.address, folder, recipe, metrics)


def _absolute(orchestrator: Orchestrator, address: str) -> str:
    return str(Path(address).absolute()) if orchestrator.is_local() else address


def _clear_checkpoints(recipe: Recipe, folder: Path) -> None:
    records = Manifest.read(folder / "manifest.json"), TrainingResult.read(folder / "training.json")
    try:
        checkpoints.clear(recipe, *records)
    except Exception as error:  # noqa: BLE001 (the artifact is stored; the task must not fail)
        log.warning("%s: the checkpoints could not be deleted: %s", recipe.name, error)


def _listed(address: str, folder: Path, recipe: Recipe, metrics: Metrics) -> Listed:
    partitions = {
        "recipe": recipe.name,
        "base_model": recipe.model.name_or_path,
        "data": Manifest.read(folder / "manifest.json").content_sha256,
    }
    return Listed(address, folder, partitions, partitions | build.facts(folder, recipe, metrics))
