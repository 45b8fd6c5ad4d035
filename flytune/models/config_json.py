"""A config.json from outside, read strictly; what is wrong with its sizes is an error of the recipe that
names the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flytune import files, json_core
from flytune.errors import RecipeError
from flytune.recipe import patterns
from training_estimates import config_json
from training_estimates.config_json import NOT_QUANTIZED, Config, shown
from training_estimates.errors import LibrariesMissingError, SizesError

LARGEST = 10_000_000
"""Bytes of a config.json that is read; published ones have kilobytes."""


@contextmanager
def recipe_errors() -> Iterator[None]:
    """Turn an error about a model's sizes into one of the recipe that names the model."""
    try:
        yield
    except SizesError as error:
        advice = " (pip install flytune[train])" if isinstance(error, LibrariesMissingError) else ""
        raise RecipeError(f"model.name_or_path: {error}{advice}") from None


def parse(content: bytes, where: str) -> dict[str, Any]:
    """Return a config.json's content.

    Raises:
        RecipeError: it is not a JSON object in UTF-8, or has more than LARGEST bytes; with `where`.
    """
    try:
        config = json_core.load(content, LARGEST)
    except json_core.JSONError as error:
        raise RecipeError(f"model.name_or_path: {where}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise RecipeError(f"model.name_or_path: {where}: {shown(config)} is not an object")
    return config


def read(path: Path) -> dict[str, Any]:
    """Return the content of a config.json; raises as `parse`, and if it cannot be read."""
    try:
        return parse(files.read_regular(path, LARGEST), str(path))
    except OSError as error:
        raise RecipeError(f"model.name_or_path: {path}: cannot be read: {error.strerror}") from None


def text_part(config: dict[str, Any], name: str) -> Config:
    """Return the part of a config.json that describes the decoder: text_config, if it has one.

    Raises:
        RecipeError: text_config is not an object.
    """
    with recipe_errors():
        return config_json.text_part(config, name)


def check_expressions(config: dict[str, Any], name: str) -> None:
    """Check the expressions that name the layers a published quantization leaves out.

    Raises:
        RecipeError: the matching of one could take long, or its section is no section of names.
    """
    whole = Config(config, name)
    with recipe_errors():
        if whole.quantized is None:
            return
        section = whole.table("quantization_config")
        for key in NOT_QUANTIZED:
            reasons = [patterns.problem(written, patterns.CONVERTED) for written in section.get(key) or []]
            whole.problems += [f"quantization_config.{key}: {reason}" for reason in reasons if reason]
        whole.check()
