"""Training data of the self-test: chats of random words, prepared like any other data."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flytune import data
from flytune.data import pack
from flytune.recipe import DataRequest, Recipe
from flytune.selftest import tiny_vision
from flytune.selftest.tiny_model import SENTENCES
from flytune.sentences import counted
from training_estimates.degrees import Degrees

_WORDS = " ".join(SENTENCES).split()
LABELS = ["first", "second", "third"]
"""Labels of texts."""
REWARD = """
def letters(completion, prompt, answer, **columns):
    shown = completion[:40]
    return sum(min(ord(character), 127) for character in shown) / 127 / max(1, len(shown))
"""
"""A reward that differs between answers of random weights: how late in the table of characters their letters
are."""


def write(path: Path, rows: int, seed: int = 0) -> None:
    """Write chats whose answers have 1 to 60 words, so that the trained tokens of samples and of ranks differ
    greatly.

    With the same seed, fewer rows are the first of more rows.
    """
    draw = random.Random(seed)
    chats = []
    for row in range(rows):
        question = " ".join(draw.choices(_WORDS, k=draw.randrange(2, 30)))
        answer = " ".join(draw.choices(_WORDS, k=draw.choice([1, 2, 4, 30, 60])))
        turns = [{"role": "user", "content": f"{row} {question}"}, {"role": "assistant", "content": answer}]
        chats.append(json.dumps({"messages": turns}) + "\n")
    path.write_text("".join(chats), encoding="utf-8")


def write_pairs(path: Path, rows: int, seed: int = 0) -> None:
    """Write pairs whose answers have 1 to 60 words; the chosen one is shorter or longer than the rejected
    one."""
    path.write_text("".join(json.dumps(pair) + "\n" for pair in _pairs(rows, seed)), encoding="utf-8")


def write_labelled(path: Path, rows: int, seed: int = 0) -> None:
    """Write labelled answers of 1 to 60 words, at random desirable or not."""
    draw, labelled = random.Random(seed), []
    for pair in _pairs(rows, seed):
        label = draw.random() < 0.6
        labelled.append(
            {"prompt": pair["prompt"], "completion": pair["chosen" if label else "rejected"], "label": label}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in labelled), encoding="utf-8")


def write_prompts(path: Path, rows: int, seed: int = 0) -> None:
    """Write prompts of different lengths with reference answers, which the function of `REWARD` prefers to
    nothing."""
    rows_of = (
        {"prompt": pair["prompt"], "answer": pair["chosen"][0]["content"]} for pair in _pairs(rows, seed)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of), encoding="utf-8")


def write_texts(path: Path, rows: int, seed: int = 0) -> None:
    """Write texts of 1 to 60 words with random labels."""
    draw = random.Random(seed)
    texts = [
        {
            "text": f"{row} {' '.join(draw.choices(_WORDS, k=draw.choice([1, 2, 4, 30, 60])))}",
            "label": LABELS[row % len(LABELS) if row < len(LABELS) else draw.randrange(len(LABELS))],
        }
        for row in range(rows)
    ]
    path.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")


def write_queries(path: Path, rows: int, seed: int = 0) -> None:
    """Write queries of 2 to 30 words with two documents of 1 to 60."""
    rows_of = (
        {
            "query": pair["prompt"][0]["content"],
            "positive": pair["chosen"][0]["content"],
            "negatives": [pair["rejected"][0]["content"]],
        }
        for pair in _pairs(rows, seed)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of), encoding="utf-8")


def write_images(path: Path, rows: int, seed: int = 0) -> None:
    """Write chats about one image, none, or two, which are drawn into the folder of `path`, named by it."""
    from PIL import Image, ImageDraw

    draw = random.Random(seed)
    chats = []
    for row in range(rows):
        parts = []
        for number in range((1, 0, 2)[row % 3]):
            name = f"{path.stem}-{row}-{number}.png"
            picture = Image.new("RGB", (tiny_vision.SIDE, tiny_vision.SIDE), "white")
            corner, color = draw.randrange(20), tuple(draw.randrange(256) for _ in range(3))
            ImageDraw.Draw(picture).rectangle((corner, corner, 50, draw.randrange(corner, 50)), fill=color)
            picture.save(path.with_name(name))
            parts.append({"type": "image", "image": name})
        parts.append({"type": "text", "text": f"{row} {' '.join(draw.choices(_WORDS, k=8))}"})
        answer = " ".join(draw.choices(_WORDS, k=draw.choice([1, 2, 4, 30])))
        turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        chats.append(json.dumps({"messages": turns}) + "\n")
    path.write_text("".join(chats), encoding="utf-8")


def _pairs(rows: int, seed: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(seed)
    for row in range(rows):
        question = " ".join(draw.choices(_WORDS, k=draw.randrange(2, 30)))
        answers = [" ".join(draw.choices(_WORDS, k=draw.choice([1, 2, 4, 30, 60]))) for _ in range(2)]
        pair = {"prompt": [{"role": "user", "content": f"{row} {question}"}]}
        for name, answer in zip(("chosen", "rejected"), answers, strict=True):
            pair[name] = [{"role": "assistant", "content": f"{answer} {name[0]}"}]
        yield pair


def prepare(recipe: Recipe, out: Path) -> list[int]:
    """Prepare the recipe's data in `out`; return the number of tokens of each row (a chat, or a packed
    block)."""
    data.prepare(DataRequest.of(recipe, "selftest"), out)
    return [len(row["input_ids"]) for row in data.load(out, "train")]


def block_length(lengths: list[int], degrees: Degrees) -> tuple[int, int]:
    """Return the shortest block length for which chats of these lengths pack into equally many blocks for
    each process.

    Returns: the tokens of a block, and the number of blocks.
    """
    tokens = max(lengths)
    while degrees.near(blocks := len(pack(lengths, tokens))) or blocks == len(lengths):
        tokens += 1
        assert tokens <= sum(lengths), (
            f"{counted(len(lengths), 'chat')} cannot be packed evenly for "
            f"{counted(degrees.data_parallel, 'process', 'processes')}"
        )
    return tokens, blocks
