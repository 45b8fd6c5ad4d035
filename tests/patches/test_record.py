"""Replacement of a name until the process ends, within a block, and on one object."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from flytune.patches import record

TEXTS = {"version": "1.0", "reason": "none", "upstream": ("library:value",), "remove_when": "never"}


class Base:
    def inherited(self):
        return "base"


class Thing(Base):
    @staticmethod
    def static():
        return "static"


@pytest.fixture
def library(monkeypatch):
    made = ModuleType("library_of_this_test")
    made.value, made.table, made.Thing = (
        1,
        {"key": 1},
        type("Thing", (Thing,), {"static": staticmethod(Thing.static)}),
    )
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(record, "_originals", {})
    return made


def test_until_the_process_ends(library):
    patch = record.ProcessPatch(name="library_of_this_test:value", **TEXTS)
    assert not patch.is_installed
    assert patch.original() == 1
    for value in (2, 3):
        patch.install(value)
        assert library.value == patch.current() == value
        assert patch.original() == 1
    assert patch.is_installed


def test_an_entry_of_a_mapping(library):
    record.ProcessPatch(name="library_of_this_test:table[key]", **TEXTS).install(2)
    assert library.table == {"key": 2}


@pytest.mark.parametrize("name", ["value", "table[key]", "table[new]", "Thing.static", "Thing.inherited"])
def test_within_a_block(library, name):
    patch = record.BlockPatch(name=f"library_of_this_test:{name}", **TEXTS)
    before = vars(library).copy(), library.table.copy(), vars(library.Thing).copy()
    with pytest.raises(KeyError), patch.replaced(5):
        assert patch.current() == 5
        raise KeyError
    assert (vars(library), library.table, dict(vars(library.Thing))) == (
        before[0],
        before[1],
        dict(before[2]),
    )


def test_blocks_within_blocks(library):
    patch = record.BlockPatch(name="library_of_this_test:value", **TEXTS)
    with patch.replaced(2):
        with patch.replaced(3):
            assert library.value == 3
        assert library.value == 2
    assert library.value == 1


def test_on_one_object(library):
    patch = record.ObjectPatch(name="library_of_this_test:Thing.inherited", **TEXTS)
    one, other = library.Thing(), library.Thing()
    patch.on(one, lambda: "replaced")
    assert (one.inherited(), other.inherited()) == ("replaced", "base")


def test_the_class_of_one_object(library):
    patch = record.ObjectPatch(name="library_of_this_test:Thing.__class__", **TEXTS)
    one = library.Thing()
    patch.on(one, type("Other", (library.Thing,), {}))
    assert type(one).__name__ == "Other"
    assert SimpleNamespace is not type(one)
