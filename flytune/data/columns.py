"""All names of columns: ours, those of other tools that stand for them, and those that a format does not
read."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from flytune.data.messages import MEDIA, text_of
from flytune.errors import DataError
from flytune.recipe import Source


class Column(NamedTuple):
    """A column of ours."""

    name: str
    aliases: tuple[str, ...] = ()
    """Other tools' names for it in rows of compared answers and of prompts; the first one that a row has
    counts."""
    unread: tuple[str, ...] = ()
    """Names that mean it, or a part of it, in other tools, and are not read: rows with one are refused, with
    advice."""


_COLUMNS = (
    Column("messages"),
    Column("conversations"),
    Column("prompt", unread=("problem", "query", "task", "prompt_text", "question_text", "user", "text")),
    Column("completion", ("output",)),
    Column("instruction", ("question", "input")),
    Column("output"),
    Column("text"),
    Column("text_pair"),
    Column("input_ids"),
    Column("input"),
    Column("history"),
    Column("system"),
    Column("tools", unread=("functions",)),
    Column("labels"),
    Column("attention_mask"),
    Column("completion_mask"),
    Column("assistant_masks"),
    Column("chosen", ("chosen_response", "preferred_output")),
    Column("rejected", ("rejected_response", "non_preferred_output"), unread=("rejected_messages",)),
    Column("label", ("kto_tag",)),
    Column("images"),
    Column("query", ("anchor",)),
    Column("positive"),
    Column("negatives", ("negative",)),
)
COLUMNS = {column.name: column for column in _COLUMNS}
TURN_KEYS = ("role", "content", "from", "value")
"""Keys of a turn, which data.columns renames as it renames columns."""
KNOWN = (*COLUMNS, *TURN_KEYS)
"""Names that data.columns may map."""

TURNS = ("messages", "conversations")
"""Columns of turns."""
PAIR = ("chosen", "rejected")
"""Columns of preferences, beside `prompt` (rows/pairs.py)."""
MASKS = ("attention_mask", "completion_mask", "assistant_masks")
"""Columns of the format tokens with 1 or 0 for each token: transformers' for padding, TRL's two for trained
tokens."""
OTHER_MASKS = ("special_tokens_mask",)
PACKED = ("position_ids", "seq_lengths", "cu_seqlens", "sequence_ids")
"""Columns of packed tokens, which a row that is one sample may have only where they say nothing."""
REFERENCES = ("completion", "answer", "reference")
"""Columns of a prompt's reference answer; the first one that a row has counts."""
VERL_REFERENCE = ("reward_model", "ground_truth")
"""verl's column of the reference answer, and its key in it."""

PROMPTED_CHAT = "prompt_completion_messages"
"""Rows of prompt_completion in messages, TRL's conversational form; a recipe names it prompt_completion."""
REQUIRED = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
    "tokens": ("input_ids",),
}
"""Columns that each format requires, in the order in which `auto` tries the formats."""
READ = REQUIRED | {
    PROMPTED_CHAT: REQUIRED["prompt_completion"],
    "instruction": ("instruction", "input", "output", "history"),
    # What else such rows have was made from the same text.
    "tokens": (
        "input_ids",
        "labels",
        *MASKS,
        *OTHER_MASKS,
        *PACKED,
        "text",
        "messages",
        "prompt",
        "completion",
        "token_type_ids",
        "length",
    ),
    "preference": ("prompt", *PAIR),
    "unpaired": ("prompt", "completion", "label"),
    # Its kind of rows says what else it does not read.
    "queries": (),
}
"""Columns that each format reads, in addition to `system` and `tools` of chats."""
PROMPTS = (*TURNS, "instruction", "input", "history")
"""Columns of compared answers that stand for the column prompt."""
TEXTS = (*TURNS, "prompt", "completion", "instruction", "output", "text", *PAIR, "question", "input")
"""Columns of a row's own text."""


_QUESTIONS = ("instruction", "question", "query", "problem", "user", "prompt", "input")
_ANSWERS = ("output", "answer", "response", "completion", "solution", "reply", "assistant", "target")
_TEXTS = ("content", "document", "body", "article")


def likely_names(row: Collection[str]) -> dict[str, str]:
    """Return the value of data.columns for a row that no format fits: its columns that by their names are a
    question and an answer, or a text; empty if there are none."""
    question = next((name for name in _QUESTIONS if name in row), None)
    answer = next((name for name in _ANSWERS if name in row), None)
    if question and answer:
        return {"instruction": question, "output": answer}
    text = next((name for name in _TEXTS if name in row), None)
    return {"text": text} if text else {}


