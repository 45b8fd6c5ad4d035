"""What the self-test trains on: chats of random words, prepared as any data is."""

import json
import random
from pathlib import Path

from flytune import data
from flytune.data.packing import pack
from flytune.recipe.recipe import DataRequest, Recipe
from flytune.selftest.tiny_model import SENTENCES


def write(path: Path, rows: int, seed: int = 0) -> None:
    """Chats whose answers have 1 to 60 words: the trained tokens of two samples, and of two ranks, differ by far.

    Fewer rows of the same seed are the first of more.
    """
    draw, words = random.Random(seed), " ".join(SENTENCES).split()
    chats = []
    for row in range(rows):
        question = " ".join(draw.choices(words, k=draw.randrange(2, 30)))
        answer = " ".join(draw.choices(words, k=draw.choice([1, 2, 4, 30, 60])))
        turns = [{"role": "user", "content": f"{row} {question}"}, {"role": "assistant", "content": answer}]
        chats.append(json.dumps({"messages": turns}) + "\n")
    path.write_text("".join(chats), encoding="utf-8")


def prepare(recipe: Recipe, out: Path) -> list[int]:
    """Prepares the recipe's data into `out`; returns the tokens of each row, blocks of packed chats included."""
    data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="selftest"), out)
    return [len(row["input_ids"]) for row in data.load(out, "train")]


def block_length(lengths: list[int], processes: int) -> tuple[int, int]:
    """The shortest block (in tokens) into which chats of these lengths pack so that each process gets as many blocks.

    Returns: tokens of a block, and the number of blocks.
    """
    tokens = max(lengths)
    while (blocks := len(pack(lengths, tokens))) % processes or blocks == len(lengths):
        tokens += 1
        assert tokens <= sum(lengths), f"{len(lengths)} chats cannot be packed evenly for {processes} processes"
    return tokens, blocks
