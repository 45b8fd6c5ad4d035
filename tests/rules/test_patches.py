"""Names of other libraries are replaced by flytune/patches/ alone, and by no import."""

import ast
import json
import os
import subprocess
import sys

import pytest

from flytune import patches
from tests.support import replacements
from tests.support.patches import RECORDS
from tests.support.paths import ROOT
from tests.support.sources import files, tree_of

FILES = files("flytune", "training_estimates", "tasks", "workflows", "flyte2", "images")
# What sets the names that the records have.
SETTER = ROOT / "flytune/patches/record.py"
# The first runs before the project's code is there, and so without flytune; the second in a process that only
# judges answers.
EXCEPTED = {
    ROOT / "images/fast_execute.py": ["entrypoint._run_subprocess"],
    ROOT / "flytune/rewards/worker.py": ["_posixsubprocess.fork_exec"],
}


@pytest.mark.slow
def test_no_file_but_the_patches_assigns_to_a_name_of_another_library():
    makers = set().union(*(replacements.makers(tree_of(path)) for path in FILES))
    assert len(makers) > 5
    found = {
        path: targets
        for path in FILES
        if path != SETTER and (targets := [target for _, target in replacements.found(tree_of(path), makers)])
    }
    assert found == EXCEPTED
    assert replacements.found(tree_of(SETTER))


def test_what_the_light_image_replaces_has_a_record():
    assert "flytekit.bin.entrypoint:_run_subprocess" in {record.name for record in RECORDS.values()}


@pytest.mark.parametrize("key", RECORDS)
def test_every_record_is_used(key):
    library, _, name = key.partition(".")
    if key == "flytekit.PROCESS_OF_TASK":  # by images/fast_execute.py, without the record
        return
    constant = name.partition("[")[0]
    used = f"{library}.{constant}"
    assert any(used in path.read_text(encoding="utf-8") for path in FILES if path.parent != SETTER.parent), (
        used
    )


IMPORTS = """
import json, pkgutil, sys
from importlib import import_module
from types import ModuleType

names, modules, libraries = json.loads(sys.argv[1])
for name in modules:
    import_module(name)
if "accelerate" in libraries:  # it adds what it knows of the process
    import_module("accelerate").PartialState()

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in libraries or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}:{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}:{key}.{one}": own for one, own in list(vars(value).items())}
    return found

def entries():
    from tests.support.patches import RECORDS
    here = [record for record in RECORDS.values() if record.name in names and record.name.endswith("]")]
    return {record.name: record.current() for record in here}

def is_ours(value):
    return str(getattr(value, "__module__", "")).partition(".")[0] in ("flytune", "tasks", "workflows")

before = attributes() | entries()
for top in ("flytune", "tasks", "workflows"):
    package = import_module(top)
    for module in pkgutil.walk_packages(package.__path__, top + "."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
after = attributes() | entries()
changed = {name for name, value in before.items() if after.get(name) is not value}
print(json.dumps(sorted(changed | {name for name in after.keys() - before.keys() if is_ours(after[name])})))
"""
PYFLYTE = "flytekit.clis"
IN_PYFLYTE = (
    "SHOWN_ERROR",
    "INPUTS_FILE",
    "LISTED_ENTITIES",
    "INPUT_OPTION",
    "JSON_INPUT",
    "DIRECTORY_INPUT",
    "FILE_INPUT",
    "DATASET_INPUT",
    "CODE_FILES",
)


