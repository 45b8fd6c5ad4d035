"""Small data sets of queries with documents."""

import json
import random
from pathlib import Path

WORDS = ["sum", "product", "difference", "quotient", "square", "root", "half", "double"]


def write_queries(path: Path, n: int) -> Path:
    """Write `n` rows of a question, its answer, and another answer, as JSON Lines."""
    draw = random.Random(0)
    rows = []
    for index in range(n):
        word, number = draw.choice(WORDS), draw.randrange(1000)
        rows.append(
            {
                "query": f"Which is the {word} of {number}, question {index}?",
                "positive": f"It is the {word}, and {number} has it.",
                "negatives": [f"It is no {word} of {draw.randrange(1000)}."],
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
