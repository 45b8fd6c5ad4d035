"""Small data sets of texts with labels."""

import random
from pathlib import Path

from tests.support.tiny import write_rows

LABELS = ["sum", "product", "difference"]


def write_classified(path: Path, n: int) -> Path:
    """Write `n` different texts as JSON Lines, about sums and products, with the place of that label."""
    draw = random.Random(0)
    rows = []
    for index in range(n):
        place, number = draw.randrange(2), draw.randrange(100)
        rows.append({"text": f"Question {index}: the {LABELS[place]} of {number} and 7.", "label": place})
    return write_rows(path, rows)
