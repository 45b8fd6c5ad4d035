"""Names of the kinds of rows, which are in flytune.data.rows: recipes, requests and manifests name one."""

from typing import Any, Literal

RowKindName = Literal[
    "answers", "pairs", "labelled_answers", "prompts", "classified", "image_answers", "queries"
]
ANSWERS: RowKindName = "answers"
PAIRS: RowKindName = "pairs"
LABELLED_ANSWERS: RowKindName = "labelled_answers"
PROMPTS: RowKindName = "prompts"
CLASSIFIED: RowKindName = "classified"
IMAGE_ANSWERS: RowKindName = "image_answers"
QUERIES: RowKindName = "queries"


def with_row_kind(record: Any) -> Any:
    """Return the fields of a record with its `row_kind`, also of one before 0.7.0, which has `pairs` and
    `labels`."""
    if not isinstance(record, dict) or "row_kind" in record:
        return record
    fields = dict(record)
    pairs, labels = fields.pop("pairs", False), fields.pop("labels", False)
    train = fields.get("train")
    if isinstance(train, dict) and train.get("desirable") is not None:
        labels = True
    if pairs is True:
        return fields | {"row_kind": PAIRS}
    return fields | {"row_kind": LABELLED_ANSWERS} if labels is True else fields
