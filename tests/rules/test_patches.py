"""Names of other libraries are replaced by flytune/patches/ alone, and by no import."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest

from flytune import patches
from tests.support.patches import RECORDS
from tests.support.paths import ROOT
from tests.support.sources import files, tree_of

OWN = {"flytune", "training_estimates", "tasks", "workflows", "flyte2", "images"}
FILES = files("flytune", "training_estimates", "tasks", "workflows", "flyte2", "images")
PATCHES = ROOT / "flytune/patches"
# The first runs before the project's code is there, and so without flytune; the second in a process that only
# judges answers.
EXCEPTED = {
    ROOT / "images/fast_execute.py": ["entrypoint._run_subprocess"],
    ROOT / "flytune/rewards/worker.py": ["_posixsubprocess.fork_exec"],
}


def assigned(tree):
    """List what a file assigns to attributes and items of other libraries' names that it imports."""
    foreign = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] not in OWN:
            foreign |= {alias.asname or alias.name for alias in node.names}
    found = []
    for node in ast.walk(tree):
        is_setter = isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr")
        is_target = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
        owner = node.args[0] if is_setter else node.value if is_target else None
        name = ast.unparse(owner) if owner is not None else ""
        # Results of calls are objects; the environment is an input.
        if "(" not in name and re.split(r"[.\[]", name)[0] in foreign - OWN:
            found.append(ast.unparse(node))
    return [target for target in found if not target.startswith("os.environ")]


def test_no_file_but_the_patches_assigns_to_a_name_of_another_library():
    found = {path: targets for path in FILES if (targets := assigned(tree_of(path)))}
    assert found == EXCEPTED


def test_what_the_light_image_replaces_has_a_record():
    assert "flytekit.bin.entrypoint:_run_subprocess" in {record.name for record in RECORDS.values()}


@pytest.mark.parametrize("key", RECORDS)
def test_every_record_is_used(key):
    library, _, name = key.partition(".")
    if key == "flytekit.PROCESS_OF_TASK":  # by images/fast_execute.py, without the record
        return
    constant = name.partition("[")[0]
    used = f"{library}.{constant}"
    assert any(used in path.read_text(encoding="utf-8") for path in FILES if path.parent != PATCHES), used


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
        record.name
        for record in RECORDS.values()
        if record.name.partition(".")[0].partition(":")[0] in libraries
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


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ("import a.b\na.b.c = 1", ["a.b.c"]),
        ("from a import b as c\nc.d += 1\ndel c.e", ["c.d", "c.e"]),
        ("from a import b\nb['key'] = 1", ["b['key']"]),
        ("from a import b\nsetattr(b.c, 'd', None)", ["setattr(b.c, 'd', None)"]),
        ("import os\nos.environ['A'] = '1'\nfrom flytune import data\ndata.x = 1\nmine.x = 1", []),
    ],
)
def test_an_assignment_to_a_name_of_another_library_is_found(source, written):
    assert assigned(ast.parse(source)) == written
