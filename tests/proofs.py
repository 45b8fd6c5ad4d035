"""The proofs: what takes too long for every change, in named parts, and a record of each part's last green
run.

    python -m tests.proofs                  every part (make proofs)
    python -m tests.proofs chaos selftest   these parts (make proofs PARTS="chaos selftest")
    python -m tests.proofs --list           the parts, what each runs, and its last green run

A part that is green writes its line into tests/proofs.json: commit, date, seconds and machine. Nothing is
recorded while files are not committed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "proofs.json"
WORKERS = os.environ.get("WORKERS", "2")

FOLDERS = {
    "training": ["training", "objectives", "rewards", "rollouts", "sharding", "export"],
    "models": ["models", "adapters", "evaluation", "inference"],
    "data": ["data", "conversion", "report"],
    "planning": ["dryrun", "training_estimates", "planning", "hardware"],
    "jobs": ["tasks", "failures", "pods"],
    "runs": ["end_to_end", "workflows", "stages", "sweeps", "flyte2"],
}
"""The folders of tests/ of each part that runs their slow tests. What is in none of them is the part
`others`."""


def pytest(marked: str, folders: list[str], beside: bool = False) -> list[str]:
    """Return the command that runs the tests with these markers in these folders, or in all others
    (`beside`)."""
    paths = [f"--ignore=tests/{folder}" if beside else f"tests/{folder}" for folder in folders]
    return [
        "pytest",
        "-n",
        WORKERS,
        "--dist",
        "worksteal",
        "-m",
        marked,
        *(["tests"] if beside else []),
        *paths,
    ]


_SLOW = "slow and not journey and not release and not gpu"
_FURTHER = "release and not gpu"
PARTS: dict[str, list[str]] = {
    **{part: pytest(_SLOW, folders) for part, folders in FOLDERS.items()},
    "others": pytest(
        _SLOW, ["rules", *(folder for group in FOLDERS.values() for folder in group)], beside=True
    ),
    "types": pytest(_FURTHER, ["models", "data"]),
    "matrices": pytest(_FURTHER, ["models", "data"], beside=True),
    "cpu_default": ["make", "test-cpus", "CPUS=default"],
    "cpu_avx2": ["make", "test-cpus", "CPUS=avx2"],
    "selftest": ["flytune", "selftest"],
    "chaos": ["python", "-m", "tests.chaos"],
    "fuzz": ["python", "-m", "tests.fuzz"],
    "removals": ["python", "-m", "tests.fuzz", "--removals"],
    "served": ["python", "-m", "tests.served"],
}
"""The command of each part. CONTRIBUTING.md says which change owes which part."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def record(part: str, commit: str, seconds: float) -> None:
    """Write the line of a part that was green."""
    parts = recorded()
    machine = f"{os.cpu_count()} cores, {platform.machine()}"
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    parts[part] = {"commit": commit, "date": when, "seconds": round(seconds), "machine": machine}
    lines = [f"  {json.dumps(name)}: {json.dumps(parts[name])}" for name in PARTS if name in parts]
    new = RECORD.with_suffix(".new")
    new.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    new.replace(RECORD)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--list", action="store_true", help="show the parts and their last green runs")
    given = parser.parse_args(arguments)
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"{unknown[0]}: no such part; the parts are {', '.join(PARTS)}")
    chosen = given.parts or list(PARTS)
    if given.list:
        for part in chosen:
            last = recorded().get(part)
            shown = f"{last['date']} {last['commit'][:10]} {last['seconds']} s" if last else "never"
            say(f"{part:<11} {shown:<34} {' '.join(PARTS[part])}")
        return 0
    red = []
    for number, part in enumerate(chosen, 1):
        commit, changed = (
            git("rev-parse", "HEAD"),
            git("status", "--porcelain", "--", ".", f":!{RECORD.relative_to(ROOT)}"),
        )
        say(f"{part} ({number} of {len(chosen)}): {' '.join(PARTS[part])}")
        began = time.monotonic()
        code = subprocess.run(PARTS[part], cwd=ROOT, check=False).returncode
        seconds = time.monotonic() - began
        say(f"{part}: {'green' if code == 0 else 'RED'} after {seconds / 60:.0f} min")
        if code:
            red.append(part)
        elif changed:
            say(f"{part}: not recorded, because files are not committed: {changed.splitlines()[0]}")
        else:
            record(part, commit, seconds)
    if red:
        sys.stderr.write(f"red: {', '.join(red)}\n")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
