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
from flytune.cluster.executions import Execution, ExecutionResult
from flytune.errors import ExportError, RecipeError, printable
from flytune.files import new_output
from flytune.records import Metrics, Plan
from flytune.schema import Record
from flytune.selftest import Matrix, table

_NAMES: dict[type[Record], str] = {Matrix: "matrix", Metrics: "metrics", Plan: "plan"}
"""Names of the files of records that workflows return."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    text = _fetched(options, Path(options.out))
    Console(emoji=False).print(printable(text), markup=False, highlight=False, soft_wrap=True)
    return 0


def _fetched(options: argparse.Namespace, out: Path) -> str:
    """Download what the options name; return a sentence on it."""
    execution = _execution(options)
    # An address of one node is Flyte 1's.
    flyte2 = flyte2_sdk.config_file() if execution is not None and execution.node is None else None
    if options.failed:
        if options.point or execution is None:
            raise RecipeError(
                "--failed: for an execution, without --point; name a point's artifact by its address"
            )
        if flyte2 is not None:
            names = runs_of_flyte2.fetch_report(flyte2, execution, out)
            return f"{out}: {', '.join(names)}: what Flyte 2 has of {execution}"
        names = failed_runs.fetch_report(execution, out)
        return f"{out}: {', '.join(names)}: what flyteadmin has of {execution}"
    if execution is None:
        result = ExecutionResult(options.address)
    elif flyte2 is not None:
        result = runs_of_flyte2.find(flyte2, execution)
    else:
        result = executions.find(execution, is_listed=not options.point)
    if result.records:
        if options.point:
            raise ExportError(f"{execution}: returns records and no sweep; leave out --point {options.point}")
        return f"{out}: {', '.join(_write(result.records, out))}, as {execution} returned it"
    address = result.address
    if options.point:
        address = fetch.find_point(address, options.point, result.reader(address))
    fetch.fetch(address, out, result.reader(address))
    return f"{out}: {address}, all files verified against artifact.json"


def _execution(options: argparse.Namespace) -> Execution | None:
    """Return the execution that the address is of; None for any other address."""
    if Path(options.address).exists():
        return None
    run = runs_of_flyte2.parse(options.address)
    return executions.parse(options.address, options.project, options.domain) if run is None else run


def _write(records: Mapping[str, Any], out: Path) -> list[str]:
    """Write records to the new folder `out`, a self-test's also as a table; return the names of the files."""
    with new_output(out) as folder:
        folder.mkdir()
        for output, value in records.items():
            record = _record(value)
            name = output if record is None else _NAMES[type(record)]
            if (folder / f"{name}.json").exists():
                name = output
            if record is None:
                (folder / f"{name}.json").write_text(
                    json.dumps(value, indent=2, default=str) + "\n", encoding="utf-8"
                )
            else:
                record.write(folder / f"{name}.json")
            if isinstance(record, Matrix):
                (folder / f"{name}.txt").write_text(table.text(record), encoding="utf-8")
        return sorted(file.name for file in folder.iterdir())


def _record(value: Any) -> Record | None:
    """Return a value as the record that it is the content of; None if it is of none."""
    for kind in _NAMES:
        try:
            return kind.model_validate(value)
        except ValidationError:
            continue
    return None
