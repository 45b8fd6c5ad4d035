"""One recipe in many variants: each point a whole fine-tune, then a table, a picture, and the best one's recipe.

pyflyte run workflows/sweep.py sweep --recipe recipes/demo-qlora.yaml --grid '{"training.learning_rate": [5e-4, 1e-3, 2e-3]}'
"""

from flytekit import LaunchPlan, Resources, dynamic, map_task, workflow
from flytekit.types.directory import FlyteDirectory

from flytune.recipe import Recipe
from images import TRAIN
from tasks.interfaces import trimmed
from tasks.sweep import compare_points, draw_points, note_failure
from workflows.finetune import finetune


@workflow(on_failure=note_failure)
def sweep_point(recipe: Recipe, notes: str) -> FlyteDirectory:
    """One point: a fine-tune that leaves the reason below `notes` when it fails."""
    return finetune(recipe=recipe)


# Flyte maps over launch plans, not over workflows; each point is an execution of its own in the console.
SWEEP_POINT = LaunchPlan.get_or_create(sweep_point, name="sweep_point")


# In the image that trains: it compiles finetune anew, all its tasks with it.
@trimmed
@dynamic(container_image=TRAIN, requests=Resources(cpu="1", mem="4Gi"), node_dependency_hints=[SWEEP_POINT])
def run_points(recipes: list[Recipe], notes: str, concurrency: int, successes: int) -> list[FlyteDirectory | None]:
    """At most `concurrency` at a time; given up as soon as `successes` are out of reach. None stands for a failed one."""
    # The ratio has no say beside min_successes; that it is not 1 makes flytekit allow for None.
    points = map_task(SWEEP_POINT, concurrency=concurrency, min_successes=successes, min_success_ratio=0.5)
    artifacts: list[FlyteDirectory | None] = points(recipe=recipes, notes=[notes] * len(recipes))
    return artifacts


@workflow
def sweep(
    recipe: Recipe,
    grid: dict = {},  # type: ignore[type-arg]  # noqa: B006 (Flyte's word for any JSON object; the default is only read)
    changes: list[dict] = [],  # type: ignore[type-arg]  # noqa: B006
    concurrency: int = 2,
    min_success_ratio: float = 0.5,
    max_points: int = 24,
) -> FlyteDirectory:
    """Fine-tune every combination of `grid` ({dotted field: values}), or every one of `changes` ([{dotted field: value}])."""
    drawn = draw_points(
        recipe=recipe,
        grid=grid,
        changes=changes,
        concurrency=concurrency,
        min_success_ratio=min_success_ratio,
        max_points=max_points,
    )
    artifacts = run_points(recipes=drawn.runnable, notes=drawn.notes, concurrency=concurrency, successes=drawn.successes)
    return compare_points(points=drawn.points, artifacts=artifacts, notes=drawn.notes)
