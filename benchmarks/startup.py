"""Time to the first optimizer step, by cause, and to the artifact.

Four tables: what a laptop and a light pod wait for (help, reading a recipe, planning it, importing a task or
the workflow; the peer is what a training script pays before its first line of work: importing TRL's
SFTTrainer); `pyflyte run` on one process, from the command to the artifact, compared with a plain script
(benchmarks/plain_script.py); `pyflyte run` on two processes, to the first step; and `pyflyte run --remote`,
to submitted, with the pods that it leads to (plan, prepare, train), cold, from the uploaded code, without
cluster (tests/support/propeller.py). Light pods hide the packages that requirements-light.lock does not list.
`--light CHECKOUT` compares light pods with those of another version. benchmarks/spans.py finds causes. Ratios
are of processor seconds, which other processes on the machine disturb less.
"""

import argparse
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

from tests.support.execution import Run
from tests.support.flyteadmin import flyteadmin
from tests.support.laptop import checkout, pyflyte, submit
from tests.support.paths import ROOT
from tests.support.tiny import cluster_recipe, tiny_base, write_pairs

CASES = {
    "flytune --help": "import contextlib\n"
    "from flytune.cli import main\n"
    "with contextlib.suppress(SystemExit): main(['--help'])",
    "read a recipe": "from flytune.recipe.recipe import Recipe; Recipe.from_yaml('recipes/demo-qlora.yaml')",
    "plan a recipe": "from flytune.cli import main; main(['plan', 'recipes/demo-qlora.yaml', '--json'])",
    "import a plan pod's task": "import tasks.plan",
    "import a prepare pod's task": "import tasks.prepare",
    "import the workflow": "import workflows.finetune",
    "peer: import flytekit": "import flytekit",
    "peer: import SFTTrainer": "from trl import SFTTrainer",
}
ROUNDS = 5
COMPLETE_RUNS = 3
RUN = ("run", "workflows/finetune.py", "finetune", "--recipe")
BUSY = "processor seconds, to the end"
SPANS = Path(__file__).with_name("spans.py")
REST = "the rest"
LIGHT_ROUNDS = 3
LIGHT_LOCK = ROOT / "requirements-light.lock"
HIDE = 'import os, sys\nsys.modules.update(dict.fromkeys(os.environ["MISSING"].split()))\n'
"""Code of a pod that runs before all other: the packages that MISSING names appear as not installed."""
# As in tests and pods: no hub, no GPU.
LAPTOP = {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}


