"""Tokens a second as training_estimates.step_time estimates them, beside published measurements.

    python -m benchmarks.throughput [--measurements FILE] [--rows]

A third of the rows, chosen by a hash of their ids, had no part in fitting the constants that
training_estimates.flops, kernels and step_time mark as fitted: its errors are listed separately.
"""

import argparse
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import measured_runs
from benchmarks.measured_runs import MeasuredRun
from flytune.errors import FlytuneError
from flytune.hardware import load_accelerators
from training_estimates import StepTime, Workload
from training_estimates.accelerators import Accelerator
from training_estimates.intervals import ENOUGH_TOKENS
from training_estimates.step_time import step

WORST = 15
NAMES = {"A100-80": "A100-80GB", "A100-40": "A100-40GB", "H100-80": "H100", "A6000Ada": "RTX6000-Ada"}
"""The table's names of GPUs -> accelerators.yaml's, where they differ; text in brackets is removed first."""


@dataclass(frozen=True, slots=True)
class Estimated:
    """A row with its estimate."""

    run: MeasuredRun
    workload: Workload
    time: StepTime
    held_out: bool

    @property
    def enough(self) -> bool:
        return self.workload.tokens >= ENOUGH_TOKENS

    @property
    def error(self) -> float:
        """Signed error as a share of the measurement."""
        return self.time.tokens_per_second / (self.run.tokens_per_second or 1.0) - 1

    @property
    def reason(self) -> str:
        return next((why for holds, why in REASONS if holds(self)), "not explained")


REASONS: list[tuple[Callable[[Estimated], bool], str]] = [
    (lambda row: "eval" in row.run.note, "wall time of the whole run, with evaluations and saves in it"),
    (
        lambda row: "settings differ" in row.run.note,
        "the source does not say the settings: faster than the GPU could with these",
    ),
    (
        lambda row: "likely" in row.run.note,
        "the source does not say whether activations are offloaded or recomputed",
    ),
    (
        lambda row: (
            row.run.gpu.startswith("RTX3090")
            and row.workload.layout.name == "fsdp1"
            and row.workload.quantization == "none"
        ),
        "beside its ddp rows each step costs 4.4 s more for 13 GB: that machine's link had 3 GB/s",
    ),
    (
        lambda row: row.run.gpu == "A6000Ada",
        "too slow for an Ada: what an A6000 of the generation before would do",
    ),
    (
        lambda row: row.workload.nodes > 1 and "Qwen" in row.run.source,
        "the source does not say the network between the two nodes",
    ),
    (
        lambda row: row.error > 0 and row.workload.gpus > 1 and row.run.gpu.startswith(("RTX", "A5000")),
        "cards without NVLink share their host's PCIe and memory; each is estimated with a slot of its own",
    ),
    (
        lambda row: row.error < 0 and row.run.gpu.startswith("RTX"),
        "GeForce cards clock above their data sheet",
    ),
    (
        lambda row: row.workload.gpus > 1 and not row.enough,
        "few tokens: a layer's weights are gathered one by one, and small messages do not fill a link",
    ),
    (
        lambda row: row.error > 0 and (row.run.reserved_gib or 0) > 0.93 * row.workload.gpu_memory_gib,
        "memory is full: the allocator may free and ask anew in each step",
    ),
    (
        lambda row: (
            row.error > 0
            and row.workload.method == "full"
            and _states(row.workload) > 0.65 * row.workload.gpu_memory_gib
        ),
        "weights, gradients and moments take two thirds of the memory: the allocator may free and ask anew "
        "in each step",
    ),
    (
        lambda row: row.error > 0 and row.run.source == "fms-acceleration" and row.workload.gpus == 2,
        "FSDP of two GPUs: a step has 0.3 to 1 s more than larger batches of the same",
    ),
]
"""Known or surmised reasons for wrong rows; the first that applies counts."""


def _states(workload: Workload) -> float:
    """Return GiB of float32 weights, gradients and moments on one GPU."""
    return 16 * workload.geometry.parameters / workload.gpus / 2**30


def held_out(row: str) -> bool:
    """Return whether a row is of the third that nothing was fitted on."""
    return int(hashlib.sha256(row.encode()).hexdigest(), 16) % 3 == 0


