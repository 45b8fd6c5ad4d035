"""Inputs of the demo, made once: two base models, the docstring pairs, the questions of its evaluation; `make
demo-model`."""

import os
from pathlib import Path

from demo import base_model, docstrings, sums, tiny_model

FOLDER = Path(".demo")
BASE_MODEL = Path("models/smollm2-135m-instruct")
TINY_MODEL = Path("models/tiny")
STUDENT = Path("models/tiny-student")
"""TINY_MODEL with random weights."""
PAIRS = Path("data/docstrings.jsonl")
PREFERENCES = Path("data/preferences.jsonl")
SUMS = Path("data/sums.jsonl")
KINDS = Path("data/kinds.jsonl")
SEARCHED = Path("data/searched.jsonl")
CHOICES = Path("data/modules.jsonl")
"""Questions of recipes/tasks/python_modules.yaml."""


def make_first(folder: Path = FOLDER) -> None:
    """Make BASE_MODEL, PAIRS and CHOICES, the inputs of recipes/demo-qlora.yaml, below `folder`, except those
    that exist.

    Raises:
        FlytuneError: the base model's package is not installed.
    """
    base_model.convert(folder / BASE_MODEL)
    if not (folder / PAIRS).exists():
        docstrings.write(folder / PAIRS)
    if not (folder / CHOICES).exists():
        docstrings.write_choices(folder / CHOICES)


def make(folder: Path = FOLDER) -> None:
    """Make BASE_MODEL, TINY_MODEL, PAIRS and CHOICES below `folder`, except those that exist.

    Raises:
        FlytuneError: the base model's package is not installed.
    """
    make_first(folder)
    if not (folder / TINY_MODEL).exists():
        tiny_model.build(folder / TINY_MODEL, docstrings.plain_text())


def make_preferences(folder: Path = FOLDER) -> None:
    """Make BASE_MODEL and PREFERENCES below `folder`, except those that exist.

    Raises:
        FlytuneError: the base model's package is not installed.
    """
    base_model.convert(folder / BASE_MODEL)
    if not (folder / PREFERENCES).exists():
        docstrings.write_preferences(folder / PREFERENCES)


def make_kinds(folder: Path = FOLDER) -> None:
    """Make TINY_MODEL and KINDS below `folder`, except those that exist."""
    if not (folder / KINDS).exists():
        docstrings.write_labelled(folder / KINDS)
    if not (folder / TINY_MODEL).exists():
        tiny_model.build(folder / TINY_MODEL, docstrings.plain_text())


def make_searched(folder: Path = FOLDER) -> None:
    """Make TINY_MODEL and SEARCHED below `folder`, except those that exist."""
    if not (folder / SEARCHED).exists():
        docstrings.write_searched(folder / SEARCHED)
    if not (folder / TINY_MODEL).exists():
        tiny_model.build(folder / TINY_MODEL, docstrings.plain_text())


def make_student(folder: Path = FOLDER) -> None:
    """Make TINY_MODEL, STUDENT and PAIRS below `folder`, except those that exist."""
    if not (folder / PAIRS).exists():
        docstrings.write(folder / PAIRS)
    for model, steps in ((TINY_MODEL, 150), (STUDENT, 0)):
        if not (folder / model).exists():
            tiny_model.build(folder / model, docstrings.plain_text(), steps)


def make_sums(folder: Path = FOLDER) -> None:
    """Make BASE_MODEL and SUMS below `folder`, except those that exist.

    Raises:
        FlytuneError: the base model's package is not installed.
    """
    base_model.convert(folder / BASE_MODEL)
    if not (folder / SUMS).exists():
        sums.write(folder / SUMS)


if __name__ == "__main__":
    # Without this, DeepSpeed's import prints that it has found no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    make_first()
