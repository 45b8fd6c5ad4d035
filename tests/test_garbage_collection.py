"""Tests of garbage collection: none while libraries are imported and at the end, as usual between."""

import gc
import subprocess
import sys

import pytest

from flytune import process_setup


@pytest.fixture(autouse=True)
def enabled_afterwards():
    """Leave collection on for other tests."""
    yield
    gc.enable()


def in_python(code):
    """Return what a new interpreter prints."""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()


@pytest.mark.slow
def test_nothing_is_collected_during_imports_and_their_objects_are_passed_over():
    code = """
import gc
from flytune import process_setup
before, runs = gc.get_freeze_count(), [one["collections"] for one in gc.get_stats()]
with process_setup.paused():
    import transformers.modeling_utils
same = [generation["collections"] for generation in gc.get_stats()] == runs
print(same, gc.isenabled(), gc.get_freeze_count() - before > 100_000)
"""
    assert in_python(code) == ["True"] * 3


def test_what_is_imported_already_freezes_nothing():
    code = """
import gc, json
from flytune import process_setup
before = gc.get_freeze_count()
with process_setup.paused():
    import json
print(gc.get_freeze_count() - before, gc.isenabled())
"""
    assert in_python(code) == ["0", "True"]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_failed_import_leaves_collection_as_it_was(enabled):
    if not enabled:
        gc.disable()
    with pytest.raises(ModuleNotFoundError), process_setup.paused():
        import no_such_module  # noqa: F401
    assert gc.isenabled() == enabled


def test_garbage_of_the_work_is_still_collected():
    code = """
import gc, weakref
from flytune import process_setup
with process_setup.paused():
    import fractions
class Cycle: pass
one = Cycle()
one.own, seen = one, weakref.ref(one)
del one
gc.collect()
print(seen() is None)
"""
    assert in_python(code) == ["True"]


@pytest.mark.parametrize(("before", "printed"), [("", ["collected"]), ("process_setup.skip_at_exit()", [])])
def test_an_ending_process_collects_nothing(before, printed):
    code = f"""
from flytune import process_setup
{before}
class Cycle:
    def __del__(self): print("collected")
one = Cycle()
one.own = one
del one
"""
    assert in_python(code) == printed
