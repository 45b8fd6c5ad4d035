"""Benchmarks of lm-evaluation-harness on base and tuned model, run in parts and combined exactly.

A part runs the model and stores its answers. Combining is the harness's own evaluation with the stored
answers in place of the model: metrics, groups and standard errors are the harness's, over all documents.
"""

import json
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flytune.data import load_tokenizer, require_chat_template
from flytune.evaluation.harness import tasks as harness_tasks
from flytune.evaluation.task_kind import SIDES, Answers, Job, JobResult, TaskKind
from flytune.recipe import HarnessTask, Recipe
from flytune.records import TaskScore

log = logging.getLogger(__name__)

BOOTSTRAPS = 100_000
"""The harness's default number of bootstrap samples, for metrics without a standard error in closed form."""
_NO_JSON = ("Infinity", "-Infinity", "NaN")


class _StoredAnswers:
    """A substitute for a model: it returns stored answers to the harness's requests."""

    rank, world_size = 0, 1

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self.answers = {key: iter(responses) for key, responses in answers.items()}

    def _responses(self, instances: list[Any]) -> list[Any]:
        return [_plain(next(self.answers[_key(instance)]), instance.request_type) for instance in instances]

    loglikelihood = loglikelihood_rolling = generate_until = _responses


class Harness(TaskKind[HarnessTask]):
    """Tasks and groups of lm-evaluation-harness, its own or a recipe's."""

    section = HarnessTask

    def check(self, recipe: Recipe) -> None:
        harness_tasks.check(recipe)

    def download(self, recipe: Recipe, folder: Path | None) -> Mapping[str, list[str] | None]:
        if recipe.evaluation.apply_chat_template:
            use = "of evaluation.apply_chat_template"
            require_chat_template(load_tokenizer(recipe.model, recipe.data), recipe.model, use)
        measured: dict[str, list[str] | None] = {}
        with harness_tasks.data_in(folder):
            for wanted in self.tasks(recipe):
                with harness_tasks.quiet(f"{wanted.name}: data"):
                    loaded = harness_tasks.load(recipe, wanted)
                for name, task in loaded["tasks"].items():
                    # A metric that is the task's own function may return metrics of other names.
                    has_functions = any(
                        callable(metric["metric"]) for metric in task.get_config("metric_list") or []
                    )
                    measured[name] = None if has_functions else list(task.aggregation())
                for name, group in loaded["groups"].items():
                    measured[name] = [metric.metric for metric in group.aggregate_metric_list or []]
        return measured

    def asked(self, recipe: Recipe, job: Job, data: Path | None) -> Callable[[Any, Any, str], Answers]:
        name = job.task.name
        with harness_tasks.quiet(f"{name}: data"), harness_tasks.data_in(data):
            tasks = harness_tasks.load(recipe, job.task)["tasks"]

        def ask(model: Any, tokenizer: Any, side: str) -> Answers:
            with harness_tasks.quiet(f"{name}: {side} model"):
                return _answers(recipe, job, tasks, model, tokenizer)

        return ask

    def scores(
        self, recipe: Recipe, results: list[JobResult], out: Path, data: Path | None
    ) -> list[TaskScore]:
        """Return the harness's scores, and write its results as base.json and tuned.json."""
        with harness_tasks.data_in(data):
            results_of = {side: self._results(recipe, results, side) if results else {} for side in SIDES}
        for side, content in results_of.items():
            # default=str: configurations may have functions.
            text = json.dumps(content, indent=2, default=str, ensure_ascii=False)
            (out / f"{side}.json").write_text(text + "\n", encoding="utf-8")
        return _scores(results_of["base"], results_of["tuned"])

    def _results(self, recipe: Recipe, results: list[JobResult], side: str) -> dict[str, Any]:
        """Return the harness's results of all tasks in its own layout."""
        import lm_eval

        evaluation, tasks = recipe.evaluation, self.tasks(recipe)
        joined: dict[str, Any] = defaultdict(dict)
        for task in tasks:
            parts = [getattr(result, side) for result in results if result.job.task == task]
            answers = {key: responses for part in parts for key, responses in part.items()}
            with harness_tasks.quiet(f"{task.name}: scores"):
                for section, content in _evaluate(recipe, task, answers).items():
                    joined[section] |= content
        return joined | {
            "config": {
                "model": recipe.model.name_or_path if side == "base" else recipe.name,
                "model_dtype": recipe.model.dtype,
                "batch_size": evaluation.batch_size,
                "apply_chat_template": evaluation.apply_chat_template,
                "limit": {task.name: task.limit for task in tasks},
                "bootstrap_iters": BOOTSTRAPS,
                "random_seed": harness_tasks.SEED,
                **{f"{library}_seed": harness_tasks.OTHER_SEED for library in ("numpy", "torch", "fewshot")},
            },
            "lm_eval_version": lm_eval.__version__,
        }


