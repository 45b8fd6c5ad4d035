"""Recipes that are made of files of other tools."""

from pathlib import Path
from typing import Any

from flytune import yaml_core
from flytune.conversion import convert
from flytune.recipe import Recipe


def written(folder: Path, name: str, content: Any) -> str:
    """Write a text, or a value as YAML; return the file's path."""
    (folder / name).write_text(content if isinstance(content, str) else yaml_core.dump(content))
    return str(folder / name)


def recipe_of(text: str) -> Recipe:
    """Return the recipe of a converted text."""
    return Recipe.from_content(yaml_core.load(text), "converted")


def converted(folder: Path, name: str, content: Any, **arguments: Any) -> tuple[Recipe, str]:
    """Return the recipe that is made of a file with this content, and its text."""
    text = convert(written(folder, name, content), **arguments)
    return recipe_of(text), text