def accelerator(run: MeasuredRun) -> Accelerator | None:
    """Return the run's GPU with the source's network between nodes; None where accelerators.yaml has no such
    GPU."""
    bare = run.gpu.split("(")[0].strip()
    found = load_accelerators().get(NAMES.get(bare, bare))
    if found and (network := re.search(r"(\d+) Gbps", run.note)):
        return found.model_copy(update={"network_gbs": int(network[1]) / 8})
    return found


def estimated(runs: Iterable[MeasuredRun]) -> tuple[list[Estimated], list[MeasuredRun]]:
    """Return the runs that have a throughput with their estimates, and those whose GPU is not in
    accelerators.yaml."""
    rows, unknown = [], []
    for run in runs:
        if run.workload is None or run.tokens_per_second is None:
            continue
        if found := accelerator(run):
            rows.append(Estimated(run, run.workload, step(run.workload, found), held_out(run.row)))
        else:
            unknown.append(run)
    return rows, unknown


def quantile(values: list[float], share: float) -> float:
    """Return the quantile at `share`, by nearest rank."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def errors(rows: list[Estimated], title: str) -> Table:
    """Return rows by source and method, and all: number, median and 90th percentile of |error|, signed median
    error."""
    table = Table(title=title, title_justify="left")
    for column in ("source", "method", "n", "median", "p90", "bias"):
        table.add_column(column, justify="left" if column in ("source", "method") else "right")
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        groups[row.run.source, row.workload.method].append(row.error)
    for (source, method), found in sorted(groups.items()):
        table.add_row(source, method, *_figures(found))
    table.add_section()
    table.add_row("all", "", *_figures([row.error for row in rows]))
    return table


def _figures(found: list[float]) -> list[str]:
    if not found:
        return ["0", "", "", ""]
    sizes = [abs(error) for error in found]
    return [
        str(len(found)),
        f"{quantile(sizes, 0.5):.1%}",
        f"{quantile(sizes, 0.9):.1%}",
        f"{quantile(found, 0.5):+.1%}",
    ]


def worst(rows: list[Estimated], count: int) -> Table:
    """Return the rows with the largest errors, and the reasons."""
    table = Table(title=f"The {count} worst rows, of all", title_justify="left")
    for column in ("row", "what", "GPUs", "tokens", "measured", "estimated", "error", "why"):
        table.add_column(
            column, justify="left" if column in ("what", "GPUs", "why") else "right", overflow="fold"
        )
    for row in sorted(rows, key=lambda row: -abs(row.error))[:count]:
        run, it = row.run, row.workload
        what = f"{run.model} {it.method} {it.layout.name}"
        gpus = f"{it.gpus} {run.gpu.split('(')[0]}"
        speeds = (f"{run.tokens_per_second:,.0f}", f"{row.time.tokens_per_second:,.0f}", f"{row.error:+.0%}")
        table.add_row(run.row, what, gpus, f"{it.tokens:,}", *speeds, row.reason)
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measurements", type=Path, default=measured_runs.TABLE, help="another table of measured runs (CSV)"
    )
    parser.add_argument("--rows", action="store_true", help="print every row, not the worst only")
    arguments = parser.parse_args()
    try:
        read, left_out = measured_runs.read(arguments.measurements)
    except FlytuneError as error:
        raise SystemExit(str(error)) from None
    rows, unknown = estimated(read)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for enough, size in (
        (True, f"{ENOUGH_TOKENS:,} tokens and more"),
        (False, f"fewer than {ENOUGH_TOKENS:,} tokens"),
    ):
        for held, which in ((True, "the third that nothing was fitted on"), (False, "the others")):
            chosen = [row for row in rows if row.enough == enough and row.held_out == held]
            console.print(errors(chosen, f"Tokens a second, {size} in a micro batch: {which}"))
    console.print(worst(rows, len(rows) if arguments.rows else min(WORST, len(rows))))
    if unknown:
        names = ", ".join(sorted({run.gpu or "(none)" for run in unknown}))
        console.print(f"{len(unknown)} rows left out: no figures for {names} in accelerators.yaml")
    if left_out:
        console.print(measured_runs.left_out_table(left_out, len(read) + len(left_out)), highlight=False)


if __name__ == "__main__":
    main()
