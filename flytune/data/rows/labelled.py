"""Unpaired preferences: answers that are labelled desirable or undesirable, each a sample of its own.

The columns are TRL's: prompt and completion, as text or as messages, and label, which is true or false; or,
in place of prompt, those of other tools (pairs.py): turns without a completion end with the answer. A row
with chosen and rejected answers is two such rows, as TRL's unpair_preference_dataset makes them. The stored
column `label` is 1 for a desirable answer, and 0 for an undesirable one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flytune.data.check import Check, judged
from flytune.data.columns import TURNS, NamedRow, refuse_unread
from flytune.data.formats import Chat, Plain, prompt_of
from flytune.data.messages import Message, text_of
from flytune.data.rows.base import ComparedRows, Content, Label
from flytune.data.rows.pairs import (
    PREFERENCE,
    context_of,
    conversation,
    other_prompt,
    pair_of,
    require_answer,
    scores_of_pairs,
    unread_of_compared,
)
from flytune.errors import DataError
from flytune.recipe import Source
from flytune.records import Manifest
from flytune.row_names import LABELLED_ANSWERS

UNPAIRED = "unpaired"
"""Format of labelled answers in recipes and manifests."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """The answers of one row, each as a complete sample of which only the answer is trained."""

    samples: list[Chat | Plain]
    labels: list[bool]
    """True for each desirable answer."""
    prompt: str
    """Identity of the prompt: answers to equal prompts are always in the same split."""


def labelled_of(row: NamedRow, system_prompt: str | None = None) -> Labelled:
    """Return a row's answers.

    Raises:
        DataError: a column is missing, its content does not fit, or the label is neither true nor false.
    """
    if is_two_answers(row):
        pair = pair_of(row, system_prompt)
        return Labelled([pair.chosen, pair.rejected], [True, False], pair.prompt)
    refuse_unread(row, unread_of_compared(row))
    row = row.with_aliases()
    prompt, answer = _prompt_and_answer(row)
    label = _label(row.require("label"), row.name("label"), row.where)
    if isinstance(prompt, str) and isinstance(answer, str):
        plain = Plain(
            text_of(prompt, row.name("prompt"), row.where), text_of(answer, row.name("completion"), row.where)
        )
        return Labelled([plain], [label], plain.prompt)
    before: list[Message] = (
        [{"role": "user", "content": text_of(prompt, row.name("prompt"), row.where)}]
        if isinstance(prompt, str)
        else conversation(prompt, "prompt", row)
    )
    messages = conversation(answer, "completion", row)
    if messages[: len(before)] == before:
        messages = messages[len(before) :]
    require_answer(messages, f"{row.where}: after the prompt, completion")
    context, tools, identity = context_of(before, row, system_prompt)
    return Labelled([Chat([*context, *messages], tools, len(context))], [label], identity)


def is_two_answers(row: NamedRow) -> bool:
    """Return whether a row is a pair, and not one answer with its label."""
    is_unlabelled = row.is_pair and not row.with_aliases().has("label")
    return row.format == PREFERENCE or (row.format == "auto" and is_unlabelled)


def _prompt_and_answer(row: NamedRow) -> tuple[Any, Any]:
    """Return the prompt and the answer of a row, each text or turns."""
    prompt = prompt_of(row)
    other = other_prompt(row) if prompt is None else None
    if other and any(row.get(name) for name in TURNS) and not row.has("completion"):
        if len(other) < 2 or other[-1]["role"] != "assistant":
            raise DataError(
                f"{row.where}: the turns end with a message of {other[-1]['role']!r:.40}; they must end with "
                "the answer"
            )
        return other[:-1], other[-1:]
    answer = row.require("completion")
    return other if other is not None else row.require("prompt"), answer


def _label(value: Any, name: str, where: str) -> bool:
    known = {
        "true": True,
        "1": True,
        "1.0": True,
        "false": False,
        "0": False,
        "0.0": False,
    }  # pandas writes 1.0
    label = known.get(str(value).strip().lower()) if isinstance(value, bool | int | float | str) else None
    if label is None:
        raise DataError(
            f"{where}: {name} is {type(value).__name__} {value!r:.40}; it must be true for a desirable "
            "answer, or false"
        )
    return label


class LabelledAnswers(ComparedRows):
    """A stored row is one answer; `label` is 1 for a desirable one, and 0 for an undesirable one."""

    name = LABELLED_ANSWERS
    meaning = "answers that are labelled desirable or undesirable"
    columns: ClassVar[Mapping[str, str]] = {"label": "int"}
    label_names: ClassVar[Mapping[bool, str]] = {True: "desirable", False: "undesirable"}
    title = "Answer"
    contradiction = "equal one with the other label"

    def form(self, row: NamedRow) -> str:
        return UNPAIRED

    def content(self, row: NamedRow, form: str, system_prompt: str | None) -> Content:
        answers = labelled_of(row, system_prompt)
        return Content([*answers.samples], answers.prompt, answers.labels)

    def rows_of(self, first: Mapping[str, Any], source: Source) -> int:
        if source.format == PREFERENCE:
            return 2
        row = NamedRow.of(self.known(dict(first), source.columns), source, "")
        return 2 if first and is_two_answers(row) else 1

    def values(self, lengths: list[int], label: Label, fields: str) -> tuple[Any, ...]:
        return (int(bool(label)),)

    def sides(self, part: Any) -> tuple[Any, Any] | None:
        return part.hashes, part.desirable

    def checks(self, manifest: Manifest) -> Iterator[Check]:
        if manifest.contradicted:
            yield scores_of_pairs(manifest)
        yield from labels(manifest)


def labels(manifest: Manifest) -> Iterator[Check]:
    """Check that answers with labels have both; the advice on their weights is Ethayarajh et al. 2024, eq.
    8."""
    counts = {"train": manifest.train, "held-out": manifest.heldout}
    for name, split in counts.items():
        if not split.samples:
            continue
        desirable, samples = split.desirable or 0, split.samples
        share = f"{desirable:,} of {samples:,} {name} answers are desirable"
        one_sided = desirable in (0, samples)
        advice = (
            "raise data.heldout_fraction, or set data.heldout_path: without both labels the evaluation "
            "compares nothing"
            if name == "held-out"
            else "all labels are equal, so nothing is compared; add answers with the other label, or train "
            "with objective: sft"
        )
        yield judged(
            f"labels, {name}",
            samples * one_sided,
            samples,
            share,
            "all labels are equal" if name == "train" else "only warns",
            stops=one_sided and name == "train",
            fine=share
            + (
                f"; {weight_advice(desirable, samples - desirable)}"
                if name == "train" and not one_sided
                else ""
            ),
            advice=advice,
        )


def weight_advice(desirable: int, undesirable: int) -> str:
    """Return the weights of KTO's losses for which desirable answers weigh 1 to 4/3 times as much as
    undesirable ones."""
    ratio = undesirable / desirable
    return (
        f"KTO's paper takes objective.desirable_weight from {ratio:.3g} to {4 / 3 * ratio:.3g}, or "
        f"objective.undesirable_weight from {0.75 / ratio:.3g} to {1 / ratio:.3g}"
    )
