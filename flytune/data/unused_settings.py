"""Settings of the section `data` that no row uses: columns that no row has, and what only chats or raw text
have, beside sources of the other kind."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flytune.data.columns import COLUMNS
from flytune.data.counts import Tally
from flytune.data.formats import Chat, Plain, Sample
from flytune.recipe import Data, Source

_CHAT, _RAW, _TOKENS = "a chat", "raw text", "tokens"


def columns_of(row: Mapping[str, Any], source: Source) -> Iterator[str]:
    """Yield our names of the columns in data.columns that a row has, as it was read."""
    for ours, theirs in source.columns.items():
        # A name with dots may be a part of an object.
        if theirs in row or theirs.partition(".")[0] in row:
            yield ours


def shape_of(sample: Sample) -> str:
    """Return what a sample is: a chat, raw text, or tokens."""
    if isinstance(sample, Chat):
        return _CHAT
    return _RAW if isinstance(sample, Plain) else _TOKENS


def listed(data: Data, tallies: Sequence[Tally]) -> list[str]:
    """List the settings that no row uses, a clause each.

    Args:
        tallies: the counts of each source, in the order of `data.all_read`.
    """
    clauses = []
    for (key, source), tally in zip(data.all_read.items(), tallies, strict=True):
        section = "data" if key == data.heldout_key else key
        clauses += [
            f"{section}.columns.{ours}: no row of {tally.name} has the column {theirs}"
            for ours, theirs in source.columns.items()
            # Keys of turns are in no column of their own.
            if ours in COLUMNS and tally.rows and not tally.named[ours]
        ]
    needs = {
        "system_prompt": (data.system_prompt is not None, _CHAT),
        "train_on": (data.train_on == "answers", _CHAT),
        "add_bos_token": (data.add_bos_token is not None, _RAW),
        "add_eos_token": (not data.add_eos_token, _RAW),
    }
    clauses += [
        f"data.{name}: no row is {shape}"
        for name, (is_set, shape) in needs.items()
        if is_set and not any(tally.named[shape] for tally in tallies)
    ]
    return list(dict.fromkeys(clauses))
