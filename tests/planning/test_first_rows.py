"""What a plan says of the first rows, before anything is prepared."""

from pathlib import Path
from typing import Any

import pytest

from flytune.errors import DataError
from flytune.planning import first_rows
from flytune.recipe import Recipe, learning_rates
from tests.support.chats import write_rows
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

LONG = {"instruction": "Add the numbers. " * 40, "output": "The sum is 7."}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_base(tmp_path_factory.mktemp("base"))


def recipe(base: Path, data: Path, **changes: Any) -> Recipe:
    return Recipe.model_validate(tiny_recipe(base, data, changes))


def test_rows_that_can_be_trained_are_nothing_to_tell(base: Path, tmp_path: Path) -> None:
    assert first_rows.warnings(recipe(base, write_pairs(tmp_path / "rows.jsonl", 20))) == []


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize(
    ("row", "columns", "said"),
    [
        ({"quest": "a", "answer": "b"}, {}, "no format fits the columns quest, answer"),
        ({"question": "a", "answer": "b"}, {"instruction": "quest", "output": "answer"},
         "data.columns names columns that the row does not have: instruction: quest; its columns are question, answer"),
        ({"instruction": "a", "output": 7}, {}, "output must be a string, found int 7"),
    ],
)  # fmt: skip
def test_columns_are_read_with_and_without_the_base(
    is_here: bool, row: dict[str, Any], columns: dict[str, str], said: str, base: Path, tmp_path: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    changes = {"data.columns": columns, "model.name_or_path": str(base) if is_here else "owner/not-here"}
    with pytest.raises(DataError) as caught:
        first_rows.warnings(recipe(base, rows, **changes))
    assert str(caught.value).startswith(f"{rows}:1: ")
    assert said in str(caught.value)


def test_rows_of_which_none_is_trained(base: Path, tmp_path: Path) -> None:
    few = write_rows(tmp_path / "few.jsonl", [LONG] * 3)
    with pytest.raises(DataError) as caught:
        first_rows.warnings(recipe(base, few, **{"data.max_length": 32}))
    assert "all 3 rows: none has a trained token: 3 are longer than data.max_length 32" in str(caught.value)
    many = write_rows(tmp_path / "many.jsonl", [LONG] * 300)
    (said,) = first_rows.warnings(recipe(base, many, **{"data.max_length": 32}))
    assert said.startswith(f"{many}: the first 256 rows: none has a trained token: 256 are longer")


def test_a_base_without_a_tokenizer(base: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(DataError) as caught:
        first_rows.warnings(recipe(bare, write_pairs(tmp_path / "rows.jsonl", 3)))
    assert "the folder has no tokenizer: none of tokenizer.json, " in str(caught.value)
    assert str(caught.value).endswith("copy them from where its weights come from")


@pytest.mark.parametrize(
    ("method", "objective", "rate", "is_doubtful"),
    [
        ("full", "sft", 1e-3, False), ("full", "sft", 10.0, True), ("lora", "sft", 1e-2, False), ("lora", "sft", 0.1, True),
        ("qlora", "sft", 0.1, True), ("full", "dpo", 1e-3, True), ("full", "dpo", 5e-6, False), ("lora", "dpo", 1e-3, False),
    ],
)  # fmt: skip
def test_learning_rates(method: str, objective: str, rate: float, is_doubtful: bool, base: Path, tmp_path: Path) -> None:
    changes = {"method": method, "objective": objective, "training.learning_rate": rate}
    doubt = learning_rates.doubt(recipe(base, tmp_path / "rows.jsonl", **changes))
    assert doubt.startswith(f"warning: training.learning_rate {rate:g}: more than ") == is_doubtful
    assert bool(doubt) == is_doubtful


def test_the_steps_of_sgd_are_as_large_as_its_gradients(base: Path, tmp_path: Path) -> None:
    changes = {"training.learning_rate": 0.5, "training.optim": "sgd"}
    assert learning_rates.doubt(recipe(base, tmp_path / "rows.jsonl", **changes)) == ""
