"""Tasks of lm-evaluation-harness: looked up and checked before training, and loaded with a recipe's
settings."""

import difflib
import importlib.util
import io
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any

from flytune import patches
from flytune.console import output
from flytune.data import harness_tasks
from flytune.errors import RecipeError
from flytune.recipe import Evaluation, HarnessTask, Recipe

SEED, OTHER_SEED = 0, 1234
"""The harness's default seeds: for `random`; for numpy, torch and the choice of few-shot examples."""
# Settings of tasks that are refused, and the reason.
_REFUSED = {
    "unsafe_code": "runs code that the model writes, which Flytune does not do in pods that have secrets",
    "doc_to_image": "shows pictures, which causal language models do not read",
    "doc_to_audio": "plays sounds, which causal language models do not hear",
}


def of_recipe(evaluation: Evaluation) -> list[HarnessTask]:
    """List the tasks that are the harness's."""
    return [task for task in evaluation.tasks if isinstance(task, HarnessTask)]


def check(recipe: Recipe) -> None:
    """Look up the recipe's tasks in the harness's index, without reading data or contacting a hub.

    Raises:
        RecipeError: the harness is not installed; include_path is not a folder; or all mistakes at once:
            unknown names, tasks named twice, tasks that are refused.
    """
    index = _manager(recipe.evaluation).task_index
    problems: list[str] = []
    owners: dict[str, str] = {}
    for task in of_recipe(recipe.evaluation):
        if task.name not in index:
            problems.append(f"evaluation.tasks: {_unknown(task.name, index, recipe.evaluation)}")
            continue
        for leaf in dict.fromkeys(_leaves(task.name, index)):
            if leaf in owners:
                problems.append(
                    f"evaluation.tasks: {leaf} is named twice, by {owners[leaf]} and by {task.name}"
                )
            owners[leaf] = task.name
            config = (index[leaf].cfg if leaf in index else None) or {}
            problems += [
                f"evaluation.tasks: {leaf} {why}" for key, why in _REFUSED.items() if config.get(key)
            ]
    if problems:
        raise RecipeError.of(f"recipe {recipe.name}", problems)