SEPARATOR = "\n\n"
"""Text between instruction and input, where data.input_separator has no other."""


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A row, whose columns are read by our names."""

    values: dict[str, Any]
    """Values by the data's names."""
    columns: Mapping[str, str]
    """The data's names of the columns that have others than ours, by ours (data.columns)."""
    where: str
    """Location of the row, for errors."""
    separator: str = SEPARATOR
    """Text between the columns instruction and input."""
    format: str = "auto"
    """Format that the recipe names (data.format)."""

    @classmethod
    def of(cls, row: dict[str, Any], source: Source, where: str) -> Self:
        """Return a row of a source."""
        return cls(row, source.columns, where, source.input_separator, source.format)

    def name(self, ours: str) -> str:
        """Return the data's name of our column."""
        return self.columns.get(ours, ours)

    def has(self, *ours: str) -> bool:
        """Return whether the row has all of these columns."""
        return all(self.name(name) in self.values for name in ours)

    def get(self, ours: str) -> Any:
        """Return the value of our column; None if the row has none."""
        return self.values.get(self.name(ours))

    def require(self, ours: str) -> Any:
        """Return the value of our column.

        Raises:
            DataError: the row has no such column.
        """
        theirs = self.name(ours)
        if theirs not in self.values:
            label = f"{theirs} (data.columns.{ours})" if theirs != ours else ours
            raise DataError(f"{self.where}: column {label} is missing; the columns are {self.listed}")
        return self.values[theirs]

    def text(self, ours: str) -> str:
        """Return the value of our column, which must be text.

        Raises:
            DataError: the row has no such column, or it is not text.
        """
        return text_of(self.require(ours), self.name(ours), self.where)

    @property
    def listed(self) -> str:
        """The names of all its columns, for errors."""
        return ", ".join(self.values) or "none"

    @property
    def is_pair(self) -> bool:
        """True if it has a chosen and a rejected answer."""
        return self.with_aliases().has(*PAIR)

    def without(self, *ours: str) -> Self:
        """Return the row without these columns."""
        theirs = {*map(self.name, ours)}
        return replace(
            self, values={name: value for name, value in self.values.items() if name not in theirs}
        )

    def with_aliases(self) -> Self:
        """Return the row with the names that other tools have for columns of compared answers, where it has
        those alone."""
        added = {}
        for ours in _COLUMNS:
            if ours.name not in self.values and ours.name not in self.columns:
                read = [
                    alias
                    for alias in ours.aliases
                    if alias in self.values and alias not in self.columns.values()
                ]
                if read:
                    added[ours.name] = read[0]
        return replace(self, columns={**added, **self.columns}) if added else self


def names_of(name: str) -> tuple[str, ...]:
    """Return our name of a column, and the other names that are read as it."""
    return (name, *COLUMNS[name].aliases)


PREFERENCES = (*names_of("rejected"), *COLUMNS["rejected"].unread)
"""Columns of the answer that is not the better one."""
CHAT_CONTEXT = ("system", "tools", *COLUMNS["tools"].unread)
"""Columns beside the turns of a chat."""
_OF_CHATS = ("chat_template_kwargs", "history", *PREFERENCES)
UNREAD = {
    "messages": _OF_CHATS,
    "sharegpt": _OF_CHATS,
    PROMPTED_CHAT: _OF_CHATS,
    "instruction": ("chat_template_kwargs", *COLUMNS["tools"].unread, *PREFERENCES),
    "prompt_completion": (*_OF_CHATS, *CHAT_CONTEXT),
    "text": PREFERENCES,
    "tokens": (),
}
"""Columns that are refused in rows of a format. Raw text may have been made of the columns beside it, and
tokens of any."""

AXOLOTL_QUESTIONS: dict[str, dict[str, str]] = {
    "gpteacher": {"output": "response"},
    "oasst": {"instruction": "INSTRUCTION", "output": "RESPONSE"},
    "aya": {"instruction": "inputs", "output": "targets"},
    "alpaca_chat.load_qa": {"instruction": "question", "output": "answer"},
    "alpaca_chat.load_camel_ai": {"instruction": "message_1", "output": "message_2"},
    "summarizetldr": {"instruction": "article", "output": "summary"},
    "jeopardy": {"instruction": "question", "input": "category", "output": "answer"},
    "context_qa": {"instruction": "article", "input": "question", "output": "answer"},
    "context_qa.load_v2": {"instruction": "context", "input": "question", "output": "answer"},
    **{
        f"alpaca_w_system.{name}": {
            "instruction": "question",
            "output": "response",
            "system": "system_prompt",
        }
        for name in ("load_open_orca", "load_open_orca_chatml", "load_openorca_chatml")
    },
}
"""Columns that have other names in axolotl's types of a question and an answer."""
AXOLOTL_PAIRS: dict[str, dict[str, str]] = {
    "argilla": {"chosen": "chosen_response", "rejected": "rejected_response"},
    "intel": {"instruction": "question"},
    "icr": {"instruction": "input"},
    "prompt_pairs": {"instruction": "prompt"},
    **{style: {} for style in ("ultra", "argilla_chat", "default", "argilla_dpo", "load", "")},
}
"""The same of its types of pairs, by what follows the dot; a column `instruction` is a question of a chat."""
AXOLOTL_LABELLED: dict[str, dict[str, str]] = {
    "ultra": {"instruction": "prompt"},
    "argilla_chat": {"prompt": "chosen"},
    "argilla": {},
}
"""The same of labelled answers, where they differ from pairs."""
LLAMA_FACTORY = {"instruction": "prompt", "input": "query", "output": "response", "label": "kto_tag"}
"""Keys in `columns` of LLaMA-Factory's dataset_info.json that are called otherwise than our column."""


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
        "has content, and video and audio cannot be trained on; remove the column, or the rows that have "
        "some",
    ),
    **dict.fromkeys(
        MEDIA[:2], "has content, which is read with data.images: true and a vision-language model alone"
    ),
}


def refuse_unread(row: NamedRow, names: Collection[str]) -> None:
    """Refuse a row that has content in one of `names` and MEDIA, unless data.columns says that it means
    something else.

    Raises:
        DataError: it has; the message says what to write instead.
    """
    for name in (*MEDIA, *names):
        if name not in row.columns.values() and row.values.get(name) not in (None, "", [], {}):
            if name in PREFERENCES and set(names_of("chosen")) & set(row.columns.values()):
                continue  # the recipe trains the chosen answers alone
            raise DataError(
                f"{row.where}: column {name} {ADVICE[name]}; or leave it out on purpose, "
                f"data.remove_columns: [{name}]"
            )
