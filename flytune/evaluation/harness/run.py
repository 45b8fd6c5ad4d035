"""Benchmarks of lm-evaluation-harness on base and tuned model, run in parts and combined exactly.

A part runs the model and stores its answers. Combining is the harness's own evaluation with the stored answers in place of the
model: metrics, groups and standard errors are the harness's, over all documents.
"""

import gc
import json
import logging
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from flytune.evaluation import score
from flytune.evaluation.harness import tasks as harness_tasks
from flytune.models import loading, tokenizers
from flytune.recipe import HarnessTask, Recipe
from flytune.records import TaskScore
from flytune.schema import Record, Strict

log = logging.getLogger(__name__)

BOOTSTRAPS = 100_000
"""The harness's default number of bootstrap samples, for metrics without a standard error in closed form."""
SIDES = ("base", "tuned")
_NO_JSON = ("Infinity", "-Infinity", "NaN")


class Job(Strict):
    """One pod's part of a task or group: every `shards`-th document of each task, starting with number `shard`."""

    task: HarnessTask
    shard: int
    shards: int


class JobResult(Record):
    """The answers of both models, by request."""

    model_config = ConfigDict(ser_json_inf_nan="strings")
    job: Job
    base: dict[str, list[Any]]
    tuned: dict[str, list[Any]]


class _StoredAnswers:
    """A substitute for a model: it returns stored answers to the harness's requests."""

    rank, world_size = 0, 1

    def __init__(self, answers: dict[str, list[Any]]) -> None:
        self.answers = {key: iter(responses) for key, responses in answers.items()}

    def _responses(self, instances: list[Any]) -> list[Any]:
        return [_plain(next(self.answers[_key(instance)]), instance.request_type) for instance in instances]

    loglikelihood = loglikelihood_rolling = generate_until = _responses


def jobs(recipe: Recipe) -> list[Job]:
    """Return the parts of all tasks, one per pod; none if the recipe has no tasks.

    A group is one task here: its model is loaded once, and evaluation.task_shards splits each of its tasks.

    Raises:
        RecipeError: see harness_tasks.check.
    """
    if not recipe.evaluation.tasks:
        return []
    harness_tasks.check(recipe)
    shards = recipe.evaluation.task_shards
    return [Job(task=task, shard=shard, shards=shards) for task in recipe.evaluation.tasks for shard in range(shards)]


def run(recipe: Recipe, trained: Path, job: Job, data: Path | None = None) -> JobResult:
    """Run a part on base and tuned model. An adapter's base is loaded once and run with the adapter switched off.

    `data` is the folder that flytune.evaluation.harness.data.download filled.

    Raises:
        RecipeError: the task cannot be loaded.
    """
    loading.import_libraries()

    with harness_tasks.quiet(f"{job.task.name}: data"), harness_tasks.data_in(data):
        tasks = harness_tasks.load(recipe, job.task)["tasks"]
    folder = str(loading.weights_folder(trained))
    tokenizer = tokenizers.load(folder, trust_remote_code=recipe.model.trust_remote_code)

    def answers(model: Any, side: str) -> dict[str, list[Any]]:
        with harness_tasks.quiet(f"{job.task.name}: {side} model"):
            return _answers(recipe, job, tasks, model, tokenizer)

    if recipe.method.name == "full":
        # One model in memory at a time.
        base = answers(score.base_model(recipe), "base")
        gc.collect()
        return JobResult(job=job, base=base, tuned=answers(score.tuned_model(recipe, trained), "tuned"))
    model = score.tuned_model(recipe, trained)
    with model.disable_adapter():
        base = answers(model, "base")
    return JobResult(job=job, base=base, tuned=answers(model, "tuned"))


