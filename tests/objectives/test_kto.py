"""Labelled answers train a tiny model: equal to TRL's own trainer, whatever the layout, exact after a kill,
and evaluated."""

import functools
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from flytune import data
from flytune.errors import DataError, DoesNotFit, RecipeError
from flytune.evaluation import score
from flytune.hardware import shape_named
from flytune.objectives import kto, objective_of, preferences
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.records import Metrics
from flytune.report import page
from flytune.training.run_state import RunState
from tests.support import objective_runs, ranks
from tests.support.objective_runs import fit
from tests.support.preferences import write_labelled
from tests.support.tiny import tiny_recipe

SAME = objective_runs.SAME


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return objective_runs.prepare(tmp_path_factory.mktemp("labelled"), "kto", write_labelled)


def recipe_for(inputs, *arguments, **changes):
    return objective_runs.recipe_for(inputs, "kto", *arguments, **changes)


def losses_of_trl(recipe, rows, out):
    from trl import KTOConfig, KTOTrainer

    def config(objective, **arguments):
        weights = {
            "desirable_weight": objective.desirable_weight,
            "undesirable_weight": objective.undesirable_weight,
        }
        return KTOConfig(loss_type=objective.loss_type[0], beta=objective.beta, **weights, **arguments)

    logs = objective_runs.logs_of_trl(config, KTOTrainer, recipe, rows, out)
    return [entry["loss"] for entry in logs], [entry["kl"] for entry in logs]


