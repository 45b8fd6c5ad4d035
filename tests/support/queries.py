"""Small data sets of queries with documents, and their loss by its definition."""

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


def plain_loss(texts, temperature, dims):
    """Return the loss of rows of vectors, each with its texts, as it is defined: one sum after the other."""
    total = 0
    for query, own, *_ in texts:
        for dim in dims:

            def similarity(document, query=query[1], dim=dim):
                first, second = query[:dim], document[:dim]
                return first @ second / (first.norm() * second.norm()) / temperature

            others = [
                similarity(document)
                for other_query, *documents in texts
                for place, (text, document) in enumerate(documents)
                if text != own[0] and not (place == 0 and other_query[0] == query[0])
            ]
            among = [similarity(own[1]), *others]
            total = total - among[0] + sum(value.exp() for value in among).log()
    return total / len(texts)
