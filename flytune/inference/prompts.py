"""Files of prompts: splitting them into parts, and joining the parts' answers; no torch."""

import base64
import hashlib
import heapq
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from flytune import json_core
from flytune.data import BadRows, image_rows, read_path, text_of, tools_of
from flytune.data.bad_rows import BAD_ROWS
from flytune.data.columns import SEPARATOR, TURNS, NamedRow
from flytune.data.formats import prompt_of, turns_of, with_system
from flytune.data.messages import MEDIA, Message
from flytune.data.rows.pairs import other_prompt
from flytune.data.sources import kind
from flytune.errors import DataError, RecipeError
from flytune.inference.texts import Texts, is_classifier
from flytune.models import Generation
from flytune.models.chat_templates import IMAGE
from flytune.recipe import Recipe
from flytune.records.contents import seal
from flytune.schema import Record, Strict
from flytune.storage import Storage

BASE = "base"
"""Value of the column `adapter` for the base model without an adapter."""
SUMMARY = "inference.json"
"""File name of the Summary."""
ANSWERS = ("row", "answer", "prompt_tokens", "answer_tokens", "finish_reason")
"""Columns that are added with the answers of every model."""
MAX_SHARDS = 900
"""Largest number of parts: most systems limit a process to 1,024 open files."""
_SETTING = "max_bad_fraction"


class PromptPart(Strict):
    """The prompts of one pod: a file of JSON Lines, and everything that their answers depend on."""

    file: str
    """Path below the folder that `split` wrote."""
    rows: int
    sha256: str
    """Hash of its rows and their numbers, independent of the file's name and folder."""
    generation: Generation
    models: str
    """Fingerprint of the artifacts that answer (flytune.artifacts.catalog.fingerprint)."""

    @property
    def key(self) -> str:
        """Key of 32 hex digits; parts with equal keys have equal answers."""
        return hashlib.sha256(self.model_dump_json(exclude={"file"}).encode()).hexdigest()[:32]


class Summary(Record):
    """inference.json: the totals of the answers."""

    rows: int
    """Number of rows in the file of prompts."""
    bad: int
    """Number of rows listed in bad_rows.jsonl."""
    stopped: int
    """Number of answers that ended with an end marker; the others were cut off at max_new_tokens."""
    prompt_tokens: int
    answer_tokens: int
    """Number of tokens of all answers, without end markers."""
    generation: Generation
    models: str