def in_order_of_training(recipe, inputs):
    return objective_runs.in_order_of_training(
        recipe,
        inputs,
        lambda text, ids: (*ids(text["prompt"] + text["completion"]), text["label"]),
        lambda row: (*row["input_ids"], bool(row["label"])),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "objective"),
    [
        ("full", {"beta": 0.5}),
        ("lora", {"desirable_weight": 1.5, "undesirable_weight": 0.5}),
        pytest.param("lora", {"loss_type": "apo_zero_unpaired"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_computes_what_trl_does(method, objective, inputs, tmp_path):
    recipe = recipe_for(
        inputs, method, objective={"name": "kto", **objective}, **{"training.learning_rate": 1e-2}
    )
    rows = in_order_of_training(recipe, inputs)
    ours = ranks.run(1, fit, recipe, inputs, tmp_path / "ours")
    theirs, divergences = ranks.run(1, losses_of_trl, recipe, rows, tmp_path / "theirs")
    assert len(theirs) == len(ours.steps) == 3
    assert [step.loss for step in ours.steps] == pytest.approx(theirs, rel=SAME)
    assert ours.steps[2].loss != pytest.approx(ours.steps[0].loss, rel=1e-3), "it learned"
    assert bool(max(divergences) > 0.01) == (recipe.objective.loss_type == ["kto"]), (
        "the divergence has a part in the loss"
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 2), (1, 4)])
def test_the_loss_is_the_same_in_any_micro_batch(layout, inputs, tmp_path):
    changes = {
        "training.learning_rate": 1e-2,
        "objective": {"name": "kto", "beta": 0.5},
        "evaluation.eval_steps": 3,
    }
    recipe = recipe_for(inputs, **changes)
    one = ranks.run(1, fit, recipe, inputs, tmp_path / "one")
    other = ranks.run(1, fit, recipe, inputs, tmp_path / "other", layout)
    assert [step.loss for step in other.steps] == pytest.approx([step.loss for step in one.steps], rel=SAME)
    assert other.steps[-1].eval_loss == pytest.approx(one.steps[-1].eval_loss, rel=SAME)


@pytest.mark.slow
def test_two_processes_compute_the_same_loss_and_score(inputs, tmp_path):
    """With 7 held-out answers for two processes, one of them scores a row that does not count."""
    changes = {"training.learning_rate": 1e-2, "evaluation.eval_steps": 3, "evaluation.max_samples": 7}
    alone = ranks.run(1, fit, recipe_for(inputs, **changes), inputs, tmp_path / "alone")
    both = ranks.run(2, fit, recipe_for(inputs, sharding="ddp", **changes), inputs, tmp_path / "both", (2, 1))
    assert [step.loss for step in both.steps] == pytest.approx([step.loss for step in alone.steps], rel=SAME)
    assert both.steps[-1].eval_loss == pytest.approx(alone.steps[-1].eval_loss, rel=SAME)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", pytest.param("ddp", marks=pytest.mark.slow)])
def test_a_killed_run_resumes_exactly(sharding, inputs, tmp_path):
    objective_runs.check_resume(
        inputs, sharding, tmp_path, objective="kto", **{"training.learning_rate": 1e-2}
    )


def scored(recipe, out, inputs):
    return score.score(recipe, out, inputs / "dataset")


@pytest.mark.slow
def test_held_out_answers_are_scored_by_label(inputs, tmp_path):
    changes = {"training.max_steps": 12, "training.learning_rate": 3e-3}
    recipe = recipe_for(inputs, "lora", objective={"name": "kto", "beta": 0.5}, **changes)
    ranks.run(1, fit, recipe, inputs, tmp_path / "out")
    metrics = ranks.run(1, scored, recipe, tmp_path / "out", inputs)
    rows = data.heldout_rows(inputs / "dataset", recipe.evaluation.max_samples)
    desirable = sum(row["label"] for row in rows)
    assert 0 < desirable < len(rows)
    loss, accuracy, margin = metrics.figures[:3]
    assert metrics.samples == len(rows)
    rewards = [metrics.figure(f"{label}_reward").tuned.value for label in ("desirable", "undesirable")]
    assert margin.tuned.value == pytest.approx(rewards[0] - rewards[1])
    assert margin.tuned.low < margin.tuned.value < margin.tuned.high
    assert margin.tuned.value > 0, "desirable answers gained more than undesirable ones"
    assert loss.name == "preference_loss"
    assert metrics.is_better == (loss.outcome == "better")
    sums = {name: sum(values) / sum(metrics.scores.weights) for name, values in metrics.scores.scores.items()}
    assert sums == {one.name: pytest.approx(one.tuned.value) for one in (loss, accuracy)}
    assert "desirable_perplexity" in {figure.name for figure in metrics.figures}
    assert Metrics.model_validate_json(metrics.model_dump_json()) == metrics
    assert page.verdict(metrics).startswith("Held-out preference loss is ")


def test_preferences_between_labels():
    import numpy

    # Negative log-likelihoods: three desirable answers, then two undesirable ones.
    base, tuned = numpy.array([2.0, 2.0, 2.0, 2.0, 2.0]), numpy.array([1.0, 1.5, 3.0, 4.0, 1.75])
    found = preferences.of_labelled(base, tuned, numpy.array([2, 1, 1, 1, 2]), 3, beta=0.5).figures
    rewards = 0.5 * (base - tuned)
    margins = numpy.array([rewards[good] - rewards[bad] for good in range(3) for bad in (3, 4)])
    assert found["reward_accuracy"]["tuned"].value == pytest.approx((margins > 0).mean())
    assert found["reward_margin"]["tuned"].value == pytest.approx(margins.mean())
    assert found["preference_loss"]["tuned"].value == pytest.approx(numpy.log1p(numpy.exp(-margins)).mean())
    # For each token: the base's are -1, -2, -2 against -2, -1.
    assert found["desirable_preferred"]["base"].value == pytest.approx(1 / 6)
    moved = [found[f"{label}_moved"]["tuned"].value for label in ("desirable", "undesirable")]
    assert moved == [pytest.approx(2 / 3), pytest.approx(1 / 2)]
    margin = found["reward_margin"]["tuned"]
    assert margin.low < margin.value < margin.high
    alone = preferences.of_labelled(base, tuned, numpy.ones(5), 4, beta=0.5).figures
    assert not alone["reward_margin"]["tuned"].is_known, "one is no evidence"
    assert not alone["preference_loss"]["tuned"].is_known


@pytest.mark.slow
def test_the_intervals_of_margin_and_loss_cover_the_truth_as_often_as_they_say():
    import numpy

    draw = numpy.random.default_rng(0)
    loss = numpy.logaddexp(0.0, -draw.normal(1, 5**0.5, 10**6)).mean()
    hits = {"reward_margin": 0, "preference_loss": 0}
    for _ in range(60):
        base, tuned = numpy.zeros(90), numpy.concatenate([draw.normal(-1, 1, 60), draw.normal(0, 2, 30)])
        found = preferences.of_labelled(base, tuned, numpy.ones(90), 60, beta=1.0).figures
        for name, truth in (("reward_margin", 1.0), ("preference_loss", loss)):
            hits[name] += found[name]["tuned"].low <= truth <= found[name]["tuned"].high
    assert all(52 <= hit <= 60 for hit in hits.values()), hits


def row(prompt, answer, label=1):
    return {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer, "label": label}


def test_a_prompt_gets_the_answer_of_the_row_before_it():
    first, second = row([1, 2], [3]), row([4], [5, 6], 0)
    joined = kto.mismatched(4, first, second)
    assert (joined["KL_input_ids"], joined["KL_labels"]) == ([1, 2, 5, 6], [-100, -100, 5, 6])
    assert kto.mismatched(3, first, second)["KL_input_ids"] == [1, 2, 5], "cut at max_length"
    batch = kto.LabelledCollator(9)([joined, kto.mismatched(4, second, first)])
    assert batch["label"].tolist() == [True, False]
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch["KL_input_ids"].tolist() == [[1, 2, 5, 6], [4, 3, 9, 9]]
    assert batch["KL_completion_mask"].tolist() == [[0, 0, 1, 1], [0, 1, 0, 0]]
    assert "KL_input_ids" not in kto.LabelledCollator(9)([first])


@hypothesis.given(
    count=st.integers(2, 40),
    batch=st.integers(2, 12),
    seed=st.integers(0, 9),
    skipped=st.sets(st.integers(0, 5)),
)
@hypothesis.settings(max_examples=40)
def test_each_answer_of_a_step_stands_after_one_other_prompt_of_it(count, batch, seed, skipped):
    """However the step is read: alone, in parts, or after batches were left out."""
    from datasets import Dataset

    training = Recipe.model_validate(
        tiny_recipe(Path("x"), Path("y"), {"training.global_batch_size": batch, "training.seed": seed})
    ).training
    stream = data.order.Stream(
        Dataset.from_list([row([2 * at], [2 * at + 1]) for at in range(count)]), training
    )
    plain = [one["input_ids"] for one in stream.__getitems__(range(len(stream)))]
    stream.joined = functools.partial(kto.mismatched, 8)
    for step in range(stream.steps):
        places = range(step * batch, (step + 1) * batch)
        together = [one["KL_input_ids"] for one in stream.__getitems__(places)]
        assert together == [stream[place]["KL_input_ids"] for place in places]
        assert sorted(prompt for prompt, _ in together) == sorted(plain[place][0] for place in places)
        assert sorted(answer for _, answer in together) == sorted(plain[place][1] for place in places)
        assert together == [
            [plain[place][0], plain[before][1]]
            for place, before in zip(places, [places[-1], *places], strict=False)
        ]
    stream.left_out = sorted(skipped)
    assert all("KL_input_ids" in one for one in stream.__getitems__(range(batch)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"method": "full", "sharding": "zero3"},
            "method full and sharding zero3: each process would hold a second model",
        ),
        (
            {"method": {"name": "lora", "adapter": "elsewhere"}},
            "with method.adapter: the reference is the model with",
        ),
        ({"method": {"name": "lora", "target_modules": ["lm_head"]}}, "with an adapter on lm_head"),
    ],
)
def test_what_dpo_refuses_is_refused(changes, said, inputs):
    recipe = Recipe.model_validate(
        tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", {"objective": "kto"} | changes)
    )
    assert [problem for problem in objective_of(recipe).problems() if said in problem]
    with pytest.raises((RecipeError, DoesNotFit), match="objective: kto with"):
        planner.make(recipe)


