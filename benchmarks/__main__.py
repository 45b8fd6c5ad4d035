"""`make bench`: all benchmarks of README.md, one after the other."""

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("README.md")
_ROW = re.compile(r"^\| `(\w+)` \|.*\| `(--\w+)` \|$", re.MULTILINE)


class Benchmark(NamedTuple):
    """A row of the table."""

    name: str
    """Module in this folder; it has a function `main`."""
    option: str
    """`--quick`, `--measurements` where it reads a table of measured runs, or one that `make bench` does not
    use."""


def listed() -> list[Benchmark]:
    """List the benchmarks of README.md, in its order."""
    return [Benchmark(*row) for row in _ROW.findall(TABLE.read_text(encoding="utf-8"))]


def options_of(benchmark: Benchmark, quick: bool, measurements: Path | None) -> list[str]:
    """Return the options that a benchmark is run with."""
    if benchmark.option == "--measurements":
        return ["--measurements", str(measurements)] if measurements else []
    return ["--quick"] if quick and benchmark.option == "--quick" else []


def main() -> None:
    """Run all benchmarks, and exit with 1 if any of them fails."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Run the benchmarks of benchmarks/README.md."
    )
    parser.add_argument(
        "--quick", action="store_true", help="small inputs: to see that they work, not to measure"
    )
    parser.add_argument(
        "--measurements", type=Path, help="another table of measured runs (CSV) for estimates and throughput"
    )
    given = parser.parse_args()
    failed = []
    for benchmark in listed():
        options = options_of(benchmark, given.quick, given.measurements)
        print(f"\n== {benchmark.name} {' '.join(options)}", flush=True)  # noqa: T201
        if subprocess.run([sys.executable, "-m", f"benchmarks.{benchmark.name}", *options]).returncode:
            failed.append(benchmark.name)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
