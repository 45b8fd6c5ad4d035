"""The dry run against training itself.

Predicted: the ledger of one step on fake tensors. True: the same kind of ledger on the real tensors of training.loop's own
run (TRL's SFTTrainer, real weights, real gloo ranks), from the moment when the model is built. Compared are the peaks of
live bytes, to the byte as torch asks its CPU allocator for them: before any step, in forward and backward, in clipping and
optimizer; of the first step, and of the second, which the dry run does not take.
"""

import json

import pytest

from flytune import data
from flytune.errors import RecipeError
from flytune.hardware import load_shapes
from flytune.models import geometry
from flytune.planning import dryrun, planner
from flytune.planning.dryrun import trace
from flytune.planning.dryrun.allocations import Ledger
from flytune.planning.dryrun.case import Case, Profile
from flytune.recipe import DataRequest, Recipe
from flytune.training.attempt_notes import Notes
from flytune.training.run_state import RunState
from flytune.training.trainer import build
from tests.support import ranks
from tests.support.tiny import tiny_base, tiny_recipe

CPU = Profile(kernels="cpu")


def truly(recipe, dataset):
    """Return the peaks of a real run on this rank: {phase: bytes}, named as DryRun's."""
    from transformers import TrainerCallback

    shape = next(shape for shape in load_shapes() if shape.name == recipe.hardware.shape)
    plan = planner.make(recipe, [shape])
    trainer, _ = build(RunState.of(recipe, plan, shape, dataset), Notes())
    ledger = Ledger()

    class Stages(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            ledger.stage(f"{state.global_step} pass")

        def on_pre_optimizer_step(self, args, state, control, **_):
            ledger.stage(f"{state.global_step} optimizer")

    trainer.add_callback(Stages())
    ledger.stage("load")
    with ledger.watch():
        ledger.add([*trainer.model.parameters(), *trainer.model.buffers()], "load")
        loaded = ledger.now
        trainer.train()
    totals = ledger.totals()
    return {"load": totals[loaded]} | {
        name: max(totals[start : end + 1]) for name, start, end in ledger.spans() if name != "load"
    }


def setting(tmp_path, changes):
    """A recipe of two steps, its base, and its data: of equal lengths, or short samples for packing."""
    base = tiny_base(tmp_path)
    text = "The quick brown fox jumps over the lazy dog. " * (1 if "data.packing" in changes else 40)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(200)))
    fixed = {"data.max_length": 96, "training.max_steps": 2, "training.optim": "adamw_torch_fused", "data.packing": False}
    recipe = Recipe.model_validate(tiny_recipe(base, tmp_path / "rows.jsonl", fixed | changes))
    dataset = tmp_path / "dataset"
    data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), dataset)
    return recipe, base, dataset


CASES = {
    "full": {},
    "full-checkpointed": {"training.activation_checkpointing": True},
    "full-bfloat16": {"model.dtype": "bfloat16"},
    "full-packed": {"data.packing": True},
    "lora": {"method": "lora"},
    "fsdp": {"sharding": "fsdp", "hardware.shape": "cpu-2"},
    "fsdp-lora-checkpointed": {
        "sharding": "fsdp",
        "hardware.shape": "cpu-2",
        "method": "lora",
        "training.activation_checkpointing": True,
    },
    "lora-dora-rows": {"method": {"name": "lora", "use_dora": True, "trainable_token_indices": [7, 8]}},
    "fsdp-lora-tables": {
        "sharding": "fsdp",
        "hardware.shape": "cpu-2",
        "method": {"name": "lora", "modules_to_save": ["embed_tokens"]},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_dry_step_holds_what_a_real_one_does(name, tmp_path, monkeypatch):
    from trl.trainer import utils

    # A tile of TRL's loss is wider than the tiny vocabulary and would hide all else; the ranks are forked with this.
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 256)
    recipe, base, dataset = setting(tmp_path, CASES[name])
    world_size = 2 if "fsdp" in name else 1
    case = Case(recipe=recipe, config=str(base), world_size=world_size, micro_batch=4 // world_size, profile=CPU)
    dry = ranks.run(1, trace.trace, case)
    true = ranks.run(world_size, truly, recipe, dataset)
    phases = dry.phases
    predicted = {"load": phases["load"]}
    for index, step in enumerate(("first step", "steady step")):
        predicted[f"{index} pass"] = max(phases[f"{step}, forward"], phases[f"{step}, backward"])
        predicted[f"{index} optimizer"] = phases[f"{step}, optimizer"]
    assert {phase: predicted[phase] / size for phase, size in true.items()} == pytest.approx(dict.fromkeys(true, 1.0), abs=0.01)


def test_what_cannot_run_on_fake_tensors_is_refused_with_the_reason(tmp_path):
    def asked(**changes):
        recipe = Recipe.model_validate(tiny_recipe(tmp_path, tmp_path / "x.jsonl", changes))
        with pytest.raises(RecipeError) as raised:
            dryrun.run(recipe, tmp_path, world_size=1, micro_batch=1)
        return str(raised.value)

    assert asked(method="qlora") == (
        "recipe tiny: no dry run: 4-bit layers (bitsandbytes) do not run on fake tensors; the closed form plans it"
    )
    assert "sharding zero3 does not run on fake tensors; none and fsdp do" in asked(sharding="zero3")
    assert "adamw_8bit (bitsandbytes) does not" in asked(**{"training.optim": "adamw_8bit"})
    # Where the model itself cannot be built: what its library said.
    assert f"no dry run of the model in {tmp_path}: " in asked()


def test_a_model_of_405_billion_parameters_on_64_gpus_needs_no_gpu(tmp_path):
    """Two layers of it, so that the test is short; benchmarks/dryrun.py takes all."""
    config = geometry.shipped()["meta-llama/Llama-3.1-405B"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    changes = {"sharding.name": "fsdp", "sharding.offload": "cpu", "model.dtype": "bfloat16", "data.max_length": 4096}
    content = tiny_recipe(tmp_path, tmp_path / "x.jsonl") | {"sharding": {}}
    for path, value in changes.items():
        section, field = path.split(".")
        content[section][field] = value
    content["training"]["activation_checkpointing"] = True
    dry = dryrun.run(Recipe.model_validate(content), tmp_path, world_size=64, micro_batch=1)
    hidden, layer, vocabulary = 16384, 3.189e9, 128256
    # A 64th of float32 weights, gradients and two moments, each parameter's rows rounded up, is on the host.
    parameters = 2 * layer + 2 * vocabulary * hidden
    assert dry.host_bytes == pytest.approx(16 * parameters / 64, rel=0.01)
    assert set(dry.kinds) == {"gathered parameters", "activations", "communication buffers", "temporaries"}
    # At the least the checkpointed input of the first layer.
    assert dry.kinds["activations"] >= 4096 * hidden * 2
    assert dry.peak_phase == "steady step, backward"
    assert dry.peak_module.startswith("model.")
    assert len(dry.largest) == 10
    assert sum(dry.kinds.values()) == dry.peak_bytes == max(dry.phases.values())
