"""Workflows as both faces declare them: their inputs with types and default values, their results and
descriptions.

A face has a function of the same name for each; it translates the types, and runs the stages. Here they have
no bodies.
"""

# mypy: disable-error-code="empty-body"

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from flytune.cluster import uploads
from flytune.models import Generation
from flytune.recipe import Recipe, read_recipe
from flytune.records import Metrics, Plan
from flytune.registry import refresh as registry_refresh
from flytune.selftest import Matrix
from flytune.stages.orchestrator import File, Folder, StoredRows
from flytune.stages.value_types import ValueTypes, as_function

RECIPES = Path(__file__).resolve().parent.parent.parent / "recipes"


def finetune(recipe: Recipe) -> Folder:
    """Plan, prepare the data, train on the plan's machines, evaluate the export, store one artifact."""


def plan_only(recipe: Recipe) -> Plan:
    """Plan the recipe: whether it fits, on which shape, why, and at what cost; no GPU is requested."""


def prepare_only(recipe: Recipe) -> Folder:
    """Prepare the data set; a later finetune with the same data, tokenizer and data section takes it from the
    cache."""


def evaluate_only(recipe: Recipe, artifact: Folder) -> Metrics:
    """Compare a stored artifact with its base model again, on the recipe's held-out data as it is now."""


def resume(recipe: Recipe) -> Folder:
    """Resume from the run's newest complete checkpoint; fail if there is none."""


def export_only(recipe: Recipe) -> Folder:
    """Export, evaluate and store the run's newest complete checkpoint without further training; keep the
    checkpoint."""


def infer(
    artifact: Folder,
    prompts: File,
    shape: str,
    adapters: dict[str, Folder] = {},  # noqa: B006 (Flyte reads it once)
    shards: int = 1,
    generation: Generation = Generation(),  # noqa: B008 (frozen)
    scratch_folder: str = "",
    trust_remote_code: bool = False,
) -> Folder:
    """Split the prompts, answer all parts in parallel on `shape`, and join the answers in order.

    Code of the artifact and of its base model runs only with `trust_remote_code`, whatever its recipe says.
    After a failure, a second run answers only the parts that have no answers below `scratch_folder`.
    """


def refresh(recipe: Recipe, kickoff: datetime, accepted: str, days: int = 1) -> str:
    """Train on the data of the `days` before the kickoff if any of it is new, and accept the model if it is
    better."""


def rollback(accepted: str, reason: str = "rolled back by hand") -> str:
    """Accept the previously accepted model again; return its artifact's address."""


def selftest(shape: str = "cpu-2", pairs: str = "") -> Matrix:
    """Compare every method and sharding, or the named `pairs` (full/zero2,lora/zero3/cpu), with plain
    training on one shape."""


def sft_then_dpo(recipe: Recipe, preference: Recipe) -> Folder:
    """Fine-tune `recipe`; if its guards hold, tune the model by `preference`, whose reference it also is."""


def sweep(
    recipe: Recipe,
    grid: dict = {},  # type: ignore[type-arg]  # noqa: B006 (Flyte's type for any JSON object; only read)
    changes: list[dict] = [],  # type: ignore[type-arg]  # noqa: B006
    concurrency: int = 2,
    min_success_ratio: float = 0.5,
    max_points: int = 24,
) -> Folder:
    """Fine-tune every combination of `grid` ({dotted field: values}), or every one of `changes` ([{dotted
    field: value}])."""


def finetune_on_file(recipe: Recipe, data: File) -> Folder:
    """Fine-tune on a file: JSON Lines, JSON, CSV or Parquet."""


def finetune_on_folder(recipe: Recipe, data: Folder) -> Folder:
    """Fine-tune on the files of a folder."""


def finetune_on_dataset(recipe: Recipe, data: StoredRows) -> Folder:
    """Fine-tune on a structured dataset in Parquet: a data frame of another task."""


def as_workflow(body: Callable[..., Any], types: ValueTypes) -> Callable[..., Any]:
    """Return a face's function with the signature and description of the workflow of its name, in the face's
    types."""
    declared = globals()[body.__name__]
    workflow: Callable[..., Any] = as_function(
        body, declared, body.__module__, body.__name__, types.signature(declared)
    )
    return workflow


def scheduled_inputs(where: str, recipe_file: str | Path, accepted: str, days: int) -> dict[str, Any]:
    """Return the fixed inputs of a scheduled refresh.

    Args:
        where: the schedule, for errors.
        recipe_file: recipe, read now and fixed; a relative path starts in recipes/.
        accepted: folder or fsspec address of the history of accepted models.
        days: days before each kickoff whose data is trained on.

    Raises:
        RecipeError: the recipe cannot be read, names no data.heldout_path, an adapter's base without its
            commit, or files of this machine: a schedule uploads nothing.
    """
    recipe = read_recipe(RECIPES / recipe_file)
    registry_refresh.check(recipe)
    uploads.refuse(recipe, f"{where}: recipe {recipe.name}")
    return {"recipe": recipe, "accepted": accepted, "days": days}
