"""Importance weights between the engine that draws and the model that is trained, as TRL computes them."""

import json
import math
from types import SimpleNamespace

import pytest

from flytune.errors import TrainingError
from flytune.objectives import importance
from flytune.recipe import Grpo
from flytune.records.rollouts import Rollout
from tests.support import objective_runs, ranks
from tests.support.prompts import section, write_prompts


def answer(*pairs):
    """Return an answer with pairs of log-probabilities: the engine's, and the trained model's."""
    return Rollout(
        tokens=[3] * len(pairs),
        text="a",
        log_probs=[drawn for drawn, _ in pairs],
        trained_log_probs=[trained for _, trained in pairs],
        rewards=[1.0],
        truncated=False,
    )


ANSWERS = [answer((-2.0, -2.0 + math.log(4)), (-1.0, -1.0)), answer((-1.0, -1.0 + math.log(0.5)))]
"""Answers whose tokens have the weights 4 and 1, and 0.5."""


@pytest.mark.parametrize(
    ("mode", "low", "wanted", "figures"),
    [
        ("token_truncate", None, [[3, 1], [0.5, 1]], (1.5, 4, 1 / 3)),
        ("token_truncate", 0.8, [[3, 1], [0.8, 1]], (1.6, 4, 2 / 3)),
        ("token_mask", None, [[0, 1], [0.5, 1]], (0.5, 4, 1 / 3)),
        ("sequence_truncate", None, [[3], [0.5]], (1.75, 4, 0.5)),
        ("sequence_mask", None, [[0], [0.5]], (0.25, 4, 0.5)),
    ],
)
def test_weights_outside_of_their_bounds_are_cut(mode, low, wanted, figures):
    engine = {"name": "vllm", "vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_min": low}
    grpo = Grpo.model_validate({"name": "grpo", "engine": engine})
    weights = importance.weights_of(grpo, [(one, False) for one in ANSWERS])
    assert weights.values.tolist() == [pytest.approx(row) for row in wanted]
    found = [weights.figures[name] for name in (importance.MEAN, importance.LARGEST, importance.CUT)]
    assert found == pytest.approx(figures)
    ratios = weights.of_batch([1], 1)["importance_sampling_ratio"]
    assert ratios.tolist() == [pytest.approx(wanted[1][:1])]


def test_answers_that_are_left_out_of_the_loss_do_not_count():
    grpo = Grpo.model_validate({"name": "grpo", "engine": "vllm"})
    weights = importance.weights_of(grpo, [(ANSWERS[0], True), (ANSWERS[1], False)])
    assert weights.figures[importance.MEAN] == pytest.approx(0.5)
    assert importance.weights_of(grpo, [(ANSWERS[0], True)]).figures[importance.MEAN] == 1


def test_a_mean_outside_of_its_bounds_ends_the_run():
    grpo = Grpo.model_validate({"name": "grpo", "engine": "vllm"})
    said = (
        r"step 7: the mean importance weight of vLLM's answers is 0.25, outside of 0.5 to 2; the largest is 4"
    )
    with pytest.raises(TrainingError, match=said):
        importance.weights_of(grpo, [(one, False) for one in ANSWERS]).check(7)


def test_the_model_itself_has_no_weights():
    assert importance.weights_of(Grpo(name="grpo"), [(ANSWERS[0], False)]) is None


def fit_as_drawn_by_another(*arguments):
    """Run on answers whose engine is noted to have had other probabilities; they are of the model itself."""
    from flytune.objectives import drawing_engines

    class Other(drawing_engines.TrainedModel):
        def draw(self, *wanted):
            # Differences of some hundredths for each token, which follow from the token.
            return [
                drawn._replace(
                    trained_log_probs=drawn.log_probs,
                    log_probs=[
                        value + 0.05 * math.sin(token)
                        for value, token in zip(drawn.log_probs, drawn.tokens, strict=True)
                    ],
                )
                for drawn in super().draw(*wanted)
            ]

    drawing_engines.Served = lambda *arguments: Other()
    return objective_runs.fit(*arguments)


def logs_of_trl(recipe, groups, out):
    """Return the logs of TRL's own trainer as with vLLM, which gets what is recorded."""
    from trl import GRPOConfig, GRPOTrainer

    drawn = iter([one for group in groups for one in group["completions"]])
    by_text = {group["text"]: group["prompt"] for group in groups}

    def config(objective, max_length, **arguments):
        names = ("loss_type", "temperature", "max_completion_length")
        own = {name: getattr(objective, name) for name in names} | {"num_generations": objective.group_size}
        bounds = {
            name: getattr(objective.engine, name)
            for name in ("vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max")
        }
        return GRPOConfig(
            **own, **bounds, beta=0.0, shuffle_dataset=False, remove_unused_columns=False, **arguments
        )

    def rollout(prompts, trainer):
        recorded = [next(drawn) for _ in prompts]
        return {
            "prompt_ids": [by_text[prompt] for prompt in prompts],
            "completion_ids": [one["tokens"] for one in recorded],
            "logprobs": [one["log_probs"] for one in recorded],
            "known": [one["rewards"][0] for one in recorded],
        }

    def trainer(*args, **kwargs):
        made = GRPOTrainer(*args, reward_funcs=[lambda known, **_: known], rollout_func=rollout, **kwargs)
        made.use_vllm, made.vllm_generation = True, SimpleNamespace(sync_weights=lambda: None)
        made._last_loaded_step = None
        return made

    return objective_runs.logs_of_trl(
        config, trainer, recipe, [{"prompt": group["text"]} for group in groups], out
    )


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return objective_runs.prepare(tmp_path_factory.mktemp("importance"), "grpo", write_prompts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.02},
        {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.02},
        {"vllm_importance_sampling_mode": "sequence_truncate", "vllm_importance_sampling_clip_max": 1.02},
    ],
)
def test_a_run_is_weighted_as_trl_does(inputs, tmp_path, engine):
    changes = {"checkpoints.folder": str(tmp_path / "kept"), "training.learning_rate": 1e-2}
    objective = section(engine={"name": "vllm"} | engine, loss_type="grpo")
    recipe = objective_runs.recipe_for(inputs, "grpo", "lora", objective=objective, **changes)
    ours = ranks.run(1, fit_as_drawn_by_another, recipe, inputs, tmp_path / "ours")
    files = sorted((tmp_path / "kept").rglob("rollouts/*.jsonl"))
    groups = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    theirs = ranks.run(1, logs_of_trl, recipe, groups, tmp_path / "theirs")
    for name in ("loss", "grad_norm"):
        # A loss is a sum of advantages of both signs, of about 1: its rounding is theirs.
        wanted = [pytest.approx(entry[name], rel=1e-4, abs=1e-5) for entry in theirs]
        assert [getattr(step, name) for step in ours.steps] == wanted, name
    mean = [pytest.approx(entry["sampling/importance_sampling_ratio/mean"], rel=1e-4) for entry in theirs]
    assert [step.importance_mean for step in ours.steps] == mean
    assert any(step.importance_cut for step in ours.steps) == bool(engine), "the bounds are reached"
