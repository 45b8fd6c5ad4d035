"""Small data sets of preferences."""

import json
import random
from pathlib import Path

from flytune import data
from flytune.recipe import DataRequest, Recipe
from tests.support.tiny import tiny_recipe, write_rows


def write_preferences(path: Path, n: int) -> Path:
    """Write `n` pairs of text as JSON Lines, two for each prompt; each word of prompts and answers is a token
    of its own."""
    draw = random.Random(0)
    rows = []
    for index in range(n):
        prompt = f"Question {index // 2}: add the numbers.\n"
        right, wrong = (f"The sum is {draw.randrange(100)}." * times for times in (1, draw.choice([1, 2])))
        rows.append({"prompt": prompt, "chosen": right, "rejected": f"No. {wrong}"})
    return write_rows(path, rows)


def write_labelled(path: Path, n: int) -> Path:
    """Write `n` labelled answers of text as JSON Lines, two or three desirable ones for each undesirable
    one."""
    draw = random.Random(0)
    rows = []
    for index in range(n):
        label = draw.random() < 0.7
        answer = f"The sum is {draw.randrange(100)}." * draw.choice([1, 2])
        prompt = f"Question {index // 2}: add the numbers.\n"
        rows.append({"prompt": prompt, "completion": answer if label else f"No. {answer}", "label": label})
    return write_rows(path, rows)


def prepare_rows(base, rows, folder, changes):
    """Write `rows` and prepare them in `folder`; return manifest, data set and recipe."""
    write_rows(folder / "rows.jsonl", rows)
    recipe = Recipe.model_validate(tiny_recipe(base, folder / "rows.jsonl", changes))
    return data.prepare(DataRequest.of(recipe, "x"), folder / "dataset"), folder / "dataset", recipe


def rows_of(path):
    """Return the rows of JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