@dataclass(frozen=True)
class Columns:
    """The names of a row's columns, and the system prompt, as in the training of the model that answers."""

    names: Mapping[str, str] = field(default_factory=dict)
    """The data's names of the columns that have others than ours, as in data.columns."""
    separator: str = SEPARATOR
    """Text between the columns instruction and input."""
    system_prompt: str | None = None
    add_bos_token: bool | None = None
    """data.add_bos_token of its training."""
    texts: Texts | None = None
    """Reader of the texts that a classifier labels; None of a model that answers in words."""
    with_images: bool = False
    """True if the model was trained on images."""
    max_pixels: int | None = None
    """data.max_pixels of its training."""

    @property
    def added(self) -> tuple[str, ...]:
        """Columns that are added with the answers; a file of prompts must not have them."""
        return ANSWERS if self.texts is None else (*ANSWERS, "probabilities")

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """Return those of a recipe; sources that differ leave the names as they are."""
        if is_classifier(recipe):
            return cls(texts=Texts(recipe))
        data = recipe.data
        of_all = cls(
            system_prompt=data.system_prompt,
            add_bos_token=data.add_bos_token,
            with_images=data.images,
            max_pixels=data.max_pixels,
        )
        first, *others = data.all_sources.values()
        if any(
            (source.columns, source.input_separator) != (first.columns, first.input_separator)
            for source in others
        ):
            return of_all
        separator = SEPARATOR if first.input_separator is None else first.input_separator
        return replace(of_all, names=first.columns, separator=separator)

    def names_in(self, row: Mapping[str, Any]) -> dict[str, str]:
        """Return the names of a row's columns: those of the training's data, or ours where it has these
        alone."""
        return {ours: theirs for ours, theirs in self.names.items() if theirs in row or ours not in row}

    def tools(self, row: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
        """Return the tools of a row.

        Raises:
            DataError: they are none.
        """
        return tools_of(row.get(self.names_in(row).get("tools", "tools")), where)

    def with_marks(self, row: dict[str, Any], where: str) -> dict[str, Any]:
        """Return a row with chat_templates.IMAGE in the place of each image; as it is for a model that was
        trained on text alone."""
        return image_rows.extracted(row, self.names_in(row), where)[0] if self.with_images else row

    def stored_images(self, row: dict[str, Any], prompts: Path, out: Path, where: str) -> list[str]:
        """Store a row's images below the folder `out`; return their hashes, in order.

        Args:
            prompts: the file of the row, in whose folder the paths of images begin.

        Raises:
            DataError: a file is missing, or no image that the model can read.
        """
        if not self.with_images:
            return []
        names = self.names_in(row)
        _, pictures = image_rows.read(row, names, str(prompts), self.max_pixels, out, where)
        return [picture.digest for picture in pictures]

    def question(self, row: dict[str, Any], where: str) -> str | list[Message]:
        """Return the prompt of a row `with_marks`: text to continue, or a chat that needs an answer.

        Raises:
            DataError: it has none, is not text or messages, ends with an answer, or has content that the
                model does not read.
        """
        names = self.names_in(row)
        if media := next((name for name in (*MEDIA, names.get("images")) if name and row.get(name)), None):
            reads = "text and images" if self.with_images else "text alone"
            raise DataError(f"{where}: column {media} has content, and this model was trained on {reads}")
        named = NamedRow(row, names, where, self.separator).with_aliases()
        turns = _turns(named)
        prompt = None if turns else prompt_of(named)
        if isinstance(prompt, list):
            turns = turns_of(prompt, "messages", named)
        elif prompt is not None:
            text = text_of(prompt, "prompt", where)
            if not text:
                raise DataError(f"{where}: prompt is empty")
            if IMAGE in text:
                raise DataError(f"{where}: prompt is text to continue, without images; write messages")
            return text
        elif not turns:
            turns = other_prompt(named)
        if turns is None:
            raise DataError(f"{where}: neither prompt nor messages nor question; there are {named.listed}")
        if turns[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: messages end with the assistant's turn, so there is nothing to answer; remove "
                "that turn"
            )
        return with_system(turns, named, self.system_prompt)


def _turns(row: NamedRow) -> list[Message] | None:
    """Return the turns of a row's column of turns; None if it has none."""
    for name in TURNS:
        value = row.get(name)
        if value is not None:
            return turns_of(value, name, row)
    return None


class _Split(Record):
    """split.json: the facts about the file that `join` needs."""

    rows: int
    bad: int
    first_bad: list[str]
    parquet: bool


def split(
    prompts: Path,
    shards: int,
    adapters: Collection[str],
    generation: Generation,
    models: str,
    out: Path,
    columns: Columns = Columns(),
) -> list[PromptPart]:
    """Distribute the rows of a file over `shards` parts in `out`: the first row to the first part, and so on.

    A row has `messages` (a chat that needs an answer, optionally with `tools`), `prompt` (plain text to
    continue, or messages) or `question` (a chat of one message), under these names or those of `columns`, and
    may name in `adapter` one of `adapters`, or `base`. The images of a model that reads them are stored below
    `out`, by their hashes.

    Raises:
        DataError: the file cannot be read or has no rows; a row is bad, or more are than max_bad_fraction
            allows.
        RecipeError: shards is below 1 or above MAX_SHARDS.
    """
    if not 1 <= shards <= MAX_SHARDS:
        raise RecipeError(f"shards {shards}: must be 1 to {MAX_SHARDS}, because each is an open file")
    out.mkdir(parents=True, exist_ok=True)
    counts, digests = [0] * shards, [hashlib.sha256() for _ in range(shards)]
    with ExitStack() as stack, BadRows(out, generation.max_bad_fraction, _SETTING).opened() as bad:
        files = [
            stack.enter_context((out / f"part-{number:05}.jsonl").open("w", encoding="utf-8"))
            for number in range(shards)
        ]
        for row, place in tqdm(read_path(str(prompts), "prompts"), desc="prompts", unit=" rows", delay=2):
            # In a pod, the file's folder is temporary: the name is enough.
            number, where, part = bad.rows, place.removeprefix(f"{prompts.parent}/"), bad.rows % shards
            bad.rows += 1
            try:
                if isinstance(row, DataError):
                    raise DataError(str(row).replace(place, where))
                _check(row, where, adapters, columns)
                line = _line(number, row, columns.stored_images(row, prompts, out, where), columns, where)
            except DataError as error:
                bad.add(where, error)
                continue
            digests[part].update(line.encode())
            files[part].write(f'{{"where": {json.dumps(where)}, {line[1:]}\n')
            counts[part] += 1
        bad.check()
    if not bad.rows:
        raise DataError(f"prompts: {prompts.name} has no rows")
    _Split(rows=bad.rows, bad=bad.count, first_bad=bad.first, parquet=kind(prompts.name) == "parquet").write(
        out / "split.json"
    )
    return [
        PromptPart(
            file=f"part-{part:05}.jsonl",
            rows=count,
            sha256=digest.hexdigest(),
            generation=generation,
            models=models,
        )
        for part, (count, digest) in enumerate(zip(counts, digests, strict=True))
        if count
    ]


def _line(number: int, row: dict[str, Any], images: list[str], columns: Columns, where: str) -> str:
    binary = sorted(name for name, value in row.items() if isinstance(value, bytes))
    if binary and not columns.with_images:
        raise DataError(f"{where}: column {binary[0]} has bytes, which JSON cannot store; remove it")
    content = {"number": number, "row": row} | ({"images": images} if images else {})
    line = json.dumps(content, ensure_ascii=False, default=_as_text)
    try:
        line.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(f"{where}: half of a surrogate pair ({half!a}), which is not a character") from None
    return line


def _as_text(value: Any) -> str:
    """Return a value that JSON does not have, of a Parquet file, as text: a date, or an image's bytes as
    base64."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _check(row: dict[str, Any], where: str, adapters: Collection[str], columns: Columns) -> None:
    if taken := sorted(set(columns.added) & set(row)):
        raise DataError(
            f"{where}: column {taken[0]} exists already, and the answers add one of that name; rename it"
        )
    if row.get("adapter") is not None and row["adapter"] not in (*adapters, BASE):
        raise DataError(
            f"{where}: adapter {row['adapter']!r:.60}: no adapter of that name; there are "
            f"{', '.join([*adapters, BASE])}"
        )
    if columns.texts is not None:
        columns.texts.tokens(row, where)
    elif not isinstance(columns.question(columns.with_marks(row, where), where), str):
        columns.tools(row, where)


def read_part(file: Path) -> list[dict[str, Any]]:
    """Read the prompts of one part: `number` (of the row, from 0), `where` (file and line), `row`, the hashes
    of its `images`, and the `folder` that has them."""
    with file.open(encoding="utf-8") as lines:
        return [{**json_core.load_object(line), "folder": str(file.parent)} for line in lines]


def answers_name(part: PromptPart) -> str:
    """Return the name of the scratch file of a part's answers."""
    return f"{part.key}.jsonl"


def remove_answers(parts: Sequence[PromptPart], scratch_folder: str) -> None:
    """Remove the scratch files of these parts.

    Raises:
        StorageError: one cannot be removed.
    """
    storage = Storage(scratch_folder, key="keep")
    for part in parts:
        storage.remove(answers_name(part))


def join(split_folder: Path, parts: Sequence[PromptPart], answered: Sequence[Path], out: Path) -> Summary:
    """Write the rows with their answers in the order of the prompts, inference.json, and the list of files to
    the folder `out`.

    The file is answers.parquet if the prompts are Parquet, otherwise answers.jsonl; rows are unchanged apart
    from the columns of ANSWERS.

    Raises:
        DataError: more rows are bad than max_bad_fraction allows; or Parquet cannot hold the columns.
    """
    info, generation = _Split.read(split_folder / "split.json"), parts[0].generation
    out.mkdir(parents=True, exist_ok=True)
    bad_rows = (split_folder / BAD_ROWS).read_bytes() if info.bad else b""
    if bad_rows:
        (out / BAD_ROWS).write_bytes(bad_rows)
    totals = dict.fromkeys(("stopped", "prompt_tokens", "answer_tokens"), 0)
    with BadRows(out, generation.max_bad_fraction, _SETTING).opened() as bad:
        bad.resume(info.rows, info.bad, info.first_bad, len(bad_rows))
        with (out / "answers.jsonl").open("w", encoding="utf-8") as file:
            merged = heapq.merge(*map(_lines, answered), key=lambda line: line["number"])
            for line in tqdm(merged, total=info.rows - info.bad, desc="answers", unit=" rows", delay=2):
                if "reason" in line:
                    bad.add(line["where"], DataError(line["reason"]))
                    continue
                columns = {"row": line["number"], **line["found"]}
                file.write(json.dumps(line["row"] | columns, ensure_ascii=False) + "\n")
                totals["stopped"] += columns["finish_reason"] == "stop"
                totals["prompt_tokens"] += columns["prompt_tokens"]
                totals["answer_tokens"] += columns["answer_tokens"]
        bad.check()
    if info.parquet:
        _to_parquet(out / "answers.jsonl")
    summary = Summary(rows=info.rows, bad=bad.count, generation=generation, models=parts[0].models, **totals)
    summary.write(out / SUMMARY)
    seal(out, "answers")
    return summary


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        yield from map(json_core.load_object, lines)


def _to_parquet(file: Path) -> None:
    """Convert a file of JSON Lines to Parquet and remove it. All rows are in memory at once, to find the
    columns' types."""
    import pyarrow
    from pyarrow import parquet

    rows = list(_lines(file))
    # Not from_pylist: it would drop the columns that the first row does not have.
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    except pyarrow.ArrowException as error:
        raise DataError(
            f"answers: Parquet cannot store these columns ({error}); give the prompts as JSON Lines"
        ) from None
    parquet.write_table(table, file.with_suffix(".parquet"))
    file.unlink()
