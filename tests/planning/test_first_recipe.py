"""`flytune init`: a recipe for rows of each kind, which the plan accepts."""

import io
import json
import shutil
from pathlib import Path

import pytest

from flytune import cli
from flytune.hardware import shape_named
from flytune.planning import first_recipe, planner
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import Model, Recipe, read_recipe
from tests.support import vision_models
from tests.support.encoders import write_encoder
from tests.support.tiny import tiny_base, write_rows

ROWS = [(f"Question {number}: what is next?", f"The answer is {number + 1}.") for number in range(80)]
KINDS = {
    "sft": [{"instruction": question, "output": answer} for question, answer in ROWS],
    "chats": [
        {"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": two}]}
        for one, two in ROWS
    ],
    "pairs": [
        {"prompt": question, "chosen": answer, "rejected": "I do not know."} for question, answer in ROWS
    ],
    "labels": [
        {"prompt": one, "completion": two, "label": place % 2 == 0} for place, (one, two) in enumerate(ROWS)
    ],
    "chats_with_labels": [
        {
            "messages": [{"role": "user", "content": one}, {"role": "assistant", "content": two}],
            "label": float(place % 2),
        }
        for place, (one, two) in enumerate(ROWS)
    ],
    "text": [{"text": f"{question} {answer}"} for question, answer in ROWS],
    "classes": [{"text": f"{question} {answer}", "label": len(answer) % 3} for question, answer in ROWS],
    "several classes": [
        {"text": f"{question} {answer}", "labels": ["even"] * (place % 2) + ["late"] * (place > 40)}
        for place, (question, answer) in enumerate(ROWS)
    ],
    "own names": [{"question": question, "answer": answer, "by": "mk"} for question, answer in ROWS],
    "input and output": [{"input": question, "output": answer} for question, answer in ROWS],
    "queries": [
        {"anchor": question, "positive": answer, "negative_1": "another answer"} for question, answer in ROWS
    ],
}
OBJECTIVES = {
    "pairs": "dpo",
    "labels": "kto",
    "chats_with_labels": "kto",
    "classes": "classify",
    "several classes": "classify",
    "queries": "embed",
}
"""Objectives by the kind of rows; sft of all others."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(kind):
        return write_rows(tmp_path / f"{kind}.jsonl", KINDS[kind]).name

    return write


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_rows_gets_its_objective_and_a_recipe_that_fits(kind, base, rows, capsys):
    assert cli.main(["init", rows(kind), "--base", str(base), "--yes", "--out", "own.yaml"]) == 0
    made = read_recipe("own.yaml")
    assert made.objective.name == OBJECTIVES.get(kind, "sft")
    assert (made.hardware.shape, made.model.name_or_path) == ("this-machine", str(base))
    # 50 held-out samples would be more than a fifth of 80.
    assert made.data.heldout_fraction == 0.2
    # A run of one epoch would save nothing before its end.
    assert made.checkpoints.save_steps == ("epoch" if made.training.num_train_epochs > 1 else 0.25)
    assert made.data.max_length % 64 == 0
    assert planner.make(made, [shape_named("this-machine")], samples=64).verdict == "fits"
    fields = [
        line
        for line in (text.strip() for text in Path("own.yaml").read_text().splitlines())
        if not line.endswith(":")
    ]
    assert all("# " in line for line in fields), "each value has its reason"
    assert cli.main(["plan", "own.yaml"]) == 0


def test_an_encoder_gets_the_pooling_of_its_own_vectors(rows, tmp_path, capsys):
    base = write_encoder(tmp_path / "base", "bert")
    (base / "1_Pooling").mkdir()
    (base / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    assert cli.main(["init", rows("queries"), "--base", str(base), "--yes", "--out", "own.yaml"]) == 0
    assert read_recipe("own.yaml").objective.pooling == "cls"
    assert cli.main(["plan", "own.yaml"]) == 0


def test_a_base_without_sdpa_and_checkpointing_gets_a_recipe_that_fits(rows, tmp_path, capsys):
    base = write_encoder(tmp_path / "base", "mpnet")
    assert cli.main(["init", rows("queries"), "--base", str(base), "--yes", "--out", "own.yaml"]) == 0
    recipe = read_recipe("own.yaml")
    assert recipe.model.attn_implementation == "eager"
    assert not recipe.training.activation_checkpointing
    assert cli.main(["plan", "own.yaml"]) == 0


def test_rows_with_images_get_a_recipe_for_them(base, rows, tmp_path, capsys):
    from PIL import Image

    Image.new("RGB", (40, 32), "red").save("red.png")
    shown = [
        {
            "messages": [
                {"role": "user", "content": "<image>" + question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in ROWS
    ]
    write_rows(Path("rows.jsonl"), [row | {"image": "red.png"} for row in shown])
    vision = vision_models.write(tmp_path / "vision", "qwen2_5_vl")
    assert cli.main(["init", "rows.jsonl", "--base", str(vision), "--yes", "--out", "own.yaml"]) == 0
    assert read_recipe("own.yaml").data.images
    assert cli.main(["plan", "own.yaml"]) == 0
    assert first_recipe.default_base("rows.jsonl") != first_recipe.default_base(rows("chats"))
    assert cli.main(["init", "rows.jsonl", "--base", str(base), "--yes", "--out", "text.yaml"]) == 1
    assert "vision-language" in capsys.readouterr().err


def test_rows_with_names_of_their_own_are_mapped(base, rows, caplog):
    looked = {
        kind: first_recipe.look(first_recipe.Asked(rows(kind), str(base), "cpu-1", "price"))
        for kind in ("sft", "own names", "input and output")
    }
    assert "near overlap" not in caplog.text, "a split of 0.3 is none of the run's"
    assert looked["sft"].columns == {}
    assert looked["own names"].columns == {"instruction": "question", "output": "answer"}
    assert looked["input and output"].columns == {"instruction": "input", "output": "output"}
    assert len({sample.longest for sample in looked.values()}) == 1, "no question is there twice"


def test_questions_are_for_rewards_where_that_is_asked(base, rows, capsys):
    given = ["--base", str(base), "--yes", "--objective", "grpo"]
    assert cli.main(["init", rows("own names"), *given, "--out", "own.yaml"]) == 0
    made = read_recipe("own.yaml")
    assert made.objective.name == "grpo"
    assert [reward.name for reward in made.objective.rewards] == ["exact_answer"]
    assert planner.make(made, [shape_named("this-machine")], samples=64).verdict == "fits"
    assert cli.main(["init", rows("text"), *given, "--out", "text.yaml"]) == 1
    assert (
        "--objective grpo: its rows have no column completion, answer, reference" in capsys.readouterr().err
    )


def test_a_step_has_complete_groups_on_any_number_of_processes(base, rows):
    machine = shape_named("cpu-2").model_copy(update={"processes": 3})
    assert machine.world_size == 3
    asked = first_recipe.Asked(rows("own names"), str(base), machine.name, "price", "grpo")
    geometry = read_geometry(Model(name_or_path=str(base)))
    recipe = first_recipe._recipe(asked, first_recipe.look(asked), 64, "lora", [machine], geometry)
    assert recipe.training.global_batch_size == 24


def test_no_file_is_overwritten(base, rows, capsys):
    path = rows("sft")
    assert cli.main(["init", path, "--base", str(base), "--yes", "--out", path]) == 1
    assert "exists already; give a new one" in capsys.readouterr().err
    assert json.loads(Path(path).read_text().splitlines()[0]) == KINDS["sft"][0]


def test_a_row_of_the_cluster_and_an_aim_are_the_planners(base, rows):
    path = rows("sft")
    text = first_recipe.recipe_text(first_recipe.Asked(path, str(base), "a10g-8", "quality"))
    made = Recipe.from_yaml(_stored(text))
    assert (made.hardware.shape, made.method.name, made.model.dtype) == ("a10g-8", "full", "bfloat16")
    assert made.sharding.name not in ("none", "auto")
    text = first_recipe.recipe_text(first_recipe.Asked(path, str(base), "auto", "price"))
    price = planner.make(Recipe.from_yaml(_stored(text))).price_per_billion_tokens
    for name in ("l4-1", "a10g-1", "a100-80gb-1"):
        for method in ("full", "lora", "qlora"):
            other = Recipe.from_yaml("made.yaml").model_dump() | {
                "method": {"name": method},
                "hardware": {"shape": name},
            }
            other |= {"sharding": {"name": "none"}, "training": other["training"]}
            assert price <= planner.make(Recipe.model_validate(other)).price_per_billion_tokens


def _stored(text):
    Path("made.yaml").write_text(text)
    return "made.yaml"


def test_it_asks_in_a_terminal_what_no_option_says(base, rows, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Terminal("cpu-1\n\n"))
    assert cli.main(["init", rows("sft"), "--base", str(base)]) == 0
    asked = capsys.readouterr().err
    assert "base model" not in asked
    assert "where it runs" in asked
    assert "what matters most: price, time, quality [price]" in asked
    assert read_recipe("recipe.yaml").hardware.shape == "cpu-1"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--yes", "--on", "nowhere"], "--on nowhere: no row of shapes.yaml"),
        (["--yes", "--aim", "speed"], "--aim speed: it can be one of price, time, quality"),
        ([], "--on: where it runs"),
    ],
)
def test_what_it_cannot_take_is_refused(given, words, base, rows, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert cli.main(["init", rows("sft"), "--base", str(base), *given]) == 1
    assert words in capsys.readouterr().err


def test_a_base_without_a_chat_template_gets_a_shipped_one_for_chats(base, rows, tmp_path):
    bare = shutil.copytree(base, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    looked = first_recipe.look(first_recipe.Asked(rows("chats"), str(bare), "cpu-1", "price"))
    assert looked.chat_template == "chatml"
    assert (
        first_recipe.look(first_recipe.Asked(rows("text"), str(bare), "cpu-1", "price")).chat_template is None
    )
