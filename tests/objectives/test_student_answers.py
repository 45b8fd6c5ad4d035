"""Distillation of answers that the student draws: TRL's losses on the same answers, whatever was drawn where,
and what a killed run does with them."""

import json
from types import SimpleNamespace

import pytest

from flytune import data
from flytune.errors import RecipeError
from flytune.objectives import objective_of
from flytune.objectives.student_answers import prompt_of
from flytune.planning import planner
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import DataRequest, Recipe
from flytune.records.plan import DRAW
from flytune.rollouts import Group
from flytune.training import reference
from tests.support import distilled, objective_runs, ranks, rollout_kills, saved_runs
from tests.support.objective_runs import ON_POLICY, TEACHER
from tests.support.tiny import tiny_recipe, write_pairs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return objective_runs.prepare(tmp_path_factory.mktemp("drawn"), ON_POLICY, write_pairs)


def recipe_for(inputs, *arguments, kept=None, **fields):
    section = objective_runs.section_of(ON_POLICY, inputs) | fields.pop("objective", {})
    fields |= {"checkpoints.folder": str(kept)} if kept else {}
    return objective_runs.recipe_for(inputs, ON_POLICY, *arguments, objective=section, **fields)


def groups_of(folder):
    """Return the recorded answers of all steps."""
    files = sorted(folder.rglob("rollouts/*.jsonl"))
    return [Group.parse(line) for file in files for line in file.read_text().splitlines()]


def with_drawn(rows, groups, size):
    """Return rows of training, in their order, with the answers that were drawn to their prompts."""
    left, drawn = list(groups), []
    for place, row in enumerate(rows):
        step, ids = 1 + place // size, row["input_ids"]
        group = next((one for one in left if one.step == step and one.prompt == ids[: len(one.prompt)]), None)
        if group is None:
            drawn.append(row)
            continue
        left.remove(group)
        answer = group.completions[0].tokens
        labels = [-100] * len(group.prompt) + answer
        drawn.append({"input_ids": group.prompt + answer, "labels": labels})
    assert not left, "each drawn answer is of a row of its step"
    return drawn


def fit(recipe, inputs, known, out, layout=None):
    """Train with the teacher's tokens in a folder."""
    saved_runs.known = lambda *_: known
    return objective_runs.fit(recipe, inputs, out, layout)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_has_the_losses_and_gradients_of_gkd_on_the_same_answers(method, inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    # All tokens of the vocabulary, and no clipping, which would hide a factor of the gradients.
    section = {"loss_top_k": 1024, "beta": 0.5}
    changes = {"training.max_grad_norm": 100.0, "training.global_batch_size": 8}
    recipe = recipe_for(inputs, method, kept=tmp_path / "kept", objective=section, **changes)
    known = tmp_path / "known"
    ranks.run(1, reference.compute, recipe, inputs / "dataset", known)
    ours = ranks.run(1, fit, recipe, inputs, known, tmp_path / "ours")
    groups, rows = groups_of(tmp_path / "kept"), distilled.rows_of(recipe, inputs)
    assert 0 < len(groups) < len(rows)
    drawn = with_drawn(rows, groups, 8)
    theirs = ranks.run(1, distilled.losses_of_gkd, recipe, drawn, inputs, tmp_path / "theirs")
    mine = [(step.loss, step.grad_norm) for step in ours.steps]
    assert mine == [pytest.approx(step, rel=1e-4) for step in theirs]


def losses_by_hand(recipe, inputs, groups):
    """Return the loss of a step by the definition, and the student's log-probabilities of its answers."""
    import torch
    from transformers import AutoModelForCausalLM

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(inputs / name, dtype="float32").eval()
        for name in ("tiny", TEACHER)
    )
    losses, log_probs = [], []
    for group in groups:
        answer = group.completions[0].tokens
        ids = torch.tensor([group.prompt + answer])
        with torch.no_grad():
            mine, theirs = (
                model(ids).logits[0, len(group.prompt) - 1 : -1].double().log_softmax(dim=1)
                for model in (student, teacher)
            )
        best = theirs.topk(recipe.objective.loss_top_k, dim=1).indices
        outcomes = [
            torch.cat([of.gather(1, best), (1 - of.gather(1, best).exp().sum(1, keepdim=True)).log()], dim=1)
            for of in (mine, theirs)
        ]
        losses += (outcomes[1].exp() * (outcomes[1] - outcomes[0])).sum(dim=1).tolist()
        log_probs.append(mine.gather(1, torch.tensor(answer)[:, None])[:, 0].tolist())
    return sum(losses) / len(losses), log_probs


