"""Small data sets of queries with documents."""

import random
from pathlib import Path

from tests.support.tiny import write_rows

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
    return write_rows(path, rows)