def load(recipe: Recipe, wanted: HarnessTask) -> dict[str, Any]:
    """Load a task, or a group with all its tasks, with the harness's TaskManager, and set its few-shot count.

    A task whose own YAML has num_fewshot: 0 keeps it, as in the harness.

    Raises:
        RecipeError: it cannot be loaded (missing data, a mistake in its YAML), or is refused.
    """
    _seed()
    try:
        loaded = _manager(recipe.evaluation).load([wanted.name])
    except Exception as error:  # raised by the task's own code, the data's reader, or the hub
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise RecipeError(f"evaluation.tasks: {wanted.name}: cannot be loaded: {reason}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise RecipeError(f"evaluation.tasks: {name} {_REFUSED['unsafe_code']}")
        shots = task.get_config("num_fewshot")
        if shots is None or (wanted.num_fewshot is not None and shots != 0):
            task.set_config(key="num_fewshot", value=wanted.num_fewshot or 0)
    return dict(loaded)


@contextmanager
def data_in(folder: Path | None) -> Iterator[None]:
    """Store and read data sets in `folder` while the context is open; with None, in this machine's own
    cache."""
    if folder is None:
        yield
        return
    with patches.datasets.CACHE.replaced(folder):
        yield


def requests(tasks: dict[str, Any], wanted: HarnessTask, lm: Any, as_chat: bool) -> list[Any]:
    """Return all requests to the model `lm`, for the documents of all tasks up to `wanted.limit`.

    Few-shot examples are drawn document by document from one random state, so a part of the documents must
    build the requests of all to get the same examples.
    """
    _seed()
    requests: list[Any] = []
    for task in tasks.values():
        task.set_fewshot_seed(seed=OTHER_SEED)
        task.build_all_requests(
            limit=wanted.limit,
            apply_chat_template=as_chat,
            fewshot_as_multiturn=True,
            chat_template=lm.apply_chat_template if as_chat else None,
            tokenizer_name=lm.tokenizer_name if as_chat else "",
        )
        requests += task.instances
    return requests


@contextmanager
def quiet(label: str) -> Iterator[None]:
    """Silence the harness's notices and prints, and name its progress bars `label`; they appear after two
    seconds."""
    import datasets

    logger = logging.getLogger("lm_eval")
    level, had_bars = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with redirect_stdout(io.StringIO()), output.named(label, delay=2):
            yield
    finally:
        logger.setLevel(level)
        if not had_bars:
            datasets.enable_progress_bars()


def _seed() -> None:
    import numpy

    random.seed(SEED)
    numpy.random.seed(OTHER_SEED)


def _manager(evaluation: Evaluation) -> Any:
    """Return the index of the harness's tasks and the recipe's own; of its own alone if no others are needed
    (5 s faster)."""
    folder = harness_tasks.folder(evaluation)
    if folder:
        manager = _indexed(folder, include_defaults=False)
        if all(task.name in manager.task_index for task in of_recipe(evaluation)):
            return manager
    return _indexed(folder, include_defaults=True)


@cache
def _indexed(folder: Path | None, include_defaults: bool) -> Any:
    if importlib.util.find_spec("lm_eval") is None:
        raise RecipeError(
            "evaluation.tasks: lm-evaluation-harness is not installed here: pip install 'flytune[harness]'"
        )
    from lm_eval.tasks import TaskManager

    # The user's tasks are read by YAML 1.2, as recipes are; the harness's own tasks as the harness reads
    # them.
    patches.lm_eval.YAML_LOADER.install(partial(harness_tasks.loader, patches.lm_eval.YAML_LOADER.original()))
    with quiet("tasks"):
        manager = TaskManager(include_path=folder, include_defaults=include_defaults)
    read = manager._factory._load_full_config

    def with_data(entry: Any, overrides: Any = None) -> Any:
        return harness_tasks.with_data(read(entry, overrides), entry.yaml_path)

    # The harness looks for local data in the working directory only.
    patches.lm_eval.TASK_CONFIG.on(manager._factory, with_data)
    return manager


def _leaves(name: str, index: Any) -> Iterator[str]:
    """Yield the tasks of a name: the task itself, or those of a group or tag."""
    entry = index.get(name)
    kind = entry.kind.name if entry else "TASK"
    if kind == "TAG":
        yield from sorted(entry.tags)
    elif kind == "GROUP":
        members = entry.cfg.get("task") or []
        for member in members if isinstance(members, list) else [members]:
            name = member if isinstance(member, str) else member.get("task") or member.get("group")
            if isinstance(name, str):  # otherwise a group that is defined in place
                yield from _leaves(name, index)
    else:
        yield name


def _unknown(name: str, index: Any, evaluation: Evaluation) -> str:
    close = difflib.get_close_matches(name, index, n=3)
    text = f"{name}: unknown to the harness" + (f"; did you mean {' or '.join(close)}?" if close else "")
    if (folder := harness_tasks.folder(evaluation)) is None:
        return text
    if not (files_there := sorted(folder.rglob("*.yaml"))):
        return f"{text}; {evaluation.include_path} has no YAML file here{harness_tasks.NOT_UPLOADED}"
    unread = [f"{path.name} ({reason})" for path in files_there if (reason := _fault(path))]
    return text + (f"; in {evaluation.include_path}, not read: {', '.join(unread)}" if unread else "")


def _fault(path: Path) -> str:
    """Return the reason why the harness silently skips a file, or an empty text."""
    from lm_eval.tasks._index import TaskIndex
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        TaskIndex.process_cfg(load_yaml(path, resolve_func=False), path, {})
    except Exception as error:  # noqa: BLE001 (as the harness does)
        return " ".join(str(error).split())[:200]
    return ""
