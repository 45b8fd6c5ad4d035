"""Preference tuning of a tiny model: equal to TRL's own trainer, exact after a kill, and evaluated as
pairs."""

import math
import os

import pytest

from flytune import data
from flytune.errors import DataError, DoesNotFit, RecipeError
from flytune.evaluation import score
from flytune.hardware import shape_named
from flytune.models import loading, scoring
from flytune.objectives import dpo, objective_of, preferences
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.records import Metrics
from flytune.training import log_probs, loop, reference
from tests.support import objective_runs, ranks
from tests.support.preferences import write_preferences
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

NEVER = {"name": "dpo", "precompute_ref_log_probs": False}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return objective_runs.prepare(tmp_path_factory.mktemp("preferences"), "dpo", write_preferences)


def recipe_for(inputs, *arguments, **changes):
    return objective_runs.recipe_for(inputs, "dpo", *arguments, **changes)


def fit(recipe, inputs, out):
    plan, known = planner.make(recipe), None
    if reference.is_needed(recipe):
        # Each process makes its own.
        known = out.parent / f"reference-{os.environ.get('RANK', 0)}"
        reference.compute(recipe, inputs / "dataset", known)
    return loop.fit(recipe, plan, shape_named(plan.shape), inputs / "dataset", out, reference=known)


def losses_of_trl(recipe, rows, out):
    from trl import DPOConfig, DPOTrainer

    def config(objective, **arguments):
        names = ("loss_type", "beta", "label_smoothing")
        own = {name: getattr(objective, name) for name in names} | {
            "loss_weights": objective.loss_weights or None
        }
        return DPOConfig(**own, **arguments)

    return [entry["loss"] for entry in objective_runs.logs_of_trl(config, DPOTrainer, recipe, rows, out)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "objective"),
    [
        ("full", {"beta": 0.5}),
        ("lora", {}),
        ("lora", {"loss_type": ["ipo"]}),
        ("lora", {"loss_type": ["apo_zero", "sft"], "loss_weights": [1.0, 0.5]}),
        pytest.param("lora", {"loss_type": ["apo_down"]}, marks=pytest.mark.slow),
        pytest.param("lora", {"loss_type": ["robust"], "label_smoothing": 0.1}, marks=pytest.mark.slow),
        pytest.param("lora", {"loss_type": ["sigmoid_norm"]}, marks=pytest.mark.slow),
    ],
)
def test_a_run_computes_what_trl_does(method, objective, inputs, tmp_path):
    recipe = recipe_for(inputs, method, objective={"name": "dpo", **objective})
    objective_runs.check_losses(recipe, inputs, tmp_path, fit, losses_of_trl)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sharding"),
    [
        ("full", "none"),
        ("lora", "none"),
        *(pytest.param("full", name, marks=pytest.mark.slow) for name in ("zero3", "fsdp")),
    ],
)
def test_log_probabilities_of_the_reference_that_were_computed_before_are_those_of_the_copy(
    method, sharding, inputs, tmp_path, monkeypatch
):
    monkeypatch.setattr(log_probs, "ROWS_AT_A_TIME", 7)  # the ranks are forked with this
    changes = {"evaluation.eval_steps": 2, "training.learning_rate": 1e-3}
    found = []
    for name, layout, asked in (("copy", "none", False), ("known", sharding, True)):
        objective = {"name": "dpo", "precompute_ref_log_probs": asked}
        recipe = recipe_for(inputs, method, layout, objective=objective, **changes)
        found.append(ranks.run(planner.make(recipe).world_size, fit, recipe, inputs, tmp_path / name / "out"))
    copy, known = found
    for field in ("loss", "eval_loss"):
        values = [
            [value for step in one.steps if (value := getattr(step, field)) is not None] for one in found
        ]
        assert len(values[0]) >= 2
        assert values[1] == pytest.approx(values[0], rel=objective_runs.SAME), field
    assert known.trained_parameters == copy.trained_parameters


