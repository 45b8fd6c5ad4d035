import json
import math
import os
import sys
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flytune.data import heldout_rows
from flytune.dryrun.allocations import AllocationLedger
from flytune.errors import DataError, ExportError, RecipeError
from flytune.evaluation import language_models
from flytune.evaluation import score as evaluation_score
from flytune.evaluation.sample_answers import Questions
from flytune.export import gate
from flytune.export.folder import write_manifest
from flytune.models import clean_process, loading, probe, scoring
from flytune.recipe import Recipe
from flytune.records import Interval
from tests.support.process_kills import end_at_once, in_which_process
from tests.support.stages import copy_tree, recipe_for, write_dataset, write_trained


@pytest.fixture(scope="module")
def rows(dataset):
    return heldout_rows(dataset, 100)


@pytest.fixture(scope="module", params=["full", "lora", "qlora"])
def scored(request, base, dataset, tmp_path_factory):
    """Recipe, trained folder and metrics of each method."""
    recipe = recipe_for(
        base, request.param, **{"evaluation.sample_answers": 3, "evaluation.max_samples": 100}
    )
    trained = write_trained(tmp_path_factory.mktemp(request.param), recipe, dataset)
    return recipe, trained, evaluation_score.score(recipe, trained, dataset)


def exported(base, dataset, folder, method, change, steps=1):
    """Train, and change the tensors of the export, whose manifest fits; return the recipe."""
    from safetensors.torch import load_file, save_file

    recipe = recipe_for(base, method)
    (file,) = write_trained(folder, recipe, dataset, steps=steps).glob("*/*model.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    write_manifest(recipe, file.parent, None)
    return recipe


def by_hand(model, row) -> list[float]:
    """Return the loss of each labelled token, in float64, from a separate forward pass."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].double()
    return [
        -torch.log_softmax(logits[at - 1], dim=0)[label].item()
        for at, label in enumerate(row["labels"])
        if at and label != -100
    ]


def test_no_logits_are_held_beside_those_of_the_next_batch(base):
    model, row = AutoModelForCausalLM.from_pretrained(base), {"input_ids": [5] * 1500, "labels": [5] * 1500}
    peaks = []
    for batches in (1, 3):
        with (ledger := AllocationLedger()).watch():
            scoring.heldout_loss(model, [row] * batches, pad_token_id=3, batch_size=1)
        peaks.append(max(ledger.totals()))
    of_logits = 4 * 1499 * model.config.vocab_size
    assert peaks[0] > of_logits
    assert peaks[1] < peaks[0] + of_logits / 2


def test_loss_equals_a_naive_loop(base, rows):
    model = AutoModelForCausalLM.from_pretrained(base)
    nll, tokens = scoring.heldout_loss(model, rows, pad_token_id=3, batch_size=5)
    for at, row in enumerate(rows):
        expected = by_hand(model, row)
        assert tokens[at] == len(expected)
        assert nll[at] / tokens[at] == pytest.approx(sum(expected) / len(expected), abs=1e-4)


def test_padding_and_batches_change_nothing(base, rows):
    model = AutoModelForCausalLM.from_pretrained(base)
    alone, _ = scoring.heldout_loss(model, rows, pad_token_id=3, batch_size=1)
    for pad in (0, 3):
        together, _ = scoring.heldout_loss(model, rows, pad_token_id=pad, batch_size=len(rows))
        assert numpy.abs(alone - together).max() < 1e-3


class Wrapped(torch.nn.Module):
    """A model in another one, which has a forward of its own."""

    def __init__(self, base):
        super().__init__()
        self.inner = AutoModelForCausalLM.from_pretrained(base)


def test_indexes_of_the_last_layers_are_not_on_the_device_of_the_tokens(base, rows):
    """For a model over several GPUs, transformers' forward indexes the last GPU's states with
    logits_to_keep."""
    given = []

    class Watched(Wrapped):
        def forward(self, input_ids, attention_mask, use_cache, logits_to_keep):
            given.append(logits_to_keep)
            return self.inner(
                input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep
            )

    scoring.heldout_loss(Watched(base), rows[:4], pad_token_id=3, batch_size=2)
    assert {type(kept) for kept in given} == {list}


def test_models_that_cannot_slice_logits_give_the_same(base, rows):
    class Plain(Wrapped):
        def forward(self, input_ids, attention_mask, use_cache):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=use_cache)

    model = Plain(base)
    plain, _ = scoring.heldout_loss(model, rows, 3, 4)
    sliced, _ = scoring.heldout_loss(model.inner, rows, 3, 4)
    assert numpy.allclose(plain, sliced, atol=1e-3)


def test_the_first_token_and_untrained_rows_are_not_scored(base):
    model = AutoModelForCausalLM.from_pretrained(base)
    rows = [
        {"input_ids": [5, 6, 7], "labels": [5, -100, -100]},
        {"input_ids": [5, 6, 7], "labels": [5, 6, 7]},
    ]
    nll, tokens = scoring.heldout_loss(model, rows, 3, 1)
    assert tokens.tolist() == [0, 2]
    assert nll[0] == 0 < nll[1]


def test_a_model_in_training_mode_stays_in_it(base, rows):
    model = AutoModelForCausalLM.from_pretrained(base).train()
    scoring.heldout_loss(model, rows[:1], 3, 1)
    assert model.training


@pytest.mark.slow
def test_scores_agree_with_a_naive_loop_over_both_models(scored, rows):
    recipe, trained, metrics = scored
    for score, model in (
        (metrics.base, loading.base_model(recipe, recipe.model.dtype)),
        (metrics.tuned, loading.exported_model(recipe, trained)),
    ):
        losses = [loss for row in rows for loss in by_hand(model, row)]
        assert score.loss == pytest.approx(sum(losses) / len(losses), abs=1e-4)
        assert score.perplexity == pytest.approx(math.exp(score.loss))
        assert score.loss_low <= score.loss <= score.loss_high
        assert metrics.tokens == len(losses)


def test_training_shows(scored):
    recipe, _, metrics = scored
    assert metrics.is_better
    assert metrics.loss_difference == pytest.approx(metrics.tuned.loss - metrics.base.loss)
    assert metrics.samples == 12
    assert metrics.loaded_as == {"full": "float32", "lora": "float32", "qlora": "nf4"}[recipe.method.name]


def test_answers_are_side_by_side(scored):
    _, _, metrics = scored
    assert len(metrics.answers) == 3
    assert metrics.sample_wins.tuned + metrics.sample_wins.base + metrics.sample_wins.ties == metrics.samples
    assert [(part.kind, part.name, part.samples) for part in metrics.parts[:2]] == [
        ("source", "a", 6),
        ("source", "b", 6),
    ]
    for kind in ("source", "length"):
        told = [part for part in metrics.parts if part.kind == kind]
        assert sum(part.samples for part in told) == metrics.samples
        assert sum(part.tokens * part.tuned_loss for part in told) == pytest.approx(
            metrics.tokens * metrics.tuned.loss
        )
        assert sum(part.tokens * part.base_loss for part in told) == pytest.approx(
            metrics.tokens * metrics.base.loss
        )
    for answer in metrics.answers:
        assert "Add" in answer.prompt
        assert answer.reference.startswith("The sum is")
        assert "<|im_end|>" not in answer.tuned + answer.base + answer.reference


def test_batched_answers_equal_single_ones(base, dataset, tmp_path):
    changes = {"evaluation.sample_answers": 3, "evaluation.max_new_tokens": 12}
    trained = write_trained(tmp_path, recipe_for(base, "full"), dataset)
    alone, together = (
        evaluation_score.score(
            recipe_for(base, "full", **changes, **{"evaluation.batch_size": size}), trained, dataset
        ).answers
        for size in (1, 8)
    )
    assert alone == together


def test_text_without_a_prompt_is_cut_in_half(base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokens = tokenizer("The quick brown fox jumps over the lazy dog.")["input_ids"]
    questions = Questions.of(
        recipe_for(base, "full").evaluation, [{"input_ids": tokens, "labels": tokens}], tokenizer
    )
    prompt, reference = questions.prompts[0]
    assert len(prompt) == len(tokens) // 2
    assert prompt + reference == tokens


def test_only_the_first_samples_count(base, dataset, rows):
    assert heldout_rows(dataset, 7) == rows[:7]
    assert len(rows) == 12


def samples(n: int):
    draw = numpy.random.default_rng(1)
    tokens = draw.integers(5, 50, n)
    base = tokens * draw.normal(3.0, 0.4, n)
    tuned = base - tokens * draw.normal(0.2, 0.1, n)
    return numpy.stack([base, tuned, tuned - base], axis=1), tokens


def test_interval_contains_the_point_and_tightens():
    widths = []
    for n in (20, 200, 2000):
        points, low, high = scoring.bootstrap(*samples(n))
        assert all(a < point < b for a, point, b in zip(low, points, high, strict=True))
        widths.append(high[0] - low[0])
    assert widths[0] > 2 * widths[1] > 4 * widths[2]


def test_interval_is_deterministic_and_paired():
    first, second = scoring.bootstrap(*samples(50)), scoring.bootstrap(*samples(50))
    assert first == second
    points, low, high = first
    # Base and tuned losses of a sample are correlated: their difference is known better than either.
    assert high[2] - low[2] < (high[0] - low[0]) / 2
    assert points[2] == pytest.approx(points[1] - points[0])


def test_interval_covers_the_truth_as_often_as_it_says():
    draw = numpy.random.default_rng(0)
    hits = 0
    for seed in range(200):
        tokens = draw.integers(10, 30, 100)
        nll = (tokens * draw.normal(2.0, 0.5, 100))[:, None]
        _, low, high = scoring.bootstrap(nll, tokens, resamples=400, seed=seed)
        hits += low[0] <= 2.0 <= high[0]
    assert 180 <= hits <= 198


def test_one_sample_proves_nothing():
    points, low, high = scoring.bootstrap(*samples(1))
    assert low[2] == -sys.float_info.max
    assert high[2] == sys.float_info.max
    assert points[2] < 0


def test_perplexity_of_a_huge_loss_is_still_json():
    loss = Interval(value=2000.0, low=-sys.float_info.max, high=sys.float_info.max)
    perplexity = language_models._perplexity(loss)
    assert (perplexity.value, perplexity.low, perplexity.high) == (
        sys.float_info.max,
        0.0,
        sys.float_info.max,
    )
    assert "Infinity" not in perplexity.model_dump_json()


def test_a_fully_trained_model_is_gone_before_its_base_is_loaded(base, dataset, tmp_path, monkeypatch):
    recipe, loaded, alive = recipe_for(base, "full", **{"evaluation.sample_answers": 1}), [], []
    trained = write_trained(tmp_path, recipe, dataset)

    def tuned_model(*arguments):
        model = language_models.tuned_model(*arguments)
        loaded.append(weakref.ref(model))
        return model

    def base_model(recipe):
        alive.append(loaded[0]() is not None)
        return loading.base_model(recipe, recipe.model.dtype)

    monkeypatch.setattr(evaluation_score, "tuned_model", tuned_model)
    monkeypatch.setattr(language_models, "base_model", base_model)
    evaluation_score.score(recipe, trained, dataset)
    assert alive == [False]


@pytest.mark.parametrize(
    ("missing", "name"), [("model.safetensors", "model/*.safetensors"), ("config.json", "model/config.json")]
)
def test_an_incomplete_trained_folder(missing, name, base, dataset, tmp_path):
    (tmp_path / "model").mkdir()
    for file in ("model.safetensors", "config.json", "tokenizer_config.json"):
        if file != missing:
            (tmp_path / "model" / file).write_text("{}")
    with pytest.raises(
        ExportError, match=rf"not a complete full export: no {name.replace('*', '.')}; train again"
    ):
        evaluation_score.score(recipe_for(base, "full"), tmp_path, dataset)


def test_a_damaged_dataset(base, dataset, tmp_path):
    with pytest.raises(
        DataError, match=r"no manifest.json, so the preparation never finished; prepare the data again"
    ):
        heldout_rows(tmp_path, 5)
    copy = copy_tree(dataset, tmp_path / "copy")
    (copy / "heldout" / "00001.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"heldout/00001.parquet cannot be read"):
        heldout_rows(copy, 100)
    (copy / "heldout" / "00001.parquet").unlink()
    with pytest.raises(DataError, match=r"heldout/00001.parquet is in manifest.json but not in the folder"):
        heldout_rows(copy, 100)
    (copy / "manifest.json").write_text('{"rows": 3}')
    with pytest.raises(DataError, match=r"manifest.json: not a valid manifest"):
        heldout_rows(copy, 100)


def test_an_empty_heldout_part(base, tmp_path):
    folder = write_dataset(tmp_path / "data", base, heldout=0)
    assert heldout_rows(folder, 100) == []


def test_a_base_that_is_gone(base, dataset, tmp_path):
    trained = write_trained(tmp_path, recipe_for(base, "lora"), dataset, steps=1)
    gone = Path("no") / "such" / "folder"
    with pytest.raises(
        ExportError, match="adapter_config.json: its base is .*, the recipe's is no/such/folder; nothing was"
    ):
        evaluation_score.score(recipe_for(gone, "lora"), trained, dataset)
    with pytest.raises(RecipeError, match="model.name_or_path: no/such/folder: no such folder"):
        language_models.tuned_model(recipe_for(gone, "lora"), trained)
    with pytest.raises(RecipeError, match="model.name_or_path: no/such/folder: no such folder"):
        language_models.base_model(recipe_for(gone, "full"))


def test_an_adapter_that_lacks_a_tensor(base, dataset, tmp_path):
    def change(tensors):
        for name in [name for name in tensors if "layers.0.self_attn.q_proj" in name]:
            tensors.pop(name)

    recipe = exported(base, dataset, tmp_path, "lora", change)
    with pytest.raises(ExportError, match="cannot be loaded: Found missing adapter keys"):
        evaluation_score.score(recipe, tmp_path, dataset)


def test_an_export_that_is_not_what_was_trained_is_refused(base, dataset, tmp_path, monkeypatch):
    def change(tensors):
        first, second = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
        tensors[first], tensors[second] = tensors[second], tensors[first]

    recipe = exported(base, dataset, tmp_path, "full", change, steps=12)
    model = loading.exported_model(recipe, tmp_path)
    with (
        monkeypatch.context() as patch,
        pytest.raises(
            ExportError, match="exported model's loss .* the live model's was .*; nothing was stored"
        ),
    ):
        # The prompts alone would refuse it already.
        patch.setattr(gate, "_check_answers", lambda recipe, trained, model: None)
        gate.check(recipe, tmp_path, dataset, heldout_rows(dataset, scoring.GATE_SAMPLES), lambda: model)
    (tmp_path / probe.PROBE).unlink()
    with pytest.raises(ExportError, match="probe.safetensors: missing, cut short or damaged"):
        evaluation_score.score(recipe, tmp_path, dataset)


@pytest.mark.slow
def test_an_artifact_is_evaluated_on_other_samples_than_it_was_stored_with(base, dataset, tmp_path):
    from tests.support.store import stored

    artifact = stored(tmp_path, base, dataset, "adds", steps=1)
    recipe = Recipe.from_yaml(artifact / "recipe.yaml")
    again = evaluation_score.score(recipe, artifact, dataset)
    other = evaluation_score.score(recipe, artifact, write_dataset(tmp_path / "other", base, heldout=6))
    fewer = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"max_samples": 3})})
    assert (again.samples, other.samples, evaluation_score.score(fewer, artifact, dataset).samples) == (
        8,
        6,
        3,
    )
    # On the same samples, the loss is compared with the live model's.
    told = json.loads((artifact / "training.json").read_text())
    (artifact / "training.json").write_text(json.dumps(told | {"heldout_loss": told["heldout_loss"] + 1}))
    with pytest.raises(ExportError, match="the exported model's loss on the first 8 held-out samples is"):
        evaluation_score.score(recipe, artifact, dataset)


def test_weights_that_diverged(base, dataset, tmp_path):
    recipe = exported(
        base, dataset, tmp_path, "full", lambda tensors: [tensor.mul_(1e20) for tensor in tensors.values()]
    )
    with pytest.raises(
        ExportError, match=r"tuned model: the loss of held-out sample 0 is nan .[1-8] of 8 are not finite"
    ):
        evaluation_score.score(recipe, tmp_path, dataset)


def test_a_process_that_has_trained_does_not_evaluate(monkeypatch):
    monkeypatch.setattr(evaluation_score, "score", in_which_process)
    for name, value in {"has_trained": False, "has_computed": False, "pool": None}.items():
        monkeypatch.setattr(clean_process._State, name, value)
    assert evaluation_score.score_in_subprocess(None, None, None) == os.getpid()
    clean_process.note_training()
    assert evaluation_score.score_in_subprocess(None, None, None) != os.getpid()
    monkeypatch.setattr(evaluation_score, "score", end_at_once)
    with pytest.raises(ExportError, match="the process that evaluates ended without an error message"):
        evaluation_score.score_in_subprocess(None, None, None)
