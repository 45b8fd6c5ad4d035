"""Published figures of the runs that recipes repeat, beside the closed form's for the published settings and
for the recipe.

`python -m benchmarks.published` prints the table of docs/recipes.md ("Published and planned"), which a test
compares with it; `--write` writes it there. Published settings are rows of measurements.csv; a recipe differs
from them as its header says. GB are 1e9 bytes, as the sources print them.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import measured_runs
from benchmarks.measured_runs import MeasuredRun
from benchmarks.throughput import accelerator
from flytune.hardware import shape_named
from flytune.planning import candidates
from flytune.planning.base_sizes import read_geometry
from flytune.planning.candidates import Fit
from flytune.recipe import Recipe
from training_estimates import Memory, Workload, memory, step_time
from training_estimates.memory import GIB

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "recipes.md"
BEGIN, END = "<!-- published: python -m benchmarks.published --write -->\n", "<!-- end of published -->"
HEAD = """\
| recipe | figure | published | published settings, estimated | ratio | recipe, planned | ratio |
|---|---|---|---|---|---|---|
"""
SECOND_FILE_MIB = 3.5e9 / 2**20
"""The second of the two files of Llama 2 7B in float16, which is read while all float32 weights are there."""
PROCESS_MIB = 1506
"""A process without a model, as the source measured it on rank 1."""


@dataclass(frozen=True, slots=True)
class System:
    """A published run and the recipe that repeats it."""

    recipe: str
    row: str | None = None
    """Row of measurements.csv; None where no figure was published."""
    asked_host_gib: float | None = None
    """Host memory of a node that the source asks for."""
    note: str = ""
    """Parts of the published time that are not steps."""
    range: str = ""
    """Published range, where the row has its upper end."""
    run: str = ""
    """Difference of the published run where the recipe has other GPUs or another batch, and so no comparable
    plan."""


SYSTEMS = [
    System("llama-2-7b-full-zero3-cpu", asked_host_gib=256),
    System("llama-2-13b-full-zero3-cpu", asked_host_gib=256),
    System("llama-2-70b-qlora-device-map", asked_host_gib=120),
    System("llama-2-70b-full-fsdp", "767", note=" (13.5 h / 500, evaluations and saves in it)"),
    System("llama-2-70b-full-fsdp-paged", "767", note=" (13.5 h / 500, evaluations and saves in it)"),
    System("llama-2-70b-lora-fsdp", "773", range="72 to 80"),
    System("llama-3.1-405b-full-fsdp-cpu", "766"),
    System("llama-3.3-70b-qlora-fsdp", "775", run="Llama 2, 2 GPUs, "),
    System("llama-3.3-70b-qlora-fsdp", "778", run="Llama 2, 2 GPUs, offload, "),
    System("llama-3.3-70b-qlora-fsdp", "751", run="Llama 2, 8 A5000, "),
    # Its log has times, and no name of the GPUs.
    System("qwen2.5-1.5b-grpo-gsm8k", run="2 GPUs, vLLM, "),
]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table; None where there is no figure."""

    recipe: str
    figure: str
    published: float
    estimated: float | None
    planned: float | None
    shown: str = ""
    """Published figure as it is shown, where it is not the number alone."""

    def cells(self) -> list[str]:
        """Return the cells as Markdown."""
        cells = [
            f"[{self.recipe}](../recipes/{self.recipe}.yaml)",
            self.figure,
            self.shown or f"{self.published:,.5g}",
        ]
        for size in (self.estimated, self.planned):
            cells += ["–", "–"] if size is None else [_number(size), f"{size / self.published:.2f}"]
        return cells


def _number(size: float) -> str:
    return f"{size:,.0f}" if size >= 1000 else f"{size:.1f}"


def planned(name: str) -> Fit:
    """Return a recipe on its shape."""
    recipe = Recipe.from_yaml(ROOT / "recipes" / f"{name}.yaml")
    fit = candidates.best_fit(recipe, shape_named(recipe.hardware.shape), read_geometry(recipe.model))
    assert isinstance(fit, Fit), f"{name}: {fit}"
    return fit


def lines() -> Iterator[Line]:
    """List all figures."""
    runs = {run.row: run for run in measured_runs.read()[0]}
    for system in SYSTEMS:
        fit = None if system.run else planned(system.recipe)
        if fit and system.asked_host_gib:
            host = next(need for need in fit.needs if need.resource == "host memory")
            shown = f"{system.asked_host_gib:.0f} asked for"
            own = host.peak_bytes / GIB
            yield Line(system.recipe, "host memory of a node, GiB", system.asked_host_gib, None, own, shown)
        if system.row:
            yield from _measured(system, fit, runs[system.row])
    # Rank 0 of two, which loads float32 weights of Llama 2 7B for both (row 768); Flytune's processes read
    # their slices.
    weights = 4 * measured_runs.model("Llama-2-7b").parameters / 2**20
    loaded = PROCESS_MIB + weights + SECOND_FILE_MIB
    yield Line(
        "llama-2-70b-full-fsdp",
        "host memory of rank 0 that loads a 7B model for two, MiB",
        32744,
        loaded,
        None,
    )


def _measured(system: System, fit: Fit | None, run: MeasuredRun) -> Iterator[Line]:
    assert run.workload is not None
    name, works = system.recipe, [run.workload, fit.workload] if fit else [run.workload]
    tables = [memory.memory(work) for work in works]

    def line(figure: str, published: float, sizes: list[float], shown: str = "") -> Line:
        estimated, planned = [*sizes, None][:2]
        return Line(name, system.run + figure, published, estimated, planned, shown)

    if run.allocated_gib:
        yield line(
            "GPU memory allocated, GB", _gb(run.allocated_gib), [table.allocated / 1e9 for table in tables]
        )
    if run.reserved_gib:
        figure = "in use by the driver" if run.reserved_on_device else "reserved"
        sizes = [_reserved(run, table, work) for table, work in zip(tables, works, strict=True)]
        yield line(f"GPU memory {figure}, GB", _gb(run.reserved_gib), sizes, system.range)
    if not (gpu := accelerator(run)):
        return
    times = [step_time.step(work, gpu) for work in works]
    if run.step_seconds:
        shown = f"{run.step_seconds:g}{system.note}"
        yield line("seconds a step", run.step_seconds, [time.seconds for time in times], shown)
    elif run.tokens_per_second:
        yield line(
            "tokens a second of a GPU", run.tokens_per_second, [time.tokens_per_second for time in times]
        )


def _gb(gib: float) -> float:
    return gib * GIB / 1e9


def _reserved(run: MeasuredRun, table: Memory, work: Workload) -> float:
    capacity = work.gpu_memory_gib * GIB
    return (table.on_device(capacity) if run.reserved_on_device else table.reserved(capacity)) / 1e9


def markdown() -> str:
    """Return the table."""
    return HEAD + "".join(f"| {' | '.join(line.cells())} |\n" for line in lines())


def with_table(page: str) -> str:
    """Return the page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + markdown() + END + rest.partition(END)[2]


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    if parser.parse_args().write:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(markdown(), end="")  # noqa: T201


if __name__ == "__main__":
    main()