def test_other_log_probabilities_are_refused(inputs, tmp_path):
    recipe = recipe_for(inputs, objective={"name": "dpo", "precompute_ref_log_probs": True})
    content = data.read_manifest(inputs / "dataset").content_sha256
    ranks.run(1, reference.compute, recipe, inputs / "dataset", tmp_path / "known")
    reference.Reference(tmp_path / "known", recipe, content)
    assert log_probs.column(tmp_path / "known", "train").shape[1] == 2
    with pytest.raises(DataError, match="of another model, or of other rows"):
        reference.Reference(tmp_path / "known", recipe, "0" * 64)
    other = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"name_or_path": "other/model"})}
    )
    with pytest.raises(DataError, match="of another model, or of other rows"):
        reference.Reference(tmp_path / "known", other, content)
    with pytest.raises(DataError, match="was given none"):
        reference.Reference(None, recipe, content)
    (tmp_path / "known/train.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"train.safetensors is not the file that reference.json lists"):
        reference.Reference(tmp_path / "known", recipe, content)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_a_run_that_continues_an_adapter_has_the_model_with_it_as_its_reference(
    sharding, tuned, inputs, tmp_path
):
    _, before, out = tuned
    changes = {
        "method.adapter": str(out / "adapter"),
        "training.learning_rate": 3e-4,
        "training.max_steps": 12,
        "evaluation.eval_steps": 12,
    }
    recipe = recipe_for(inputs, "lora", sharding, **changes)
    result = ranks.run(planner.make(recipe).world_size, fit, recipe, inputs, tmp_path / "out")
    # At the first step the model is the reference; the base is far away: the adapter's own run has lowered
    # its loss.
    assert before.steps[-1].loss < 0.6
    assert result.steps[0].loss == pytest.approx(math.log(2), rel=objective_runs.SAME)
    assert result.steps[-1].loss < result.steps[0].loss
    if sharding == "none":
        loss = ranks.run(1, scored, recipe, tmp_path / "out", inputs).figures[0]
        assert loss.tuned.value == pytest.approx(result.steps[-1].eval_loss, abs=1e-4)
        assert (
            objective_of(recipe).card_text().endswith("the base with the adapter that training began from.")
        )


@pytest.mark.parametrize(
    ("method", "sharding"), [("full", "none"), pytest.param("lora", "ddp", marks=pytest.mark.slow)]
)
def test_a_killed_run_resumes_exactly(method, sharding, inputs, tmp_path):
    changes = {"objective": "dpo", "method": method if method == "full" else {"name": method}}
    objective_runs.check_resume(inputs, sharding, tmp_path, **changes)


@pytest.fixture(scope="module")
def tuned(inputs, tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned") / "out"
    changes = {"training.max_steps": 12, "training.learning_rate": 3e-3, "evaluation.eval_steps": 12}
    recipe = recipe_for(inputs, "lora", **changes)
    return recipe, ranks.run(1, fit, recipe, inputs, out), out


def scored(recipe, out, inputs):
    return score.score(recipe, out, inputs / "dataset")


@pytest.mark.slow
def test_held_out_pairs_are_scored_by_both_models(tuned, inputs):
    recipe, result, out = tuned
    metrics = ranks.run(1, scored, recipe, out, inputs)
    loss, accuracy, margin = metrics.figures[:3]
    assert [one.name for one in (loss, accuracy, margin)] == [
        "preference_loss",
        "reward_accuracy",
        "reward_margin",
    ]
    assert metrics.samples == min(8, data.read_manifest(inputs / "dataset").heldout.samples)
    assert loss.tuned.value == pytest.approx(result.steps[-1].eval_loss, abs=1e-4), "the loss that is trained"
    assert accuracy.tuned.value > 0.5
    assert 0 < margin.tuned.low < margin.tuned.value < margin.tuned.high
    assert metrics.is_better == (loss.tuned.high < math.log(2))
    assert metrics.base is metrics.tuned is None, "a perplexity of tokens is not what dpo aims at"
    assert metrics.figure("chosen_perplexity").better == "neither"
    sums = {name: sum(values) / sum(metrics.scores.weights) for name, values in metrics.scores.scores.items()}
    assert sums == {one.name: pytest.approx(one.tuned.value) for one in (loss, accuracy)}
    assert {step.reward_accuracy is None for step in result.steps} == {False}
    assert [figure.unit for figure in result.figures if figure.step == "loss"] == ["nats per pair"]
    assert Metrics.model_validate_json(metrics.model_dump_json()) == metrics
    card = objective_runs.card_of(recipe, result, out, inputs, metrics)
    printed = ranks.run(1, objective_runs.run_card, card, loading.weights_folder(out), inputs / "dataset")
    assert float(printed.split()[-1]) == pytest.approx(
        metrics.figure("chosen_perplexity").tuned.value, rel=1e-4
    )
    # The loss of the pairs falls below that of a model that prefers nothing.
    assert result.steps[-1].eval_loss < 0.6931
    # The gate has compared both answers of the pairs.
    rows = data.heldout_rows(inputs / "dataset", scoring.GATE_SAMPLES)
    assert len(scoring.sequences_of(rows)) == 2 * len(rows)


def test_data_of_another_objective_is_refused(inputs, tmp_path):
    recipe = recipe_for(inputs, objective="sft")
    with pytest.raises(
        DataError,
        match="the recipe's objective, sft, needs answers to train",
    ):
        fit(recipe, inputs, tmp_path / "out")


def test_preferences_of_two_models():
    import numpy

    # Negative log-likelihoods: three chosen answers, then the rejected ones.
    base = numpy.array([2.0, 2.0, 2.0, 1.0, 3.0, 1.0])
    tuned = numpy.array([1.0, 2.0, 3.0, 2.0, 4.0, 1.0])
    found = preferences.of_pairs(base, tuned, beta=0.5).figures
    assert [found["chosen_preferred"][side].value for side in ("base", "tuned")] == pytest.approx(
        [1 / 3, 2 / 3]
    )
    assert found["reward_accuracy"]["tuned"].value == pytest.approx(2 / 3)
    assert found["reward_margin"]["tuned"].value == pytest.approx(0.5 * (2 + 1 - 1) / 3)
    losses = [math.log1p(math.exp(-0.5 * margin)) for margin in (2, 1, -1)]
    assert found["preference_loss"]["tuned"].value == pytest.approx(sum(losses) / 3)


def test_rewards_are_compared_with_the_reference_where_it_is_not_the_base():
    base, tuned = numpy_of(2.0, 2.0, 1.0, 3.0), numpy_of(1.0, 2.0, 2.0, 4.0)
    figures = preferences.of_pairs(base, tuned, 0.5, reference=tuned).figures
    assert figures["preference_loss"]["tuned"].value == pytest.approx(math.log(2))
    assert figures["reward_margin"]["tuned"].value == 0
    assert [figures["chosen_preferred"][side].value for side in ("base", "tuned")] == [0.5, 1.0]


def test_a_share_of_all_pairs_has_an_interval():
    base = numpy_of(1.0, 1.0, 1.0, 2.0, 2.0, 2.0)
    share = preferences.of_pairs(base, base * 2, beta=0.5).figures["reward_accuracy"]["tuned"]
    assert (share.value, share.high) == (1.0, 1.0)
    assert share.low == pytest.approx(0.025 ** (1 / 3))


def numpy_of(*values):
    import numpy

    return numpy.array(values)


def test_sequences_of_pairs_begin_with_the_chosen_ones():
    pair = {"input_ids": [1, 2, 3, 1, 4], "labels": [-100, 2, 3, -100, 4], "seq_lengths": [3, 2]}
    assert [one["input_ids"] for one in scoring.sequences_of([pair, pair])] == [
        [1, 2, 3],
        [1, 2, 3],
        [1, 4],
        [1, 4],
    ]
    batch = dpo.PairCollator(9)([pair])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [1, 4, 9]]
    assert batch["completion_mask"].tolist() == [[0, 1, 1], [0, 1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"method": "full", "sharding": "zero3", "objective": NEVER},
            "method full and sharding zero3: each process would hold a second model",
        ),
        (
            {"method": {"name": "lora", "adapter": "elsewhere"}, "objective": NEVER},
            "with method.adapter: the reference is the model with that",
        ),
        (
            {"method": {"name": "lora", "init_lora_weights": "pissa"}},
            "without its adapter the model lacks its largest singular",
        ),
        (
            {"method": {"name": "lora", "modules_to_save": ["lm_head"]}},
            "with method.modules_to_save: TRL's loss reads the head",
        ),
        ({"method": {"name": "lora", "target_modules": ["lm_head"]}}, "with an adapter on lm_head"),
    ],
)
def test_what_is_not_built_is_refused_with_the_reason(changes, said, inputs):
    recipe = Recipe.model_validate(
        tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", {"objective": "dpo"} | changes)
    )
    assert [problem for problem in objective_of(recipe).problems() if said in problem]
    with pytest.raises((RecipeError, DoesNotFit), match="objective: dpo with"):
        planner.make(recipe)


