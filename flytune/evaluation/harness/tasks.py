"""Tasks of lm-evaluation-harness: found, refused before anything is paid for, and loaded as a recipe asks them."""

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
from unittest.mock import patch

from tqdm import tqdm

from flytune.data import harness_tasks
from flytune.errors import RecipeError
from flytune.recipe.recipe import Recipe
from flytune.recipe.sections import Evaluation, HarnessTask

SEED, OTHER_SEED = 0, 1234
"""The harness's own defaults: of random; of numpy, torch and the choice of few-shot examples."""
# The harness runs what such a task's YAML or model says.
_REFUSED = {
    "unsafe_code": "runs code that the model writes, which Flytune does not do in pods that hold secrets",
    "doc_to_image": "shows pictures, which causal language models do not read",
    "doc_to_audio": "plays sounds, which causal language models do not hear",
}


def check(recipe: Recipe) -> None:
    """Looks the recipe's tasks up in the harness's index; reads no data and asks no hub.

    Raises:
        RecipeError: the harness is not installed; include_path is no folder; or all mistakes at once: unknown names, tasks
            asked twice, tasks that are refused.
    """
    index = _manager(recipe.evaluation).task_index
    problems: list[str] = []
    owners: dict[str, str] = {}
    for asked in recipe.evaluation.tasks:
        if asked.name not in index:
            problems.append(f"evaluation.tasks: {_unknown(asked.name, index, recipe.evaluation)}")
            continue
        for leaf in dict.fromkeys(_leaves(asked.name, index)):
            if leaf in owners:
                problems.append(f"evaluation.tasks: {leaf} is asked twice, by {owners[leaf]} and by {asked.name}")
            owners[leaf] = asked.name
            config = (index[leaf].cfg if leaf in index else None) or {}
            problems += [f"evaluation.tasks: {leaf} {why}" for key, why in _REFUSED.items() if config.get(key)]
    if problems:
        raise RecipeError.of(f"recipe {recipe.name}", problems)


def load(recipe: Recipe, asked: HarnessTask) -> dict[str, Any]:
    """The task, or the group with all its tasks, as the harness's TaskManager loads it, with its data and few-shot count.

    A task whose own YAML says num_fewshot: 0 keeps it, as in the harness.

    Raises:
        RecipeError: it cannot be loaded (its data is not there, its YAML is wrong), or is refused.
    """
    _seed()
    try:
        loaded = _manager(recipe.evaluation).load([asked.name])
    except Exception as error:  # Of the task's own code, of the data's reader, of the hub.
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise RecipeError(f"evaluation.tasks: {asked.name}: cannot be loaded: {reason}") from error
    for name, task in loaded["tasks"].items():
        if getattr(task, "UNSAFE_CODE", False):
            raise RecipeError(f"evaluation.tasks: {name} {_REFUSED['unsafe_code']}")
        own = task.get_config("num_fewshot")
        if own is None or (asked.num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=asked.num_fewshot or 0)
    return dict(loaded)


@contextmanager
def data_in(folder: Path | None) -> Iterator[None]:
    """Data sets are kept in `folder` and read from there, where there is one; else in this machine's own cache."""
    if folder is None:
        yield
        return
    import datasets

    with patch.object(datasets.config, "HF_DATASETS_CACHE", folder):
        yield


def requests(tasks: dict[str, Any], asked: HarnessTask, lm: Any, as_chat: bool) -> list[Any]:
    """Everything that is asked of the model `lm`, over all documents up to asked.limit.

    Few-shot examples are drawn from document to document: who asks a part of the documents must build the requests of all,
    or it would show other examples.
    """
    _seed()
    found: list[Any] = []
    for task in tasks.values():
        task.set_fewshot_seed(seed=OTHER_SEED)
        task.build_all_requests(
            limit=asked.limit,
            apply_chat_template=as_chat,
            fewshot_as_multiturn=True,
            chat_template=lm.apply_chat_template if as_chat else None,
            tokenizer_name=lm.tokenizer_name if as_chat else "",
        )
        found += task.instances
    return found


