"""Store: one artifact, whole or not at all."""

import json
import logging
from pathlib import Path
from typing import Annotated, Any

from flytekit import Artifact, Deck, Resources, task
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.artifacts import build, notify, publish
from flytune.failures.table import RETRIES
from flytune.recipe.recipe import Recipe
from flytune.records.dataset import Manifest
from flytune.records.metrics import Metrics
from flytune.records.plan import Plan
from flytune.records.training import TrainingResult
from flytune.training import checkpoints
from images import LIGHT
from tasks.runtime.directories import fetch, fresh, placed, uploaded
from tasks.runtime.harness_data import combined
from tasks.runtime.retries import retried
from tasks.runtime.schema import trimmed
from tasks.runtime.secrets import secrets

log = logging.getLogger(__name__)

ARTIFACT = Artifact(name="flytune", partition_keys=["recipe", "base_model", "data"])
"""Its name in Union's catalogue; open-source Flyte keeps the same as metadata of the output, and asks nothing."""


class Facts:
    """What the console shows of an artifact without opening it: metadata of the task's output."""

    def __init__(self, folder: Path, recipe: Recipe, metrics: Metrics) -> None:
        self.partitions: dict[str, str] = {
            "recipe": recipe.name,
            "base_model": recipe.model.name_or_path,
            "data": Manifest.read(folder / "manifest.json").content_sha256,
        }
        self._facts = {**self.partitions, **build.facts(folder, recipe, metrics)}

    def serialize_to_string(self, context: Any, variable: str) -> tuple[str, str]:
        """Flytekit's protocol for what it puts beside an output."""
        return "flytune", json.dumps(self._facts)


@trimmed
@task(
    container_image=LIGHT,
    requests=Resources(cpu="2", mem="8Gi"),
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
    data: FlyteDirectory,
) -> Annotated[FlyteDirectory, ARTIFACT]:
    """Store the artifact, with its report as a file and as this task's deck; published where the recipe says.

    `answers` are those to the parts of the harness's tasks, whose `data` scoring needs.
    """
    with retried():
        metrics, results = combined(recipe, metrics, answers, data)
        folder = build.store(recipe, plan, fetch(dataset), fetch(trained), metrics, fresh(recipe.name), results)
    Deck("Report", (folder / "report.html").read_text(encoding="utf-8"))
    with retried():
        stored = uploaded(folder)
    published = publish.attempt(folder, recipe, metrics)
    records = Manifest.read(folder / "manifest.json"), TrainingResult.read(folder / "training.json")
    try:
        checkpoints.clear(placed(recipe), *records)
    except Exception as error:  # noqa: BLE001 (the artifact is stored, and must not be lost for it)
        log.warning("%s: its checkpoints stay, for they cannot be removed: %s", recipe.name, error)
    notify.send(recipe, "succeeded", notify.success_message(recipe, metrics, published or stored.path))
    facts = Facts(folder, recipe, metrics)
    return ARTIFACT.create_from(stored, facts, **facts.partitions)