def test_the_plan_counts_both_sequences_and_the_reference(inputs):
    plans = {name: planner.make(recipe_for(inputs, "full", objective=name)) for name in ("sft", "dpo")}
    memory = {name: plan.needs[0].phases["steady step"] for name, plan in plans.items()}
    assert "reference model" not in memory["sft"]
    assert memory["dpo"]["reference model"] == pytest.approx(4 * plans["dpo"].total_parameters)
    assert memory["dpo"]["activations"] > 1.8 * memory["sft"]["activations"]
    assert any(
        reason.startswith("objective: dpo: each row is two sequences") for reason in plans["dpo"].reasons
    )
    adapter = planner.make(recipe_for(inputs, "lora"))
    assert "reference model" not in adapter.needs[0].phases["steady step"]


def test_the_plan_says_that_robust_without_smoothing_is_sigmoid(inputs):
    def reasons(**section):
        recipe = recipe_for(inputs, "full", objective={"name": "dpo", "loss_type": "robust", **section})
        return [reason for reason in objective_of(recipe).reasons() if "is the loss sigmoid" in reason]

    assert len(reasons()) == 1
    assert reasons(label_smoothing=0.1) == []


def test_sft_and_dpo_read_their_own_data(tmp_path):
    rows = write_pairs(tmp_path / "rows.jsonl", 8)
    recipe = Recipe.model_validate(tiny_recipe(tiny_base(tmp_path), rows, {"objective": "dpo"}))
    with pytest.raises(
        DataError, match="column chosen is missing; the columns are instruction, input, output"
    ):
        data.prepare(DataRequest.of(recipe, "x"), tmp_path / "dataset")
