"""Objective grpo: its section, its rollouts under every sharding, and what a killed run does with them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from flytune import data
from flytune.errors import RecipeError, TrainingError
from flytune.evaluation import score
from flytune.objectives import objective_of
from flytune.objectives.rollout_steps import Rollouts, advantages_of
from flytune.recipe import DataRequest, Grpo, Recipe, read_recipe
from flytune.records import Manifest
from flytune.rollouts import Group, Rollout, RolloutLedger, numbers
from flytune.training.checkpoints import paths
from tests.support import objective_runs, ranks, rollout_kills, saved_runs
from tests.support.prompts import LETTERS, section, write_prompts
from tests.support.stages import training_result
from tests.support.tiny import tiny_base, tiny_recipe


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return objective_runs.prepare(tmp_path_factory.mktemp("grpo"), "grpo", write_prompts)


def recipe_of(objective, **changes):
    return Recipe.model_validate(
        tiny_recipe(Path("/of/base"), Path("/rows.jsonl"), {"objective": objective, **changes})
    )


@pytest.mark.parametrize(
    ("objective", "changes", "said"),
    [
        ({"rewards": []}, {}, "rewards"),
        ({"rewards": ["nothing"]}, {}, "there is no such reward"),
        ({"rewards": ["exact_answer", "exact_answer"]}, {}, "named twice"),
        ({"rewards": ["regular_expression"]}, {}, "pattern"),
        ({"rewards": [{"name": "regular_expression", "pattern": "(.*)*x"}]}, {}, "too many ways"),
        ({"rewards": [{"name": "exact_answer", "weight": 0}]}, {}, "counts for nothing"),
        ({"rewards": [{"name": "exact_answer", "code": "x"}]}, {}, "give the function another name"),
        ({"rewards": ["rewards.py:f"]}, {}, "only a person's own recipe file"),
        ({"loss_type": "bnpo"}, {}, "loss_type"),
        ({"importance_sampling_level": "sequence"}, {}, "as GSPO does"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, {}, "epsilon_high: 0.28: loss_type: cispo cuts"),
        ({"loss_type": "cispo", "epsilon": 0.2}, {}, "epsilon: loss_type: cispo has no lower bound"),
        ({"use_bias_correction_kl": False}, {}, "with beta: 0 there is no KL divergence"),
        ({}, {"data.format": "messages"}, "data.format"),
        ({}, {"data.packing": True}, "data.packing"),
        ({}, {"data.too_long": "split"}, "data.too_long"),
        ({}, {"training.neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({}, {"training.probe_longest": True}, "probe_longest"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(objective, changes, said):
    with pytest.raises(RecipeError, match=said):
        recipe_of({"name": "grpo"} | objective, **changes)


@pytest.mark.parametrize(
    ("objective", "changes", "said"),
    [
        ({"group_size": 3}, {}, "is not a multiple of objective.group_size 3"),
        ({"max_completion_length": 128}, {}, "leaves no token of data.max_length"),
        ({"beta": 0.1}, {"sharding": "fsdp"}, "objective.beta: 0.1 with method full and sharding fsdp"),
        ({"beta": 0.1}, {"sharding": "zero2"}, "objective.beta: 0.1 with method full and sharding zero2"),
        ({}, {"sharding": "zero3"}, "sharding zero3"),
        ({}, {"method": {"name": "lora", "init_lora_weights": "pissa"}}, "init_lora_weights"),
        ({}, {"model.trust_remote_code": True}, "trust_remote_code"),
        ({}, {"training.on_bad_loss": "skip"}, "on_bad_loss"),
        ({}, {"training.max_loss_jump": 3.0}, "max_loss_jump"),
    ],
)
def test_what_is_not_built_is_refused_by_name(objective, changes, said):
    recipe = recipe_of(section() | objective, **changes)
    assert [problem for problem in objective_of(recipe).problems() if said in problem]


def test_a_file_of_rewards_is_part_of_the_recipe_and_of_its_key(tmp_path):
    (tmp_path / "own.py").write_text(LETTERS)
    content = tiny_recipe(
        tmp_path, tmp_path, {"objective": {"name": "grpo", "rewards": [f"{tmp_path}/own.py:letters"]}}
    )
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(content))
    first = read_recipe(file)
    assert first.objective.rewards[0].code == LETTERS
    assert first.objective.own_code == ["letters"]
    content["objective"]["rewards"] = [{"name": f"{tmp_path}/own.py:letters", "weight": 2}]
    file.write_text(json.dumps(content))
    assert read_recipe(file).objective.rewards[0].weight == 2
    (tmp_path / "own.py").write_text(LETTERS + "\n")
    file.write_text(
        json.dumps(content | {"objective": {"name": "grpo", "rewards": [f"{tmp_path}/own.py:letters"]}})
    )
    assert read_recipe(file).key() != first.key()
    for name, said in (
        ("own.py:other", "has no function other; it has letters"),
        ("none.py:f", "no such file"),
    ):
        file.write_text(
            json.dumps(content | {"objective": {"name": "grpo", "rewards": [f"{tmp_path}/{name}"]}})
        )
        with pytest.raises(RecipeError, match=said):
            read_recipe(file)
    (tmp_path / "own.py").write_text("def f(:")
    file.write_text(
        json.dumps(content | {"objective": {"name": "grpo", "rewards": [f"{tmp_path}/own.py:f"]}})
    )
    with pytest.raises(RecipeError, match="is not Python"):
        read_recipe(file)


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [("none", [-0.5, 0.5, 0, 0]), ("group", [-0.707, 0.707, 0, 0]), ("batch", [-1, 1, 0, 0])],
)
def test_advantages_are_those_of_the_group(scale, wanted):
    grpo = Grpo.model_validate({"name": "grpo", "group_size": 2, "scale_rewards": scale})
    found, logs = advantages_of(
        grpo, [[0.0], [1.0], [1.0], [1.0]] if scale != "batch" else [[0.0], [1.0], [0.5], [0.5]]
    )
    assert found.tolist() == pytest.approx(
        [one * (1.2247 if scale == "batch" else 1) for one in wanted], rel=1e-3
    )
    assert logs["frac_reward_zero_std"] == 0.5


def group(step=1, prompt=(1, 2), rewards=(1.0,)):
    one = Rollout(tokens=[3], text="a", log_probs=[-1.0], rewards=list(rewards), truncated=False)
    return Group(step=step, prompt=list(prompt), completions=[one, one])


@pytest.mark.parametrize(
    ("are_equal", "text", "changes", "said"),
    [
        (True, "a", {}, "step 1: all answers to each prompt have equal rewards, so it has no gradient"),
        (True, " ", {}, "step 1: all drawn answers are empty, so it has no gradient"),
        (
            False,
            "a",
            {"mask_truncated_completions": True},
            "step 1: all drawn answers are cut, and mask_truncated_completions",
        ),
        (False, "a", {}, ""),
    ],
)
def test_a_first_step_without_a_gradient_is_told(are_equal, text, changes, said, caplog):
    answer = Rollout(tokens=[3], text=text, log_probs=[-1.0], rewards=[0.0], truncated=True)
    Rollouts(recipe_of(section() | changes))._warn_without_gradient([answer, answer], are_equal)
    assert len(caplog.messages) == bool(said)
    assert all(message.startswith(said) for message in caplog.messages)


def test_a_ledger_has_a_step_whole_and_only_for_the_same_prompts_and_keys(tmp_path, caplog):
    ledger, keys = RolloutLedger(str(tmp_path / "run")), {"rewards": "a", "weights": "b"}
    made = group().model_copy(update={"made_by": keys})
    assert ledger.read(1, [[1, 2]], keys) is None
    assert not caplog.text
    ledger.write(1, [made])
    assert ledger.read(1, [[1, 2]], keys) == [made]
    for prompts, changes, said in (
        ([[1, 3]], {}, "of other rows than"),
        ([[1, 2]], {"weights": "c"}, "of other weights than"),
        ([[1, 2]], {"rewards": "c", "weights": "d"}, "of other rewards and weights than"),
    ):
        caplog.clear()
        assert ledger.read(1, prompts, keys | changes) is None
        assert said in caplog.text
    ledger.write(1, [group()])
    assert ledger.read(1, [[1, 2]], keys) is None, "an earlier release wrote no keys"
    for step in range(2, 60):
        ledger.write(step, [group(step)] * 5)
    sample = [json.loads(line) for line in ledger.sample(59).splitlines()]
    assert sorted({one["step"] for one in sample})[::19] == [1, 59]
    assert len(sample) == 39
    (tmp_path / "run/rollouts/00000001.jsonl").write_text("{")
    with pytest.raises(TrainingError, match="delete the file"):
        ledger.read(1, [[1, 2]], {})


def rollouts_of(folder):
    """Return the recorded lines of all steps."""
    return [
        line for file in sorted(folder.rglob("rollouts/*.jsonl")) for line in file.read_text().splitlines()
    ]


def first_flip(one, other, seed):
    """Return the first token that two runs have drawn differently, as a sentence; None if there is none.

    Args:
        one: the recorded groups of a run.
        seed: training.seed of both.
    """
    for here, there in zip(one, other, strict=True):
        assert (here.step, here.prompt) == (there.step, there.prompt)
        for index, both in enumerate(zip(here.completions, there.completions, strict=True)):
            pairs = zip(*(zip(answer.tokens, answer.log_probs, strict=True) for answer in both), strict=False)
            for at, ((token, log_prob), (other_token, other_log_prob)) in enumerate(pairs):
                if token != other_token:
                    number = numbers(seed, here.step, here.prompt, index, at + 1)[at]
                    return (
                        f"step {here.step}, prompt {here.text!r}, answer {index}, token {at}: {token} with "
                        f"log-probability {log_prob:.7f}, {other_token} with {other_log_prob:.7f}; random "
                        f"number {number:.7f}"
                    )
                assert log_prob == pytest.approx(other_log_prob, abs=1e-4)
    return None


def test_the_first_token_that_two_runs_draw_differently_is_named():
    def drawn(step, *tokens):
        answers = [
            Rollout(tokens=list(token), text="", log_probs=[-0.5] * len(token), rewards=[1], truncated=True)
            for token in tokens
        ]
        return Group(step=step, prompt=[1], text="a", completions=answers)

    same = [drawn(1, [3, 4], [5]), drawn(2, [3], [4, 5, 6])]
    assert first_flip(same, same, seed=0) is None
    number = f"random number {numbers(0, 2, [1], 1, 2)[1]:.7f}"
    said = (
        "step 2, prompt 'a', answer 1, token 1: 5 with log-probability -0.5000000, 7 with -0.5000000; "
        f"{number}"
    )
    assert first_flip(same, [same[0], drawn(2, [3], [4, 7, 8])], seed=0) == said


def logs_of_trl(recipe, groups, out):
    """Return the logs of TRL's own trainer, which draws what is recorded, and rewards it with what is
    recorded."""
    from trl import GRPOConfig, GRPOTrainer

    drawn = iter([one for group in groups for one in group["completions"]])

    def config(objective, max_length, **arguments):
        names = (
            "beta",
            "loss_type",
            "temperature",
            "max_completion_length",
            "importance_sampling_level",
            "scale_rewards",
        )
        own = {name: getattr(objective, name) for name in names} | {"num_generations": objective.group_size}
        return GRPOConfig(**own, shuffle_dataset=False, remove_unused_columns=False, **arguments)

    def rollout(prompts, trainer):
        found = [next(drawn) for _ in prompts]
        ids = [by_text[prompt] for prompt in prompts]
        tokens, log_probs = ([one[name] for one in found] for name in ("tokens", "log_probs"))
        return {
            "prompt_ids": ids,
            "completion_ids": tokens,
            "logprobs": log_probs,
            "known": [one["rewards"][0] for one in found],
        }

    def reward(known, **_):
        return known

    def trainer(*args, **kwargs):
        return GRPOTrainer(*args, reward_funcs=[reward], rollout_func=rollout, **kwargs)

    by_text = {group["text"]: group["prompt"] for group in groups}
    rows = [{"prompt": group["text"]} for group in groups]
    return objective_runs.logs_of_trl(config, trainer, recipe, rows, out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "objective"),
    [
        ("full", {"beta": 0.04}),
        ("lora", {"beta": 0.04, "loss_type": "grpo", "temperature": 0.7}),
        ("lora", {"loss_type": "dr_grpo", "scale_rewards": "batch"}),
        ("lora", {"beta": 0.04, "loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ],
)
def test_a_run_computes_what_trl_does(inputs, tmp_path, method, objective):
    changes = {"checkpoints.folder": str(tmp_path / "kept"), "training.learning_rate": 1e-2}
    recipe = objective_runs.recipe_for(inputs, "grpo", method, objective=section(**objective), **changes)
    ours = ranks.run(1, objective_runs.fit, recipe, inputs, tmp_path / "ours")
    groups = [json.loads(line) for line in rollouts_of(tmp_path / "kept")]
    theirs = ranks.run(1, logs_of_trl, recipe, groups, tmp_path / "theirs")
    names = ("loss", "grad_norm", "reward", "entropy", *(["kl"] if "beta" in objective else []))
    assert len(theirs) == len(ours.steps) == 3
    for name in names:
        wanted = [pytest.approx(entry[name], rel=1e-4, abs=1e-6) for entry in theirs]
        assert [getattr(step, name) for step in ours.steps] == wanted, name
    assert ("kl" in [figure.name for figure in ours.logged]) == ("beta" in objective), "the report draws it"
    assert ours.steps[0].kl == (0 if "beta" in objective else None)
    assert "beta" not in objective or ours.steps[2].kl > 1e-4, "it went away from the reference"


def test_cispo_trains_its_whole_loss(inputs, tmp_path):
    # All importance weights are 1, so that its gradient is that of dapo: both are minus advantage times the
    # gradient of the log-probability. TRL's default cuts the weights at 0.2.
    norms = []
    for loss_type in ("dapo", "cispo"):
        changes = {
            "checkpoints.folder": str(tmp_path / f"kept-{loss_type}"),
            "training.max_steps": 1,
            "training.warmup_steps": 0,
        }
        recipe = objective_runs.recipe_for(inputs, "grpo", objective=section(loss_type=loss_type), **changes)
        norms.append(
            ranks.run(1, objective_runs.fit, recipe, inputs, tmp_path / loss_type).steps[0].grad_norm
        )
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["generation", "reward", "update"])
def test_a_run_that_is_killed_within_a_step_goes_on_to_the_bit(inputs, tmp_path, where):
    recipe = saved_runs.recipe_for(inputs, "none", tmp_path / "kept", objective=section(beta=0.04))
    calm = saved_runs.recipe_for(inputs, "none", tmp_path / "calm", objective=section(beta=0.04))
    never = ranks.run(1, saved_runs.fit, calm, inputs, tmp_path / "never")
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(1, rollout_kills.fit_and_die, recipe, inputs, tmp_path / "killed", where, 3)
    # What was recorded is not drawn again.
    goes_on = rollout_kills.fit_without_drawing if where == "update" else rollout_kills.fit_and_die
    arguments = (3,) if where == "update" else ("nowhere", 3)
    resumed = ranks.run(1, goes_on, recipe, inputs, tmp_path / "resumed", *arguments)
    assert resumed.resumed_from_step == 2
    again, once = ([(step.loss, step.grad_norm, step.kl) for step in one.steps] for one in (resumed, never))
    assert again == once
    assert resumed.heldout_loss == never.heldout_loss
    assert rollouts_of(tmp_path / "kept") == rollouts_of(tmp_path / "calm")


@pytest.mark.journey
@pytest.mark.parametrize(
    ("method", "sharding", "beta"),
    [
        ("full", "ddp", 0.04),
        ("full", "zero2", 0),
        ("full", "fsdp", 0),
        ("lora", "ddp", 0),
        ("lora", "zero2", 0.04),
        ("lora", "fsdp", 0.04),
        ("qlora", "ddp", 0.04),
    ],
)
def test_two_processes_draw_and_train_what_one_does(inputs, tmp_path, method, sharding, beta):
    found = [
        ranks.run(
            processes,
            objective_runs.fit,
            objective_runs.recipe_for(
                inputs,
                "grpo",
                method,
                name,
                objective=section(beta=beta),
                **{"checkpoints.folder": str(tmp_path / f"kept-{name}")},
            ),
            inputs,
            tmp_path / name,
        )
        for processes, name in ((1, "none"), (2, sharding))
    ]
    drawn = [
        [Group.parse(line) for line in rollouts_of(tmp_path / f"kept-{name}")] for name in ("none", sharding)
    ]
    assert first_flip(*drawn, seed=recipe_of(section()).training.seed) is None
    alone, together = (
        [(step.grad_norm, step.reward, step.entropy, step.kl or 0) for step in one.steps] for one in found
    )
    assert together == [pytest.approx(one, rel=1e-4, abs=1e-9) for one in alone]
    assert found[1].heldout_loss == pytest.approx(found[0].heldout_loss, rel=1e-5)


def test_the_next_run_of_a_recipe_draws_its_own_answers(tmp_path):
    recipe = recipe_of(section(), **{"checkpoints.folder": str(tmp_path)})
    address = paths.ledger_of(recipe, paths.run_key(recipe, "0" * 64)).storage.address
    RolloutLedger(address).write(1, [group()])
    manifest, training = SimpleNamespace(content_sha256="0" * 64), training_result(2)
    for kept in ({"attempt": "0001-abcdef", "stopped_early": "a budget"}, {"attempt": ""}):
        paths.clear(recipe, manifest, training.model_copy(update=kept))
        assert RolloutLedger(address).read(1, [[1, 2]], {}) == [group()]
    paths.clear(
        recipe, manifest, training.model_copy(update={"attempt": "0001-abcdef", "stopped_early": None})
    )
    assert RolloutLedger(address).read(1, [[1, 2]], {}) is None
    assert not Path(address).exists()


@pytest.mark.slow
def test_answers_that_cannot_be_recorded_are_a_failure_of_the_storage(inputs, tmp_path):
    # Another attempt may help, which a failed reward does not get.
    recipe = objective_runs.recipe_for(inputs, "grpo", **{"checkpoints.folder": str(tmp_path / "kept")})
    content = Manifest.read(inputs / "dataset" / "manifest.json").content_sha256
    home = Path(paths.ledger_of(recipe, paths.run_key(recipe, content)).storage.address)
    home.mkdir(parents=True)
    (home / "rollouts").touch()
    with pytest.raises(ranks.RankFailed, match=r"flytune.errors.Storage\w+: .*rollouts"):
        ranks.run(1, objective_runs.fit, recipe, inputs, tmp_path / "out")


def test_prompts_without_reference_answers_are_trained_scored_and_shown(tmp_path):
    base, path = tiny_base(tmp_path), write_prompts(tmp_path / "rows.jsonl", 64)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    unjudged = section(rewards=[{"name": "letters", "code": LETTERS.replace(", answer", "")}], eval_answers=2)
    changes = {"objective": unjudged, "evaluation.sample_answers": 2, "training.max_steps": 2}
    recipe = Recipe.model_validate(tiny_recipe(base, path, changes))
    manifest = data.prepare(DataRequest.of(recipe, "x"), tmp_path / "dataset")
    assert manifest.notes == {"without a reference answer": 64, "bare text": 64}
    result = ranks.run(1, objective_runs.fit, recipe, tmp_path, tmp_path / "out")
    assert all(step.reward is not None and step.tokens for step in result.steps)
    metrics = ranks.run(1, score.score, recipe, tmp_path / "out", tmp_path / "dataset")
    assert [figure.name for figure in metrics.figures] == ["reward"]
    assert (metrics.sample_wins, metrics.answer_wins) == (None, None)
    assert [answer.reference for answer in metrics.answers] == ["", ""]
