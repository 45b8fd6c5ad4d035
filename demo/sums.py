"""Prompts of the demo with verifiable rewards: sums of two numbers, whose answer shall be the number
alone."""

import json
import random
from pathlib import Path

from flytune.files import written_atomically

LARGEST = 20
"""Largest number that is added."""


def write(file: Path) -> Path:
    """Write each sum of two numbers once, in a fixed random order, as JSON Lines."""
    pairs = [(left, right) for left in range(1, LARGEST + 1) for right in range(1, LARGEST + 1)]
    random.Random(0).shuffle(pairs)
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_atomically(file) as temporary:
        temporary.write_text("".join(json.dumps(_row(*pair)) + "\n" for pair in pairs), encoding="utf-8")
    return file


def _row(left: int, right: int) -> dict[str, object]:
    asked = [
        {"role": "system", "content": "Answer with the number alone."},
        {"role": "user", "content": f"{left} + {right} = ?"},
    ]
    return {"prompt": asked, "answer": str(left + right)}
