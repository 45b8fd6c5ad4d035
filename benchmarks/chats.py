"""Chats for benchmarks: real questions and answers in different conversations of several turns, the same in
each run.

The turns are the demo's docstring pairs and, where a file is given, its rows of instruction, input and
output. A conversation is of log-normal length (median 400 tokens, 2,000 at most) and begins with a system
turn that has its number. A shorter corpus is the beginning of a longer one.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

from tqdm import tqdm

MEDIAN, SPREAD, LONGEST = 400, 0.65, 2_000
"""Tokens; the standard deviation of their logarithm; tokens at most."""
TURN, SYSTEM = 11, 30
"""Tokens that ChatML adds to a question and its answer, and those of a system turn, about."""

Pair = tuple[str, str, int]
"""A question, its answer, and the number of their tokens with those of ChatML."""


def pairs(docstrings: Path, more: Path | None, tokenizer_json: Path) -> list[Pair]:
    """Return all pairs of `docstrings` (JSON Lines) and of `more` (one JSON list), with instruction, input
    and output."""
    from tokenizers import Tokenizer

    rows: list[dict[str, str]] = [
        json.loads(line) for line in docstrings.read_text(encoding="utf-8").splitlines()
    ]
    rows += json.loads(more.read_text(encoding="utf-8")) if more else []
    questions = [row["instruction"] + (f"\n\n{row['input']}" if row["input"] else "") for row in rows]
    answers = [row["output"] for row in rows]
    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    asked, answered = (
        tokenizer.encode_batch(texts, add_special_tokens=False) for texts in (questions, answers)
    )
    lengths = [len(question) + len(answer) + TURN for question, answer in zip(asked, answered, strict=True)]
    return list(zip(questions, answers, lengths, strict=True))


def write(path: Path, rows: int, all_pairs: list[Pair]) -> None:
    """Write `rows` conversations to `path`, as JSON Lines with a column `messages`."""
    with path.open("w", encoding="utf-8") as file:
        for number in tqdm(range(rows), desc=f"writing {path.name}", unit=" chats", delay=2):
            file.write(json.dumps({"messages": _chat(number, all_pairs)}, ensure_ascii=False) + "\n")


def _chat(number: int, all_pairs: list[Pair]) -> list[dict[str, Any]]:
    draws = random.Random(number)
    target = min(LONGEST, draws.lognormvariate(math.log(MEDIAN), SPREAD))
    messages = [
        {
            "role": "system",
            "content": f"You answer questions about Python and about numbers. Conversation {number}.",
        }
    ]
    tokens = SYSTEM
    while len(messages) == 1 or tokens < target:
        question, answer, length = draws.choice(all_pairs)
        if len(messages) > 1 and tokens + length > LONGEST:
            break
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        tokens += length
    return messages
