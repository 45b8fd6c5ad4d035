"""Intervals of the estimates: fitted on the rows of development, counted on the held-out ones.

    python -m benchmarks.intervals [--held-out]

prints the lines of training_estimates/intervals.py. An interval has the 5th to the 95th percentile of
measured over estimated, by groups: memory of batches of one shape and of lengths that vary, speed with many
and with few tokens. In "calibrated" the estimate is multiplied by the ratio of one other row of the same
source, machines, method and sharding, as `flytune calibrate` does after a run; "same model": a row with other
batches, lengths or kernels. Held-out rows are read only with --held-out, and then only to count those that
are inside.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks import estimates, measured_runs, throughput
from benchmarks.measured_runs import MeasuredRun
from training_estimates.intervals import LEVEL, Band, is_enough


def ratios(table: Path = measured_runs.TABLE) -> dict[str, list[tuple[MeasuredRun, float]]]:
    """Return measured over estimated of all rows, by the names of the bands."""
    runs = measured_runs.read(table)[0]
    found: dict[str, list[tuple[MeasuredRun, float]]] = defaultdict(list)
    for run, table in estimates.estimable(runs)[0]:
        assert run.workload is not None
        for figure, (measured, estimated) in estimates.estimates(run, table).items():
            kind = "lengths vary" if run.workload.variable_length else "one shape"
            found[f"{figure}, {kind}"].append((run, measured / estimated))
    for row in throughput.estimated(runs)[0]:
        kind = "enough tokens" if is_enough(row.workload) else "few tokens"
        found[f"speed, {kind}"].append((row.run, 1 / (1 + row.error)))
    bare = {figure: found[f"{figure}, one shape"] for figure in ("allocated", "reserved")}
    bare["speed"] = [*found["speed, enough tokens"], *found["speed, few tokens"]]
    for figure, rows in bare.items():
        found[f"{figure}, calibrated"] = list(calibrated(rows, is_same_model=False))
        found[f"{figure}, calibrated, same model"] = list(calibrated(rows, is_same_model=True))
    return found


def calibrated(
    rows: Iterable[tuple[MeasuredRun, float]], is_same_model: bool
) -> Iterator[tuple[MeasuredRun, float]]:
    """List the ratios that remain after one other run on the same machines, of the same part of the rows."""
    groups: dict[tuple[object, ...], list[tuple[MeasuredRun, float]]] = defaultdict(list)
    for run, ratio in rows:
        work = run.workload
        assert work is not None
        machines = (run.source, run.gpu, work.gpus, work.nodes, work.method, work.layout.name)
        groups[*machines, run.model if is_same_model else "", held_out(run)].append((run, ratio))
    for group in (group for group in groups.values() if len(group) > 1):
        # Half of the group away: neighbours differ least.
        away = len(group) // 2
        for (run, ratio), (_, other) in zip(group, [*group[away:], *group[:away]], strict=True):
            yield run, ratio / other


def held_out(run: MeasuredRun) -> bool:
    return estimates.held_out(run.row)


def ends(found: list[float]) -> tuple[float, float]:
    """Return the ends of an interval that holds LEVEL of further values on average, rounded outwards to
    hundredths.

    Values in order divide what further ones may be into parts of equal share; an end within such a part is
    interpolated.
    """
    ordered, beyond = sorted(found), (1 - LEVEL) / 2

    def at(share: float) -> float:
        place = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
        below = math.floor(place)
        return ordered[below] + (place - below) * (ordered[min(below + 1, len(ordered) - 1)] - ordered[below])

    return math.floor(100 * at(beyond)) / 100, math.ceil(100 * at(1 - beyond)) / 100


def bands(with_held_out: bool, table: Path = measured_runs.TABLE) -> dict[str, Band]:
    """Return all bands; without the held-out rows, nothing is counted."""
    bands = {}
    for name, rows in ratios(table).items():
        seen = [ratio for run, ratio in rows if not held_out(run)]
        others = [ratio for run, ratio in rows if held_out(run)] if with_held_out else []
        low, high = ends(seen)
        bands[name] = Band(low, high, len(seen), len(others), sum(low <= ratio <= high for ratio in others))
    return bands


def main() -> None:
    """Print the bands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--held-out", action="store_true", help="count the held-out rows too")
    parser.add_argument(
        "--measurements", type=Path, default=measured_runs.TABLE, help="another table of measured runs (CSV)"
    )
    arguments = parser.parse_args()
    for name, band in bands(arguments.held_out, arguments.measurements).items():
        print(f'    "{name}": Band({", ".join(map(str, band))}),')  # noqa: T201


if __name__ == "__main__":
    main()
