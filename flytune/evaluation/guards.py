"""Guards (evaluation.must_not_fall): benchmark scores that training must not make worse."""

from collections.abc import Mapping, Sequence

from flytune.recipe import Guard, Recipe
from flytune.records import Metrics, TaskScore
from flytune.sentences import counted

# 0.4 - 0.3 is more than 0.1, in floating point.
_ROUNDING = 1e-9


def broken(recipe: Recipe, metrics: Metrics) -> list[str]:
    """Return a sentence for each broken guard.

    A guard is broken if the tuned model is worse than the base by more than the margin, whether higher or
    lower is better. The margin is compared with the difference itself: standard errors are reported, but not
    subtracted.
    """
    return [
        sentence for guard in recipe.evaluation.must_not_fall if (sentence := _fault(guard, metrics.tasks))
    ]


def never_measured(recipe: Recipe, measured: Mapping[str, Sequence[str] | None]) -> list[str]:
    """Return a sentence for each guard whose task or metric would not be measured.

    `measured` has the metrics of each task and group; None for a task whose metrics are only known after it
    has run.
    """
    problems = []
    for guard in recipe.evaluation.must_not_fall:
        metrics = measured.get(guard.task, [])
        if (
            metrics is None
            or (guard.metric is None and metrics)
            or any(_is_meant(metric, guard.metric or "") for metric in metrics)
        ):
            continue
        there = ", ".join(
            f"{name} ({', '.join(names_there)})" for name, names_there in measured.items() if names_there
        )
        name = f"{guard.task} {guard.metric}" if guard.metric else guard.task
        problems.append(
            f"evaluation.must_not_fall: {name}: not measured by evaluation.tasks, which measures: {there}"
        )
    return problems


def _fault(guard: Guard, scores: list[TaskScore]) -> str | None:
    of_task = [score for score in scores if score.task == guard.task]
    score = next((score for score in of_task if _is_meant(guard.metric, score.metric)), None)
    if score is None:
        there = ", ".join(score.metric for score in of_task) or "none of that task"
        name = f"{guard.task} {guard.metric}" if guard.metric else guard.task
        return (
            f"evaluation.must_not_fall: {name} was not measured, so nothing shows that it did not fall; "
            f"measured: {there}"
        )
    worse = score.base - score.tuned if score.higher_is_better else score.tuned - score.base
    if worse <= guard.margin + _ROUNDING:
        return None
    way = "fell" if score.higher_is_better else "rose"
    errors = (
        f"standard errors {_number(score.base_stderr)} and {_number(score.tuned_stderr)}, "
        f"{counted(score.documents, 'document')}"
    )
    return (
        f"{score.task} {score.metric} {way} from {_number(score.base)} to {_number(score.tuned)}, by "
        f"{_number(worse)} ({errors}); evaluation.must_not_fall allows {guard.margin:g}"
    )


def _is_meant(wanted: str | None, metric: str) -> bool:
    """Return whether a guard names a metric: with the harness's filter (acc,none) or without."""
    return wanted is None or wanted in (metric, metric.partition(",")[0])


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
