"""A sharding is one file in flytune/sharding and one line in flytune/recipe/sections.py: no other code
compares its name."""

import re
from typing import get_args

import pytest

from flytune.recipe import Sharding
from tests.support.paths import ROOT
from tests.support.sources import files, name_of

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


# from_pretrained has an argument device_map, which is no sharding as the key of a dictionary.
NAMED = re.compile(rf"""(["'])({"|".join(sorted(WORDS - {"device_map"}))}|(?<!\[.)device_map(?!.: \S))\1""")
COMPARED = re.compile(r"""sharding(?:\.name|_name)? (?:[!=]=|(?:not )?in) .*["'](none)["']""")


def names_in(text):
    """Yield the names of shardings among the strings of a source, and "none" where it is compared, with
    lines."""
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((match[2], number) for match in NAMED.finditer(line))
        yield from ((match[1], number) for match in COMPARED.finditer(line))


def test_no_file_outside_the_package_names_a_sharding():
    outside = {name: path for path in FILES if not (name := name_of(path)).startswith("flytune/sharding/")}
    found = [
        (word, f"{name}:{line}")
        for name, path in outside.items()
        for word, line in names_in(path.read_text(encoding="utf-8"))
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
    assert list(names_in(source))


def test_other_words_are_no_names():
    assert not list(names_in('load(**{"device_map": "cpu"}); options["device_map"] = 1; offload == "none"'))


def test_exceptions_are_used():
    for name, words in OTHER_MEANINGS.items():
        assert words <= {word for word, _ in names_in((ROOT / name).read_text(encoding="utf-8"))}
