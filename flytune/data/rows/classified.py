"""Texts with labels: a text, a chat, a prompt with its completion or a pair of texts, and what it is.

The column `label` has the name of a label, or its place in objective.labels, from 0 on; where rows may have
several labels, `labels` has a list of them, which may be empty. The text has the tokens that the tokenizer
makes of it, as in a program that classifies it later: the end token where the tokenizer adds it (BERT's
[SEP]), also where the text is cut. The stored column `classes` has the places of the labels.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, ClassVar, Self

from flytune.data.check import Check, judged
from flytune.data.columns import SEPARATOR, NamedRow
from flytune.data.formats import Plain, choose, convert
from flytune.data.labels import Encoded, cut_before_end
from flytune.data.rows.base import Content, Label, UnpredictedRows
from flytune.errors import DataError
from flytune.recipe import Data, DataRequest, Source
from flytune.records import Manifest
from flytune.row_names import CLASSIFIED

LABELS = ("label", "labels")
"""Columns of the labels; the first one that a row has counts."""
SECOND = "text_pair"
"""Column of the second text of a pair, as transformers' tokenizers call it."""
SEVERAL = "multi_label_classification"
"""Value of objective.problem_type for rows with several labels or none."""
MOST_NAMED = 12
"""Labels that an error or a check names."""
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_TRUTHS = {"true": True, "yes": True, "false": False, "no": False}
"""Names of labels that true and false in the data are."""


class Classified(UnpredictedRows):
    """A stored row is a text, none of whose tokens is predicted; `classes` are the places of its labels."""

    name = CLASSIFIED
    meaning = "texts with labels"
    title = "Text"
    columns: ClassVar[Mapping[str, str]] = {"classes": "list"}
    own_columns: ClassVar[tuple[str, ...]] = (*LABELS, SECOND)
    _end: int | None = None

    def __init__(self, classes: Sequence[str] = (), has_several: bool = False) -> None:
        """Bind it to the names of the labels, in the order of the model's outputs.

        Args:
            has_several: whether a row may have several labels, or none.
        """
        self._classes, self._has_several = list(classes), has_several
        self._places = {label: place for place, label in enumerate(classes)}
        self._numbers = {float(label): self._places[label] for label in classes if _NUMBER.fullmatch(label)}
        self._truths = {
            _TRUTHS[label.lower()]: place for label, place in self._places.items() if label.lower() in _TRUTHS
        }

    def bound(self, request: DataRequest) -> Self:
        return type(self)(request.classes, request.labelling == SEVERAL)

    def with_end(self, token: int | None) -> Self:
        bound = copy(self)
        bound._end = token
        return bound

    def with_some_label(self, row: Mapping[str, Any], source: Source) -> dict[str, Any]:
        """Return a row with some label in the place of its own, so that its text is read as in training."""
        name = LABELS[0]
        some = [] if self._has_several else self._classes[0]
        return dict(row) | {source.columns.get(name, name): some}

    def form(self, row: NamedRow) -> str:
        if row.is_pair:
            raise DataError(
                f"{row.where}: the columns chosen and rejected are preferences, which objective: classify "
                "does not train; write objective: reward, or data.columns: {text: chosen} for one of them"
            )
        return choose(self.unread(row), row.format)

    def content(self, row: NamedRow, form: str, system_prompt: str | None) -> Content:
        labels = self.labels_of(row)
        sample = convert(self.unread(row), form, system_prompt)
        if isinstance(sample, Plain):
            second = [] if row.get(SECOND) is None else [row.text(SECOND)]
            text = (row.separator or SEPARATOR).join([sample.text, *second])
            # The tokenizer's end token is left out of a text without a completion.
            sample = Plain(text, None if self._end is None else "")
        return Content([sample], labels=[labels])

    def cut(self, sequences: Sequence[Encoded], data: Data) -> list[list[Encoded]]:
        ((ids, labels),) = sequences
        if data.too_long == "drop" or self._end is None or ids[-1] != self._end:
            return super().cut(sequences, data)
        return [[cut_before_end(ids, labels, data.max_length)]]

    def labels_of(self, row: NamedRow) -> tuple[int, ...]:
        """Return the places of a row's labels, ascending.

        Raises:
            DataError: the row has no label, an unknown one, one twice, or several where one is expected.
        """
        ours, where = next(filter(row.has, LABELS), LABELS[self._has_several]), row.where
        value, theirs = row.require(ours), row.name(ours)
        if not self._has_several:
            return (self._place(value, theirs, where),)
        if not isinstance(value, list | tuple):
            raise DataError(
                f"{where}: {theirs} is {type(value).__name__} {value!r:.40}; it must be a list of labels, "
                "which may be empty (objective.problem_type: multi_label_classification)"
            )
        places = sorted(self._place(label, theirs, where) for label in value)
        if twice := [place for place, after in pairwise(places) if place == after]:
            raise DataError(
                f"{where}: {theirs} has {self._classes[twice[0]]!r:.40} twice; name each label once (a list "
                "of 0 or 1 for each label is not read)"
            )
        return tuple(places)

    def _place(self, value: Any, name: str, where: str) -> int:
        """Return the place of a label that a row names, or gives the number of."""
        place = self._known_place(value) if isinstance(value, bool | int | float | str) else None
        if place is not None:
            return place
        known = ", ".join(self._classes[:MOST_NAMED]) + ", ..." * (len(self._classes) > MOST_NAMED)
        raise DataError(
            f"{where}: {name} is {type(value).__name__} {value!r:.60}, which is none of objective.labels "
            f"({known}), nor the place of one; add it there"
            + (
                "; rows with several labels need objective.problem_type: multi_label_classification"
                if isinstance(value, list)
                else ""
            )
        )

    def _known_place(self, value: bool | float | str) -> int | None:
        text = str(value).strip()
        if text in self._places:
            return self._places[text]
        if isinstance(value, bool):
            if self._truths:
                return self._truths.get(value)
            text = str(int(value))
        if self._numbers:
            return None if isinstance(value, str) else self._numbers.get(float(text))
        if isinstance(value, float) and value.is_integer():
            text = str(int(value))  # pandas writes 1.0
        return int(text) if text.isdecimal() and int(text) < len(self._classes) else None

    def is_trained(self, sequences: Sequence[Encoded]) -> bool:
        return bool(sequences[0][0])

    def values(self, lengths: list[int], label: Label, fields: str) -> tuple[Any, ...]:
        assert isinstance(label, tuple)
        return (list(label),)

    def traced(self, length: int, packing: bool) -> dict[str, Any]:
        return super().traced(length, packing) | {"classes": [0]}

    def checks(self, manifest: Manifest) -> Iterator[Check]:
        yield from label_counts(manifest)