def test_with_share_1_all_answers_are_drawn_whatever_the_micro_batch(inputs, tmp_path):
    section = {"on_policy": 1.0}
    known = tmp_path / "known"
    ranks.run(1, reference.compute, recipe_for(inputs, objective=section), inputs / "dataset", known)
    assert not (known / "train.parquet").exists(), "no answer of the data is trained"
    runs = {}
    for layout in ((4, 1), (1, 4)):
        recipe = recipe_for(inputs, kept=tmp_path / f"kept-{layout[0]}", objective=section)
        runs[layout] = ranks.run(1, fit, recipe, inputs, known, tmp_path / f"out-{layout[0]}", layout)
    whole, single = ([(step.loss, step.grad_norm) for step in run.steps] for run in runs.values())
    assert single == [pytest.approx(one, rel=1e-4) for one in whole]
    groups = [groups_of(tmp_path / f"kept-{size}") for size in (4, 1)]
    drawn = [[(one.step, one.prompt, one.completions[0].tokens) for one in part] for part in groups]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 3 * 4
    loss, log_probs = ranks.run(1, losses_by_hand, recipe, inputs, groups[0][:4])
    assert whole[0][0] == pytest.approx(loss, rel=1e-4)
    for group, wanted in zip(groups[0], log_probs, strict=False):
        assert group.completions[0].log_probs == pytest.approx(wanted, abs=1e-4)
    sample = (tmp_path / "out-4" / "rollouts.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in sample} == {1, 2, 3}, "the artifact has some"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["generation", "update"])
def test_a_run_that_is_killed_within_a_step_goes_on_to_the_bit(inputs, tmp_path, where):
    section = objective_runs.section_of(ON_POLICY, inputs)
    recipe, calm = (
        saved_runs.recipe_for(inputs, "none", tmp_path / name, objective=section) for name in ("kept", "calm")
    )
    never = ranks.run(1, saved_runs.fit, calm, inputs, tmp_path / "never")
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(1, rollout_kills.fit_and_die, recipe, inputs, tmp_path / "killed", where, 3)
    # What was recorded is not drawn again.
    goes_on = rollout_kills.fit_without_drawing if where == "update" else rollout_kills.fit_and_die
    arguments = (3,) if where == "update" else ("nowhere", 3)
    resumed = ranks.run(1, goes_on, recipe, inputs, tmp_path / "resumed", *arguments)
    assert resumed.resumed_from_step == 2
    again, once = ([(step.loss, step.grad_norm) for step in run.steps] for run in (resumed, never))
    assert again == once
    assert resumed.heldout_loss == never.heldout_loss
    kept, undisturbed = (
        [group.model_dump() for group in groups_of(tmp_path / name)] for name in ("kept", "calm")
    )
    assert kept == undisturbed
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("resumed", "never")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_two_processes_draw_and_train_what_one_does(inputs, tmp_path):
    runs = [
        ranks.run(
            processes,
            objective_runs.fit,
            recipe_for(inputs, "lora", name, kept=tmp_path / name, objective={"on_policy": 0.8}),
            inputs,
            tmp_path / f"out-{name}",
        )
        for processes, name in ((1, "none"), (2, "ddp"))
    ]
    drawn = [
        [(one.step, one.prompt, one.completions[0].tokens) for one in groups_of(tmp_path / name)]
        for name in ("none", "ddp")
    ]
    assert drawn[0] == drawn[1]
    alone, together = ([(step.loss, step.grad_norm) for step in run.steps] for run in runs)
    assert together == [pytest.approx(one, rel=1e-4) for one in alone]


def test_share_0_is_the_run_that_it_was(inputs):
    def key(recipe):
        base = reference.BaseRequest(name_or_path=recipe.model.name_or_path)
        [request] = reference.requests(recipe, DataRequest.of(recipe, "x"), base)
        return request.model_dump_json(exclude={"request"})

    off, drawing = recipe_for(inputs, objective={"on_policy": 0}), recipe_for(inputs)
    section = objective_runs.section_of("distill", inputs) | {"max_completion_length": 12}
    plain = objective_runs.recipe_for(inputs, "distill", objective=section)
    assert off.key() == plain.key() != drawing.key()
    assert key(off) == key(plain) != key(drawing)
    assert objective_of(off).draws() is None
    assert objective_of(off).trainer_arguments(None) == {}


@pytest.mark.parametrize(
    ("labels", "length"),
    [
        ([-100, -100, 5, 6], 2),
        ([-100, 5, 6, -100, -100, 7, 8], 5),
        ([-100, 5, 6, -100], 1),
        ([5, 6, 7], 0),
        ([-100, -100], 0),
    ],
)
def test_the_prompt_is_what_precedes_the_last_answer(labels, length):
    assert prompt_of({"input_ids": list(range(len(labels))), "labels": labels}) == list(range(length))


@pytest.mark.parametrize(
    ("objective", "changes", "said"),
    [
        ({"alpha": 0.5}, {}, "objective.alpha: a drawn answer has no loss of the data"),
        ({}, {"data.format": "text"}, "data.format: text: a text has no prompt"),
        ({}, {"data.too_long": "split"}, "data.too_long: split: a piece of a sample"),
        ({}, {"data.completion_only_loss": False}, "data.completion_only_loss: false"),
        ({}, {"training.neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({}, {"training.torch_compile": True}, "torch_compile"),
        ({}, {"training.probe_longest": True}, "probe_longest"),
        ({"max_completion_length": 128}, {}, "leaves no token of data.max_length"),
        ({}, {"sharding": "zero2"}, "holds the teacher complete beside the student"),
        ({}, {"sharding": "fsdp"}, "holds the teacher complete beside the student"),
        ({}, {"method": "qlora"}, "with method qlora: a teacher beside a quantized student"),
        ({}, {"method": {"name": "lora", "init_lora_weights": "pissa"}}, "init_lora_weights pissa"),
        ({}, {"training.on_bad_loss": "skip"}, "on_bad_loss: skip"),
        ({}, {"model.attn_implementation": "flash_attention_2"}, "its batches are padded; write sdpa"),
    ],
)
def test_what_is_not_built_is_refused_with_the_reason(objective, changes, said, inputs):
    section = objective_runs.section_of(ON_POLICY, inputs) | objective
    content = tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", {"objective": section} | changes)
    with pytest.raises(RecipeError, match=said):
        planner.make(Recipe.model_validate(content))


def test_texts_without_a_prompt_are_named_before_the_first_step(inputs):
    sources = [SimpleNamespace(name=name, format=name) for name in ("text", "messages")]
    [line] = objective_of(recipe_for(inputs)).warnings(SimpleNamespace(sources=sources))
    assert line.startswith("objective.on_policy: text: texts without a prompt")
    assert data.read_manifest(inputs / "dataset").sources, "a manifest has them"


def test_the_plan_has_the_teacher_beside_the_student(inputs):
    drawing_recipe = recipe_for(inputs)
    drawing, off = (
        planner.make(recipe) for recipe in (drawing_recipe, recipe_for(inputs, objective={"on_policy": 0.0}))
    )
    assert drawing.reasons != off.reasons
    assert any("teacher, which each process holds too, scores them" in line for line in drawing.reasons)
    size = 4 * read_geometry(drawing_recipe.objective.teacher(drawing_recipe.model)).parameters
    assert all(parts["teacher"] == size for parts in drawing.memory.phases.values())
    assert DRAW in drawing.memory.phases
    assert not any("teacher" in parts or name == DRAW for name, parts in off.memory.phases.items())
