"""Kinds answer for themselves: what a kind of objective, rows or head is, is asked in the room of that kind
alone."""

import ast
import inspect
import re

from flytune.data import ROW_KINDS
from flytune.models import heads
from flytune.objectives import OBJECTIVES
from flytune.recipe import SECTIONS
from tests.support.paths import ROOT
from tests.support.sources import files, nodes_of

ROOMS = ("flytune/objectives", "flytune/recipe/objectives", "flytune/data", "flytune/models/heads.py")
FILES = files("flytune", "training_estimates", "tasks", "workflows", "flyte2")
OUTSIDE = [path for path in FILES if not any(path.is_relative_to(ROOT / room) for room in ROOMS)]
KINDS = [
    *SECTIONS.values(),
    *OBJECTIVES.values(),
    *(type(kind) for kind in ROW_KINDS.values()),
    *(type(head) for head in heads.HEADS.values()),
]
# Of a figure, and of everything else that is measured.
NOT_OF_A_KIND = {"is_paired"}


def flags_of(kind):
    """Return the names of a class's fields, class variables, properties and methods that are true or
    false."""
    for base in kind.__mro__:
        for name, annotation in vars(base).get("__annotations__", {}).items():
            if re.search(r"\bbool\b", str(annotation)) and "Mapping" not in str(annotation):
                yield name
        for name, value in vars(base).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            returned = (
                getattr(function, "__annotations__", {}).get("return")
                if inspect.isfunction(function)
                else None
            )
            if isinstance(value, bool) or returned in (bool, "bool"):
                yield name


def flags():
    found = {
        name
        for kind in KINDS
        for name in flags_of(kind)
        if not name.startswith("_") and not name.startswith("model_")
    }
    return found - NOT_OF_A_KIND


def test_the_flags_of_a_class_are_found():
    class Kind:
        declared: bool
        value = True

        @property
        def computed(self) -> bool:
            return True

        def answered(self, recipe) -> bool:
            return bool(recipe)

    assert {*flags_of(Kind)} >= {"declared", "value", "computed", "answered"}


def test_no_flag_of_a_kind_is_read_outside_its_room():
    # Fields of objectives that a person writes: the objective's own file alone reads them.
    found = flags()
    assert found >= {"disable_dropout", "has_template"}
    for path in OUTSIDE:
        for node in nodes_of(path):
            if isinstance(node, ast.Attribute) and node.attr in found:
                raise AssertionError(
                    f"{path}:{node.lineno}: {ast.unparse(node)}: let the kind answer what follows from it"
                )


def test_no_name_of_an_objective_is_compared():
    # In conversion, the keys of other tools for each.
    for path in [path for path in OUTSIDE if not path.is_relative_to(ROOT / "flytune/conversion")]:
        check_names(path)


def check_names(path):
    for node in nodes_of(path):
        compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        tested = node.args if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" else []
        for part in [*compared, *tested]:
            if re.search(r"objective(\(.*\))?(\.name|_name)$|^(Sft|Dpo|Kto)$", ast.unparse(part)):
                raise AssertionError(
                    f"{path}:{node.lineno}: {ast.unparse(part)}: say it by an attribute of the objective"
                )
