"""Classifiers of a tiny base: equal to transformers' own trainer, exact in any layout, and the same when
reloaded."""

import json
import shutil

import pytest

from flytune import data
from flytune.artifacts import build
from flytune.data.columns import NamedRow
from flytune.data.rows.classified import Classified
from flytune.errors import DataError, DoesNotFit, RecipeError
from flytune.evaluation import score
from flytune.export import gate
from flytune.files import sha256_of
from flytune.inference import batch, prompts
from flytune.models import Generation, loading
from flytune.objectives import classify
from flytune.planning import planner
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import Classify, DataRequest, Recipe, Source
from flytune.report import page
from tests.support import classified, objective_runs, ranks
from tests.support.classified import LABELS, write_classified
from tests.support.tiny import tiny_base, tiny_recipe, write_rows

SINGLE = {"name": "classify", "labels": LABELS}
SEVERAL = SINGLE | {"problem_type": "multi_label_classification"}
WEIGHTED = {"class_weight": {"product": 3.0}}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return objective_runs.prepare(tmp_path_factory.mktemp("classified"), SINGLE, write_classified)


def write_several(path, n):
    rows = [json.loads(line) for line in write_classified(path, n).read_text().splitlines()]
    texts = [row["text"] + " Twice." * (number % 3 == 0) for number, row in enumerate(rows)]
    labels = [[LABELS[row["label"]]] * (number % 4 > 0) for number, row in enumerate(rows)]
    twice = ["difference"]
    return write_rows(
        path,
        [
            {"text": text, "labels": [*names, *(twice if "Twice" in text else [])]}
            for text, names in zip(texts, labels, strict=True)
        ],
    )


@pytest.fixture(scope="session")
def several(tmp_path_factory):
    return objective_runs.prepare(tmp_path_factory.mktemp("several"), SEVERAL, write_several)


def recipe_for(inputs, *arguments, **changes):
    changes = {"objective": SINGLE} | changes
    return objective_runs.recipe_for(inputs, "classify", *arguments, **changes)


@pytest.mark.parametrize(
    ("method", "changes"), [("full", {}), ("lora", {}), ("full", WEIGHTED), ("full", SEVERAL)]
)
def test_a_run_computes_what_transformers_does(method, changes, inputs, several, tmp_path):
    rows = several if "problem_type" in changes else inputs
    recipe = recipe_for(rows, method, objective=SINGLE | changes)
    ours = ranks.run(1, objective_runs.fit, recipe, rows, tmp_path / "ours")
    theirs = ranks.run(1, classified.logs_of_transformers, recipe, rows, tmp_path / "theirs")
    assert len(theirs) == len(ours.steps) == 3
    # Padding on another side sums in another order.
    assert [step.loss for step in ours.steps] == pytest.approx([loss for loss, _ in theirs], rel=1e-4)
    assert [step.grad_norm for step in ours.steps] == pytest.approx([norm for _, norm in theirs], rel=1e-3)
    assert ours.steps[2].loss != pytest.approx(ours.steps[0].loss, rel=1e-3), "it learned"


@pytest.mark.parametrize("changes", [WEIGHTED, SEVERAL | WEIGHTED])
def test_weights_are_not_divided_by_those_of_a_micro_batch(changes, inputs, several, tmp_path):
    rows = several if "problem_type" in changes else inputs
    recipe = recipe_for(rows, objective=SINGLE | changes)
    whole, single = (
        ranks.run(1, objective_runs.fit, recipe, rows, tmp_path / str(layout[0]), layout)
        for layout in ((4, 1), (1, 4))
    )
    assert [step.loss for step in single.steps] == pytest.approx(
        [step.loss for step in whole.steps], rel=1e-4
    )


@pytest.fixture(scope="module", params=["full", "lora", "several"])
def tuned(request, inputs, several, tmp_path_factory):
    folder = several if request.param == "several" else inputs
    out = tmp_path_factory.mktemp("tuned") / "out"
    method, section = ("full", SEVERAL) if request.param == "several" else (request.param, SINGLE)
    changes = {"objective": section, "training.max_steps": 24, "training.learning_rate": 3e-3}
    recipe = recipe_for(folder, method, **changes)
    return recipe, ranks.run(1, objective_runs.fit, recipe, folder, out), out, folder


