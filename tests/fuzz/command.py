"""Command of the fuzz test: chunks of inputs in several processes, and a table of their ends."""

import argparse
import gc
import multiprocessing
from collections import Counter
from pathlib import Path
from typing import Any

import tqdm
from rich.console import Console
from rich.table import Table

from flytune.console import output, tables
from flytune.errors import RecipeError
from tests.fuzz import named_tests
from tests.fuzz.inputs import CHUNK, Result, run
from tests.fuzz.kinds import KINDS, Samples
from tests.fuzz.removals import REMOVALS
from tests.fuzz.removing import noticed

_SHOWN = 40
"""Failures that are shown in full."""
_SAMPLES: list[Samples] = []


def main(arguments: argparse.Namespace, home: str) -> int:
    """Run the inputs and show the table; return 1 if one failed."""
    names = arguments.kinds.split(",") if arguments.kinds else list(KINDS)
    if unknown := [name for name in names if name not in KINDS]:
        raise RecipeError(f"--kinds: {', '.join(unknown)}: unknown; there are {', '.join(KINDS)}")
    # Threads would be missing in forked processes.
    tqdm.tqdm.monitor_interval = 0
    output.part_from_forks()
    _SAMPLES.append(Samples(Path(home) / "samples"))
    _import_all()
    gc.collect()
    gc.freeze()
    if arguments.only:
        chunk, number = map(int, arguments.only.split(":"))
        results = list(run(names[0], arguments.seed, chunk, _SAMPLES[0], only=number))
        show(results, Console())
        return int(any(result.outcome.verdict == "failure" for result in results))
    if arguments.removals is not None:
        return _removals(arguments, home)
    work = [
        (name, arguments.seed, chunk, min(CHUNK, wanted - chunk * CHUNK), home)
        for name, wanted in shares(arguments.inputs, names).items()
        for chunk in range(-(-wanted // CHUNK))
    ]
    # Kinds in turn, so that the bar's rate is that of all.
    work.sort(key=lambda one: one[2])
    results = []
    with (
        multiprocessing.get_context("fork").Pool(arguments.jobs) as pool,
        tqdm.tqdm(total=arguments.inputs, desc="inputs", unit=" inputs") as bar,
    ):
        for found in pool.imap_unordered(_run_chunk, work):
            results += found
            bar.update(len(found))
            for one in found:
                if one.outcome.verdict == "failure":
                    bar.write(f"FAILED: {one.command}: {_last(one.outcome.text)}")
    show(results, Console())
    return int(any(result.outcome.verdict == "failure" for result in results))


def _removals(arguments: argparse.Namespace, home: str) -> int:
    """Remove each protection by itself, until an input fails; show them, and return 1 if one was removed
    unnoticed."""
    table = Table(title="Protections, and the input that notices their removal", title_justify="left")
    for title in ("protection", "of", "noticed by", "inputs"):
        table.add_column(title, justify="right" if title == "inputs" else "left")
    kinds = {*arguments.kinds.split(",")} if arguments.kinds else {*KINDS}
    words = arguments.removals.split(",")
    wanted = [
        removal
        for removal in REMOVALS
        if {*removal.kinds} & kinds and any(word in removal.name for word in words)
    ]
    work = [(REMOVALS.index(one), arguments.seed) for one in wanted]
    unnoticed = []
    with (
        multiprocessing.get_context("fork").Pool(arguments.jobs) as pool,
        tqdm.tqdm(total=len(work), desc="protections", unit=" removed") as bar,
    ):
        for removal, (found, tried) in zip(wanted, pool.imap(_removed, work, chunksize=1), strict=True):
            bar.update()
            if found is None:
                unnoticed.append(removal)
            said = f"{found.kind} {found.chunk}:{found.number}" if found else "nothing"
            bar.write(f"{removal.name}: noticed by {said}, {tried:,} inputs")
            table.add_row(removal.name, removal.held_by, said, f"{tried:,}")
    console = Console()
    tables.show(table, console)
    for removal in unnoticed:
        console.print(
            f"{removal.name}: removed, and no input of {', '.join(removal.kinds)} fails; give one an oracle"
        )
    console.print(f"{len(wanted) - len(unnoticed)} of {len(wanted)} removals are noticed")
    untested = _unnoticed_by_named_tests(console) if words == [""] else []
    return int(bool(unnoticed or untested))


def _unnoticed_by_named_tests(console: Console) -> list[named_tests.Holder]:
    """Show the protection of each file on the security page whose removal the tests beside it notice; return
    those of none."""
    unnoticed = []
    for holder in named_tests.holders():
        removal = named_tests.first_noticed(holder)
        said = (
            f"notice that it is removed: {removal.name}"
            if removal
            else "notice no removal of it: name others, or write one"
        )
        console.print(f"{holder.file}: {', '.join(holder.tests)} {said}", soft_wrap=True)
        if removal is None:
            unnoticed.append(holder)
    return unnoticed


def _removed(one: tuple[int, int]) -> tuple[Result | None, int]:
    return noticed(REMOVALS[one[0]], one[1], _SAMPLES[0])


def shares(inputs: int, names: list[str]) -> dict[str, int]:
    """Return how many of all inputs each kind has, by its share."""
    total, taken, found = sum(KINDS[name].share for name in names), 0.0, {}
    for name in names:
        start, taken = round(taken), taken + inputs * KINDS[name].share / total
        found[name] = round(taken) - start
    return found


def _import_all() -> None:
    """Import what inputs need once, before the forks."""
    import datasets  # noqa: F401
    import kubernetes.client  # noqa: F401
    import peft  # noqa: F401
    import transformers

    import flytune.adapters.combining
    import flytune.adapters.merging
    import flytune.report.xray  # noqa: F401

    assert transformers.AutoTokenizer


def _run_chunk(one: tuple[str, int, int, int, str]) -> list[Result]:
    name, seed, chunk, count, _ = one
    return list(run(name, seed, chunk, _SAMPLES[0], count=count))


def show(results: list[Result], console: Console) -> None:
    """Print the table by kind, and the failures."""
    table = Table(title="Inputs, and what became of them", title_justify="left")
    for title in (
        "kind",
        "inputs",
        "accepted",
        "refused",
        "failures",
        "slowest, s",
        "on the clock, s",
        "most memory, MB",
    ):
        table.add_column(title, justify="left" if title == "kind" else "right")
    by_kind: dict[str, list[Result]] = {}
    for one in results:
        by_kind.setdefault(one.kind, []).append(one)
    for name, found in [*sorted(by_kind.items()), ("all", results)]:
        ends: Counter[Any] = Counter(one.outcome.verdict for one in found)
        slowest = max((one.outcome.seconds for one in found), default=0.0)
        longest = max((one.outcome.clock for one in found), default=0.0)
        largest = max((one.outcome.bytes for one in found), default=0) / 1e6
        counts = (len(found), ends["accepted"], ends["refused"], ends["failure"])
        table.add_row(
            name, *map("{:,}".format, counts), f"{slowest:.1f}", f"{longest:.1f}", f"{largest:,.0f}"
        )
    tables.show(table, console)
    failed = [result for result in results if result.outcome.verdict == "failure" or len(results) == 1]
    for one in failed[:_SHOWN]:
        said = [one.command, f"  {_last(one.outcome.text)}"]
        if len(results) == 1:
            said = [one.command, f"  input: {one.given}", f"  {one.outcome.verdict}: {one.outcome.text}"]
        for line in said:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if len(failed) > _SHOWN:
        console.print(f"and {len(failed) - _SHOWN} more failures")


def _last(text: str) -> str:
    """Return a traceback's last frame of the project, and its error; another text in one line."""
    lines = text.strip().splitlines()
    frames = [line.strip() for line in lines if "/flytune/" in line and line.lstrip().startswith("File")]
    return " | ".join([*frames[-1:], lines[-1][:300]]) if frames else " ".join(lines)[:500]
