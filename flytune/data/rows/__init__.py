"""The kinds of rows that objectives train on, by name. A new kind is a file in this folder, and a row of the
table."""

from flytune.data.rows.answers import ImageAnswers, TrainedAnswers
from flytune.data.rows.base import RowKind
from flytune.data.rows.classified import Classified
from flytune.data.rows.labelled import LabelledAnswers, weight_advice
from flytune.data.rows.pairs import Pairs
from flytune.data.rows.prompts import Prompts
from flytune.data.rows.queries import Queries

__all__ = ["ROW_KINDS", "RowKind", "row_kind", "weight_advice"]

_KINDS: tuple[RowKind, ...] = (
    TrainedAnswers(),
    Pairs(),
    LabelledAnswers(),
    Prompts(),
    Classified(),
    ImageAnswers(),
    Queries(),
)
ROW_KINDS: dict[str, RowKind] = {kind.name: kind for kind in _KINDS}


def row_kind(name: str, negatives: int = 0) -> RowKind:
    """Return the kind of rows that a request or a manifest names, whose rows have so many negatives."""
    return ROW_KINDS[name].with_negatives(negatives) if negatives else ROW_KINDS[name]
