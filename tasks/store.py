"""Storage of one artifact, complete or not at all."""

import json
import logging
from pathlib import Path
from typing import Annotated, Any

from flytekit import Artifact, Deck, Resources, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.artifacts import build, notify, publish
from flytune.failures.table import RETRIES
from flytune.planning import pod_disk
from flytune.recipe import Recipe
from flytune.records import Manifest, Metrics, Plan, TrainingResult
from flytune.storage import Storage
from flytune.training import checkpoints
from images import LIGHT
from tasks.runtime.directories import fetch, fetch_without, new_folder, upload, with_checkpoint_folder
from tasks.runtime.harness_data import combine_scores
from tasks.runtime.retries import classify_failures
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets
from tasks.runtime.volumes import light_pod

log = logging.getLogger(__name__)

ARTIFACT = Artifact(name="flytune", partition_keys=["recipe", "base_model", "data"])
"""Artifact as Union's catalogue lists it; open-source Flyte only stores the same as metadata of the output."""


class Facts:
    """Metadata of the task's output, which the console shows without opening the artifact."""

    def __init__(self, folder: Path, recipe: Recipe, metrics: Metrics) -> None:
        self.partitions: dict[str, str] = {
            "recipe": recipe.name,
            "base_model": recipe.model.name_or_path,
            "data": Manifest.read(folder / "manifest.json").content_sha256,
        }
        self._facts = {**self.partitions, **build.facts(folder, recipe, metrics)}

    def serialize_to_string(self, context: Any, variable: str) -> tuple[str, str]:
        """Return the metadata's key and value, as flytekit's protocol for an output's metadata requires."""
        return "flytune", json.dumps(self._facts)


@without_schema
@task(
    container_image=LIGHT,
    pod_template=light_pod(),
    requests=Resources(cpu="2", mem="8Gi", ephemeral_storage=f"{pod_disk.STORE_GIB}Gi"),
    retries=RETRIES,
    secret_requests=[*secrets("hub"), *secrets("notify")],
    enable_deck=True,
    deck_fields=(),
)
def store_artifact(
    recipe: Recipe,
    plan: Plan,
    dataset: FlyteDirectory,
    trained: FlyteDirectory,
    metrics: Metrics,
    answers: list[FlyteFile],
    harness_data: FlyteDirectory,
) -> Annotated[FlyteDirectory, ARTIFACT]:
    """Store the artifact with its report, also as this task's deck; publish it if the recipe asks for that.

    `answers` are the answers to the parts of the harness's tasks; `harness_data` is needed to score them.
    """
    with classify_failures():
        metrics, results = combine_scores(recipe, metrics, answers, harness_data)
        small, model = fetch_without(build.WEIGHTS, trained)
        folder = build.store(recipe, plan, fetch(dataset), small, metrics, new_folder() / recipe.name, results, model)
    Deck("Report", (folder / "report.html").read_text(encoding="utf-8"))
    with classify_failures():
        # 405B parameters are 811 GB: no weight passes through this pod, unless a hub is to get it.
        stored = upload(folder, build.weight_files(folder, model) if model else None, model)
    published = publish.attempt(folder, recipe, metrics, Storage(stored.path, "") if model else None)
    records = Manifest.read(folder / "manifest.json"), TrainingResult.read(folder / "training.json")
    try:
        checkpoints.clear(with_checkpoint_folder(recipe), *records)
    except Exception as error:  # noqa: BLE001 (the artifact is stored; the task must not fail)
        log.warning("%s: the checkpoints could not be deleted: %s", recipe.name, error)
    notify.send(recipe, "succeeded", notify.success_message(recipe, metrics, published or stored.path))
    facts = Facts(folder, recipe, metrics)
    return ARTIFACT.create_from(stored, facts, **facts.partitions)
