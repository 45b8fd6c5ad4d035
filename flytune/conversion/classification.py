"""Arguments of transformers' run_classification.py, the one script of these tools that trains a classifier of
texts."""

from typing import Any

from flytune.conversion import training
from flytune.conversion.draft import Draft

_KEYS = ("text_column_names", "label_column_name", "train_file")


def put(draft: Draft, gpus: int) -> None:
    """Set objective, method, data and training by the script's arguments and defaults.

    The script names labels by the data, in their order as text; the recipe's are left for a person.
    """
    if not any(draft.has(key) for key in _KEYS):
        draft.refuse(
            "TRL trains no classifier of texts, and run_classification.py has "
            f"{', '.join(_KEYS[:-1])} or {_KEYS[-1]}; write objective: classify (docs/objectives.md)"
        )
    if draft.take("do_regression"):
        draft.refuse("do_regression: objective: classify has labels, and no number to predict")
    draft.put("objective.name", "classify")
    draft.put("objective.labels", [], "name them: the script's are those of the data, sorted as text")
    draft.put("method.name", "full")
    draft.put("training.activation_checkpointing", bool(draft.take("gradient_checkpointing")))
    draft.put("data.max_length", training.whole(draft, "max_seq_length", 128))
    _put_columns(draft)
    _put_places(draft)
    training.put_defaults_of_transformers(draft, 5e-5, "adamw_torch_fused", gpus)


def _put_columns(draft: Draft) -> None:
    texts = str(draft.take("text_column_names", "sentence")).split(",")
    label, separator = draft.take("label_column_name", "label"), draft.take("text_column_delimiter", " ")
    if len(texts) > 2:
        draft.refuse(f"text_column_names: {len(texts)} columns, and a text has two at most here; join them")
    named = dict(zip(("text", "text_pair"), texts, strict=False)) | {"label": str(label)}
    columns = {ours: theirs for ours, theirs in named.items() if ours != theirs}
    draft.put("data.columns", columns or None)
    if len(texts) == 2:
        draft.put("data.input_separator", separator)


def _put_places(draft: Draft) -> None:
    source: dict[str, Any] = {}
    if file := draft.take("train_file"):
        source["path"] = str(file)
        draft.put("data.heldout_path", draft.take("validation_file"))
    elif name := draft.take("dataset_name"):
        source |= {"dataset_name": str(name), "dataset_config": draft.take("dataset_config_name")}
        source |= {"dataset_split": draft.take("train_split_name")}
        draft.put("data.eval_split", draft.take("validation_split_name", "validation"))
    else:
        draft.refuse("it has neither train_file nor dataset_name")
    training.put_sources(draft, [{key: value for key, value in source.items() if value is not None}])
    draft.put("data.max_samples", draft.take("max_train_samples"))
