"""The dry run against training itself.

Predicted: the ledger of one step on fake tensors. True: the same kind of ledger on the real tensors of
training.loop's own run (TRL's SFTTrainer, real weights, real gloo ranks), from the moment when the model is
built. Compared are the peaks of live bytes, to the byte as torch asks its CPU allocator for them: before any
step, in forward and backward, in clipping and optimizer; of the first step, and of the second, which the dry
run does not take.
"""

import json

import pytest
import torch

from flytune import data, dryrun
from flytune.dryrun import cuda_kernels, layers, trace
from flytune.dryrun.allocations import AllocationLedger
from flytune.dryrun.case import Case, Profile
from flytune.errors import RecipeError
from flytune.hardware import load_shapes
from flytune.models import config_json, loading
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.selftest import tiny_model
from flytune.training.attempt_notes import Notes
from flytune.training.run_state import RunState
from flytune.training.trainer import build
from tests.support import ranks
from tests.support.tiny import tiny_base, tiny_recipe
from training_estimates.degrees import Degrees

CPU = Profile(kernels="cpu")


def scales(model):
    """List what the 4-bit layers of a model keep beside their parameters."""
    states = [layer.quant_state for layer in model.modules() if loading.is_quantized(layer)]
    inner = [state.state2 for state in states if state.nested]
    nested = [state.offset for state in states if state.nested]
    return [tensor for state in (*states, *inner) for tensor in (state.absmax, state.code)] + nested


def truly(recipe, dataset):
    """Return the peaks of a real run on this rank: {phase: bytes}, named as DryRun's."""
    from transformers import TrainerCallback

    shape = next(shape for shape in load_shapes() if shape.name == recipe.hardware.shape)
    plan = planner.make(recipe, [shape])
    trainer, _ = build(RunState.of(recipe, plan, shape, dataset), Notes())
    ledger = AllocationLedger()

    class Stages(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            ledger.stage(f"{state.global_step} pass")

        def on_pre_optimizer_step(self, args, state, control, **_):
            ledger.stage(f"{state.global_step} optimizer")

    trainer.add_callback(Stages())
    ledger.stage("load")
    with ledger.watch():
        for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
            ledger.add([*model.parameters(), *model.buffers(), *scales(model)], "load")
        loaded = ledger.now
        trainer.train()
    totals = ledger.totals()
    return {"load": totals[loaded]} | {
        name: max(totals[start : end + 1]) for name, start, end in ledger.spans() if name != "load"
    }


def row(number, text, changes):
    """Return a row of the kind that the objective needs; answers are cut at data.max_length."""
    objective = str(changes.get("objective", "sft"))
    if "kto" in objective:
        return {"prompt": f"{number} ", "completion": text, "label": number % 2 == 0}
    if objective in ("dpo", "reward"):
        return {"prompt": f"{number} ", "chosen": text, "rejected": f"Not so. {text}"}
    return {"text": f"{number} {text}"}


def setting(tmp_path, changes):
    """A recipe of two steps, its base, and its data: of equal lengths, or short samples for packing."""
    from transformers import AutoTokenizer

    changes = dict(changes)
    base = tiny_base(tmp_path)
    if changes.pop("experts", False):
        base = tiny_model.write_mixture(tmp_path / "mixture", AutoTokenizer.from_pretrained(base))
    config = json.loads((base / "config.json").read_text()) | changes.pop("config", {})
    (base / "config.json").write_text(json.dumps(config))
    text = "The quick brown fox jumps over the lazy dog. " * (1 if "data.packing" in changes else 40)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps(row(n, text, changes)) + "\n" for n in range(200))
    )
    fixed = {
        "data.max_length": 96,
        "training.max_steps": 2,
        "training.optim": "adamw_torch_fused",
        "data.packing": False,
    }
    recipe = Recipe.model_validate(tiny_recipe(base, tmp_path / "rows.jsonl", fixed | changes))
    dataset = tmp_path / "dataset"
    data.prepare(DataRequest.of(recipe, "x"), dataset)
    return recipe, base, dataset


