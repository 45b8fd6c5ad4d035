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
from flytune.data.columns import TURNS, refuse_unread
from flytune.data.formats import (
    SEPARATOR,
    Chat,
    Plain,
    column,
    is_pair,
    optional_column,
    prompt_of,
    with_other_names,
)
from flytune.data.messages import Message, text_of
from flytune.data.rows.base import ComparedRows, Content, Label
from flytune.data.rows.pairs import (
    PREFERENCE,
    context_of,
    conversation,
    other_prompt,
    pair_of,
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


def labelled_of(
    row: dict[str, Any],
    form: str,
    columns: dict[str, str],
    where: str,
    system_prompt: str | None = None,
    separator: str = SEPARATOR,
) -> Labelled:
    """Return a row's answers; `form` is the format in the recipe, `columns` maps our names to those in the
    data.

    Raises:
        DataError: a column is missing, its content does not fit, or the label is neither true nor false.
    """
    if is_two_answers(row, form, columns):
        pair = pair_of(row, columns, where, system_prompt, separator)
        return Labelled([pair.chosen, pair.rejected], [True, False], pair.prompt)
    refuse_unread(row, columns, where, unread_of_compared(row, columns))
    columns = with_other_names(row, columns)
    prompt, answer = _prompt_and_answer(row, columns, where, separator)
    label = _label(column(row, "label", columns, where), columns.get("label", "label"), where)
    if isinstance(prompt, str) and isinstance(answer, str):
        names = [columns.get(name, name) for name in ("prompt", "completion")]
        plain = Plain(text_of(prompt, names[0], where), text_of(answer, names[1], where))
        return Labelled([plain], [label], plain.prompt)
    before: list[Message] = (
        [{"role": "user", "content": text_of(prompt, columns.get("prompt", "prompt"), where)}]
        if isinstance(prompt, str)
        else conversation(prompt, "prompt", columns, where)
    )
    messages = conversation(answer, "completion", columns, where)
    if messages[: len(before)] == before:
        messages = messages[len(before) :]
    if not messages or messages[0]["role"] != "assistant":
        instead = f"a message of {messages[0]['role']!r:.40}" if messages else "nothing"
        raise DataError(
            f"{where}: after the prompt, completion has {instead}; it must be an answer of the assistant"
        )
    context, tools, identity = context_of(before, row, columns, where, system_prompt)
    return Labelled([Chat([*context, *messages], tools, len(context))], [label], identity)


def is_two_answers(row: dict[str, Any], form: str, columns: dict[str, str]) -> bool:
    """Return whether a row of the format `form` in a recipe is a pair, and not one answer with its label."""
    label = with_other_names(row, columns).get("label", "label")
    return form == PREFERENCE or (form == "auto" and is_pair(row, columns) and label not in row)


def _prompt_and_answer(
    row: dict[str, Any], columns: dict[str, str], where: str, separator: str
) -> tuple[Any, Any]:
    """Return the prompt and the answer of a row, each text or turns."""
    prompt = prompt_of(row, columns)
    other = other_prompt(row, columns, where, separator) if prompt is None else None
    has_turns = any(optional_column(row, name, columns) for name in TURNS)
    if other and has_turns and columns.get("completion", "completion") not in row:
        if len(other) < 2 or other[-1]["role"] != "assistant":
            raise DataError(
                f"{where}: the turns end with a message of {other[-1]['role']!r:.40}; they must end with the "
                "answer"
            )
        return other[:-1], other[-1:]
    answer = column(row, "completion", columns, where)
    return other if other is not None else column(row, "prompt", columns, where), answer


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

    def form(self, row: dict[str, Any], source: Source, where: str) -> str:
        return UNPAIRED

    def content(
        self, row: dict[str, Any], form: str, source: Source, where: str, system_prompt: str | None
    ) -> Content:
        answers = labelled_of(
            row, source.format, source.columns, where, system_prompt, source.input_separator
        )
        return Content([*answers.samples], answers.prompt, answers.labels)

    def rows_of(self, first: Mapping[str, Any], source: Source) -> int:
        if source.format == PREFERENCE:
            return 2
        row = self.known(dict(first), source.columns)
        return 2 if first and is_two_answers(row, source.format, source.columns) else 1

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
