"""Prompts whose answers a model draws itself: a prompt, mostly a reference answer, and the columns that
rewards read.

`prompt` is text or messages, as in TRL. The reference answer is the column `completion`, `answer` or
`reference`, the first that there is, or verl's `reward_model.ground_truth`. It is not trained: rewards are
checked with it before training, and its loss shows what the training does to it. Rewards get all other
columns, which are stored as JSON text in the column `fields`.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from flytune import json_core
from flytune.data.check import Check, judged
from flytune.data.columns import (
    COLUMNS,
    REFERENCES,
    SEPARATOR,
    TURNS,
    VERL_REFERENCE,
    NamedRow,
    refuse_unread,
)
from flytune.data.formats import Chat, Plain, Sample, prompt_of, turns_of
from flytune.data.labels import Encoded
from flytune.data.messages import Message, text_of
from flytune.data.rows.base import AnsweredRows, Content, Label
from flytune.data.rows.pairs import context_of, conversation, other_prompt
from flytune.errors import DataError, RewardError
from flytune.models.scoring import IGNORED
from flytune.recipe import Data, DataRequest, Grpo
from flytune.records import Manifest, SplitCounts
from flytune.rewards import Judged, RewardProcess
from flytune.row_names import PROMPTS
from flytune.sentences import counted, counted_of

log = logging.getLogger(__name__)
FORM = "prompts"
"""Format of such rows in manifests."""
LONGEST_FIELDS = 200_000
"""Characters of the columns that rewards read, of one row."""
REFERENCE = "reference"
"""Key of the reference answer in a stored row's fields, where no column has this name."""
PROMPT = "prompt"
"""Key of the prompt, as text or messages."""
_REFERENCE_BESIDE_COLUMN = "reference answer"
"""Key of the reference answer beside a column `reference` of the row."""
_COMPLETION = "completion"
BARE_TEXT = "bare text"
"""Name of the count of rows whose prompt is text, which gets no chat template."""
_UNREFERENCED, _LITTLE_ROOM = "without a reference answer", "little room"
"""Names of counts of rows (RowKind.notes)."""


