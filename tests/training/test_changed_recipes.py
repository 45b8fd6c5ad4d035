"""Real runs that resume with a changed recipe: what holds from the next step on, and what is refused."""

import re
import shutil
from pathlib import Path

import pytest

from flytune.planning import planner
from flytune.recipe import SECTIONS, Recipe
from flytune.schema import Strict
from flytune.training import eval_loss, loop
from flytune.training.checkpoints import changes
from tests.support import changed_base, ranks, saved_runs
from tests.support.saved_runs import recipe_for

EARLIER = {
    "training.learning_rate": 1e-3,
    "training.lr_scheduler_type": "linear",
    "training.warmup_steps": 0,
    "training.max_steps": 4,
    "training.weight_decay": 0.0,
    "training.max_grad_norm": 1.0,
    "checkpoints.name": "run",
}
LATER = {
    "training.learning_rate": 1e-4,
    "training.lr_scheduler_type": "cosine",
    "training.max_steps": 8,
    "training.weight_decay": 0.25,
    "training.max_grad_norm": 0.5,
    "checkpoints.save_steps": 3,
    "training.logging_steps": 2,
}
OF_ADAM = {"training.adam_beta1": 0.8, "training.adam_beta2": 0.95, "training.adam_epsilon": 1e-6}


def interrupted(recipe, inputs, folder):
    """Train the first two steps of a run, and save them."""
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(planner.make(recipe).world_size, saved_runs.fit, recipe, inputs, folder / "killed", 1, 3)


def fit_and_watch(recipe, inputs, out):
    """Return the settings of the optimizer in each step, of all its groups, and ZeRO's limit of the
    gradients' norm."""
    from transformers import TrainerCallback

    seen, build = [], loop.build

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            names = ("lr", "weight_decay", "betas", "eps")
            groups = [
                {name: group[name] for name in names if name in group} for group in optimizer.param_groups
            ]
            seen.append(
                (state.global_step + 1, groups, getattr(optimizer.optimizer, "clip_grad", args.max_grad_norm))
            )

    def watched(*arguments):
        trainer, resumed = build(*arguments)
        trainer.add_callback(Watch())
        return trainer, resumed

    loop.build = watched
    result = saved_runs.fit(recipe, inputs, out)
    return seen, [step.step for step in result.steps]


@pytest.mark.parametrize(
    ("sharding", "optim"),
    [
        ("none", "auto"),
        ("zero2", "auto"),
        ("fsdp", "auto"),
        pytest.param("none", "paged_adamw_8bit", marks=pytest.mark.slow),
        pytest.param("none", "sgd", marks=pytest.mark.slow),
        pytest.param("none", "adafactor", marks=pytest.mark.slow),
        pytest.param("zero3", "auto", marks=pytest.mark.slow),
        pytest.param("zero2", "lion_32bit", marks=pytest.mark.slow),
    ],
)
def test_optimizer_and_schedule_have_the_values_of_the_recipe_from_the_first_step_on(
    sharding, optim, inputs, tmp_path
):
    interrupted(
        recipe_for(inputs, sharding, tmp_path, **EARLIER, **{"training.optim": optim}), inputs, tmp_path
    )
    of_adam = OF_ADAM if "adam" in optim or optim == "auto" else {}
    later = recipe_for(inputs, sharding, tmp_path, **EARLIER | LATER | of_adam, **{"training.optim": optim})
    seen, logged = ranks.run(planner.make(later).world_size, fit_and_watch, later, inputs, tmp_path / "out")
    assert [step for step, _, _ in seen] == [3, 4, 5, 6, 7, 8]
    # 1e-4 (1 + cos(pi step / 8)) / 2 of the steps before: 2, 3, 4, 5, 6 and 7 of 8.
    rates = [8.5355339e-5, 6.9134172e-5, 5e-5, 3.0865828e-5, 1.4644661e-5, 3.8060234e-6]
    assert [groups[0]["lr"] for _, groups, _ in seen] == pytest.approx(rates, rel=1e-6)
    for _, groups, most in seen:
        assert sorted({group["weight_decay"] for group in groups}) == [0.0, 0.25]
        assert len({group["lr"] for group in groups}) == 1
        assert most == 0.5
        if of_adam:
            assert [(tuple(group["betas"]), group["eps"]) for group in groups] == [((0.8, 0.95), 1e-6)] * 2
    # Of the earlier recipe, which saved and logged each step, only the first two lines are left.
    assert logged == [1, 2, 3, 4, 6, 8]


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_base_whose_weights_changed_is_refused(method, inputs, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(inputs, own)
    recipe = recipe_for(own, "none", tmp_path / "kept", **EARLIER, method=method)
    interrupted(recipe, own, tmp_path)
    changed_base.change_weights(own / "tiny")
    with pytest.raises(
        ranks.RankFailed, match="step 2: trained from another base model: .* has changed .* Restore the base"
    ):
        ranks.run(1, saved_runs.fit, recipe, own, tmp_path / "out")
    moved = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"name_or_path": str(inputs / "tiny")})}
    )
    assert ranks.run(1, saved_runs.fit, moved, own, tmp_path / "moved").resumed_from_step == 2, (
        "the same base, elsewhere"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"training.global_batch_size": 2}, "training.global_batch_size: 4, now 2 .the position in the data"),
        (
            {"training.optim": "sgd"},
            'training.optim: "adamw_torch_fused", now "sgd" .the checkpoint has the states of another',
        ),
        (
            {"training.max_steps": 1},
            "the checkpoint is of step 2, and with training.max_steps, .* this run has 1 step;",
        ),
    ],
)
def test_what_a_resumed_run_cannot_change_is_refused_by_name(change, said, inputs, tmp_path):
    interrupted(recipe_for(inputs, "none", tmp_path, **EARLIER), inputs, tmp_path)
    later = recipe_for(inputs, "none", tmp_path, **EARLIER | change)
    with pytest.raises(ranks.RankFailed, match=said):
        ranks.run(1, saved_runs.fit, later, inputs, tmp_path / "out")


