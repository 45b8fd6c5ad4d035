"""Refusals and doubts of a plan on the first rows, before anything is prepared."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flytune.errors import DataError, RecipeError
from flytune.planning import planner, sample_count
from flytune.recipe import Recipe, learning_rates
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs, write_rows

LONG = {"instruction": "Add the numbers. " * 40, "output": "The sum is 7."}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"))


def recipe(base: Path, data: Path, **changes: Any) -> Recipe:
    return Recipe.model_validate(tiny_recipe(base, data, changes))


def test_rows_that_can_be_trained_are_nothing_to_tell(base: Path, tmp_path: Path) -> None:
    assert sample_count.doubts(recipe(base, write_pairs(tmp_path / "rows.jsonl", 20))) == []


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize(
    ("row", "columns", "said"),
    [
        ({"quest": "a", "answer": "b"}, {}, "no format fits the columns quest, answer"),
        (
            {"question": "a", "answer": "b"},
            {"instruction": "quest", "output": "answer"},
            "data.columns names columns that the row does not have: instruction: quest; its columns are "
            "question, answer",
        ),
        ({"instruction": "a", "output": 7}, {}, "output must be a string, found int 7"),
    ],
)
def test_columns_are_read_with_and_without_the_base(
    is_here: bool, row: dict[str, Any], columns: dict[str, str], said: str, base: Path, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    changes = {"data.columns": columns, "model.name_or_path": str(base) if is_here else "owner/not-here"}
    with pytest.raises(DataError) as caught:
        sample_count.doubts(recipe(base, rows, **changes))
    assert str(caught.value).startswith(f"{rows}:1: ")
    assert said in str(caught.value)


def test_rows_of_which_none_is_trained(base: Path, tmp_path: Path) -> None:
    few = write_rows(tmp_path / "few.jsonl", [LONG] * 3)
    with pytest.raises(
        DataError, match=r"all 3 rows: none has a trained token: 3 are longer than data\.max_length 32 \("
    ):
        sample_count.doubts(recipe(base, few, **{"data.max_length": 32}))
    many = write_rows(tmp_path / "many.jsonl", [{"instruction": "Add the numbers.", "output": ""}] * 300)
    with pytest.raises(
        DataError, match=r"the first 256 rows: none has a trained token: the answers are missing or empty; "
    ):
        sample_count.doubts(recipe(base, many))


def test_rows_that_all_stay_together(base: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"instruction": "a", "output": "b"}] * 3)
    with pytest.raises(DataError, match="3 samples with the same content, or the same prompt, which stay"):
        sample_count.doubts(recipe(base, rows))
    assert sample_count.doubts(recipe(base, rows, **{"data.heldout_fraction": 0})) == []


def test_a_base_without_a_tokenizer(base: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(DataError) as caught:
        sample_count.doubts(recipe(bare, write_pairs(tmp_path / "rows.jsonl", 3)))
    assert "the folder has no tokenizer: none of tokenizer.json, " in str(caught.value)
    assert str(caught.value).endswith("copy them from where its weights come from")


def test_a_base_without_weights(base: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    shutil.copytree(base, half)
    (half / "model.safetensors").rename(half / "pytorch_model.bin")
    doubts = sample_count.doubts(recipe(half, write_pairs(tmp_path / "rows.jsonl", 3)))
    assert "found only pytorch_model.bin, which must be converted first" in doubts[0]


@pytest.mark.parametrize(
    ("method", "objective", "rate", "is_doubtful"),
    [
        ("full", "sft", 1e-3, False),
        ("full", "sft", 10.0, True),
        ("lora", "sft", 1e-2, False),
        ("lora", "sft", 0.1, True),
        ("qlora", "sft", 0.1, True),
        ("full", "dpo", 1e-3, True),
        ("full", "dpo", 5e-6, False),
        ("lora", "dpo", 1e-3, False),
    ],
)
def test_learning_rates(
    method: str, objective: str, rate: float, is_doubtful: bool, base: Path, tmp_path: Path
) -> None:
    changes = {"method": method, "objective": objective, "training.learning_rate": rate}
    doubt = learning_rates.doubt(recipe(base, tmp_path / "rows.jsonl", **changes))
    assert (
        doubt.startswith(f"warning: training.learning_rate {rate:g}: with method {method}, objective ")
        == is_doubtful
    )
    assert bool(doubt) == is_doubtful


def test_a_learning_rate_that_leaves_nothing_of_the_base_is_refused(base: Path, tmp_path: Path) -> None:
    rows = write_pairs(tmp_path / "rows.jsonl", 20)
    with pytest.raises(
        RecipeError, match=r"training\.learning_rate: 10: a step of adamw moves each weight by about as much"
    ):
        planner.make(recipe(base, rows, **{"training.learning_rate": 10}))
    # SGD's steps are as large as its gradients.
    assert (
        planner.make(recipe(base, rows, **{"training.learning_rate": 10, "training.optim": "sgd"})).steps == 3
    )


@pytest.mark.parametrize(
    ("too_long", "said"), [("truncate", "and are cut; "), ("drop", "and are dropped; "), ("split", "")]
)
def test_most_rows_are_longer(too_long: str, said: str, base: Path, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "A long text. " * 40}] * 3 + [{"text": "A text."}])
    told = sample_count.doubts(recipe(base, rows, **{"data.max_length": 32, "data.too_long": too_long}))
    assert len(told) == bool(said)
    assert all(
        line.startswith(f"{rows}: all 4 rows: 3 are longer than data.max_length 32 (") and said in line
        for line in told
    )


@pytest.mark.parametrize("is_here", [True, False])
def test_rows_that_may_be_bad(is_here: bool, base: Path, tmp_path: Path) -> None:
    good, bad = json.dumps({"text": "A text."}), "{"
    changes = {"data.max_bad_fraction": 0.9, "model.name_or_path": str(base) if is_here else "owner/not-here"}

    def of(lines: list[str]) -> list[str]:
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        return sample_count.doubts(recipe(base, tmp_path / "rows.jsonl", **changes))

    assert of([bad, good, bad]) == []
    with pytest.raises(DataError, match=r"rows\.jsonl:1: not JSON"):
        of([bad] * 3)
    # A good row after those that are read may make them few enough.
    (told,) = of([*[bad] * 300, good])
    assert "the first 256 rows: none can be used; " in told


def test_every_source_is_read_and_those_elsewhere_are_not(base: Path, tmp_path: Path) -> None:
    with gzip.open(tmp_path / "good.jsonl.gz", "wt") as packed:
        packed.write(json.dumps({"text": "A text."}) + "\n")
    (tmp_path / "bad.csv").write_text("quest,reply\na,b\n")
    elsewhere = [
        {"dataset_name": "owner/rows"},
        {"path": "s3://bucket/rows.jsonl"},
        {"path": "/data/%Y-%m-%d.jsonl"},
    ]

    def of(*sources: dict[str, str]) -> list[str]:
        content = tiny_recipe(base, tmp_path) | {
            "data": {"sources": [*elsewhere, *sources], "max_length": 32}
        }
        return sample_count.doubts(Recipe.model_validate(content))

    packed_source = {"path": str(tmp_path / "good.jsonl.gz")}
    assert of(packed_source) == []
    with pytest.raises(DataError, match=r"bad\.csv:2: no format fits the columns quest, reply"):
        of(packed_source, {"path": str(tmp_path / "*.csv")})