def combine(recipe: Recipe, results: list[JobResult], out: Path, data: Path | None = None) -> list[TaskScore]:
    """Return the scores over the documents of all parts, and write the harness's results to `out` as base.json and tuned.json.

    `data` is the folder that flytune.evaluation.harness.data.download filled.

    Raises:
        RecipeError: a task cannot be loaded.
    """
    with harness_tasks.data_in(data):
        found: dict[str, Any] = {side: _results(recipe, results, side) if results else {} for side in SIDES}
    out.mkdir(parents=True, exist_ok=True)
    for side, content in found.items():
        # default=str: configurations may have functions.
        text = json.dumps(content, indent=2, default=str, ensure_ascii=False)
        (out / f"{side}.json").write_text(text + "\n", encoding="utf-8")
    return _scores(found["base"], found["tuned"])


def _answers(recipe: Recipe, job: Job, tasks: dict[str, Any], model: Any, tokenizer: Any) -> dict[str, list[Any]]:
    import torch
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=recipe.evaluation.batch_size)
    torch.manual_seed(harness_tasks.OTHER_SEED)
    by_kind: dict[str, list[Any]] = defaultdict(list)
    for request in harness_tasks.requests(tasks, job.task, lm, recipe.evaluation.apply_chat_template):
        if request.doc_id % job.shards == job.shard:
            by_kind[request.request_type] += [request] * request.repeats
    found: dict[str, list[Any]] = defaultdict(list)
    for kind, requests in by_kind.items():
        for request, response in zip(requests, getattr(lm, kind)(requests), strict=True):
            found[_key(request)].append(response)
    return dict(found)


def _key(request: Any) -> str:
    return f"{request.task_name} {request.doc_id} {request.request_type} {request.idx}"


def _plain(response: Any, kind: str) -> Any:
    """Restore a response from JSON, which has no tuples and no infinity. Generated text stays text, even if it is NaN."""
    if isinstance(response, list):
        return tuple(float(part) if part in _NO_JSON else part for part in response)
    return float(response) if kind == "loglikelihood_rolling" else response


def _results(recipe: Recipe, results: list[JobResult], side: str) -> dict[str, Any]:
    """Return the harness's results of all tasks in its own layout."""
    import lm_eval

    evaluation = recipe.evaluation
    found: dict[str, Any] = defaultdict(dict)
    for task in evaluation.tasks:
        parts = [getattr(result, side) for result in results if result.job.task == task]
        answers = {key: responses for part in parts for key, responses in part.items()}
        with harness_tasks.quiet(f"{task.name}: scores"):
            for section, content in _evaluate(recipe, task, answers).items():
                found[section] |= content
    return found | {
        "config": {
            "model": recipe.model.name_or_path if side == "base" else recipe.name,
            "model_dtype": recipe.model.dtype,
            "batch_size": evaluation.batch_size,
            "apply_chat_template": evaluation.apply_chat_template,
            "limit": {task.name: task.limit for task in evaluation.tasks},
            "bootstrap_iters": BOOTSTRAPS,
            "random_seed": harness_tasks.SEED,
            **{f"{of}_seed": harness_tasks.OTHER_SEED for of in ("numpy", "torch", "fewshot")},
        },
        "lm_eval_version": lm_eval.__version__,
    }


def _evaluate(recipe: Recipe, task: HarnessTask, answers: dict[str, list[Any]]) -> dict[str, Any]:
    from lm_eval.evaluator import evaluate

    loaded: Any = harness_tasks.load(recipe, task)
    for one in loaded["tasks"].values():
        one.set_fewshot_seed(seed=harness_tasks.OTHER_SEED)
    lm: Any = _StoredAnswers(answers)
    return dict(evaluate(lm, loaded, limit=task.limit, bootstrap_iters=BOOTSTRAPS, log_samples=False) or {})


def _scores(base: dict[str, Any], tuned: dict[str, Any]) -> list[TaskScore]:
    """Return a score for each metric of each task and group, in the harness's order."""
    found = []
    for task, values in tuned.get("results", {}).items():
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            before = base["results"][task].get(key)
            if not comma or metric.endswith("_stderr"):
                continue
            if not _is_number(value) or not _is_number(before):
                log.warning("%s %s: %s and %s, not both numbers; skipped in the scores", task, key, before, value)
                continue
            error = f"{metric}_stderr,{filtered}"
            higher = tuned["higher_is_better"].get(task, {}).get(metric)
            found.append(
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
    return found


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