class StoredPrompt(NamedTuple):
    """The fields of a stored row, taken apart."""

    prompt: Any
    """Text, or messages."""
    reference: str | None
    """Reference answer; None where the row has none."""
    columns: dict[str, Any]
    """Columns that rewards read, by the names under which functions get them."""

    @property
    def shown(self) -> str:
        """Return the text of the prompt's last message, for errors."""
        return str(self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"])


def stored_prompt(row: Mapping[str, Any]) -> StoredPrompt:
    """Return the prompt, the reference answer and the other columns of a stored row."""
    columns = json_core.load_object(row["fields"])
    prompt = columns.pop(PROMPT, "")
    if _REFERENCE_BESIDE_COLUMN in columns:
        return StoredPrompt(prompt, columns.pop(_REFERENCE_BESIDE_COLUMN), columns)
    return StoredPrompt(prompt, columns.get(REFERENCE), columns)


class Prompts(AnsweredRows):
    """A stored row is a prompt, and its reference answer, which has the labels, if it has one; `fields` is
    for rewards."""

    name = PROMPTS
    meaning = "prompts"
    title = "Prompt"
    columns: ClassVar[Mapping[str, str]] = {"fields": "text"}
    keeps_columns = True
    trains_labels = False

    def known(self, row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
        name, key = VERL_REFERENCE
        judged_by = row.get(name)
        if not isinstance(judged_by, dict) or judged_by.get(key) is None or "answer" in row:
            return row
        return {**row, "answer": judged_by[key]}

    def form(self, row: NamedRow) -> str:
        return FORM

    def content(self, row: NamedRow, form: str, system_prompt: str | None) -> Content:
        fields, where = _fields(row), row.where
        row = replace(row, separator=row.separator or SEPARATOR).with_aliases()
        refuse_unread(row, ("chat_template_kwargs",))
        prompt = prompt_of(row)
        turns = other_prompt(row) if prompt is None else None
        if prompt is None and turns is None:
            _refuse_other_names(row)
            prompt = row.require("prompt")  # says that it is missing
        reference = _reference(row)
        if reference is not None:
            fields = (
                {REFERENCE: reference, "answer": reference}
                | fields
                | ({_REFERENCE_BESIDE_COLUMN: reference} if REFERENCE in fields else {})
            )
        if isinstance(prompt, str):
            text = text_of(prompt, row.name("prompt"), where)
            if not text.strip():
                raise DataError(f"{where}: prompt is empty; remove the row")
            return Content([Plain(text, reference)], text, fields=_json({PROMPT: text} | fields, where))
        before = turns if turns is not None else _turns(prompt, row)
        if not before or before[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: prompt ends with {'nothing' if not before else 'an answer'}; it must end with a "
                "question"
            )
        context, tools, identity = context_of(before, row, system_prompt)
        answer = [] if reference is None else [{"role": "assistant", "content": reference}]
        chat = Chat([*context, *answer], tools, len(context))
        bare = [{"role": message["role"], "content": message["content"]} for message in context]
        return Content([chat], identity, fields=_json({PROMPT: bare} | fields, where))

    def values(self, lengths: list[int], label: Label, fields: str) -> tuple[Any, ...]:
        return (fields,)

    def traced(self, length: int, packing: bool) -> dict[str, Any]:
        ids = [1] * length
        # A prompt has a token at least.
        return {"input_ids": ids, "labels": [IGNORED, *ids[1:]], "fields": "{}"}

    def cut(self, sequences: Sequence[Encoded], data: Data) -> list[list[Encoded]]:
        if _is_unreferenced(sequences):
            return []
        return [row for row in super().cut(sequences, data) if not _is_unreferenced(row)]

    def is_trained(self, sequences: Sequence[Encoded]) -> bool:
        # Without a token before the answer there is nothing to answer to.
        ids, labels = sequences[0]
        return bool(ids) and labels[0] == IGNORED

    def is_long(self, sequences: Sequence[Encoded], max_length: int) -> bool:
        # After a prompt without a reference answer there must be room for a token.
        return super().is_long(sequences, max_length - _is_unreferenced(sequences))

    def notes(
        self, sequences: Sequence[Encoded], samples: Sequence[Sample], request: DataRequest
    ) -> Iterator[str]:
        if isinstance(samples[0], Plain):
            yield BARE_TEXT
        if _is_unreferenced(sequences):
            yield _UNREFERENCED
        room = request.data.max_length - prompt_length({"labels": sequences[0][1]})
        if request.judged_by is not None and room < request.judged_by.max_completion_length:
            yield _LITTLE_ROOM

    def checks(self, manifest: Manifest) -> Iterator[Check]:
        rows = manifest.train.samples + manifest.heldout.samples
        unreferenced, little = (manifest.notes.get(name, 0) for name in (_UNREFERENCED, _LITTLE_ROOM))
        yield judged(
            "reference answers",
            unreferenced,
            rows,
            f"{counted_of(unreferenced, rows, 'prompt', 'has', 'have')} none: rewards are not checked with "
            "them, and no pass@k and no loss is measured on them; data.columns: {completion: NAME} names a "
            "column with one",
            "only says",
            is_fine=True,
            fine="" if unreferenced else f"each of {counted(rows, 'prompt')} has one",
            advice="",
        )
        yield judged(
            "room for answers",
            little,
            rows,
            f"{counted_of(little, rows, 'prompt', 'leaves', 'leave')} less than "
            f"objective.max_completion_length within data.max_length {manifest.max_length}, so that answers "
            "are cut off earlier",
            "only warns",
            fine=f"each of {counted(rows, 'prompt')} leaves room for a longest answer",
            advice="raise data.max_length, lower objective.max_completion_length, or shorten the prompts",
        )


def prompt_length(row: Mapping[str, Any]) -> int:
    """Return the number of tokens of a stored row's prompt: those before the reference answer, or all where
    there is none."""
    return next((at for at, label in enumerate(row["labels"]) if label != IGNORED), len(row["labels"]))


def _is_unreferenced(sequences: Sequence[Encoded]) -> bool:
    """Return whether a row has no reference answer, or one that was cut off completely."""
    return all(label == IGNORED for label in sequences[0][1])


def _turns(value: Any, row: NamedRow) -> list[Message]:
    is_turns = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    if not is_turns:
        raise DataError(
            f"{row.where}: prompt is {type(value).__name__} {value!r:.40}; it must be text, or a list of "
            "messages"
        )
    return conversation(value, "prompt", row) if "from" in value[0] else turns_of(value, "messages", row)


def _reference(row: NamedRow) -> str | None:
    """Return the reference answer of a row, as text; None where it has none, or several."""
    for name in REFERENCES:
        value = row.get(name)
        if isinstance(value, bool | int | float):
            return str(value)
        if (
            isinstance(value, list) and value and all(isinstance(turn, dict) for turn in value)
        ):  # TRL's form of messages
            value = "".join(message["content"] for message in conversation(value, name, row))
        if not isinstance(value, str):
            continue
        text = text_of(value, row.name(name), row.where)
        if not text.strip():
            raise DataError(
                f"{row.where}: {row.name(name)} is empty; rewards are checked with the reference "
                "answer: remove the column, or write null where there is none"
            )
        return text
    return None


def _refuse_other_names(row: NamedRow) -> None:
    """Refuse a row without a prompt that has a column of another name for it, with what reads it."""
    for name in COLUMNS[PROMPT].unread:
        if row.values.get(name):
            raise DataError(
                f"{row.where}: column prompt is missing, and {name} is not read by itself; write "
                f"data.columns: {{instruction: {name}}} for the question of a chat, or {{prompt: {name}}} "
                "for raw text"
            )


def _fields(row: NamedRow) -> dict[str, Any]:
    """Return the columns that rewards read, by our names where data.columns maps them.

    A function gets the drawn answer as `completion`: a column of another name that is mapped to it keeps its
    own.
    """
    ours = {theirs: name for name, theirs in row.columns.items() if name != _COMPLETION}
    named = {ours.get(name, name): value for name, value in row.values.items()}
    paths = [name for name in row.columns.values() if "." in name]
    return {
        name: value
        for name, value in named.items()
        if name not in (PROMPT, _COMPLETION, *TURNS, "system", "tools", "history", *paths)
    }


def _json(fields: dict[str, Any], where: str) -> str:
    text = json.dumps(fields, sort_keys=True, default=str, ensure_ascii=False)
    if len(text) > LONGEST_FIELDS:
        raise DataError(
            f"{where}: {len(text):,} characters of columns that rewards read, and {LONGEST_FIELDS:,} are the "
            "most; remove columns that none reads"
        )
    return text


MOST = 5_000
"""Rows of each split that are checked."""
_AT_ONCE = 200


def check_references(
    request: DataRequest, counts: Sequence[SplitCounts], folder: Path, tokenizer: Any
) -> None:
    """Check that rewards judge each reference answer higher than an empty one, and each text of a prompt as
    it is tokenized.

    Raises:
        RewardError: a reward fails, or an empty answer has as much; says for which row.
        DataError: the end of a prompt is a part of a token of its answer.
    """
    section = request.judged_by
    if section is None:
        return
    with RewardProcess(section) as process:
        for count in counts:
            for rows in _batches(folder, count):
                _check(section, process, [_question(row, where, tokenizer) for row, where in rows])
    log.info("rewards: checked with the reference answers")


def _check(section: Grpo, process: RewardProcess, questions: list[tuple[Judged, str | None]]) -> None:
    """Compare the rewards of reference answers with those of empty ones, which rows without a reference
    answer get too."""
    empty = process.values([item for item, _ in questions])
    with_reference = [
        item._replace(completion=reference) for item, reference in questions if reference is not None
    ]
    full = iter(process.values(with_reference))
    for (item, reference), values in zip(questions, empty, strict=True):
        if reference is None:
            continue
        reward, reward_of_empty = section.total(next(full)), section.total(values)
        if reward <= reward_of_empty:
            raise RewardError(
                f"{item.where}: the rewards give the reference answer {reference!r:.80} {reward:g}, and an "
                f"empty one {reward_of_empty:g}, so that they would teach nothing, or the wrong; look at "
                "objective.rewards and at the columns that they read"
            )


def _question(row: dict[str, Any], where: str, tokenizer: Any) -> tuple[Judged, str | None]:
    """Return an empty answer to a stored row, and its reference answer."""
    prompt, reference, columns = stored = stored_prompt(row)
    place = f"{where} (prompt {stored.shown!r:.80})"
    if isinstance(prompt, str):
        tokens = row["input_ids"][: prompt_length(row)]
        read = tokenizer.decode(tokens, skip_special_tokens=True)
        # Space at the end may be a part of the answer's first token.
        if "".join(read.split()) != "".join(prompt.split()):
            raise DataError(
                f"{place}: the end of the prompt and the begin of its answer are one token, so that the "
                f"model would be asked {read[-40:]!r}; end the prompt with a line break, or write it as "
                "messages"
            )
    return Judged(prompt, "", columns, place), reference


def _batches(folder: Path, counts: SplitCounts) -> Iterator[list[tuple[dict[str, Any], str]]]:
    """Yield the first stored rows of a split, each with its place, some at a time."""
    from pyarrow.parquet import ParquetFile

    left = MOST
    for shard in counts.shards:
        number = 0
        with ParquetFile(folder / shard.file) as file:
            for table in file.iter_batches(_AT_ONCE):
                rows = table.slice(0, left).to_pylist()
                yield [(row, f"{shard.file} row {place}") for place, row in enumerate(rows, number)]
                number, left = number + len(rows), left - len(rows)
                if not left:
                    return
