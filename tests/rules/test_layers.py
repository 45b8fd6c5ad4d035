"""Layers of the project: the imports that each package may have. docs/design.md draws them."""

import ast
import re
import sys
from collections import defaultdict
from graphlib import TopologicalSorter

import pytest

from flytune.cli import problems
from tests.support.paths import ROOT
from tests.support.sources import files, name_of, nodes_of, tree_of

# Packages that each package of flytune/ may import, in addition to the estimator (training_estimates/) and to
# the modules directly in flytune/ (errors, storage ...), which import no package. An import points at least
# one layer down in the drawing of docs/design.md.
ALLOWED = {
    "failures": "",
    "recipe": "",
    "hardware": "",
    "records": "",
    "patches": "",
    "console": "patches records",
    "servers": "",
    "pods": "hardware recipe",
    "cluster": "console data hardware models patches recipe records",
    "doctor": "cluster hardware recipe",
    "models": "patches recipe records",
    "sharding": "hardware patches recipe records",
    "rewards": "recipe",
    "rollouts": "models recipe records servers",
    "data": "console models recipe records rewards",
    "export": "models recipe records sharding",
    "objectives": "data export models patches recipe records rewards rollouts servers sharding",
    "evaluation": "console data export models objectives patches recipe records",
    "planning": "cluster console data hardware models objectives pods recipe records sharding",
    "dryrun": "console data hardware models objectives patches planning recipe records rollouts sharding",
    "report": "data hardware models objectives recipe records",
    "artifacts": "data evaluation export failures models patches recipe records report servers",
    "sweeps": "console evaluation failures models recipe records report",
    "training": "console data export failures hardware models objectives patches planning pods recipe "
    "records sharding",
    "adapters": "artifacts export models recipe records",
    "registry": "artifacts console data evaluation export models recipe records",
    "selftest": "console data hardware models objectives planning recipe records sharding training",
    "inference": "adapters artifacts console data evaluation export models recipe records",
    "serving": "artifacts models recipe records servers",
    "stages": "adapters artifacts cluster console data dryrun evaluation failures hardware inference models "
    "patches planning pods recipe records registry selftest sharding sweeps training",
    "conversion": "data models planning recipe",
    "cli": "adapters artifacts cluster console conversion data doctor dryrun evaluation hardware inference "
    "models planning recipe records registry report selftest serving stages",
}
FLOORS = re.search(
    r"<!-- floors -->\n```\n(.*?)```", (ROOT / "docs/design.md").read_text(encoding="utf-8"), re.DOTALL
)
# Packages above flytune, from the lowest.
TOPS = ("images", "tasks", "workflows", "flyte2")
PROJECT = {*TOPS, "flytune", "training_estimates", "demo", "tests", "benchmarks"}
# Libraries that are slow to import on a laptop, or missing in CPU pods.
HEAVY = {
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "deepspeed",
    "bitsandbytes",
    "datasets",
    "pyarrow",
    "numpy",
}
HEAVY |= {"matplotlib", "huggingface_hub", "safetensors", "fsspec", "tokenizers", "jinja2"}
FILES = files("flytune", "training_estimates", *TOPS)
# In a line of code or of a string: to parse all tests takes seconds.
IMPORT_OF_TEST = re.compile(
    r"^\s*(from\s+\S+\s+)?import\b(\s*\([^)]*|.*)\btest_|^\s*from\s+\S*\btest_", re.MULTILINE
)


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module):
    """Return the package of flytune that a module is in; "" for the modules directly in flytune/."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and (ROOT / "flytune" / parts[1]).is_dir() else ""


def imports(path, top_only=False):
    for node in tree_of(path).body if top_only else nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are absolute"
            for alias in node.names:
                submodule = ROOT / node.module.replace(".", "/") / alias.name
                is_module = submodule.is_dir() or submodule.with_suffix(".py").is_file()
                yield (f"{node.module}.{alias.name}" if is_module else node.module), node


def test_every_library_that_is_imported_is_told_with_what_installs_it():
    base = {"fsspec", "pydantic", "pydantic_core", "rich", "tqdm", "yaml"}
    told_where_they_are_imported = {"flyte", "flyteidl2", "mlflow", "pynvml", "wandb"}
    paths = files("flytune", "training_estimates")
    libraries = {name.partition(".")[0] for path in paths for name, _ in imports(path)}
    others = libraries - sys.stdlib_module_names - PROJECT - base - told_where_they_are_imported
    assert len(others) > 20
    assert [name for name in others if problems.missing(ModuleNotFoundError(name=name)) is None] == []


def test_files_were_found():
    assert len(FILES) > 20
    assert set(ALLOWED) == {path.parent.name for path in (ROOT / "flytune").glob("*/__init__.py")}


@pytest.mark.parametrize("top", ["flytune", *TOPS])
def test_imports_point_down(top):
    for path, name, node in [(file, *imported) for file in files(top) for imported in imports(file)]:
        module, theirs = module_of(path), name.split(".")[0]
        mine, where = package_of(module), f"{name_of(path)}:{node.lineno}: {name}"
        if theirs not in PROJECT:
            continue
        if top != "flytune":
            assert theirs in ("flytune", "training_estimates") or TOPS.index(theirs) <= TOPS.index(top), where
            # Two faces of the same stages.
            assert top != "flyte2" or theirs not in ("tasks", "workflows"), where
        else:
            assert module != "flytune", f"{where}: importing flytune does nothing else"
            if theirs == "training_estimates":
                continue
            assert theirs == "flytune", where
            assert package_of(name) in {"", mine, *ALLOWED.get(mine, "").split()}, (
                f"{where}: not in ALLOWED[{mine!r}]"
            )


def test_imports_have_no_cycle():
    graph = {
        module_of(path): {name for name, _ in imports(path) if name != module_of(path)} for path in FILES
    }
    TopologicalSorter({module: names & set(graph) for module, names in graph.items()}).prepare()


def test_the_drawing_in_the_design_is_the_table():
    rows = [row.split() for row in FLOORS[1].strip().splitlines()]
    assert [int(number) for number, *_ in rows] == list(range(len(rows), 0, -1))
    assert len(rows) <= 11
    floors = {package: int(number) for number, *packages in rows for package in packages}
    modules = {path.stem for path in (ROOT / "flytune").glob("*.py")} - {"__init__"}
    assert {package for package, floor in floors.items() if floor == 1} == modules
    assert set(floors) == modules | set(ALLOWED)
    for package, below in ALLOWED.items():
        assert [name for name in below.split() if floors[name] >= floors[package]] == []


@pytest.mark.parametrize("package", ALLOWED)
def test_every_allowed_import_is_used(package):
    used = {
        package_of(name) for path in (ROOT / "flytune" / package).rglob("*.py") for name, _ in imports(path)
    }
    assert set(ALLOWED[package].split()) - used == set()


def test_the_estimator_imports_nothing_of_flytune():
    """It is a house of its own: published runs of other frameworks test it, and others may use it."""
    for path in files("training_estimates"):
        assert {name.split(".")[0] for name, _ in imports(path)} & PROJECT <= {"training_estimates"}, (
            path.name
        )


def test_a_class_has_a_name_of_its_own():
    """A reader who looks for a name finds one class."""
    places = defaultdict(list)
    for path in FILES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 200
    assert {name: place for name, place in places.items() if len(place) > 1} == {}


def test_few_modules_are_in_no_package():
    assert len({path.stem for path in (ROOT / "flytune").glob("*.py")} - {"__init__"}) <= 15


def test_heavy_imports_are_inside_functions_and_project_imports_at_the_top():
    for path in FILES:
        top = {node.lineno for _, node in imports(path, top_only=True)}
        for name, node in imports(path):
            package, where = name.split(".")[0], f"{name_of(path)}:{node.lineno}: import {name}"
            if node.lineno in top:
                assert package not in HEAVY, f"{where} inside the function that uses it"
            else:
                assert package not in PROJECT, f"{where} at the top: fast registration ships what is loaded"


def test_the_root_is_no_package():
    assert not (ROOT / "__init__.py").exists()


def test_no_file_is_longer_than_600_lines():
    assert [
        f"{path.name}: {n} lines" for path in FILES if (n := len(path.read_text().splitlines())) > 600
    ] == []


def test_flytune_knows_nothing_of_flyte():
    """What a stage needs of Flyte is in flytune/stages/orchestrator.py, and tasks/runtime/ has it."""
    # The room of the clients of both Flytes, and the checks that use them.
    names = (
        "cluster/control_plane.py",
        "cluster/flyte2_sdk.py",
        "cluster/runs_of_flyte2.py",
        "doctor/admin.py",
    )
    names = (*names, "doctor/flyte2.py", "cluster/debug_program.py")
    asking = {ROOT / "flytune" / name for name in names}
    for path in set((ROOT / "flytune").rglob("*.py")) - asking:
        assert not {name.split(".")[0] for name, _ in imports(path)} & {
            "flytekit",
            "flytekitplugins",
            "flyte",
            "flyteidl2",
        }


def test_no_test_imports_another():
    maybe = [path for path in files("tests") if IMPORT_OF_TEST.search(path.read_text(encoding="utf-8"))]
    assert [
        (name_of(path), name) for path in maybe for name, _ in imports(path) if re.search(r"\btest_", name)
    ] == []


def test_an_import_of_a_test_is_found():
    for line in (
        "import a.test_b",
        "  import a as c, test_b",
        "from a.test_b import c",
        "from a import (\n  b, test_c)",
    ):
        assert IMPORT_OF_TEST.search(f"import a\n{line}\n"), line
