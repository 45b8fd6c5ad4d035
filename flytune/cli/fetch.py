"""`flytune fetch ADDRESS OUT`."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from flytune.artifacts import fetch
from flytune.cli import arguments
from flytune.cluster import executions, failed_runs, flyte2_sdk, runs_of_flyte2
from flytune.errors import ExportError, RecipeError, printable
from flytune.files import new_output
from flytune.records import Metrics, Plan
from flytune.schema import Record
from flytune.selftest import Matrix, table

_RECORDS: dict[str, type[Record]] = {"matrix": Matrix, "metrics": Metrics, "plan": Plan}
"""Records that workflows return, by the names of their files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument(
        "address",
        help="an execution (its id, or its address in the console), an fsspec address, or "
        "hf://owner/name@REVISION",
    )
    parser.add_argument("out", help="a new folder")
    parser.add_argument(
        "--point",
        metavar="NAME",
        help="of a sweep: the artifact of this point (default: table, chart, best recipe)",
    )
    parser.add_argument(
        "--failed",
        action="store_true",
        help="of a failed execution: the report of the failure, and all decks",
    )
    arguments.add_cluster(parser, "for an execution's id")


def run(options: argparse.Namespace) -> int:
    """Download an artifact or what else an execution has made, and verify its files."""
    address, out, reader = options.address, Path(options.out), None
    execution, second = None, None
    if not Path(address).exists() and (execution := runs_of_flyte2.parse(address)) is None:
        execution = executions.parse(address, options.project, options.domain)
    if execution is not None and execution.node is None:
        second = flyte2_sdk.config_file()
    if options.failed:
        if options.point or execution is None:
            raise RecipeError(
                "--failed: for an execution, without --point; name a point's artifact by its address"
            )
        if second is not None:
            names = ", ".join(runs_of_flyte2.fetch_report(second, execution, out))
            return _say(f"{out}: {names}: what Flyte 2 has of {execution}")
        return _say(
            f"{out}: {', '.join(failed_runs.fetch_report(execution, out))}: what flyteadmin has of "
            f"{execution}"
        )
    opened = None
    if execution is not None:
        if second is not None:
            address, opened, records = runs_of_flyte2.find(second, execution)
        else:
            address, opened, records = executions.find(execution, is_listed=not options.point)
        if records:
            if options.point:
                raise ExportError(
                    f"{execution}: returns records and no sweep; leave out --point {options.point}"
                )
            return _say(f"{out}: {', '.join(_write(records, out))}, as {execution} returned it")
        reader = opened(address) if opened else None
    if options.point:
        address = fetch.find_point(address, options.point, reader)
        reader = opened(address) if opened else None
    fetch.fetch(address, out, reader)
    return _say(f"{out}: {address}, all files verified against artifact.json")


def _say(text: str) -> int:
    Console(emoji=False).print(printable(text), markup=False, highlight=False, soft_wrap=True)
    return 0


def _write(records: Mapping[str, Any], out: Path) -> list[str]:
    """Write records to the new folder `out`, a self-test's also as a table; return the names of the files."""
    with new_output(out) as folder:
        folder.mkdir()
        for output, value in records.items():
            kind, record = _known(value)
            name = kind if kind and not (folder / f"{kind}.json").exists() else output
            if record is None:
                (folder / f"{name}.json").write_text(
                    json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8"
                )
            else:
                record.write(folder / f"{name}.json")
            if isinstance(record, Matrix):
                (folder / f"{name}.txt").write_text(table.text(record), encoding="utf-8")
        return sorted(file.name for file in folder.iterdir())


def _known(value: Any) -> tuple[str, Record | None]:
    for name, kind in _RECORDS.items():
        try:
            return name, kind.model_validate(value)
        except ValidationError:
            continue
    return "", None
