"""Columns that other tools read and that a row's format does not: refused by name (docs/data.md, "Keys of
other tools")."""

from collections.abc import Collection
from typing import Any

from flytune.data.columns import CHAT_CONTEXT, PREFERENCES, names_of
from flytune.data.messages import MEDIA
from flytune.errors import DataError

_CHATS_ALONE = "of raw text is not read; write the row as messages"
_COMPARED = "is an answer to compare, which objective: sft does not train; write objective: dpo"
ADVICE = {
    "chat_template_kwargs": "is not read; write its values into a template that data.chat_template names "
    "({% set enable_thinking = false %})",
    "history": "is read beside instruction and output alone; write its turns into the row's messages",
    **dict.fromkeys(CHAT_CONTEXT, _CHATS_ALONE),
    "functions": "is read beside messages alone; write tools: [{type: function, function: ...}]",
    **dict.fromkeys(PREFERENCES, _COMPARED),
    "segments": "(axolotl's input_output) is not read; write prompt and completion, or input_ids and labels",
    **dict.fromkeys(
        MEDIA,
        "has content, and images, video and audio cannot be trained on; remove the column, or the rows that "
        "have some",
    ),
}


def refuse(row: dict[str, Any], columns: dict[str, str], where: str, names: Collection[str]) -> None:
    """Refuse a row that has content in one of `names` and MEDIA, unless data.columns says that it means
    something else.

    Raises:
        DataError: it has; the message says what to write instead.
    """
    for name in (*MEDIA, *names):
        if name in row and name not in columns.values() and row[name] not in (None, "", [], {}):
            if name in PREFERENCES and set(names_of("chosen")) & set(columns.values()):
                continue  # the recipe trains the chosen answers alone
            raise DataError(
                f"{where}: column {name} {ADVICE[name]}; or leave it out on purpose, data.remove_columns: "
                f"[{name}]"
            )