def fields_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of objective classify that rows show: the names, or the numbers as names, of their
    labels, and whether a row has several."""
    values = [row.get(LABELS[0], row.get(LABELS[1])) for row in rows]
    single = [label for value in values for label in (value if isinstance(value, list) else [value])]
    known = {
        str(int(label)) if isinstance(label, bool | float) and float(label).is_integer() else str(label)
        for label in single
        if isinstance(label, bool | int | float | str)
    }
    labels = sorted(known, key=lambda name: (int(name) if name.isdecimal() else 0, name))
    has_several = any(isinstance(value, list) for value in values)
    return {"labels": labels} | ({"problem_type": SEVERAL} if has_several else {})


def label_counts(manifest: Manifest) -> Iterator[Check]:
    """Check that each label is trained, and say how often; the balanced weights are scikit-learn's (King and
    Zeng 2001)."""
    for name, split in (("train", manifest.train), ("held-out", manifest.heldout)):
        if not split.samples:
            continue
        counts = dict(zip(manifest.classes, [*split.classes, *[0] * len(manifest.classes)], strict=False))
        absent = [label for label, count in counts.items() if not count]
        shown = list(counts.items())[:MOST_NAMED]
        named = [f"{label} {count:,}" for label, count in shown] + ["..."] * (len(counts) > MOST_NAMED)
        sentence = f"{split.samples:,} {name} texts: {', '.join(named)}"
        stops = name == "train" and len(absent) >= len(counts) - 1
        advice = (
            "add texts with them, or remove them from objective.labels"
            if name == "train"
            else "raise data.heldout_fraction, or set data.heldout_path: their figures are of nothing"
        )
        weights = ", ".join(
            f"{label}: {split.samples / (len(counts) * count):.3g}" for label, count in shown if count
        )
        yield judged(
            f"labels, {name}",
            len(absent),
            len(counts),
            f"{sentence}; none is {', '.join(absent[:MOST_NAMED])}",
            "fewer than two labels are trained" if name == "train" else "only warns",
            stops=stops,
            fine=sentence
            + (f"; balanced weights are objective.class_weight: {{{weights}}}" if name == "train" else ""),
            advice=advice,
        )