def fit_with_losses(recipe, inputs, out, losses, die_at=None):
    """Run with given held-out losses, and return the exported step."""
    score = eval_loss.Scorer.score

    def given(self, trainer):
        score(self, trainer)
        return losses[trainer.state.global_step]

    eval_loss.Scorer.score = given
    return saved_runs.fit(recipe, inputs, out, 1, die_at).exported_step


@pytest.mark.parametrize(
    ("change", "exported", "said"),
    [
        ({"publish.address": "hf://ada/model"}, 2, "exports step 2 of 4: eval_loss 5.93, the lowest\n"),
        ({"training.max_steps": 5}, 2, "exports step 2 of 5: eval_loss 5.93, the lowest\n"),
        (
            {"evaluation.max_samples": 4},
            3,
            "exports step 3 of 4: eval_loss 6.90, the lowest; steps up to 2 were scored otherwise, and are "
            "not compared\n",
        ),
    ],
)
def test_the_best_is_looked_for_among_all_steps_scored_on_the_same_samples(
    change, exported, said, inputs, tmp_path, capfd
):
    best = {"checkpoints.export": "best", "evaluation.eval_steps": 1}
    losses = {1: 6.5, 2: 5.93, 3: 6.9, 4: 6.98, 5: 7.0}
    first = recipe_for(inputs, "none", tmp_path, **EARLIER | best)
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(1, fit_with_losses, first, inputs, tmp_path / "killed", losses, 3)
    later = recipe_for(inputs, "none", tmp_path, **EARLIER | best | change)
    assert ranks.run(1, fit_with_losses, later, inputs, tmp_path / "out", losses) == exported
    assert said in capfd.readouterr().out


def fields_of(section, place=""):
    """Return the dotted names of all fields of a section and of those in it; of the objectives, all
    sections'."""
    for name, field in section.model_fields.items():
        here = f"{place}.{name}".lstrip(".")
        kinds = list(SECTIONS.values()) if here == "objective" else [field.annotation]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Strict):
                yield from fields_of(kind, here)
            else:
                yield here


def test_it_is_decided_of_each_field_what_it_changes_and_the_page_says_so():
    effects = {field: changes.effect_of(field) for field in fields_of(Recipe)}
    assert len(effects) > 100
    assert None not in effects.values()
    section = (
        Path("docs/checkpoints.md")
        .read_text(encoding="utf-8")
        .partition("## A changed recipe")[2]
        .partition("\n## ")[0]
    )
    rows = [row.split("|")[1:3] for row in section.splitlines() if row.startswith("| `")]
    documented = {
        effect.partition(":")[0].strip(): set(re.findall(r"`([a-z_0-9.]+)`", fields))
        for fields, effect in rows
    }
    words = {
        "refused": " ".join(changes.FIXED.values()),
        "holds from the next step on": changes.TAKEN["next step"],
        "holds, and changes no weights": changes.TAKEN["no step"],
        "its content is compared": changes.TAKEN["content"],
    }
    assert documented == {effect: set(fields.split()) for effect, fields in words.items()}