@contextmanager
def quiet(label: str) -> Iterator[None]:
    """The harness without its notices and prints, and with our progress bars: named `label`, and only after two seconds."""
    import datasets
    import lm_eval.api.task

    told = logging.getLogger("lm_eval")
    level, had_bars = told.level, datasets.are_progress_bars_disabled()
    told.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with redirect_stdout(io.StringIO()), patch.object(lm_eval.api.task, "tqdm", partial(_bar, label)):
            yield
    finally:
        told.setLevel(level)
        if not had_bars:
            datasets.enable_progress_bars()


@contextmanager
def quiet_model(label: str) -> Iterator[None]:
    """`quiet`, for the model's answers as well."""
    import lm_eval.models.huggingface

    bar = partial(_bar, label)
    with quiet(label), patch.object(lm_eval.models.huggingface, "tqdm", bar), patch.object(lm_eval.api.model, "tqdm", bar):
        yield


def _bar(label: str, *arguments: Any, **settings: Any) -> Any:
    return tqdm(*arguments, **settings | {"desc": label, "delay": 2})


def _seed() -> None:
    import numpy

    random.seed(SEED)
    numpy.random.seed(OTHER_SEED)


def _manager(evaluation: Evaluation) -> Any:
    """The harness's tasks and the recipe's own; those alone where they are all that is asked (which saves five seconds)."""
    folder = harness_tasks.folder(evaluation)
    if folder:
        own = _indexed(folder, include_defaults=False)
        if all(asked.name in own.task_index for asked in evaluation.tasks):
            return own
    return _indexed(folder, include_defaults=True)


@cache
def _indexed(folder: Path | None, include_defaults: bool) -> Any:
    if importlib.util.find_spec("lm_eval") is None:
        raise RecipeError("evaluation.tasks: lm-evaluation-harness is not installed here: pip install 'flytune[harness]'")
    from lm_eval.tasks import TaskManager, _yaml_loader

    # Tasks of one's own are read as recipes are; the harness's own as the harness does.
    if not isinstance(upstream := _yaml_loader._make_loader, partial):
        _yaml_loader._make_loader = partial(harness_tasks.loader, upstream)
    with quiet("tasks"):
        manager = TaskManager(include_path=folder, include_defaults=include_defaults)
    read = manager._factory._load_full_config
    # The harness reads local data from the working directory alone.
    manager._factory._load_full_config = lambda entry, overrides=None: harness_tasks.with_data(
        read(entry, overrides), entry.yaml_path
    )
    return manager


def _leaves(name: str, index: Any) -> Iterator[str]:
    """The tasks that a name stands for: itself, or a group's or tag's."""
    entry = index.get(name)
    kind = entry.kind.name if entry else "TASK"
    if kind == "TAG":
        yield from sorted(entry.tags)
    elif kind == "GROUP":
        members = entry.cfg.get("task") or []
        for member in members if isinstance(members, list) else [members]:
            name = member if isinstance(member, str) else member.get("task") or member.get("group")
            if isinstance(name, str):  # else a group that is written out in place
                yield from _leaves(name, index)
    else:
        yield name


def _unknown(name: str, index: Any, evaluation: Evaluation) -> str:
    close = difflib.get_close_matches(name, index, n=3)
    text = f"{name}: unknown to the harness" + (f"; did you mean {' or '.join(close)}?" if close else "")
    folder = harness_tasks.folder(evaluation)
    unread = (
        [f"{path.name} ({reason})" for path in sorted(folder.rglob("*.yaml")) if (reason := _fault(path))] if folder else []
    )
    return text + (f"; in {evaluation.include_path}, not read: {', '.join(unread)}" if unread else "")


def _fault(path: Path) -> str:
    """Why the harness passes a file by in silence, if it does."""
    from lm_eval.tasks._index import TaskIndex
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        TaskIndex.process_cfg(load_yaml(path, resolve_func=False), path, {})
    except Exception as error:  # noqa: BLE001 (as the harness does)
        return " ".join(str(error).split())[:200]
    return ""