CASES = {
    "full": {},
    "full-own-logits": {"config": {"logit_scale": 0.5}},
    "lora-own-logits-bfloat16": {"config": {"logit_scale": 0.5}, "method": "lora", "model.dtype": "bfloat16"},
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
    "qlora": {"method": "qlora", "training.optim": "adamw_torch_fused"},
    "qlora-8bit-optimizer": {
        "method": "qlora",
        "training.optim": "adamw_8bit",
        "training.activation_checkpointing": True,
    },
    "fsdp-qlora": {"method": "qlora", "sharding": "fsdp", "hardware.shape": "cpu-2"},
    "fsdp-divided": {
        "sharding": {"name": "fsdp", "sequence_parallel": 2},
        "hardware.shape": "cpu-2",
        "training.activation_checkpointing": True,
    },
    "ddp": {"sharding": "ddp", "hardware.shape": "cpu-2"},
    "ddp-qlora": {
        "method": "qlora",
        "sharding": "ddp",
        "hardware.shape": "cpu-2",
        "training.optim": "adamw_torch_fused",
    },
    "lora-dora-rows": {"method": {"name": "lora", "use_dora": True, "trainable_token_indices": [7, 8]}},
    "full-8bit-optimizer": {"training.optim": "adamw_8bit"},
    "lora-tables-8bit": {
        "method": {"name": "lora", "modules_to_save": ["embed_tokens"]},
        "training.optim": "adamw_8bit",
    },
    "full-lion": {"training.optim": "lion_32bit"},
    "full-lion-8bit": {"training.optim": "lion_8bit", "training.activation_checkpointing": True},
    "full-adafactor": {"training.optim": "adafactor"},
    "dpo-lora": {"objective": "dpo", "method": "lora", "training.activation_checkpointing": True},
    "dpo-full": {"objective": "dpo"},
    "dpo-qlora-ddp": {"objective": "dpo", "method": "qlora", "sharding": "ddp", "hardware.shape": "cpu-2"},
    "dpo-fsdp-lora": {"objective": "dpo", "method": "lora", "sharding": "fsdp", "hardware.shape": "cpu-2"},
    "kto-lora": {"objective": "kto", "method": "lora"},
    "kto-full": {"objective": {"name": "kto", "loss_type": "apo_zero_unpaired"}},
    "reward-full": {"objective": "reward"},
    "reward-fsdp-lora": {
        "objective": "reward",
        "method": "lora",
        "sharding": "fsdp",
        "hardware.shape": "cpu-2",
    },
    "lora-sgd": {"method": "lora", "training.optim": "sgd"},
    "lora-experts": {"experts": True, "method": {"name": "lora", "experts": True}},
    "fsdp-lora-tables": {
        "sharding": "fsdp",
        "hardware.shape": "cpu-2",
        "method": {"name": "lora", "modules_to_save": ["embed_tokens"]},
    },
}


def zero(stage, **more):
    """Return changes that shard by DeepSpeed, with buckets that do not hide the rest."""
    config = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 4_000}
    found = {"name": f"zero{stage}", "config": {"zero_optimization": config}}
    return {"sharding": found, "hardware.shape": "cpu-2", "model.dtype": "bfloat16"} | more


ZERO = {
    "zero1": zero(1),
    "zero2": zero(2),
    "zero2-lora": zero(2, method="lora", **{"training.activation_checkpointing": True}),
    "zero2-qlora": zero(2, method="qlora"),
    "zero2-float32": zero(2, **{"model.dtype": "float32"}),
    "zero3": zero(3),
    "zero3-lora": zero(3, method="lora"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO)
def test_zeros_partitions_are_counted_beside_the_trace(name, tmp_path, monkeypatch):
    """DeepSpeed updates at the end of backward, so that a step has one peak.

    The partition of gradients is counted from the first time that a bucket may be reduced, which is before it
    must be. What stage 3 may hold gathered is here all of the model, and is counted from the first layer to
    the last: DeepSpeed, which does not reuse anything in its first step, then gathers less.
    """
    from trl.trainer import utils

    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 256)
    recipe, base, dataset = setting(tmp_path, ZERO[name])
    dry = ranks.run(
        1, trace.trace, Case(recipe=recipe, config=str(base), degrees=Degrees(2), micro_batch=2, profile=CPU)
    )
    true = ranks.run(2, truly, recipe, dataset)
    for index, step in enumerate(("first step", "steady step")):
        predicted = max(size for phase, size in dry.phases.items() if phase.startswith(step))
        ratio = predicted / true[f"{index} pass"]
        assert 0.98 <= ratio <= (1.3 if "zero3" in name and not index else 1.08)


