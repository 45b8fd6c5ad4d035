"""A sharding is one file in flytune/sharding and one line in flytune/recipe/sections.py: no other code
compares its name."""

import ast
import re
from typing import get_args

import pytest

from flytune.recipe import Sharding
from tests.support.paths import ROOT
from tests.support.sources import files, name_of, tree_of

# `auto` is no sharding: the plan chooses one.
NAMES = set(get_args(Sharding.model_fields["name"].annotation)) - {"auto"}
# Prefixes and layouts of the same families.
WORDS = (NAMES - {"none"}) | {"zero", "fsdp1", "fsdp1_grad_op", "fsdp2", "fsdp2_grad_op"}
# The same words with other meanings; the words of a file, and what they mean there.
OTHER_MEANINGS = {
    # names in the files of other tools, and the recipe's for them
    "flytune/conversion/sharding.py": {"fsdp", "ddp", "zero", "zero1", "zero2", "zero3"},
    "flytune/dryrun/allocations.py": {"fsdp"},  # the namespace of torch's operators
}
FILES = files("flytune", "training_estimates", "images", "tasks", "workflows")


def keys_in(tree):
    """List the strings that are keys of dictionaries: from_pretrained has an argument device_map."""
    for node in ast.walk(tree):
        yield from (
            node.keys
            if isinstance(node, ast.Dict)
            else [node.slice]
            if isinstance(node, ast.Subscript)
            else []
        )


def names_in(tree):
    """List the names of shardings among the string literals of a source, and what is compared with "none",
    with lines."""
    keys = set(keys_in(tree))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and node.value in WORDS
            and (node.value != "device_map" or node not in keys)
        ):
            yield node.value, node.lineno
        if isinstance(node, ast.Compare) and re.search(r"sharding(\.name|_name)?$", ast.unparse(node.left)):
            said = [
                part.value
                for right in node.comparators
                for part in ast.walk(right)
                if isinstance(part, ast.Constant)
            ]
            yield from ((name, node.lineno) for name in said if name in NAMES)


def test_no_file_outside_the_package_names_a_sharding():
    outside = {name: path for path in FILES if not (name := name_of(path)).startswith("flytune/sharding/")}
    found = [
        (word, f"{name}:{line}")
        for name, path in outside.items()
        for word, line in names_in(tree_of(path))
        if word not in OTHER_MEANINGS.get(name, ())
    ]
    # The one line: the values of `sharding:` in a recipe.
    places = {place for _, place in found}
    assert {place.partition(":")[0] for place in places} == {"flytune/recipe/sections.py"}, (
        f"{places}: say it by an attribute of ShardingBase or Layout"
    )
    assert len(places) == 1
    assert {word for word, _ in found} == NAMES - {"none"}


@pytest.mark.parametrize(
    "source",
    [
        'if name == "fsdp": pass',
        'name.startswith("zero")',
        'name in ("fsdp1", "zero3")',
        'if recipe.sharding.name == "none": pass',
        'if sharding in ("none", "other"): pass',
        'if "device_map" == name: pass',
    ],
)
def test_a_name_is_found(source):
    assert list(names_in(ast.parse(source)))


def test_other_words_are_no_names():
    assert not list(
        names_in(
            ast.parse(
                'load(**{"device_map": "cpu"}); options["device_map"] = 1; offload == "none"; x = "none"'
            )
        )
    )


def test_exceptions_are_used():
    for name, words in OTHER_MEANINGS.items():
        assert words <= {word for word, _ in names_in(tree_of(ROOT / name))}
