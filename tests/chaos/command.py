"""Command of the chaos test: pairs run in parallel subprocesses; their results are shown as a table."""

import argparse
import json
import multiprocessing
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import tqdm
from rich.console import Console
from rich.table import Table

from flytune.console import output, tables
from flytune.errors import RecipeError
from flytune.selftest.runs import Pair
from tests.chaos.pairs import DisturbedPair, Report, make_inputs, pairs_on_cpu


def main(arguments: argparse.Namespace, home: str) -> int:
    """Run the pairs and show the results; return 1 if anything was lost."""
    folder = Path(home)
    # tqdm's monitor thread would be missing in forked processes.
    tqdm.tqdm.monitor_interval = 0
    output.part_from_forks()
    make_inputs(folder)
    pairs = _selected(arguments.pairs, pairs_on_cpu(folder))
    share, more = divmod(arguments.faults, len(pairs))
    waiting = [(pair, share + (index < more)) for index, pair in enumerate(pairs) if share + (index < more)]
    with tqdm.tqdm(total=arguments.faults, desc="faults", unit="fault") as bar:
        reports = _run_pairs(waiting, arguments, folder, bar)
    reports.sort(key=lambda report: [str(pair) for pair in pairs].index(report.pair))
    console = Console()
    if arguments.json:
        print(json.dumps([report.model_dump() for report in reports], indent=2))  # noqa: T201
    else:
        show(reports, console)
    if arguments.keep:
        Console(stderr=True).print(f"folders: {folder}", highlight=False)
    return 1 if any(report.problems for report in reports) else 0


def _selected(names: str, pairs: list[Pair]) -> list[Pair]:
    by_name = {str(pair): pair for pair in pairs}
    wanted = names.split(",") if names else list(by_name)
    if unknown := [name for name in wanted if name not in by_name]:
        raise RecipeError(
            f"--pairs: {', '.join(unknown)}: does not run on a CPU; those that do: {', '.join(by_name)}"
        )
    return [by_name[name] for name in wanted]


def _run_pairs(
    waiting: list[tuple[Pair, int]], arguments: argparse.Namespace, folder: Path, bar: Any
) -> list[Report]:
    context = multiprocessing.get_context("fork")
    running: dict[Any, tuple[Pair, Any]] = {}
    reports: list[Report] = []
    try:
        while waiting or running:
            while waiting and len(running) < arguments.jobs:
                pair, faults = waiting.pop(0)
                receiving, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run_pair, args=(pair, faults, arguments, folder, sender))
                process.start()
                sender.close()
                running[receiving] = pair, process
            ready: list[Any] = wait(list(running))
            for receiver in ready:
                pair, process = running[receiver]
                try:
                    message = receiver.recv()
                except EOFError:
                    process.join()
                    del running[receiver]
                    if str(pair) not in {report.pair for report in reports}:
                        raise RuntimeError(f"{pair}: its process ended with {process.exitcode}") from None
                    continue
                if message is None:
                    bar.update()
                elif isinstance(message, str):
                    bar.write(f"LOST: {message}", file=sys.stderr)
                else:
                    reports.append(message)
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return reports


def _run_pair(pair: Pair, faults: int, arguments: argparse.Namespace, folder: Path, sender: Any) -> None:
    own = folder / str(pair).replace("/", "-")
    disturbed = DisturbedPair(
        pair, folder, own, f"{arguments.seed} {pair}", arguments.storage, arguments.cold
    )
    sender.send(disturbed.run(faults, sender.send))
    sender.close()


def show(reports: list[Report], console: Console) -> None:
    """Print the table, the faults by kind, and the differences."""
    table = Table(title="Runs with faults, compared with an undisturbed run", title_justify="left")
    for name in ("pair", "faults", "runs (on S3)", "pods", "steps", "repeated", "s to next step", "verdict"):
        table.add_column(name, justify="left" if name in ("pair", "verdict") else "right")
    for report in reports:
        median = f"{report.median:.1f}" if report.median is not None else ""
        verdict = "[red]LOST[/]" if report.problems else "[green]equal, bit for bit[/]"
        numbers = (sum(report.faults.values()), f"{report.runs} ({report.on_s3})", report.pods, report.steps)
        table.add_row(report.pair, *map(str, numbers), str(sum(report.repeated.values())), median, verdict)
    tables.show(table, console)
    kinds = Table(title="Faults by kind", title_justify="left")
    for name in ("fault", "times", "repeated steps"):
        kinds.add_column(name, justify="left" if name == "fault" else "right")
    for kind in sorted({kind for report in reports for kind in report.faults}):
        sides = [report.faults for report in reports], [report.repeated for report in reports]
        kinds.add_row(kind, *(str(sum(found.get(kind, 0) for found in side)) for side in sides))
    tables.show(kinds, console)
    total, problems = (
        sum(sum(report.faults.values()) for report in reports),
        [(report.pair, text) for report in reports for text in report.problems],
    )
    by_hand = sum(report.by_hand for report in reports)
    console.print(
        f"{total} faults, {by_hand} of them final for Flyte and restarted as by a user; lost: {len(problems)}"
    )
    for pair, text in problems:
        console.print(f"  {pair}: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
