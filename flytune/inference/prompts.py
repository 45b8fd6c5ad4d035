"""Files of prompts: read, dealt out to parts that are answered apart, and joined with their answers; no torch."""

import hashlib
import heapq
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune.data.bad_rows import BAD_ROWS, BadRows
from flytune.data.messages import messages_of, text_of, tools_of
from flytune.data.readers import read_path
from flytune.data.sources import kind
from flytune.errors import DataError, RecipeError
from flytune.models.generation import Generation
from flytune.schema import Record, Strict
from flytune.storage import Storage

BASE = "base"
"""In the column `adapter`: the base model alone."""
SUMMARY = "inference.json"
ANSWERS = ("row", "answer", "prompt_tokens", "answer_tokens", "finish_reason")
"""The columns that answers bring; a file of prompts has none of them."""
MAX_SHARDS = 900
"""Systems let a process have 1,024 files open, as a rule."""
_SETTING = "max_bad_fraction"


class Part(Strict):
    """Prompts that are answered together, in one pod: a file of JSON Lines, with all that their answers depend on."""

    file: str
    """Below the folder that `split` wrote."""
    rows: int
    sha256: str
    """Of its rows and their numbers; the file's name and place do not count."""
    generation: Generation
    models: str
    """Who answers: flytune.artifacts.catalog.fingerprint of the artifacts."""

    @property
    def key(self) -> str:
        """32 hex digits: parts of equal key have equal answers."""
        return hashlib.sha256(self.model_dump_json(exclude={"file"}).encode()).hexdigest()[:32]


class Summary(Record):
    """inference.json: what was answered."""

    rows: int
    """Of the file of prompts."""
    bad: int
    """Set aside in bad_rows.jsonl."""
    stopped: int
    """Answers that ended by themselves; the others were cut off at max_new_tokens."""
    prompt_tokens: int
    answer_tokens: int
    """Without the end markers."""
    generation: Generation
    models: str


class _Split(Record):
    """split.json: what `join` must know of the file."""

    rows: int
    bad: int
    first_bad: list[str]
    parquet: bool


def split(prompts: Path, shards: int, adapters: Collection[str], generation: Generation, models: str, out: Path) -> list[Part]:
    """Deals the rows of a file out to `shards` parts, written into `out`: the first row to the first part, and so on.

    A row has messages (a chat, whose answer is wanted; `tools` beside it) or prompt (plain text that is gone on with), and may
    say in `adapter` which of `adapters` answers it, or `base`.

    Raises:
        DataError: the file cannot be read or has no rows; a row is bad, or more are than max_bad_fraction allows.
        RecipeError: shards is below 1 or above MAX_SHARDS.
    """
    if not 1 <= shards <= MAX_SHARDS:
        raise RecipeError(f"shards {shards}: it takes 1 to {MAX_SHARDS}, for each is a file that is open meanwhile")
    out.mkdir(parents=True, exist_ok=True)
    counts, digests = [0] * shards, [hashlib.sha256() for _ in range(shards)]
    with ExitStack() as stack, BadRows(out, generation.max_bad_fraction, _SETTING).opened() as bad:
        files = [stack.enter_context((out / f"part-{number:05}.jsonl").open("w", encoding="utf-8")) for number in range(shards)]
        for row, found in tqdm(read_path(str(prompts), "prompts", "train"), desc="prompts", unit=" rows", delay=2):
            # Of a pod's file, the name says all.
            number, where, part = bad.rows, found.removeprefix(f"{prompts.parent}/"), bad.rows % shards
            bad.rows += 1
            try:
                if isinstance(row, DataError):
                    raise DataError(str(row).replace(found, where))
                _check(row, where, adapters)
                line = _line(number, row, where)
            except DataError as error:
                bad.add(where, error)
                continue
            digests[part].update(line.encode())
            files[part].write(f'{{"where": {json.dumps(where)}, {line[1:]}\n')
            counts[part] += 1
        bad.check()
    if not bad.rows:
        raise DataError(f"prompts: {prompts.name} has no rows")
    _Split(rows=bad.rows, bad=bad.count, first_bad=bad.first, parquet=kind(prompts.name) == "parquet").write(out / "split.json")
    return [
        Part(file=f"part-{part:05}.jsonl", rows=count, sha256=digest.hexdigest(), generation=generation, models=models)
        for part, (count, digest) in enumerate(zip(counts, digests, strict=True))
        if count
    ]


