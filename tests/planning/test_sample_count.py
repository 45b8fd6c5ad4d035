"""Number of training samples: of the files that are there, not of what a recipe would take at most."""

import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from flytune import data
from flytune.cli import main
from flytune.errors import DataError
from flytune.planning import sample_count
from flytune.recipe import DataRequest, Recipe
from tests.support.tiny import tiny_base, tiny_recipe


def counted(path: Any, changes: dict[str, Any] | None = None) -> sample_count.SampleCount:
    asked = {"data.heldout_fraction": 0.1} | (changes or {})
    return sample_count.counted(Recipe.model_validate(tiny_recipe(Path("models/base"), path, asked)))


TRAINING = {
    "learning_rate": 1e-3,
    "global_batch_size": 8,
    "num_train_epochs": 1,
    "activation_checkpointing": False,
}
ROWS = [{"prompt": f"Question {n}", "completion": "x" * 50} for n in range(1000)]


def write(folder: Any, name: str, rows: list[dict[str, Any]] = ROWS) -> Any:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name.endswith(".parquet"):
        from pyarrow import Table, parquet

        parquet.write_table(Table.from_pylist(rows), path)
    elif name.endswith(".csv"):
        path.write_text(
            "prompt,completion\n" + "".join(f'"{row["prompt"]}\nmore",{row["completion"]}\n' for row in rows)
        )
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    else:
        path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else b"\n" + lines)
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "x.ndjson", "x.json", "x.csv", "x.parquet", "x.jsonl.gz"])
def test_files_of_each_kind_are_counted(name, tmp_path):
    path = write(tmp_path, name)
    count = counted(path)
    assert count.samples == 900
    assert (
        count.origin
        == f"900 training samples: 1,000 rows counted in {path}, of which a share of 0.1 is held out"
    )


def test_pieces_of_long_rows_are_said_not_to_be_counted(tmp_path):
    path = write(tmp_path, "x.jsonl")
    split = counted(path, {"data.too_long": "split"})
    assert split.samples == 900
    assert "become several samples each (data.too_long: split), which are not counted" in split.origin


def test_max_samples_is_a_limit_and_no_number_of_rows(tmp_path):
    path = write(tmp_path, "x.jsonl")
    assert counted(path, {"data.max_samples": 5000}).samples == 900
    assert counted(path, {"data.max_samples": 500}).samples == 450
    assert f"500 rows of {path}, as max_samples says" in counted(path, {"data.max_samples": 500}).origin
    heldout = {"data.max_samples": 50, "data.heldout_path": str(path), "data.heldout_fraction": 0.02}
    assert counted(path, heldout).samples == 50


def test_folders_and_several_sources(tmp_path):
    write(tmp_path, "all/a.jsonl")
    write(tmp_path, "all/b/c.parquet")
    path = write(tmp_path, "all/d.csv")
    assert counted(tmp_path / "all").samples == 2700
    assert counted(tmp_path / "all", {"data.max_samples": 1500}).samples == 1350
    several = {
        "data.path": None,
        "data.sources": [{"path": str(path), "weight": 2}, {"path": str(path), "max_samples": 10}],
    }
    assert counted(path, several).samples == 1809
    import datasets

    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert counted(tmp_path / "saved").samples == 900


@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "x.jsonl.gz"])
def test_large_files_are_estimated_and_said_to_be(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sample_count, "COUNTED_BYTES", 50_000)
    monkeypatch.setattr(sample_count, "PARSED_BYTES", 50_000)
    # Python 3.12 reads 131,072 bytes at a time, more than this file is to be read of.
    monkeypatch.setattr(gzip, "READ_BUFFER_SIZE", 8192, raising=False)
    draw = random.Random(0)
    path = write(tmp_path, name, [row | {"completion": f"{draw.getrandbits(400):x}"} for row in ROWS * 5])
    count = counted(path)
    assert "rows estimated in" in count.origin
    assert 0.8 * 4500 < count.samples < 1.2 * 4500
    assert counted(path, {"data.max_samples": 20}).samples == 18
    assert "is too large to be counted" in counted(write(tmp_path, "y.json")).origin