def probabilities_of(recipe, out, folder, side):
    """Return the probabilities of held-out rows as transformers computes them in one padded batch, and the
    rows' labels."""
    import torch

    model = loading.exported_model(recipe, out).eval()
    tokenizer = data.stored_tokenizer(folder / "dataset")
    tokenizer.padding_side = side
    rows = data.heldout_rows(folder / "dataset", 8)
    batch = tokenizer.pad({"input_ids": [row["input_ids"] for row in rows]}, return_tensors="pt")
    with torch.no_grad():
        logits = model(**batch).logits.double()
    several = model.config.problem_type == "multi_label_classification"
    found = logits.sigmoid() if several else logits.softmax(dim=-1)
    return found.tolist(), [row["classes"] for row in rows], model.config.id2label


def scored(recipe, out, folder):
    return score.score(recipe, out, folder / "dataset")


def test_the_reloaded_model_labels_held_out_texts_as_its_card_says(tuned, tmp_path):
    from sklearn.metrics import confusion_matrix, f1_score, log_loss

    recipe, result, out, folder = tuned
    metrics = ranks.run(1, scored, recipe, out, folder)
    left, classes, names = ranks.run(1, probabilities_of, recipe, out, folder, "left")
    right, _, _ = ranks.run(1, probabilities_of, recipe, out, folder, "right")
    for of_left, of_right in zip(left, right, strict=True):
        assert of_left == pytest.approx(of_right, abs=1e-4), "whatever side is padded"
    assert list(names.values()) == LABELS
    accuracy, f1, loss = (figure.tuned for figure in metrics.figures)
    several = recipe.objective.problem_type == "multi_label_classification"
    if several:
        given = [[int(value >= 0.5) for value in row] for row in left]
        wanted = [[int(place in row) for place in range(3)] for row in classes]
        assert accuracy.value == pytest.approx(sum(map(list.__eq__, given, wanted)) / len(given))
        # Labels that are nowhere are not in the mean, as where scikit-learn is not told of them.
        used = [place for place in range(3) if any(row[place] for row in [*given, *wanted])]
        columns = [[[row[place] for place in used] for row in rows] for rows in (wanted, given)]
        assert f1.value == pytest.approx(f1_score(*columns, average="macro", zero_division=0))
        assert {label.answers == [] for label in metrics.labels} == {True}
    else:
        given, wanted = [row.index(max(row)) for row in left], [row[0] for row in classes]
        assert f1.value == pytest.approx(f1_score(wanted, given, average="macro", zero_division=0))
        assert loss.value == pytest.approx(log_loss(wanted, left, labels=[0, 1, 2]), abs=1e-4)
        matrix = confusion_matrix(wanted, given, labels=[0, 1, 2]).tolist()
        assert [label.answers for label in metrics.labels] == matrix
        assert accuracy.value > 0.8
    assert loss.value == pytest.approx(result.heldout_loss, abs=1e-4), "as the live model's"
    assert f1.low <= f1.value <= f1.high
    weights = loading.weights_folder(out)
    if recipe.method.name == "full":
        config = json.loads((weights / "config.json").read_text())
        assert config["id2label"] == {str(place): label for place, label in enumerate(LABELS)}
        assert config["problem_type"] == recipe.objective.problem_type
    else:
        assert "score" in json.loads((weights / "adapter_config.json").read_text())["modules_to_save"]
    card = objective_runs.card_of(recipe, result, out, folder, metrics)
    assert "0: sum, 1: product, 2: difference" in card
    printed = ranks.run(1, objective_runs.run_card, card, weights, folder / "dataset")
    assert "2: 'difference'" in printed
    assert float(printed.split()[-1]) == pytest.approx(accuracy.value)
    plan, manifest = planner.make(recipe), data.read_manifest(folder / "dataset")
    report = page.render(recipe, plan, manifest, result, metrics, broken=[])
    assert ("confusion matrix" in report) == (not several)


