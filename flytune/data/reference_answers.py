"""The check of rewards with the reference answers of prepared prompts, before a GPU is asked for."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flytune.data.rows.prompts import prompt_length, stored_prompt
from flytune.errors import DataError, RewardError
from flytune.recipe import DataRequest, Grpo
from flytune.records import SplitCounts
from flytune.rewards import Judged, RewardProcess

log = logging.getLogger(__name__)

MOST = 5_000
"""Rows of each split that are checked."""
_AT_ONCE = 200


def check(request: DataRequest, counts: Sequence[SplitCounts], folder: Path, tokenizer: Any) -> None:
    """Check that rewards judge each reference answer higher than an empty one, and each text of a prompt as
    it is tokenized.

    Raises:
        RewardError: a reward fails, or an empty answer has as much; says for which row.
        DataError: the end of a prompt is a part of a token of its answer.
    """
    section = request.judged_by
    if section is None:
        return
    with RewardProcess(section) as process:
        for count in counts:
            for rows in _batches(folder, count):
                _check(section, process, [_question(row, where, tokenizer) for row, where in rows])
    log.info("rewards: checked with the reference answers")


def _check(section: Grpo, process: RewardProcess, questions: list[tuple[Judged, str | None]]) -> None:
    """Compare the rewards of reference answers with those of empty ones, which rows without a reference
    answer get too."""
    empty = process.values([item for item, _ in questions])
    with_reference = [
        item._replace(completion=reference) for item, reference in questions if reference is not None
    ]
    full = iter(process.values(with_reference))
    for (item, reference), values in zip(questions, empty, strict=True):
        if reference is None:
            continue
        reward, reward_of_empty = section.total(next(full)), section.total(values)
        if reward <= reward_of_empty:
            raise RewardError(
                f"{item.where}: the rewards give the reference answer {reference!r:.80} {reward:g}, and an "
                f"empty one {reward_of_empty:g}, so that they would teach nothing, or the wrong; look at "
                "objective.rewards and at the columns that they read"
            )


def _question(row: dict[str, Any], where: str, tokenizer: Any) -> tuple[Judged, str | None]:
    """Return an empty answer to a stored row, and its reference answer."""
    prompt, reference, columns = stored = stored_prompt(row)
    place = f"{where} (prompt {stored.shown!r:.80})"
    if isinstance(prompt, str):
        tokens = row["input_ids"][: prompt_length(row)]
        read = tokenizer.decode(tokens, skip_special_tokens=True)
        # Space at the end may be a part of the answer's first token.
        if "".join(read.split()) != "".join(prompt.split()):
            raise DataError(
                f"{place}: the end of the prompt and the begin of its answer are one token, so that the "
                f"model would be asked {read[-40:]!r}; end the prompt with a line break, or write it as "
                "messages"
            )
    return Judged(prompt, "", columns, place), reference


def _batches(folder: Path, counts: SplitCounts) -> Iterator[list[tuple[dict[str, Any], str]]]:
    """Yield the first stored rows of a split, each with its place, some at a time."""
    from pyarrow.parquet import ParquetFile

    left = MOST
    for shard in counts.shards:
        number = 0
        with ParquetFile(folder / shard.file) as file:
            for table in file.iter_batches(_AT_ONCE):
                rows = table.slice(0, left).to_pylist()
                yield [(row, f"{shard.file} row {place}") for place, row in enumerate(rows, number)]
                number, left = number + len(rows), left - len(rows)
                if not left:
                    return