def test_the_plan_counts_all_passes(inputs):
    plans = {name: planner.make(recipe_for(inputs, "full", objective=name)) for name in ("sft", "kto")}
    memory = {name: plan.needs[0].phases["steady step"] for name, plan in plans.items()}
    assert memory["kto"]["reference model"] == pytest.approx(4 * plans["kto"].total_parameters)
    assert memory["kto"]["activations"] == pytest.approx(memory["sft"]["activations"], rel=0.05)
    assert any(
        reason.startswith("objective: kto: each row has three more forward passes")
        for reason in plans["kto"].reasons
    )
    passes = {
        loss: objective_of(one).frozen_passes()
        for loss in ("kto", "apo_zero_unpaired")
        for one in [recipe_for(inputs, "lora", objective={"name": "kto", "loss_type": loss})]
    }
    assert passes == {"kto": 3, "apo_zero_unpaired": 1}


def test_data_of_another_objective_is_refused(inputs, tmp_path):
    with pytest.raises(
        DataError,
        match="labelled desirable or undesirable, and the recipe's objective, dpo, needs",
    ):
        fit(recipe_for(inputs, objective="dpo"), inputs, tmp_path / "out")


def test_weights_far_from_those_of_the_paper_are_named(inputs, tmp_path, caplog):
    train = data.read_manifest(inputs / "dataset").train
    ratio = (train.samples - train.desirable) / train.desirable
    for weight, warned in ((1.0, True), (1.1 * ratio, False)):
        caplog.clear()
        recipe = recipe_for(inputs, objective={"name": "kto", "desirable_weight": weight})
        plan = planner.make(recipe)
        RunState.of(recipe, plan, shape_named(plan.shape), inputs / "dataset")
        assert ("desirable answers weigh" in caplog.text) == warned
