"""Reserved memory of rows whose lengths vary, by the simulated allocator over the dry run's trace.

`python -m benchmarks.lengths`: LoRA of Yi-6B with the loss of all logits, as rows 364 and 365 of
measurements.csv (ms-swift). The step is traced with 512 and with 1,024 tokens; sizes of other lengths are on
the line through both. Lengths are drawn from the log-normal distribution with ms-swift's mean and deviation,
and longer rows than the limit are left out.
"""

import argparse
import math
import random
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import measured_runs, reserved
from benchmarks.allocator import CachingAllocator, ledger_of
from flytune.dryrun.allocations import OPTIMIZER, AllocationLedger
from training_estimates.memory import GIB

ROW, TRACED = "365", (512, 1024)
MEAN, DEVIATION = 3234, 2547
"""Tokens of a row in ms-swift's benchmark (its README: 3234+-2547)."""
SHORTEST, ROWS = 32, 100


def ledgers() -> tuple[AllocationLedger, AllocationLedger]:
    """Return the ledgers of the step with both lengths, whose entries are the same but for sizes."""
    run = next(run for run in measured_runs.read()[0] if run.row == ROW)
    assert run.workload is not None
    pair = []
    for length in TRACED:
        other = replace(run, workload=replace(run.workload, sequence_length=length))
        with tempfile.TemporaryDirectory() as folder:
            pair.append(ledger_of(reserved.case(other, Path(folder))))
    return pair[0], pair[1]


def drawn(most: int, seed: int, rows: int) -> list[int]:
    """Draw lengths of at most `most` tokens."""
    generator, variance = random.Random(seed), math.log(1 + (DEVIATION / MEAN) ** 2)
    lengths: list[int] = []
    while len(lengths) < rows:
        length = int(generator.lognormvariate(math.log(MEAN) - variance / 2, math.sqrt(variance)))
        if SHORTEST <= length <= most:
            lengths.append(length)
    return lengths


def replayed(
    pair: tuple[AllocationLedger, AllocationLedger], lengths: list[int], expandable: bool
) -> CachingAllocator:
    """Return the allocator after a step with each length."""
    short, long = pair
    begin, served, blocks = short.stages[1][1], CachingAllocator(expandable=expandable), {}
    events = [(life.born, True, at) for at, life in enumerate(short.lives)]
    events += [
        (short.now + 1 if life.died is None else life.died, False, at) for at, life in enumerate(short.lives)
    ]
    events.sort(key=lambda event: event[0])
    for step, length in enumerate(lengths):
        beyond = (length - TRACED[0]) / (TRACED[1] - TRACED[0])
        for time, born, at in events:
            life, other = short.lives[at], long.lives[at]
            if life.born <= begin or life.kind == OPTIMIZER:
                if not step and born:
                    blocks[at] = served.allocate(life.bytes, life.stream)
                elif not step and time <= begin:
                    served.free(blocks.pop(at))
            elif born:
                blocks[at] = served.allocate(
                    max(1, round(life.bytes + beyond * (other.bytes - life.bytes))), life.stream
                )
            else:
                served.free(blocks.pop(at))
    return served


def main() -> None:
    """Show what is reserved and allocated with fixed and with drawn lengths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rows")
    given = parser.parse_args()
    pair, rows = ledgers(), 3 if given.quick else ROWS
    vocabulary = next(run for run in measured_runs.read()[0] if run.row == ROW).workload.geometry.vocab_size  # type: ignore[union-attr]
    table = Table(title=f"GiB reserved by {rows} steps", title_justify="left")
    for column in ("lengths", "allocated", "reserved", "more, in float32 logits", "expandable segments"):
        table.add_column(column, justify="left" if column == "lengths" else "right")
    for most in TRACED:
        for name, lengths in (
            (f"all {most:,}", [most] * 3),
            *((f"up to {most:,}, draw {seed}", drawn(most, seed, rows)) for seed in (1, 2)),
        ):
            grown = replayed(pair, lengths, expandable=False)
            more = (grown.peak_reserved - grown.peak_allocated) / (4 * vocabulary * most)
            large = replayed(pair, lengths, expandable=True)
            figures = (grown.peak_allocated / GIB, grown.peak_reserved / GIB, more, large.peak_reserved / GIB)
            table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