def answered(recipe, out, folder, work):
    """Store an artifact of a run, and return its answers to the texts of the held-out rows, in order."""
    metrics = scored(recipe, out, folder)
    artifact = build.store(recipe, planner.make(recipe), folder / "dataset", out, metrics, work / "artifact")
    tokenizer = data.stored_tokenizer(folder / "dataset")
    rows = data.heldout_rows(folder / "dataset", 8)
    texts = [{"text": tokenizer.decode(row["input_ids"])} for row in rows]
    prompts = write_rows(work / "prompts.jsonl", texts)
    batch.answer_file(prompts, artifact, {}, Generation(batch_size=3), work / "answers")
    lines = (work / "answers" / "answers.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_flytune_infer_answers_with_labels_and_probabilities(tuned, tmp_path):
    recipe, _, out, folder = tuned
    answers = ranks.run(1, answered, recipe, out, folder, tmp_path)
    expected, _, _ = ranks.run(1, probabilities_of, recipe, out, folder, "left")
    several = recipe.objective.problem_type == "multi_label_classification"
    assert len(answers) == len(expected) > 0
    for line, of_labels in zip(answers, expected, strict=True):
        by_name = dict(zip(LABELS, of_labels, strict=True))
        assert line["probabilities"] == pytest.approx(by_name, abs=1e-4)
        best = max(by_name, key=by_name.get)
        assert line["answer"] == ([name for name in LABELS if by_name[name] >= 0.5] if several else best)
        assert "label" not in line


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "What is it?"}, "p.jsonl:1: no format fits the columns prompt"),
        ({"text": "One.", "probabilities": 1}, "column probabilities exists already"),
        ({"text": "One.", "adapter": "other"}, "adapter 'other': no adapter of that name"),
    ],
)
def test_texts_that_are_none_are_refused_before_the_model_is_loaded(row, message, inputs, tmp_path):
    columns = prompts.Columns.of(recipe_for(inputs))
    with pytest.raises(DataError) as refused:
        prompts.split(
            write_rows(tmp_path / "p.jsonl", [row]), 1, [], Generation(), "m", tmp_path / "out", columns
        )
    assert message in str(refused.value)


def check(recipe, out, folder):
    rows = data.heldout_rows(folder / "dataset", 8)
    gate.check(recipe, out, folder / "dataset", rows, lambda: loading.exported_model(recipe, out))