def changed_by_imports(libraries, environment=(), pyflyte=False):
    """Return the names of libraries that change when all of flytune, tasks and workflows is imported."""
    names = [
        one.name for one in RECORDS.values() if one.name.partition(".")[0].partition(":")[0] in libraries
    ]
    names = [name for name in names if pyflyte or not name.startswith(PYFLYTE)]
    modules = list(dict.fromkeys(name.partition(":")[0] for name in names))
    arguments = json.dumps([names, modules, sorted(libraries)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORTS, arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_imports_replace_nothing():
    assert changed_by_imports(set(patches.__all__)) == []


def test_in_pyflyte_imports_replace_what_it_shows_and_reads():
    used = [patches.tqdm.BAR, *(getattr(patches.flytekit, name) for name in IN_PYFLYTE)]
    found = changed_by_imports({"tqdm", "flytekit"}, pyflyte=True)
    assert set(found) >= {one.name for one in used}
    # Modules that import the name from its place have it by another one.
    assert {name.rpartition(":")[2] for name in found} == {one.name.rpartition(":")[2] for one in used}


def test_in_a_pod_imports_replace_what_it_shows(tmp_path):
    pod = {"FLYTE_INTERNAL_EXECUTION_ID": "e", "HOME": str(tmp_path)}
    assert changed_by_imports({"tqdm", "flytekit"}, pod) == sorted(
        [patches.tqdm.BAR.name, patches.flytekit.TRACEBACK.name]
    )


REPLACED = """
import {0}
{0}.value = 1
import {0}.inner as alias
alias.Class.method = None
from {0} import thing
thing.Class.method: object = None
thing.Class.count += 1
del thing.Class.method
first, thing.Class.method = 1, 2
for thing.value in (1, 2): pass
with open("x") as thing.value: pass
[1 for thing.value in (1, 2)]
thing.Table["key"] = 1
thing.Table.update(key=1)
thing.Rows.append(1)
setattr(thing.Class, "method", None)
delattr(thing, "value")
object.__setattr__(thing, "value", 1)
type.__setattr__(thing.Class, "value", 1)
thing.Class.__setattr__("value", 1)
vars(thing)["value"] = 1
vars(thing).update(value=1)
thing.__dict__["value"] = 1
getattr(thing, "Class").method = None
renamed: object = thing.Class
renamed.method = None
again = renamed
again.method = None
for kind in (thing.A, thing.B): kind.convert = None
(walrus := thing.Class).method = None
one, other = thing.A, 2
one.method = None
(thing.A if other else other).method = None
import sys, importlib
sys.modules["library"].value = 1
sys.modules["library"] = None
module = sys.modules.get("library")
module.value = 1
importlib.import_module("library").value = 1
from unittest import mock
mock.patch.object(thing, "value", 1)
mock.patch.dict(thing.Table, key=1)
mock.patch("library.thing", 1)
""".format("library")
IN_FUNCTIONS = """
def f(model, kind, replaced):
    import library
    library.value = 1
    from library import Class
    Class.method = None
    type(model).method = None
    model.__class__ = kind
    model.run.__code__ = None
    def forward(): pass
    model.forward = forward
    model.forward = lambda: None
    model.forward = replaced or None if kind else forward
    from functools import partial
    model.forward = partial(model.forward, 1)
    from types import MethodType
    model.deep.forward = MethodType(forward, model)
    model.execute = wrapped(model.execute)
    setattr(model, "forward", forward)
    model.__dict__["forward"] = 1
def wrapped(function):
    def inner(): pass
    return inner
"""
USED = """
import os
import library
from library import Class
os.environ["X"] = "1"
os.environ |= {}
os.environ.update(X="1")
mine = Class()
mine.value = 1
mine.config.use_cache = False
mine.rows.append(1)
mine.value = library.compute(mine)
library.configure(value=1)
class Own(Class):
    value = 1
    def __init__(self):
        self.method = lambda: 1
        self.__dict__["x"] = 1
found = {}
found["x"] = lambda: 1
Table = dict(library.Table)
Table["x"] = 1
def f(tally): tally.rows = min(tally.rows, 2)
"""


@pytest.mark.parametrize("source", [REPLACED, IN_FUNCTIONS], ids=["module", "function"])
def test_every_way_to_replace_a_name_is_found(source):
    lines = dict(enumerate(source.splitlines(), 1))
    expected = {
        number
        for number, line in lines.items()
        if line.strip() and not line.strip().startswith(("import ", "from ", "def ", "return "))
    } - {
        number
        for number, line in lines.items()
        if line.startswith(("renamed:", "again =", "one, other =", "module ="))
    }
    assert {lines[line] for line, _ in replacements.found(ast.parse(source))} == {
        lines[number] for number in expected
    }


def test_use_of_a_library_is_no_replacement():
    assert replacements.found(ast.parse(USED)) == []


def test_functions_of_other_files_that_make_functions_are_known():
    tree = ast.parse("import own\ndef f(made): made.execute = wrapped(made.execute)")
    assert replacements.found(tree) == []
    assert replacements.found(tree, {"wrapped"}) == [(2, "made.execute")]