def _answers(
    recipe: Recipe, job: Job, tasks: dict[str, Any], model: Any, tokenizer: Any
) -> dict[str, list[Any]]:
    import torch
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=recipe.evaluation.batch_size)
    torch.manual_seed(harness_tasks.OTHER_SEED)
    by_kind: dict[str, list[Any]] = defaultdict(list)
    for request in harness_tasks.requests(tasks, job.task, lm, recipe.evaluation.apply_chat_template):
        if request.doc_id % job.shards == job.shard:
            by_kind[request.request_type] += [request] * request.repeats
    answers: dict[str, list[Any]] = defaultdict(list)
    for kind, requests in by_kind.items():
        for request, response in zip(requests, getattr(lm, kind)(requests), strict=True):
            answers[_key(request)].append(response)
    return dict(answers)


def _key(request: Any) -> str:
    return f"{request.task_name} {request.doc_id} {request.request_type} {request.idx}"


def _plain(response: Any, kind: str) -> Any:
    """Restore a response from JSON, which has no tuples and no infinity. Generated text stays text, even if
    it is NaN."""
    if isinstance(response, list):
        return tuple(float(part) if part in _NO_JSON else part for part in response)
    return float(response) if kind == "loglikelihood_rolling" else response


def _evaluate(recipe: Recipe, task: HarnessTask, answers: dict[str, list[Any]]) -> dict[str, Any]:
    from lm_eval.evaluator import evaluate

    loaded: Any = harness_tasks.load(recipe, task)
    for loaded_task in loaded["tasks"].values():
        loaded_task.set_fewshot_seed(seed=harness_tasks.OTHER_SEED)
    lm: Any = _StoredAnswers(answers)
    return dict(evaluate(lm, loaded, limit=task.limit, bootstrap_iters=BOOTSTRAPS, log_samples=False) or {})


def _scores(base: dict[str, Any], tuned: dict[str, Any]) -> list[TaskScore]:
    """Return a score for each metric of each task and group, in the harness's order."""
    scores = []
    for task, values in tuned.get("results", {}).items():
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            before = base["results"][task].get(key)
            if not comma or metric.endswith("_stderr"):
                continue
            if not _is_number(value) or not _is_number(before):
                log.warning(
                    "%s %s: %s and %s, not both numbers; skipped in the scores", task, key, before, value
                )
                continue
            error = f"{metric}_stderr,{filtered}"
            higher = tuned["higher_is_better"].get(task, {}).get(metric)
            scores.append(
                TaskScore(
                    task=task,
                    metric=key,
                    higher_is_better=True if higher is None else higher,
                    base=_finite(before),
                    base_stderr=_error(base["results"][task].get(error)),
                    tuned=_finite(value),
                    tuned_stderr=_error(values.get(error)),
                    documents=values.get("sample_len", 0),
                    num_fewshot=tuned["n-shot"].get(task) or 0,
                )
            )
    return scores


def _is_number(value: Any) -> bool:
    try:
        return not math.isnan(float(value))
    except (TypeError, ValueError):
        return False


def _error(value: Any) -> float | None:
    """Return a standard error, or None for the harness's N/A."""
    return float(value) if _is_number(value) and math.isfinite(float(value)) else None


def _finite(value: Any) -> float:
    """Return the nearest finite value: JSON has no infinity."""
    return max(-sys.float_info.max, min(sys.float_info.max, float(value)))