def rewritten(out, copy, change):
    """Copy an export and change the tensors and the names of its only file of weights."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(out, copy)
    [file] = loading.weights_folder(copy).glob("*.safetensors")
    tensors = load_file(file)
    [name] = [name for name in tensors if name.endswith("score.weight")]
    change(tensors, name)
    save_file(tensors, file, metadata={"format": "pt"})
    export = json.loads((copy / "export.json").read_text())
    for one in export["files"]:
        if one["file"] == file.name:
            one |= {"sha256": sha256_of(file), "size": file.stat().st_size}
    (copy / "export.json").write_text(json.dumps(export))
    return copy


def test_the_gate_refuses_another_head_and_other_labels(tuned, tmp_path):
    recipe, _, out, folder = tuned

    def swap(tensors, name):
        tensors[name] = tensors[name][[1, 0, 2]].copy()

    with pytest.raises(ranks.RankFailed, match="probabilities are .* away from the live model's"):
        ranks.run(1, check, recipe, rewritten(out, tmp_path / "swapped", swap), folder)
    with pytest.raises(ranks.RankFailed, match="score"):
        ranks.run(
            1,
            check,
            recipe,
            rewritten(out, tmp_path / "lost", lambda tensors, name: tensors.pop(name)),
            folder,
        )
    if recipe.method.name == "full":
        renamed = shutil.copytree(out, tmp_path / "renamed")
        file = loading.weights_folder(renamed) / "config.json"
        file.write_text(file.read_text().replace('"sum"', '"product"', 1))
        with pytest.raises(ranks.RankFailed, match="id2label of the recipe's objective"):
            ranks.run(1, check, recipe, renamed, folder)
    ranks.run(1, check, recipe, out, folder)


def test_data_of_another_order_of_labels_is_refused(inputs, tmp_path):
    recipe = recipe_for(inputs, objective=SINGLE | {"labels": LABELS[::-1]})
    assert recipe.key() != recipe_for(inputs).key()
    requests = [DataRequest.of(one, "x") for one in (recipe, recipe_for(inputs))]
    assert data.digest_of(requests[0]) != data.digest_of(requests[1])
    with pytest.raises(ranks.RankFailed, match="its labels are sum, product, difference, in this order"):
        ranks.run(1, objective_runs.fit, recipe, inputs, tmp_path / "out")


def request_for(row, section, **changes):
    recipe = {"objective": section, **changes}
    return DataRequest.of(Recipe.model_validate(tiny_recipe(row / "base", row / "rows.jsonl", recipe)), "x")


@pytest.mark.parametrize(
    ("section", "row", "places"),
    [
        (SINGLE, {"label": "product"}, (1,)),
        (SINGLE, {"label": 2}, (2,)),
        (SINGLE, {"label": "2"}, (2,)),
        (SINGLE, {"label": 1.0}, (1,)),
        (SINGLE, {"label": True}, (1,)),
        (SINGLE | {"labels": ["1", "0"]}, {"label": 1}, (0,)),
        (SINGLE | {"labels": [1, 2, 3]}, {"label": 3}, (2,)),
        (SINGLE | {"labels": ["0.0", "0.5", "1.0"]}, {"label": 1}, (2,)),
        (SINGLE | {"labels": ["true", "false"]}, {"label": True}, (0,)),
        (SINGLE | {"labels": ["Yes", "No"]}, {"label": False}, (1,)),
        (SEVERAL, {"labels": ["difference", 0]}, (0, 2)),
        (SEVERAL, {"labels": []}, ()),
    ],
)
def test_labels_are_names_or_places(section, row, places, tmp_path):
    kind, source = Classified().bound(request_for(tmp_path, section)), Source(path="rows.jsonl")
    assert kind.labels_of(NamedRow.of(row, source, "rows.jsonl:1")) == places


@pytest.mark.parametrize(
    ("section", "row", "message"),
    [
        (SINGLE, {"label": "sums"}, "label is str 'sums', which is none of objective.labels"),
        (SINGLE, {"label": 3}, "label is int 3, which is none of objective.labels"),
        (SINGLE, {"label": -1}, "label is int -1, which is none"),
        (SINGLE, {"label": 0.5}, "label is float 0.5, which is none"),
        (SINGLE, {"label": float("nan")}, "label is float nan, which is none"),
        (SINGLE, {"label": None}, "label is NoneType None, which is none"),
        (SINGLE, {"label": ["sum"]}, "rows with several labels need objective.problem_type"),
        (SINGLE | {"labels": [1, 2, 3]}, {"label": 0}, "label is int 0, which is none"),
        (SINGLE | {"labels": ["-1", "+1"]}, {"label": 0}, "label is int 0, which is none"),
        (SINGLE, {}, "column label is missing"),
        (SEVERAL, {}, "column labels is missing"),
        (SEVERAL, {"labels": "sum"}, "it must be a list of labels"),
        (SEVERAL, {"labels": [0, "sum"]}, "labels has 'sum' twice"),
    ],
)
def test_other_labels_are_refused(section, row, message, tmp_path):
    kind, source = Classified().bound(request_for(tmp_path, section)), Source(path="rows.jsonl")
    with pytest.raises(DataError) as refused:
        kind.labels_of(NamedRow.of(row, source, "rows.jsonl:1"))
    assert message in str(refused.value)
    assert str(refused.value).startswith("rows.jsonl:1: ")


@pytest.mark.parametrize(
    ("row", "rendered"),
    [
        ({"text": "One."}, "One."),
        ({"text": "One.", "text_pair": "Two."}, "One.\n\nTwo."),
        ({"prompt": "One. ", "completion": "Two."}, "One. Two."),
        ({"messages": [{"role": "user", "content": "One."}]}, "<|im_start|>user\nOne.<|im_end|>\n"),
    ],
)
def test_texts_pairs_and_chats_are_rendered_without_an_end_of_their_own(row, rendered, tmp_path):
    base = tiny_base(tmp_path)
    rows = [json.loads(json.dumps(row).replace("One", f"One{number}")) for number in range(6)]
    path = write_rows(
        tmp_path / "rows.jsonl", [one | {"label": number % 2} for number, one in enumerate(rows)]
    )
    recipe = Recipe.model_validate(
        tiny_recipe(base, path, {"objective": "classify", "data.heldout_fraction": 0})
    )
    manifest = data.prepare(DataRequest.of(recipe, "x"), tmp_path / "dataset")
    assert (manifest.classes, manifest.train.classes) == (["0", "1"], [3, 3])
    assert not manifest.left_out
    stored, tokenizer = data.load(tmp_path / "dataset", "train"), data.stored_tokenizer(tmp_path / "dataset")
    texts = [tokenizer.decode(ids) for ids in stored["input_ids"]]
    assert texts == [rendered.replace("One", f"One{number}") for number in range(6)]
    assert stored["classes"] == [[number % 2] for number in range(6)]


def test_deduplicate_keeps_equal_texts_with_other_labels(tmp_path):
    base = tiny_base(tmp_path)
    rows = [{"text": f"Text {number // 3}.", "label": int(number % 3 > 1)} for number in range(12)]
    changes = {"objective": "classify", "data.deduplicate": True, "data.heldout_fraction": 0}
    recipe = Recipe.model_validate(tiny_recipe(base, write_rows(tmp_path / "rows.jsonl", rows), changes))
    manifest = data.prepare(DataRequest.of(recipe, "x"), tmp_path / "dataset")
    assert (manifest.train.samples, manifest.duplicates, manifest.train.classes) == (8, 4, [4, 4])


def test_data_of_one_label_stops_the_run(tmp_path):
    base = tiny_base(tmp_path)
    rows = [{"text": f"Text {number}.", "label": 0} for number in range(12)]
    recipe = tiny_recipe(base, write_rows(tmp_path / "rows.jsonl", rows), {"objective": "classify"})
    with pytest.raises(DataError, match="fewer than two labels are trained|labels, train: "):
        data.prepare(DataRequest.of(Recipe.model_validate(recipe), "x"), tmp_path / "dataset")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": {"name": "lora", "adapter": "elsewhere"}}, "has no head of classes; merge it first"),
        ({"evaluation.tasks": ["arc_easy"]}, "a classifier gives labels"),
        ({"data.packing": True}, "data.packing: true: objective: classify pads its rows"),
        ({"data.too_long": "split"}, "cannot give the label of a text to its pieces"),
        ({"data.format": "preference"}, "labels one text; write objective: reward"),
        ({"objective": {"name": "classify", "labels": ["a", "b", "a"]}}, "a is there twice"),
        ({"objective": {"name": "classify", "labels": ["a"]}}, "2 or more entries"),
        ({"objective": SINGLE | {"class_weight": {"sums": 2}}}, "sums is none of labels"),
    ],
)
def test_what_is_not_built_is_refused_with_the_reason(changes, message, inputs):
    with pytest.raises((RecipeError, DoesNotFit, ValueError), match=message):
        planner.make(
            Recipe.model_validate(
                tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", {"objective": "classify"} | changes)
            )
        )


def test_a_base_with_a_head_of_other_labels_is_refused(inputs, tuned):
    recipe, _, out, _ = tuned
    if recipe.method.name != "full":
        pytest.skip("the base of an adapter has no head")
    model = recipe.model.model_copy(update={"name_or_path": str(loading.weights_folder(out))})
    own = classify.Classification(recipe.model_copy(update={"model": model}))
    geometry = read_geometry(model)
    assert own.base_problems(geometry) == []
    other = Classify.model_validate(SINGLE | {"labels": LABELS[::-1]})
    swapped = classify.Classification(recipe.model_copy(update={"model": model, "objective": other}))
    assert "name its labels, in their order" in swapped.base_problems(geometry)[0]
