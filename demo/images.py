"""`make demo-images`: a small vision-language model learns to name drawn figures, from a recipe to an
artifact, on this machine, without a hub or a GPU."""

import json
import random
import sys
from pathlib import Path

from demo.__main__ import run_one
from flytune.records import Metrics
from flytune.selftest import tiny_vision

RECIPE = Path("recipes/demo-images.yaml")
MODEL, ROWS = Path("models/tiny-vision"), Path("data/figures/figures.jsonl")
COLORS = {"red": (210, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 210), "black": (20, 20, 20)}
FIGURES = ("circle", "square", "triangle")
FIGURES_DRAWN = 360
TEXTS = ["What is this?", *(f"A {color} {figure}." for color in COLORS for figure in FIGURES)]
"""Texts that the tokenizer is trained on."""


def make(folder: Path) -> None:
    """Make the model and the drawn figures below `folder`, except those that exist."""
    if not (folder / MODEL).exists():
        tiny_vision.write(folder / MODEL, TEXTS)
    if not (folder / ROWS).exists():
        write_rows(folder / ROWS)


def write_rows(file: Path, count: int = FIGURES_DRAWN, seed: int = 0) -> None:
    """Draw `count` figures as PNG beside `file`, and write a question and its answer about each."""
    from PIL import Image, ImageDraw

    draw = random.Random(seed)
    rows = []
    file.parent.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        color, figure = draw.choice(list(COLORS)), draw.choice(FIGURES)
        left, top, size = draw.randrange(4, 24), draw.randrange(4, 24), draw.randrange(20, 30)
        box = (left, top, left + size, top + size)
        picture = Image.new("RGB", (tiny_vision.SIDE, tiny_vision.SIDE), "white")
        pencil = ImageDraw.Draw(picture)
        if figure == "circle":
            pencil.ellipse(box, fill=COLORS[color])
        elif figure == "square":
            pencil.rectangle(box, fill=COLORS[color])
        else:
            pencil.polygon(
                [(left, top + size), (left + size, top + size), (left + size / 2, top)], fill=COLORS[color]
            )
        picture.save(file.parent / f"{number:03}.png")
        question = [{"type": "image", "image": f"{number:03}.png"}, {"type": "text", "text": "What is this?"}]
        answer = f"A {color} {figure}."
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def verdict(metrics: Metrics) -> str:
    """Return the held-out perplexity of both models, and how many sample answers are right."""
    perplexity = metrics.figure("perplexity")
    assert perplexity.base is not None, "a language model has one"
    right = sum(answer.tuned == answer.reference for answer in metrics.answers)
    return (
        f"held-out perplexity {perplexity.base.value:.1f} -> {perplexity.tuned.value:.2f}; "
        f"{right} of {len(metrics.answers)} sample answers are right"
    )


def main() -> int:
    """Run the demo; return 1 if the tuned model is not better than its base."""
    worse = "The tuned model is not better than its base."
    return run_one(RECIPE, "a model learns to name drawn figures", make, verdict, worse)


if __name__ == "__main__":
    sys.exit(main())
