"""What the demo trains on: two base models and the docstring pairs, and what it is asked afterwards; made once and kept."""

from pathlib import Path

from demo import base_model, docstrings, tiny_model

FOLDER = Path(".demo")
BASE_MODEL = Path("models/smollm2-135m-instruct")
TINY_MODEL = Path("models/tiny")
PAIRS = Path("data/docstrings.jsonl")
CHOICES = Path("data/modules.jsonl")
"""Where recipes/tasks/python_modules.yaml looks for its questions."""


def make(folder: Path = FOLDER) -> None:
    """Makes BASE_MODEL, TINY_MODEL, PAIRS and CHOICES below `folder`; what is there already stays.

    Raises:
        FlytuneError: the base model's package is not installed.
    """
    base_model.find_gguf()
    if not (folder / PAIRS).exists():
        docstrings.write(folder / PAIRS)
    if not (folder / CHOICES).exists():
        docstrings.write_choices(folder / CHOICES)
    if not (folder / TINY_MODEL).exists():
        tiny_model.build(folder / TINY_MODEL, docstrings.plain_text())
    base_model.convert(folder / BASE_MODEL)