def test_what_is_not_read_is_said(tmp_path):
    path = write(tmp_path, "x.jsonl")
    for changes, said in (
        (
            {"data.path": "s3://bucket/x.jsonl"},
            "training samples: data: s3://bucket/x.jsonl was not read, and has no max_samples",
        ),
        ({"data.path": None, "data.dataset_name": "a/b"}, "data: a/b was not read"),
        ({"data.packing": True}, "training samples: as many as the packed blocks, which are not known"),
    ):
        count = counted(path, changes)
        assert count.samples is None
        assert said in count.origin
    taken = counted(path, {"data.path": "s3://bucket/x.jsonl", "data.max_samples": 700})
    assert taken.samples == 630
    assert (
        "data: s3://bucket/x.jsonl was not read, and is taken to have the 700 rows of max_samples"
        in taken.origin
    )
    empty = counted(write(tmp_path, "empty.jsonl", []))
    assert (empty.samples, "training samples: none, 0 rows counted in" in empty.origin) == (None, True)
    with pytest.raises(DataError, match=r"data.path: .*nothing.jsonl: no such file"):
        counted(tmp_path / "nothing.jsonl")


def test_a_pair_is_two_samples_of_kto(tmp_path):
    pairs = [{"prompt": "q", "chosen": f"{n}", "rejected": "no"} for n in range(100)]
    path = write(tmp_path, "pairs.jsonl", pairs)
    assert counted(path, {"objective": "kto"}).samples == 180
    assert counted(path, {"objective": "dpo"}).samples == 90
    labelled = write(tmp_path, "labelled.jsonl", [row | {"label": True} for row in ROWS])
    assert counted(labelled, {"objective": "kto"}).samples == 900


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """Return a function that plans a recipe with changes; it returns exit code, and what the terminal
    shows."""
    out = io.StringIO()
    monkeypatch.setattr("flytune.console.tables.console", lambda: Console(file=out, width=400))
    base = tiny_base(tmp_path)

    def plan(changes: dict[str, Any], *options: str) -> tuple[int, str]:
        asked = {"checkpoints.folder": None, "training": TRAINING}
        recipe = tiny_recipe(base, write(tmp_path, "x.jsonl", ROWS[:100]), asked | changes)
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        code = main(["plan", str(tmp_path / "recipe.yaml"), *options])
        said = capsys.readouterr()
        return code, out.getvalue() + said.out + said.err

    return plan


def test_the_command_counts_and_says_so(planned, tmp_path):
    code, text = planned({"data.max_samples": 90_000, "data.heldout_fraction": 0.2})
    assert code == 0
    assert f"80 training samples: 100 rows counted in {tmp_path}/x.jsonl" in text
    _, text = planned({"data.heldout_fraction": 0.2}, "--json")
    assert '"steps": 10,' in text
    code, text = planned({}, "--samples", "160")
    assert "160 training samples: as --samples says" in text


@pytest.mark.parametrize(
    ("changes", "said", "options"),
    [
        ({"data.path": "no/rows.jsonl"}, "data.path: no/rows.jsonl: no such file or folder", ()),
        (
            {"data.path": None, "data.sources": [{"path": "no/a"}, {"path": "no/b.csv"}]},
            "data.sources[1].path: no/b.csv: no such",
            ("--samples", "10"),
        ),
        (
            {"data.heldout_path": "no/rows.jsonl", "data.heldout_fraction": 0.02},
            "data.heldout_path: no/rows.jsonl: no such file",
            ("--shape", "auto"),
        ),
        ({"data.chat_template": "no/chat.jinja"}, "data.chat_template: no/chat.jinja: no such file", ()),
        ({"model.name_or_path": "./no/model"}, "model.name_or_path: ./no/model: no such folder", ()),
        (
            {"evaluation.include_path": "no/tasks", "evaluation.tasks": ["own"]},
            "evaluation.include_path: no/tasks",
            (),
        ),
        (
            {"method": {"name": "lora", "adapter": "./no/adapter"}},
            "method.adapter: ./no/adapter: no adapter_config.json",
            (),
        ),
    ],
)
def test_what_is_not_on_this_machine_is_refused_by_name(changes, said, options, planned):
    code, text = planned(changes, *options)
    assert code == 1
    assert said in text
    assert "local files: " in text
    assert "fits" not in text


def test_rows_that_are_split_are_counted_as_the_first_ones_are(tmp_path, base):
    """The plan's steps, hours and price follow from the samples that the preparation makes."""
    rows = [{"text": "word " * (20 if place % 4 else 100)} for place in range(400)]
    path = write(tmp_path, "x.jsonl", rows)
    changes = {"data.too_long": "split", "data.max_length": 64, "data.heldout_fraction": 0.0}
    recipe = Recipe.model_validate(tiny_recipe(base, path, changes))
    count = sample_count.counted(recipe)
    prepared = data.prepare(DataRequest.of(recipe, "x"), tmp_path / "dataset")
    assert count.samples == prepared.train.samples > 400
    mean = f"{count.samples / 400:.3g}"
    assert count.origin.endswith(f": the mean of the first 256 rows of each source is {mean}")
