"""Preparing data: reading, rendering, tokenizing and packing the same chats, by Flytune, by its peers; and
the limit of it all.

`python -m benchmarks.prepare --rows 20000 --data gsm8k_train.json --peer
llamafactory=/path/to/its/bin/python` makes the chats (chats.py) and has each way (preparers.py) prepare them
in fresh processes, one at a time, in alternating rounds. Measured: from the file of chats to the input of
training, including the start of worker processes and loading the tokenizer. Not measured, shown as warming:
imports, and the same work for the first 500 chats. The limit is the bare tokenizer: its encode_batch of the
rendered texts, on all cores, and nothing else. Caches are new each time.

Tokens a second are of each one's own kept tokens; a line names those whose tokens differ from the bare
tokenizer's. Shares are of the bare tokenizer's rate. CPU seconds are those of the process and its ended
children.

--memory measures memory in separate runs: PSS (memory that processes share is divided among them), summed
over the process and all its descendants, read every 50 ms: the peak while it prepares, and the value just
before (warmed). Files mapped into memory are part of PSS, and the kernel can drop them at any time; so the
anonymous part is listed below it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks import chats
from demo import inputs

HOME = Path(".demo")
MODEL = HOME / inputs.BASE_MODEL
MAX_LENGTH = 2048
"""Longer than any chat, so that no way cuts or drops any."""
WARM_ROWS = 500
"""Rows of warming; enough to contain a held-out sample for Flytune."""
PEERS = {"llamafactory": "LLaMA-Factory", "axolotl": "axolotl preprocess (packs later)"}
NAMES = {"flytune": "Flytune", "trl": "TRL's SFTTrainer", **PEERS, "bare": "the bare tokenizer"}
SAMPLED_EVERY = 0.05
"""Seconds between two samples of memory."""
MIB = 2**20
_QUIET = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"}


def run(way: str, interpreter: str, rows: Path, watched: bool = False) -> dict[str, Any]:
    """Return the figures of one way in a new process; with `watched` also the memory of it and its
    descendants, in bytes."""
    with tempfile.TemporaryDirectory(dir=rows.parent) as folder:
        out = Path(folder)
        with rows.open("rb") as lines:
            (out / "warm.jsonl").write_bytes(b"".join(islice(lines, WARM_ROWS)))
        files = {
            "rows": str(rows),
            "warm": f"{folder}/warm.jsonl",
            "model": str(MODEL.resolve()),
            "out": folder,
        }
        job = {**files, "max_length": MAX_LENGTH, "cores": _cores()}
        environment = {**os.environ, **_QUIET, "TMPDIR": folder, "HF_DATASETS_CACHE": str(out / "cache")}
        if way == "bare":
            environment["TOKENIZERS_PARALLELISM"] = "true"
        if interpreter == sys.executable:
            environment["PYTHONPATH"] = str(
                Path(__file__).resolve().parents[1]
            )  # The flytune beside this file.
        else:
            environment.pop("PYTHONPATH", None)
        # -P: imports come from the installation, not from benchmarks/, the script's folder.
        command = [
            interpreter,
            "-P",
            str(Path(__file__).with_name("preparers.py").resolve()),
            way,
            json.dumps(job),
        ]
        with (out / "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)
            samples = list(_watch(process)) if watched else []
            code = process.wait()
        if code or not (out / "told.json").exists():
            log_text = (out / "log").read_text(encoding="utf-8", errors="replace")
            raise SystemExit(f"{way} ended with {code}; the end of its output:\n{log_text[-3000:]}")
        told: dict[str, Any] = json.loads((out / "told.json").read_text(encoding="utf-8"))
    if watched:
        for index, kind in enumerate(("PSS", "anonymous")):
            before = [sizes[index] for at, sizes in samples if at < told["started"]][-1]
            told[kind] = (
                before,
                max(sizes[index] for at, sizes in samples if told["started"] <= at <= told["ended"]),
            )
    return told | {"seconds": told["ended"] - told["started"]}


def _watch(process: "subprocess.Popen[bytes]") -> Iterator[tuple[float, tuple[int, int]]]:
    """Yield PSS and its anonymous part, in bytes, every SAMPLED_EVERY seconds until the process ends."""
    while process.poll() is None:
        at = time.perf_counter()
        sizes = [_sizes(each) for each in _family(process.pid)]
        yield at, (sum(size[0] for size in sizes), sum(size[1] for size in sizes))
        time.sleep(SAMPLED_EVERY)


def _family(process: int) -> Iterator[int]:
    yield process
    for thread in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = thread.read_text(encoding="ascii").split()
        except (FileNotFoundError, ProcessLookupError):  # Ended since.
            continue
        for child in children:
            yield from _family(int(child))


def _sizes(process: int) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0
    found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
    return found["Pss"], found["Pss_Anon"]


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def speed(ways: dict[str, str], rows: Path, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of each way, by round."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tqdm(total=rounds * len(ways), unit="run") as bar:
        for _ in range(rounds):
            for way, interpreter in ways.items():
                bar.set_description(NAMES[way])
                found[way].append(run(way, interpreter, rows))
                bar.update()
    return found


def speed_table(found: dict[str, list[dict[str, Any]]], title: str) -> Table:
    """Return a table with a line for each way, and one for Flytune without the contract."""
    table = Table(title=title, title_justify="left")
    for column in (
        "who",
        "warming",
        "seconds, best",
        "median",
        "CPU s",
        "samples/s",
        "tokens/s",
        "of the bare",
    ):
        table.add_column(column, justify="left" if column == "who" else "right", no_wrap=True)
    limit = min(told["seconds"] for told in found["bare"])
    lines = {NAMES[way]: (all_told, 0.0) for way, all_told in found.items()}
    if "flytune" in found:
        lines = {
            "Flytune": lines.pop("Flytune"),
            "Flytune without its contract": (found["flytune"], 1.0),
        } | lines
    rate = found["bare"][0]["tokens"] / limit
    for name, (all_told, left_out) in lines.items():
        seconds = [told["seconds"] - left_out * told.get("contract", 0.0) for told in all_told]
        best, told = min(seconds), all_told[0]
        cpu = "" if left_out else f"{min(told['cpu'] for told in all_told):.1f}"
        figures = [
            f"{told['warming']:.1f}",
            f"{best:.2f}",
            f"{median(seconds):.2f}",
            cpu,
            f"{told['samples'] / best:,.0f}",
        ]
        table.add_row(name, *figures, f"{told['tokens'] / best:,.0f}", f"{told['tokens'] / best / rate:.2f}")
    return table


def remarks(found: dict[str, list[dict[str, Any]]], rows: int) -> Iterator[str]:
    """Yield remarks on differences between the ways, and on the share of the contract.

    Raises:
        SystemExit: a way did not keep every row, so that the times cannot be compared.
    """
    for way, all_told in found.items():
        if {told["samples"] for told in all_told} != {rows}:
            raise SystemExit(f"{way} kept {all_told[0]['samples']} samples of {rows} rows: not the same work")
    expected = found["bare"][0]
    same = [NAMES[way] for way, told in found.items() if told[0]["checksum"] == expected["checksum"]]
    yield (
        f"{rows:,} samples, {expected['tokens']:,} tokens; the same tokens (count, sum of ids): "
        f"{', '.join(same)}."
    )
    for way, (told, *_) in found.items():
        if told["checksum"] != expected["checksum"]:
            yield f"{NAMES[way]} keeps other tokens: {told['tokens'] - expected['tokens']:+,}."
    yield "Trained tokens: " + ", ".join(
        f"{NAMES[way]} {told[0]['trained']:,}" for way, told in found.items() if way != "bare"
    )
    for told in found.get("flytune", ()):
        if "contract" not in told:
            raise SystemExit("data.prepare no longer calls contract.enforce: time it anew")
    if "flytune" in found:
        times = [told["contract"] for told in found["flytune"]]
        yield f"Flytune's contract: {min(times):.2f} s (median {median(times):.2f})."


def memory_table(ways: dict[str, str], corpora: dict[int, Path]) -> Table:
    """Return the peak memory while preparing, in MiB, by the number of chats."""
    table = Table(title=f"Memory at most while preparing, MiB; {_cores()} cores", title_justify="left")
    for column in ("who", "warmed", *(f"{rows:,} chats" for rows in corpora), "ratio", "beyond the warmed"):
        table.add_column(column, justify="left" if column == "who" else "right", no_wrap=True)
    with tqdm(total=len(ways) * len(corpora), unit="run") as bar:
        for way, interpreter in ways.items():
            found = []
            for rows, path in corpora.items():
                bar.set_description(f"memory, {NAMES[way]}, {rows} chats")
                found.append(run(way, interpreter, path, watched=True))
                bar.update()
            for kind in ("PSS", "anonymous"):
                before, most = zip(*(told[kind] for told in found), strict=True)
                beyond = " and ".join(
                    f"{(high - low) / MIB:,.0f}" for low, high in zip(before, most, strict=True)
                )
                sizes = [f"{size / MIB:,.0f}" for size in (before[0], *most)]
                table.add_row(f"{NAMES[way]}, {kind}", *sizes, f"{most[-1] / most[0]:.2f}", beyond)
    return table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=20_000, help="chats to prepare (default 20,000)")
    parser.add_argument(
        "--data",
        type=Path,
        help="a JSON list of instruction, input and output for the chats, beside the demo's",
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way (default 3)")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=["flytune", "trl"], help="ways to leave out"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help=f"{' or '.join(PEERS)}, and the interpreter that has it",
    )
    parser.add_argument(
        "--memory", action="store_true", help="also measure memory, at --memory-rows and at ten times as many"
    )
    parser.add_argument(
        "--memory-rows",
        type=int,
        default=8_000,
        help="chats (default 8,000: more than a packing window holds)",
    )
    parser.add_argument("--quick", action="store_true", help="1,000 chats, one round")
    given = parser.parse_args()
    if given.quick:
        given.rows, given.rounds = 1_000, 1
    given.peers = {
        name: os.path.abspath(python) for name, _, python in (peer.partition("=") for peer in given.peer)
    }
    if min(given.rows, given.memory_rows) < WARM_ROWS:
        parser.error(f"--rows and --memory-rows: {WARM_ROWS} at least")
    for name, interpreter in given.peers.items():
        if name not in PEERS or not os.access(interpreter, os.X_OK):
            parser.error(
                f"--peer {name}={interpreter}: NAME is one of {', '.join(PEERS)}, PYTHON an interpreter"
            )
    return given


def main() -> None:
    """Make the demo's inputs if needed, then the chats; measure, and show the tables."""
    given, console = _arguments(), Console(width=None if sys.stdout.isatty() else 120)
    inputs.make(HOME)
    own = {way: sys.executable for way in ("flytune", "trl") if way not in given.without}
    ways = {**own, **given.peers, "bare": sys.executable}
    with tempfile.TemporaryDirectory() as folder:
        all_pairs = chats.pairs(HOME / inputs.PAIRS, given.data, MODEL / "tokenizer.json")
        rows = Path(folder) / "chats.jsonl"
        chats.write(rows, given.rows, all_pairs)
        found = speed(ways, rows, given.rounds)
        size = (
            f"{given.rows:,} chats, {rows.stat().st_size / 1e6:.0f} MB, blocks of {MAX_LENGTH}, "
            f"{_cores()} cores"
        )
        console.print(speed_table(found, f"Preparing {size}; {given.rounds} rounds"))
        for line in remarks(found, given.rows):
            console.print(line, highlight=False)
        for name in PEERS.keys() - given.peers.keys():
            console.print(f"{PEERS[name]}: left out; give --peer {name}=PYTHON", highlight=False)
        if given.memory:
            corpora = {
                number: Path(folder) / f"chats-{number}.jsonl"
                for number in (given.memory_rows, 10 * given.memory_rows)
            }
            for number, path in corpora.items():
                chats.write(path, number, all_pairs)
            console.print(memory_table(own, corpora))


if __name__ == "__main__":
    main()
