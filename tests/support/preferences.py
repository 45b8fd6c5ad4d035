"""Small data sets of preferences."""

import json
import random
from pathlib import Path


def write_preferences(path: Path, n: int) -> Path:
    """Write `n` pairs of text as JSON Lines, two for each prompt; each word of prompts and answers is a token of its own."""
    draw = random.Random(0)
    rows = []
    for index in range(n):
        prompt = f"Question {index // 2}: add the numbers.\n"
        right, wrong = (f"The sum is {draw.randrange(100)}." * times for times in (1, draw.choice([1, 2])))
        rows.append({"prompt": prompt, "chosen": right, "rejected": f"No. {wrong}"})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