def test_processes_that_divide_samples_hold_a_part_of_their_activations(tmp_path, monkeypatch):
    from trl.trainer import utils

    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 256)
    changes = CASES["fsdp-divided"]
    phases = []
    for parts, micro_batch in ((1, 2), (2, 4)):
        sharding = {"name": "fsdp", "sequence_parallel": parts}
        recipe, base, _ = setting(tmp_path / str(parts), changes | {"sharding": sharding})
        degrees = Degrees(2, sequence_parallel=parts)
        case = Case(recipe=recipe, config=str(base), degrees=degrees, micro_batch=micro_batch, profile=CPU)
        phases.append(ranks.run(1, trace.trace, case).phases)
    # What is exchanged is there twice.
    assert phases[1] == pytest.approx(phases[0], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_dry_step_holds_what_a_real_one_does(name, tmp_path, monkeypatch):
    from trl.trainer import utils

    # A tile of TRL's loss is wider than the tiny vocabulary and would hide all else; the ranks are forked
    # with this.
    monkeypatch.setattr(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 256)
    recipe, base, dataset = setting(tmp_path, CASES[name])
    world_size = 2 if "hardware.shape" in CASES[name] else 1
    degrees = Degrees(world_size, sequence_parallel=recipe.sharding.sequence_parallel)
    micro_batch = degrees.samples(4)
    case = Case(recipe=recipe, config=str(base), degrees=degrees, micro_batch=micro_batch, profile=CPU)
    dry = ranks.run(1, trace.trace, case)
    true = ranks.run(world_size, truly, recipe, dataset)
    phases = dry.phases
    predicted = {"load": phases["load"]}
    for index, step in enumerate(("first step", "steady step")):
        passes = [
            size
            for phase, size in phases.items()
            if phase.startswith(step) and not phase.endswith("optimizer")
        ]
        predicted[f"{index} pass"] = max(passes)
        predicted[f"{index} optimizer"] = phases[f"{step}, optimizer"]
    assert {phase: predicted[phase] / size for phase, size in true.items()} == pytest.approx(
        dict.fromkeys(true, 1.0), abs=0.01
    )


@pytest.mark.slow
def test_what_cannot_run_on_fake_tensors_is_refused_with_the_reason(tmp_path):
    def asked(**changes):
        recipe = Recipe.model_validate(tiny_recipe(tmp_path, tmp_path / "x.jsonl", changes))
        with pytest.raises(RecipeError) as raised:
            dryrun.run(recipe, tmp_path, degrees=Degrees(1), micro_batch=1)
        return str(raised.value)

    assert asked(method={"name": "qlora", "load_in_8bit": True}) == (
        "recipe tiny: no dry run: 8-bit layers (bitsandbytes) look for outliers in the values of their "
        "inputs, which fake tensors do not have; where the closed form knows the model, plan it without "
        "--dry-run"
    )
    assert "sharding device_map does not run on fake tensors; none and ddp and " in asked(
        method="qlora", sharding="device_map"
    )
    # Where the model itself cannot be built: what its library said.
    assert f"no dry run of the model in {tmp_path}: " in asked()


@pytest.mark.slow
def test_a_model_of_405_billion_parameters_on_64_gpus_needs_no_gpu(tmp_path):
    """Two layers of it, so that the test is short; benchmarks/dryrun.py takes all."""
    config = config_json.shipped()["meta-llama/Llama-3.1-405B"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    changes = {
        "sharding.name": "fsdp",
        "sharding.offload": "cpu",
        "model.dtype": "bfloat16",
        "data.max_length": 4096,
    }
    content = tiny_recipe(tmp_path, tmp_path / "x.jsonl") | {"sharding": {}}
    for path, value in changes.items():
        section, field = path.split(".")
        content[section][field] = value
    content["training"]["activation_checkpointing"] = True
    dry = dryrun.run(Recipe.model_validate(content), tmp_path, degrees=Degrees(64), micro_batch=1)
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


def gradient_of_a_tied_embedding():
    table = torch.linspace(-1.0, 1.0, 8000).reshape(1000, 8).requires_grad_()
    hidden = torch.nn.functional.embedding(torch.arange(4), table)
    torch.tanh(hidden @ table.T).sum().backward()
    return table.grad


def test_a_tied_embeddings_gradient_is_added_in_place():
    expected = gradient_of_a_tied_embedding()
    for fake in (False, True):
        with (ledger := AllocationLedger()).watch(fake=fake):
            found = gradient_of_a_tied_embedding()
        # The gradients of head and embedding, and no sum of them, beside the table (which linspace fills, and
        # reshape views).
        assert [life.bytes for life in ledger.lives].count(4 * 1000 * 8) == 3
        assert fake or torch.equal(found, expected)


def test_the_mask_of_cudas_dropout_has_a_byte_for_each_number():
    with cuda_kernels.cuda(), (ledger := AllocationLedger()).watch(fake=True):
        numbers = torch.empty(64, 64, requires_grad=True)
        dropped = torch.nn.functional.dropout(numbers, 0.1)
    assert dropped.requires_grad
    assert sorted(life.bytes for life in ledger.alive(ledger.now)) == [64 * 64, 4 * 64 * 64, 4 * 64 * 64]


SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
REPEATED = {
    "llama full": ({"model_type": "llama", "num_hidden_layers": 12}, {}, 1),
    "llama, checkpointed": (
        {"model_type": "llama", "num_hidden_layers": 12},
        {"training.activation_checkpointing": True},
        1,
    ),
    "llama lora, fsdp": (
        {"model_type": "llama", "num_hidden_layers": 12},
        {"method": "lora", "sharding": "fsdp", "training.activation_checkpointing": True},
        4,
    ),
    "llama qlora, ddp": (
        {"model_type": "llama", "num_hidden_layers": 12},
        {"method": "qlora", "sharding": "ddp"},
        2,
    ),
    "llama qlora, fsdp": (
        {"model_type": "llama", "num_hidden_layers": 12},
        {"method": "qlora", "sharding": "fsdp"},
        4,
    ),
    "llama full, zero1": ({"model_type": "llama", "num_hidden_layers": 12}, {"sharding": "zero1"}, 4),
    "llama lora, zero2": (
        {"model_type": "llama", "num_hidden_layers": 12},
        {"method": "lora", "sharding": "zero2", "training.activation_checkpointing": True},
        4,
    ),
    "llama full, zero3": ({"model_type": "llama", "num_hidden_layers": 12}, {"sharding": "zero3"}, 4),
    "llama qlora, zero3": (
        {"model_type": "llama", "num_hidden_layers": 12},
        {"method": "qlora", "sharding": "zero3"},
        4,
    ),
    "llama, zero3 offload": (
        {"model_type": "llama", "num_hidden_layers": 12},
        {"sharding": {"name": "zero3", "offload": "cpu"}},
        4,
    ),
    "llama, fsdp offload": (
        {"model_type": "llama", "num_hidden_layers": 12},
        {"sharding": {"name": "fsdp", "offload": "cpu"}},
        4,
    ),
    "ranks by layer": (
        {"model_type": "llama", "num_hidden_layers": 14},
        {"method": {"name": "lora", "rank_pattern": {"layers.1.self_attn.q_proj": 32}}},
        1,
    ),
    "two kinds of attention": (
        {"model_type": "gemma3_text", "num_hidden_layers": 20, "head_dim": 16, "sliding_window": 8}
        | {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 6
            + ["sliding_attention"] * 2
        },
        {"training.activation_checkpointing": True},
        1,
    ),
    "dpo lora, fsdp": (
        {"model_type": "llama", "num_hidden_layers": 12},
        {"objective": "dpo", "method": "lora", "sharding": "fsdp", "training.activation_checkpointing": True},
        4,
    ),
    "reward lora": (
        {"model_type": "llama", "num_hidden_layers": 12},
        {"objective": "reward", "method": "lora"},
        1,
    ),
    "kto qlora": (
        {"model_type": "llama", "num_hidden_layers": 12},
        {"objective": "kto", "method": "qlora"},
        1,
    ),
    "experts": ({"model_type": "qwen3_moe", "num_hidden_layers": 12, "head_dim": 16} | EXPERTS, {}, 1),
}


def both(case):
    """Return the dry run of few layers, that of all, and whether few were traced."""
    extended, extend = [], layers.Trace.extend
    layers.Trace.extend = lambda self, units: extended.append(units) or extend(self, units)
    return trace.trace(case).model_dump(), trace.trace(case, every_layer=True).model_dump(), any(extended)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPEATED)
def test_a_few_layers_are_traced_as_all(name, tmp_path):
    config, changes, world_size = REPEATED[name]
    (tmp_path / "config.json").write_text(json.dumps(SIZES | config))
    content = tiny_recipe(
        tmp_path, tmp_path / "x.jsonl", {"model.dtype": "bfloat16", "data.max_length": 64} | changes
    )
    case = Case(
        recipe=Recipe.model_validate(content),
        config=str(tmp_path),
        degrees=Degrees(world_size),
        micro_batch=2,
    )
    few, every, were_few = ranks.run(1, both, case)
    assert were_few
    assert few | {"seconds": 0} == every | {"seconds": 0}


def test_layers_that_are_not_alike_are_all_traced(tmp_path):
    config = {"model_type": "diffllama", "num_hidden_layers": 10}  # each has a factor of its own
    (tmp_path / "config.json").write_text(json.dumps(SIZES | config))
    case = Case(
        recipe=Recipe.model_validate(tiny_recipe(tmp_path, tmp_path / "x")),
        config=str(tmp_path),
        degrees=Degrees(1),
        micro_batch=1,
    )
    few, every, were_few = ranks.run(1, both, case)
    assert not were_few
    assert few | {"seconds": 0} == every | {"seconds": 0}


def test_values_that_are_narrower_than_queries_are_traced(tmp_path):
    """Multi-head latent attention, of DeepSeek: on CUDA, whose attention is replaced, as on a CPU."""
    from tests.support.model_types import tiny_config

    (tmp_path / "config.json").write_text(tiny_config("deepseek_v3").to_json_string())
    recipe = Recipe.model_validate(tiny_recipe(tmp_path, tmp_path / "x", {"data.max_length": 64}))
    for profile in (Profile(), CPU):
        case = Case(recipe=recipe, config=str(tmp_path), degrees=Degrees(1), micro_batch=2, profile=profile)
        assert ranks.run(1, trace.trace, case).kinds["activations"] > 0
