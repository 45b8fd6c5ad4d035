"""The loss that is trained is the model's own: compared before the first step, and the same by either
head."""

import json
import shutil

import pytest

from flytune.hardware import shape_named
from flytune.models import model_types
from flytune.training import loop
from tests.support import ranks, trained_types
from tests.support.model_types import VOCABULARY, tiny_config
from tests.support.objective_runs import fit, prepare, recipe_for
from tests.support.preferences import write_preferences
from tests.support.tiny import write_pairs

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(folder, model_type):
    base = trained_types.write_base(model_type, folder / "tokenizer", folder / model_type)
    recipe = trained_types.recipe_for(base, "full", **{"checkpoints.folder": str(folder / "checkpoints")})
    plan = trained_types.plan_of(recipe)
    return loop.fit(recipe, plan, shape_named(plan.shape), folder / "dataset", folder / "out").steps


@pytest.mark.parametrize("model_type", ["modernbert-decoder", "xlstm"])
def test_a_loss_that_is_not_the_models_own_is_refused_before_the_first_step(
    model_type, tmp_path, monkeypatch
):
    ranks.run(1, trained_types.inputs, tmp_path)
    # As if no test had found it: the ranks are forked with this.
    row = model_types.table()[model_type]
    monkeypatch.setitem(
        model_types.table(), model_type, {key: row[key] for key in row if key != "chunked_loss"}
    )
    if model_type == "xlstm":  # its cap is 30, which random logits are far from
        monkeypatch.setattr(trained_types, "tiny_config", capped)
    refusal = (
        r"the loss that would be trained is not the model's own: \d\.\d+, and \d\.\d+ of model\(...\).loss "
        rf"on the first \d+ tokens of the data, more than 0\.000\d+ apart; {model_type} changes its "
        "logits or its loss in a way that Flytune does not know; nothing was trained"
    )
    with pytest.raises(ranks.RankFailed, match=refusal):
        ranks.run(1, trained, tmp_path, model_type)
    assert not (tmp_path / "out" / "training.json").exists()


def capped(model_type, vocabulary=VOCABULARY):
    config = tiny_config(model_type, vocabulary)
    config.output_logit_soft_cap = 0.1
    return config


WRITERS = {"sft": write_pairs, "dpo": write_preferences}
RUNS = [
    ("sft", "full", "none"),
    ("sft", "lora", "ddp"),
    ("sft", "full", "fsdp"),
    ("sft", "full", "zero3"),
    ("dpo", "lora", "none"),
    ("dpo", "full", "none"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "method", "sharding"), RUNS)
def test_both_heads_train_the_same(objective, method, sharding, tmp_path):
    # A field that TRL would apply, and that Llama does not have: the run computes its own logits.
    prepare(tmp_path, objective, WRITERS[objective])
    recipe = recipe_for(tmp_path, objective, method, sharding)
    world_size = 1 if sharding == "none" else 2
    chunked = ranks.run(world_size, fit, recipe, tmp_path, tmp_path / "chunked")
    shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config | {"logit_scale": 0.25}))
    own = ranks.run(world_size, fit, recipe, tmp_path, tmp_path / "own")
    assert [step.loss for step in own.steps] == pytest.approx([step.loss for step in chunked.steps], rel=1e-5)
    assert own.heldout_loss == pytest.approx(chunked.heldout_loss, rel=1e-5)