def _line(number: int, row: dict[str, Any], where: str) -> str:
    if binary := sorted(name for name, value in row.items() if isinstance(value, bytes)):
        raise DataError(f"{where}: column {binary[0]} holds bytes, which would not come back as they were; leave it out")
    # What JSON has no word for (dates of a Parquet file) is kept as text.
    line = json.dumps({"number": number, "row": row}, ensure_ascii=False, default=str)
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half of a surrogate pair ({error.object[error.start]!a}), which is no character") from None
    return line


def _check(row: dict[str, Any], where: str, adapters: Collection[str]) -> None:
    if taken := sorted(set(ANSWERS) & set(row)):
        raise DataError(f"{where}: column {taken[0]} is there already, and the answers bring one of that name; rename it")
    if row.get("adapter") is not None and row["adapter"] not in (*adapters, BASE):
        raise DataError(f"{where}: adapter {row['adapter']!r:.60}: none of that name; there are {', '.join([*adapters, BASE])}")
    if row.get("messages") is not None:
        if messages_of(row["messages"], where)[-1]["role"] == "assistant":
            raise DataError(f"{where}: messages end with the assistant's: nothing is asked; leave the answer out")
        tools_of(row.get("tools"), where)
    elif row.get("prompt") is None:
        raise DataError(f"{where}: neither prompt nor messages; there are {', '.join(row) or 'none'}")
    elif not text_of(row["prompt"], "prompt", where):
        raise DataError(f"{where}: prompt is empty")


def read_part(file: Path) -> list[dict[str, Any]]:
    """The prompts of one part: number (of the row, from 0), where (it stands) and row."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def kept_name(part: Part) -> str:
    """Of the file that a part's answers are kept in."""
    return f"{part.key}.jsonl"


def forget(parts: Sequence[Part], keep: str) -> None:
    """Removes what was kept of these parts; raises StorageError."""
    storage = Storage(keep, key="keep")
    for part in parts:
        storage.remove(kept_name(part))


def join(split_folder: Path, parts: Sequence[Part], answered: Sequence[Path], out: Path) -> Summary:
    """One file of rows with their answers, in the order of the prompts, and inference.json, in the folder `out`.

    answers.parquet where the prompts are Parquet, else answers.jsonl; a row is as it was, with the columns of ANSWERS.

    Raises:
        DataError: more rows are bad than max_bad_fraction allows; or Parquet cannot hold the columns.
    """
    info, generation = _Split.read(split_folder / "split.json"), parts[0].generation
    out.mkdir(parents=True, exist_ok=True)
    listed = (split_folder / BAD_ROWS).read_bytes() if info.bad else b""
    if listed:
        (out / BAD_ROWS).write_bytes(listed)
    totals = dict.fromkeys(("stopped", "prompt_tokens", "answer_tokens"), 0)
    with BadRows(out, generation.max_bad_fraction, _SETTING).opened() as bad:
        bad.resume(info.rows, info.bad, info.first_bad, len(listed))
        with (out / "answers.jsonl").open("w", encoding="utf-8") as file:
            merged = heapq.merge(*map(_lines, answered), key=lambda line: line["number"])
            for line in tqdm(merged, total=info.rows - info.bad, desc="answers", unit=" rows", delay=2):
                if "reason" in line:
                    bad.add(line["where"], DataError(line["reason"]))
                    continue
                found = {"row": line["number"], **line["found"]}
                file.write(json.dumps(line["row"] | found, ensure_ascii=False) + "\n")
                totals["stopped"] += found["finish_reason"] == "stop"
                totals["prompt_tokens"] += found["prompt_tokens"]
                totals["answer_tokens"] += found["answer_tokens"]
        bad.check()
    if info.parquet:
        _to_parquet(out / "answers.jsonl")
    summary = Summary(rows=info.rows, bad=bad.count, generation=generation, models=parts[0].models, **totals)
    summary.write(out / SUMMARY)
    return summary


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _to_parquet(file: Path) -> None:
    """Beside the JSON Lines, which then go. All of it is in memory at once, for the types of the columns."""
    import pyarrow
    from pyarrow import parquet

    rows = list(_lines(file))
    # Not from_pylist: it would leave out the columns that the first row has not.
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    except pyarrow.ArrowException as error:
        raise DataError(f"answers: no Parquet file can hold these columns ({error}); give the prompts as JSON Lines") from None
    parquet.write_table(table, file.with_suffix(".parquet"))
    file.unlink()
