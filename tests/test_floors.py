"""The floors of the house: an import may only point down. See docs/design.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Highest first. A module may import project modules of a lower floor, and of its own.
FLOORS = [
    {"workflows"},
    {"tasks"},
    {"images"},
    {
        "flytune.training",
        "flytune.data",
        "flytune.evaluation",
        "flytune.comparing",
        "flytune.refreshing",
        "flytune.harness",
        "flytune.points",
        "flytune.harness_data",
        "flytune.export",
        "flytune.gate",
        "flytune.merging",
        "flytune.tensors",
        "flytune.sealing",
        "flytune.artifact",
        "flytune.catalog",
        "flytune.adapters",
        "flytune.combining",
        "flytune.answering",
        "flytune.questions",
        "flytune.prompts",
        "flytune.inference",
        "flytune.xray",
        "flytune.uploads",
        "flytune.executions",
        "flytune.selftest",
        "flytune.doctor",
        "flytune.cli",
        "flytune.__main__",
    },
    {
        "flytune.confirming",
        "flytune.plan_table",
        "flytune.counting",
        "flytune.loading",
        "flytune.host_memory",
        "flytune.harness_tasks",
        "flytune.task_files",
        "flytune.dryrun",
        "flytune.slices",
        "flytune.weights",
        "flytune.recording",
        "flytune.scoring",
        "flytune.probing",
        "flytune.tracking",
        "flytune.checkpoints",
        "flytune.stopping",
        "flytune.report",
        "flytune.card",
        "flytune.sweeps",
        "flytune.publishing",
        "flytune.fetching",
    },
    {"flytune.planner", "flytune.evaluating"},
    {"flytune.search"},
    {"flytune.candidates"},
    {"flytune.needs"},
    {"flytune.forecast"},
    {"flytune.calibration"},
    {"flytune.notifying"},
    {
        "flytune.charts",
        "flytune.task_table",
        "flytune.guards",
        "flytune.strips",
        "flytune.parallel_coordinates",
        "flytune.heldout",
        "flytune.timing",
        "flytune.peaks",
        "flytune.step_lines",
    }
    | {"flytune.collating", "flytune.ordering", "flytune.notes", "flytune.breakdown"}
    | {"flytune.phase_notes", "flytune.pod_memory", "flytune.failure_text", "flytune.devices"}
    | {"flytune.failures", "flytune.causes", "flytune.intervals", "flytune.watching", "flytune.losses"}
    | {
        "flytune.accepted",
        "flytune.windows",
        "flytune.continuing",
        "flytune.budgets",
        "flytune.speed",
        "flytune.traffic",
        "flytune.kernels",
        "flytune.flops",
    },
    {"flytune.strategies", "flytune.closed_form"},
    {"flytune.activations", "flytune.states"},
    {"flytune.workload"},
    {"flytune.models"},
    {"flytune.grids"},
    {"flytune.bases"},
    {"flytune.addresses"},
    {"flytune.recipe", "flytune.shapes", "flytune.cluster"}
    | {"flytune.records", "flytune.metrics", "flytune.plans", "flytune.gpus"},
    {"flytune.run_sections"},
    {"flytune.sections"},
    {"flytune.caches"},
    {"flytune.strict", "flytune.errors", "flytune.output", "flytune.yaml_core", "flytune.tables"},
]
PROJECT = {"workflows", "tasks", "images", "flytune", "demo", "chaos", "tests", "benchmarks"}
# What a laptop waits for, or a CPU pod does not have.
HEAVY = {"torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes", "datasets", "pyarrow", "numpy"}
HEAVY |= {"matplotlib", "huggingface_hub", "safetensors", "fsspec", "tokenizers", "jinja2"}
FILES = sorted(path for top in ("flytune", "tasks", "workflows", "images") for path in (ROOT / top).rglob("*.py"))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module):
    if module == "flytune":  # its version alone
        return len(FLOORS) - 1
    for height, names in enumerate(FLOORS):
        if any(module == name or module.startswith(name + ".") for name in names):
            return height
    return None


def imports(path, top_only):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                submodule = ROOT / node.module.replace(".", "/") / alias.name
                is_module = submodule.is_dir() or submodule.with_suffix(".py").is_file()
                yield (f"{node.module}.{alias.name}" if is_module else node.module), node


def test_files_were_found():
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_down(path):
    module = module_of(path)
    mine = floor_of(module)
    assert mine is not None, f"{module} stands on no floor: give it one in FLOORS"
    for name, _ in imports(path, top_only=False):
        if name.split(".")[0] in PROJECT:
            theirs = floor_of(name)
            assert theirs is not None, f"{module} imports {name}, which stands on no floor"
            assert theirs >= mine, f"{module} imports {name}, which stands above it"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_heavy_imports_stand_inside_functions_and_project_imports_at_the_top(path):
    top = {node.lineno for _, node in imports(path, top_only=True)}
    for name, node in imports(path, top_only=False):
        package = name.split(".")[0]
        if node.lineno in top:
            assert package not in HEAVY, f"{path.name}:{node.lineno}: import {name} inside the function that uses it"
        else:
            assert package not in PROJECT, (
                f"{path.name}:{node.lineno}: import {name} at the top: fast registration ships what is loaded"
            )


def test_the_root_is_no_package():
    assert not (ROOT / "__init__.py").exists()


@pytest.mark.parametrize("module", ["tasks.plan", "tasks.prepare", "tasks.store"])
def test_a_cpu_pod_imports_its_task_without_torch(module):
    code = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"


def test_no_file_outgrows_its_reader():
    assert [f"{path.name}: {n} lines" for path in FILES if (n := len(path.read_text().splitlines())) > 400] == []


def test_flytune_knows_nothing_of_flyte():
    # The doctor asks Flyte whether it is there, and `flytune fetch` what an execution has stored.
    asking = {ROOT / "flytune" / "doctor" / "admin.py", ROOT / "flytune" / "executions.py"}
    for path in set((ROOT / "flytune").rglob("*.py")) - asking:
        assert not {name.split(".")[0] for name, _ in imports(path, top_only=False)} & {"flytekit", "flytekitplugins"}
