"""Reserved memory of published runs by the simulated allocator, over the dry run's trace, beside the closed
form's.

`python -m benchmarks.reserved`: the rows of measurements.csv that name reserved memory and that the dry run
can trace: full or LoRA, not quantized, with transformers' loss of all logits, every batch of one shape. FSDP1
is traced as FSDP2. The allocator has no expandable segments, as in those runs. Each row is a subprocess of
about eight seconds.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import dryrun as rows_of_dryrun
from benchmarks import estimates, measured_runs
from benchmarks.allocator import CachingAllocator, least_capacity, ledger_of, replay
from benchmarks.frameworks import HF, HF_4_45
from benchmarks.measured_runs import MeasuredRun
from flytune import dryrun
from flytune.dryrun import Case
from flytune.errors import FlytuneError
from training_estimates import Memory
from training_estimates.memory import GIB

TARGETS = {name: f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}


def traceable(run: MeasuredRun) -> bool:
    """Return whether a run has a reserved figure, and a step that the dry run takes as it was."""
    work = run.workload
    assert work is not None
    return (
        run.reserved_gib is not None
        and run.source == "fms-acceleration"
        and work.method in ("full", "lora")
        and work.framework.loss in (HF, HF_4_45)
        and set(work.lora_targets) <= set(TARGETS)
        and (work.layout.name == "none" or work.layout.fsdp)
        and work.precision in ("pure", "autocast")
        and not work.variable_length
        and work.accumulation == 1
    )


def case(run: MeasuredRun, folder: Path) -> Case:
    """Return the input of a published run's dry run; the folder receives its model's config.json."""
    work = run.workload
    assert work is not None
    sections: dict[str, Any] = {
        "training": {"optim": "adamw_torch", "activation_checkpointing": work.checkpointing != "none"},
        "data": {"max_length": work.sequence_length},
    }
    if work.method == "lora":
        sections["method"] = {
            "name": "lora",
            "r": work.lora_r,
            "target_modules": [TARGETS[name] for name in work.lora_targets],
        }
    if work.layout.fsdp:
        sections["sharding"] = {"name": "fsdp"}
    profile = dryrun.Profile(
        loss="full", weight_dtype=work.weight_dtype, autocast=work.precision == "autocast"
    )
    config = json.loads(measured_runs.MODELS.read_text(encoding="utf-8"))[run.model]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    recipe = rows_of_dryrun.recipe(sections)
    return Case(
        recipe=recipe, config=str(folder), degrees=work.degrees, micro_batch=work.micro_batch, profile=profile
    )


def served(run: MeasuredRun) -> tuple[CachingAllocator, int]:
    """Return the allocator that has served the dry run of a published run, and the least capacity with which
    it could.

    Raises:
        RecipeError: transformers cannot build the model on fake tensors.
    """
    with tempfile.TemporaryDirectory() as folder:
        ledger = ledger_of(case(run, Path(folder)))
    unlimited = replay(ledger, CachingAllocator())
    return unlimited, least_capacity(ledger, unlimited)


def reserved(run: MeasuredRun, closed: Memory, most: int, least: int) -> float:
    """Return GiB as the row counts them: on a GPU of its size, with what is beside the allocator if the
    driver counted.

    Args:
        most: bytes that the allocator reserves where there is room.
        least: bytes that it must be able to reserve.
    """
    assert run.workload is not None
    outside = sum(closed.outside.values())
    room = run.workload.gpu_memory_gib * GIB - outside
    return (max(least, min(most, room)) + (outside if run.reserved_on_device else 0)) / GIB


def main() -> None:
    """Run the rows one after the other, and show the table and the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="only the first row")
    quick = parser.parse_args().quick
    runs = [
        (run, closed) for run, closed in estimates.estimable(measured_runs.read()[0])[0] if traceable(run)
    ]
    table = Table(title="GiB allocated and reserved, measured and estimated", title_justify="left")
    for column in (
        "row",
        "run",
        "allocated",
        "closed form",
        "dry run",
        "reserved",
        "closed form",
        "simulated",
        "errors",
    ):
        table.add_column(column, justify="left" if column == "run" else "right")
    errors: list[tuple[float, float]] = []
    for run, closed in runs[:1] if quick else runs:
        work = run.workload
        assert work is not None
        said = (
            f"{run.model} {work.method} {work.layout.name} x{work.gpus}, {work.micro_batch} x "
            f"{work.sequence_length}"
        )
        pairs = estimates.estimates(run, closed)
        try:
            allocator, least = served(run)
        except FlytuneError as error:
            table.add_row(run.row, f"{said}: {error}")
            continue
        simulated = reserved(run, closed, allocator.peak_reserved, least)
        measured, estimated = pairs["reserved"]
        errors.append((estimated / measured - 1, simulated / measured - 1))
        allocated = pairs.get("allocated", (float("nan"), closed.allocated / GIB))
        sizes = [*allocated, allocator.peak_allocated / GIB, measured, estimated, simulated]
        shown = " ".join(f"{error:+.1%}" for error in errors[-1])
        table.add_row(run.row, said, *(f"{size:.2f}" for size in sizes), shown)
    console = Console(width=160)
    console.print(table)
    for name, found in zip(("closed form", "simulated"), zip(*errors, strict=True), strict=True):
        sizes = sorted(map(abs, found))
        console.print(f"{name}: median {median(sizes):.1%}, largest {sizes[-1]:.1%}, n = {len(sizes)}")


if __name__ == "__main__":
    main()
