"""Rows of prompts, and a reward that a model of random weights can raise, for tests of objective grpo."""

import random
from pathlib import Path
from typing import Any

from tests.support.tiny import write_rows

LETTERS = '''
def letters(completion, prompt, answer, **columns):
    """Return how late in the table of characters those of the answer are, from 0 to 1."""
    return sum(min(ord(character), 127) for character in completion[:40]) / 127 / max(1, len(completion[:40]))
'''


def write_prompts(path: Path, n: int) -> Path:
    """Write `n` different prompts of text with their answers as JSON Lines."""
    drawn, rows = random.Random(0), []
    for index in range(n):
        left, right = drawn.randrange(100), drawn.randrange(100)
        rows.append(
            {
                "prompt": f"Question {index}: add {left} and {right}.\n",
                "answer": f"The sum is {left + right}.",
            }
        )
    return write_rows(path, rows)


def section(**changes: Any) -> dict[str, Any]:
    """Return a section `objective` of a tiny run."""
    rewards = [{"name": "letters", "code": LETTERS}]
    return {"name": "grpo", "rewards": rewards, "group_size": 2, "max_completion_length": 12} | changes