def main() -> None:
    """Measure, and show the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only the first table, one round")
    parser.add_argument(
        "--light",
        metavar="CHECKOUT",
        type=Path,
        help="only the light pods, with the code of another version too",
    )
    arguments = parser.parse_args()
    # Its server of objects prints each request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    if arguments.light:
        show_light_pods(arguments.light)
        return
    quick = arguments.quick
    show_laptop(1 if quick else ROUNDS)
    if quick:
        return
    with tempfile.TemporaryDirectory(prefix="flytune-startup-") as folder:
        show_complete_runs(Path(folder, "complete"))
        show_causes(Path(folder))


def show_laptop(rounds: int) -> None:
    """Interleave the cases, so that a slow moment of the machine affects all; show the median of each."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, code in CASES.items():
            taken[name].append(_timed(code))
    median = {
        name: [sorted(kind)[rounds // 2] for kind in zip(*times, strict=True)]
        for name, times in taken.items()
    }
    show_medians(f"Start-up, median of {rounds} fresh processes", median, "peer: import SFTTrainer")


def show_medians(title: str, median: dict[str, list[float]], peer: str) -> None:
    """Show seconds and processor seconds by case, and the latter as a ratio to those of the peer."""
    table = Table(title=title, title_justify="left")
    for column in ("case", "seconds", "processor seconds", "of the peer"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name, (seconds, busy) in median.items():
        table.add_row(name, f"{seconds:.2f}", f"{busy:.2f}", f"{busy / median[peer][1]:.2f}")
    Console().print(table)


def _timed(code: str) -> tuple[float, float]:
    """Run code in a fresh Python; return the seconds that it took, and those that processors worked for
    it."""
    busy, started = _busy(), time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, capture_output=True)
    return time.perf_counter() - started, _busy() - busy


def _busy() -> float:
    """Return the processor seconds of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def show_complete_runs(folder: Path) -> None:
    """Alternate `pyflyte run` and the plain script; show the median of each, and the processor seconds as a
    ratio."""
    folder.mkdir()
    base, data = tiny_base(folder), write_pairs(folder / "pairs.jsonl", 64)
    laptop, taken = checkout(folder / "laptop"), defaultdict(list)
    script = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("plain_script.py")),
        str(base),
        str(data),
        "3",
    ]
    for number in range(COMPLETE_RUNS):
        home = folder / f"home-{number}"
        home.mkdir()
        (home / "recipe.yaml").write_text(yaml.safe_dump(cluster_recipe(base, data)))
        runs = {
            "pyflyte run": lambda home=home: pyflyte(laptop, home, *RUN, str(home / "recipe.yaml"), **LAPTOP),
            "peer: plain TRL script": lambda home=home: subprocess.run(
                [*script, str(home / "out")], env=os.environ | LAPTOP, capture_output=True, text=True
            ),
        }
        for name, run in runs.items():
            busy, started = _busy(), time.perf_counter()
            done = run()
            if done.returncode:
                raise RuntimeError(done.stderr)
            taken[name].append((time.perf_counter() - started, _busy() - busy))
    median = {
        name: [sorted(kind)[COMPLETE_RUNS // 2] for kind in zip(*times, strict=True)]
        for name, times in taken.items()
    }
    show_medians(f"From command to artifact, median of {COMPLETE_RUNS}", median, "peer: plain TRL script")


def missing_in_light_image() -> str:
    """Return the top-level names of the packages here that the light image lacks; pods hide them (HIDE)."""
    locked = {_plain(line.split("==")[0]) for line in LIGHT_LOCK.read_text().split()}
    own = {"flytune", "training_estimates", "tasks", "workflows", "images", "flytekitplugins", "google"}
    found = metadata.packages_distributions()
    return " ".join(
        name
        for name, made_by in found.items()
        if name not in own and not {_plain(one) for one in made_by} & locked
    )


def _plain(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


def show_light_pods(other: Path) -> None:
    """Alternate the light pods of two versions, cold, without what the light image lacks; show the median of
    each."""
    taken = defaultdict(list)
    with (
        tempfile.TemporaryDirectory(prefix="flytune-startup-") as name,
        flyteadmin(Path(name, "cluster")) as (admin, storage),
    ):
        folder = Path(name)
        (folder / "site.py").write_text(HIDE)
        recipe = cluster_recipe(tiny_base(folder), write_pairs(folder / "pairs.jsonl", 64))
        executions, paths = {}, {}
        for version, root in {"before": other, "after": ROOT}.items():
            laptop = checkout(folder / version, root)
            executions[version] = submit(laptop, folder / "cluster", admin, recipe, **LAPTOP)
            paths[version] = _light_path(folder / f"{version}-bin", root)
        variables = storage | {"SITE": str(folder / "site.py"), "MISSING": missing_in_light_image()}
        for number in range(LIGHT_ROUNDS):
            for version, execution in executions.items():
                run = Run(
                    admin, execution, folder / f"{version}-{number}", variables | {"PATH": paths[version]}
                )
                for task in ("make_plan", "fetch_base_model", "prepare_data"):
                    busy, started = _busy(), time.perf_counter()
                    run.until(task)
                    taken[f"{task}, {version}"].append((time.perf_counter() - started, _busy() - busy))
    table = Table(title=f"Light pods, start to end, median of {LIGHT_ROUNDS}", title_justify="left")
    for column in ("pod", "seconds", "processor seconds", "of those before"):
        table.add_column(column, justify="left" if column == "pod" else "right")
    median = {
        name: [sorted(kind)[LIGHT_ROUNDS // 2] for kind in zip(*times, strict=True)]
        for name, times in taken.items()
    }
    for name, (seconds, busy) in median.items():
        before = median[name.replace(", after", ", before")][1]
        table.add_row(name, f"{seconds:.2f}", f"{busy:.2f}", f"{busy / before:.2f}")
    Console().print(table)


def _light_path(folder: Path, root: Path) -> str:
    """Return PATH of a checkout's light image, and write its script into `folder`."""
    folder.mkdir()
    if (script := root / "images" / "fast_execute.py").exists():
        shutil.copy(script, folder / "pyflyte-fast-execute")
        (folder / "pyflyte-fast-execute").chmod(0o755)
    return f"{folder}:{Path(sys.executable).parent}:/usr/bin:/bin"


def show_causes(folder: Path) -> None:
    """Run the smallest recipe on two processes each way; show seconds by cause, to the first step or the end
    of the pod."""
    recipe = cluster_recipe(
        tiny_base(folder),
        write_pairs(folder / "pairs.jsonl", 64),
        {"sharding": "ddp", "hardware.shape": "cpu-2"},
    )
    laptop = checkout(folder / "laptop")
    columns = {"run": _local(folder, laptop, recipe), **_remote(folder, laptop, recipe)}
    busy = {name: column.pop(BUSY) for name, column in columns.items()}
    causes = sorted(
        {cause for column in columns.values() for cause in column},
        key=lambda cause: -columns["run"].get(cause, 0),
    )
    table = Table(title="Seconds to the first step, by cause", title_justify="left")
    for name in ("cause", *columns):
        table.add_column(name, justify="left" if name == "cause" else "right")
    for cause in causes:
        table.add_row(
            cause, *(f"{column[cause]:.1f}" if cause in column else "" for column in columns.values())
        )
    table.add_row("in all", *(f"{sum(column.values()):.1f}" for column in columns.values()))
    table.add_row(BUSY, *(f"{seconds:.1f}" for seconds in busy.values()))
    Console(width=140).print(table)


def _local(folder: Path, laptop: Path, recipe: dict) -> dict[str, float]:
    """Return the seconds of `pyflyte run` by cause, to the first step of rank 0."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "home").mkdir()
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SPANS.read_text())
    busy = _busy()
    where = {"SPANS": str(folder / "run"), "paths": [str(site)]}
    done = pyflyte(laptop, folder / "home", *RUN, str(folder / "recipe.yaml"), **LAPTOP, **where)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return by_cause(folder / "run") | {BUSY: _busy() - busy}


def _remote(folder: Path, laptop: Path, recipe: dict) -> dict[str, dict[str, float]]:
    """Return the seconds of `pyflyte run --remote` and of each pod by cause, to its end or to the first
    step."""
    home, found = folder / "cluster", {}
    with flyteadmin(home) as (admin, storage):
        busy = _busy()
        name = submit(
            laptop, home, admin, recipe, **LAPTOP, SPANS=str(folder / "submit"), paths=[str(folder / "site")]
        )
        found["run --remote"] = by_cause(folder / "submit") | {BUSY: _busy() - busy}
        (folder / "site.py").write_text(HIDE + SPANS.read_text())
        light = {"MISSING": missing_in_light_image(), "PATH": _light_path(folder / "bin", ROOT)}
        run = Run(admin, name, folder / "pods", storage | {"SITE": str(folder / "site.py")} | light)
        for task in ("make_plan", "prepare_data", "train"):
            if task == "train":
                run.environment = storage | {"SITE": str(folder / "site.py"), "MISSING": ""}
            run.environment["SPANS"], busy = str(folder / task), _busy()
            run.until(task)
            found[f"{task} pod"] = by_cause(folder / task) | {BUSY: _busy() - busy}
    return found


def by_cause(file: Path) -> dict[str, float]:
    """Return seconds by cause, from the first process's start to the end of the first step, or its own end.

    At each moment the youngest process in the chain to rank 0 (else to the last process) counts, and its
    innermost span.
    """
    spans = defaultdict(list)
    parents, end = {}, None
    for line in file.read_text().splitlines():
        process, parent, cause, start, stop = json.loads(line)
        parents[process] = parent
        spans[process].append((start, stop, cause))
        if cause == "THE FIRST STEP":
            end, last = stop, process
    if end is None:
        end = max(stop for process in spans for _, stop, _ in spans[process])
        last = max(spans, key=lambda process: min(spans[process])[0])
    chain = [last]
    while parents.get(chain[-1]) in spans:
        chain.append(parents[chain[-1]])
    cuts = sorted(
        {
            min(moment, end)
            for process in chain
            for start, stop, _ in spans[process]
            for moment in (start, stop)
        }
        | {end}
    )
    seconds = defaultdict(float)
    for low, high in pairwise(cuts):
        seconds[_cause([spans[process] for process in chain], low, high)] += high - low
    return {cause: spent for cause, spent in seconds.items() if spent > 0.05}


def _cause(chain: list[list[tuple[float, float, str]]], low: float, high: float) -> str:
    for spans in chain:
        if around := [(start, cause) for start, stop, cause in spans if start <= low and high <= stop]:
            return max(around)[1]
    return REST


if __name__ == "__main__":
    main()
