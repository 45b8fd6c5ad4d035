"""Content of rows that no sample has: columns, and keys of messages, with what each would mean."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from flytune.data.columns import PROMPTS, READ, TEXTS, NamedRow
from flytune.data.formats import Chat, Sample, prompt_of
from flytune.data.messages import IN_TEMPLATES, THOUGHT_KEYS, is_answer

MOST_NAMES = 50
"""Number of different names that are counted; those after them are counted as OTHERS."""
OTHERS = "others"
_EMPTY_TURN = "messages without content"
_OF_MESSAGES = " of messages"
_REMOVED = " (data.remove_columns)"


class _Meaning(NamedTuple):
    pattern: re.Pattern[str]
    meaning: str


def _meaning(pattern: str, meaning: str) -> _Meaning:
    return _Meaning(re.compile(pattern, re.IGNORECASE), meaning)


_MEANINGS = (
    _meaning(r"messages without content", "an empty answer is not trained"),
    _meaning(r"(?:.*_)?margins?(?:_.*)?", "TRL's RewardTrainer would subtract it; here a pair has no margin"),
    _meaning(
        r"(?:.*_)?(?:scores?|ratings?|rewards?|ranks?|preferences?|votes?|winners?|better)(?:_.*)?",
        "no loss uses it: chosen is the better answer, whatever it says, and all rows weigh the same",
    ),
    _meaning(
        r"(?:.*_)?labels?(?:_.*)?",
        "objective: kto reads a label beside prompt and completion, and classify one of a text; of a pair "
        "chosen is the better answer in any case",
    ),
    _meaning(r"(?:.*_)?weights?(?:_.*)?", "all rows weigh the same; data.sources have weights"),
    _meaning(
        r"(?:.*_)?masks?|(?:.*_)?(?:train|trainable|train_on.*|loss)",
        "it does not change what is trained; a message may have train: false",
    ),
    _meaning(
        r"(?:.*_)?(?:neg|negatives?)(?:_\d+)?",
        "objective: embed reads as many documents that do not belong to a query as objective.negatives says, "
        "from the columns negatives or negative_1, negative_2 ...",
    ),
    _meaning(r"rejected|chosen", "preferences, which objective: dpo, reward and kto train"),
    _meaning(
        r"(?:ref|reference)_.*log_?p(?:rob)?s?", "the reference's log-probabilities are computed by the run"
    ),
    _meaning(
        r"(?:messages|conversations|prompt|completion|instruction|output|text|input_ids)",
        "a format of its own, which data.format names",
    ),
    _meaning(
        r"system|tools",
        "only chats have it: raw text has no chat template, and an own system message comes first",
    ),
    _meaning(
        r"input|context|history|functions|documents|chat_template_kwargs|query|question|answers?|response",
        "no part of this format; data.columns names a column that has another name there",
    ),
    _meaning(r"name of messages", "the template does not write it"),
    _meaning(
        r"(?:reasoning|thinking|thoughts?|rationale|chain_of_thought|cot)(?:_.*)?",
        "the model is not trained with it; thoughts are read in reasoning_content of an answer, or as "
        "<think>why</think> in it",
    ),
    _meaning(
        r"(?:image|video|audio|pixel)s?_.*",
        "images need data.images: true, and video and audio cannot be trained on",
    ),
)


def removed(name: str) -> str:
    """Return the name under which a column of data.remove_columns is counted."""
    return f"{name}{_REMOVED}"


def meaning(name: str) -> str:
    """Return the meaning that a left-out column or key would have for training; "" for one that only
    describes the row."""
    forms = (name, name.removesuffix(_OF_MESSAGES))
    return next(
        (meaning.meaning for meaning in _MEANINGS if any(meaning.pattern.fullmatch(form) for form in forms)),
        "",
    )


def names(row: NamedRow, form: str, samples: Sequence[Sample], text: str) -> Iterator[str]:
    """Yield the names of the columns of a row, and of the keys of its messages, that have content and are in
    no sample.

    `samples` were made of the row as format `form`; `text` is the text of them.
    """
    chats = [sample for sample in samples if isinstance(sample, Chat)]
    form = "preference" if form == "unpaired" and len(samples) > 1 else form  # made from a pair
    if form in ("preference", "unpaired"):
        row = row.with_aliases()
    read = {*map(row.name, READ[form])}
    if form in ("preference", "unpaired") and prompt_of(row) is None:
        read |= {*map(row.name, PROMPTS)}
    if chats:
        read.add(row.name("tools"))
    if any(message["content"] == row.get("system") for chat in chats for message in chat.messages):
        read.add(row.name("system"))
    if row.values.keys() - read:
        for name, value in row.values.items():
            if name not in read and has_content(value) and not (name in TEXTS and _is_in(value, text)):
                yield name
    if any(len(message) > 2 or not message["content"].strip() for chat in chats for message in chat.messages):
        yield from of_messages(chats, text)


def of_messages(chats: list[Chat], text: str) -> Iterator[str]:
    """Yield the names of the keys of messages that have content and are not in `text`, which was rendered of
    them."""
    names = dict[str, None]()
    for message in (message for chat in chats for message in chat.messages):
        if not message["content"].strip() and not is_answer(message):
            names[_EMPTY_TURN] = None
        for key, value in message.items():
            is_thought = key in THOUGHT_KEYS and message["role"] == "assistant"  # counted by ThoughtCounts
            if key not in IN_TEMPLATES and not is_thought and has_content(value) and not _is_in(value, text):
                names[f"{key}{_OF_MESSAGES}"] = None
    yield from names


def has_content(value: Any) -> bool:
    """Return whether a value says anything."""
    return value is not None and not (isinstance(value, str | list | dict) and not value)


def _is_in(value: Any, text: str) -> bool:
    """Return whether the texts of a value are part of `text`; what has none is not."""
    if isinstance(value, str):
        return value.strip() in text
    if isinstance(value, list) and value:
        parts = [item.get("content", item.get("value")) if isinstance(item, dict) else item for item in value]
        return all(isinstance(part, str) and part.strip() in text for part in parts)
    return False


def contradicts(row: dict[str, Any]) -> bool:
    """Return whether a pair's own figures say that the rejected answer is the better one."""
    for chosen, rejected in (
        ("score_chosen", "score_rejected"),
        ("chosen_score", "rejected_score"),
        ("chosen_rating", "rejected_rating"),
        ("chosen_reward", "rejected_reward"),
    ):
        if _is_number(row.get(chosen)) and _is_number(row.get(rejected)) and row[chosen] < row[rejected]:
            return True
    return _is_number(row.get("margin")) and bool(row["margin"] < 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def count(names: Iterator[str], counts: Counter[str]) -> None:
    """Add one row's names to `counts`, which never has more than MOST_NAMES different ones and OTHERS."""
    shown = dict.fromkeys(name[:60] for name in names)
    for name in dict.fromkeys(
        name if name in counts or len(counts) < MOST_NAMES else OTHERS for name in shown
    ):
        counts[name] += 1
