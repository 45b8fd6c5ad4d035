"""Adapters on experts of a tiny mixture: trained as PEFT alone trains them, exported, gated, merged, resumed,
continued."""

import json
import shutil

import pytest

from flytune import data
from flytune.adapters import combining, merging
from flytune.errors import ExportError, RecipeError
from flytune.export import gate
from flytune.export.folder import MANIFEST, write_manifest
from flytune.hardware import shape_named
from flytune.models import experts, initial_adapter, loading
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.records import Export
from flytune.training import loop
from tests.support import ranks, trained_types
from tests.support.saved_runs import fit as fit_and_die
from tests.support.stages import write_artifact
from tests.support.tiny import tiny_recipe, write_pairs

METHOD = {"name": "lora", "r": 4, "lora_alpha": 8, "experts": True}
TRAINED = {
    "learning_rate": 2e-2,
    "global_batch_size": 8,
    "max_steps": 3,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "max_grad_norm": 1000.0,
    "router_aux_loss_coef": 0.5,
    "activation_checkpointing": True,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with a tiny Qwen3-MoE as base, pairs, and their prepared data set."""
    folder = tmp_path_factory.mktemp("experts")
    tokenizer, _ = trained_types.inputs(folder / "made")
    base = trained_types.write_base("qwen3_moe", tokenizer, folder / "tiny")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"num_experts": 4, "router_aux_loss_coef": 0.001}))
    recipe = Recipe.model_validate(tiny_recipe(base, write_pairs(folder / "pairs.jsonl", 64)))
    data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), folder / "dataset")
    return folder


def recipe_for(inputs, sharding="none", method=METHOD, **changes):
    shape = "cpu-1" if sharding == "none" else "cpu-2"
    fixed = {"method": method, "sharding": sharding, "hardware.shape": shape, "training": TRAINED}
    return Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", fixed | changes))


def fit(recipe, inputs, out, micro_batch=2):
    import torch

    torch.set_num_threads(1)
    plan = planner.make(recipe)
    batch = {
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": 8 // micro_batch // plan.world_size,
    }
    return loop.fit(recipe, plan.model_copy(update=batch), shape_named(plan.shape), inputs / "dataset", out)


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    """A finished run in one process: recipe, result and folder."""
    recipe, out = recipe_for(inputs), tmp_path_factory.mktemp("run") / "trained"
    return recipe, ranks.run(1, fit, recipe, inputs, out), out


def tensors(out):
    from safetensors.numpy import load_file

    return load_file(next(out.glob("*/*model.safetensors")))


def plain(inputs):
    """Train with transformers and PEFT alone; return losses, and the adapter's tensors."""
    import torch
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM, set_seed

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(inputs / "tiny", dtype="float32")
    set_seed(42)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["k_proj", "o_proj", "q_proj", "v_proj"],
        target_parameters=["experts.down_proj", "experts.gate_up_proj"],
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, config).train()
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=2e-2, weight_decay=0.0
    )
    rows = data.load(inputs / "dataset", "train")
    order, losses = data.order.permutation(42, 0, len(rows)), []
    for step in range(3):
        chosen = [rows[int(at)] for at in order[8 * step : 8 * step + 8]]
        trained_tokens = sum(label != -100 for row in chosen for label in row["labels"][1:])
        total = 0.0
        for start in range(0, 8, 2):
            pair = chosen[start : start + 2]
            longest = max(len(row["input_ids"]) for row in pair)
            ids, labels, mask = (
                torch.tensor([[*values(row), *[filler] * (longest - len(row["input_ids"]))] for row in pair])
                for values, filler in (
                    (lambda row: row["input_ids"], 0),
                    (lambda row: row["labels"], -100),
                    (lambda row: [1] * len(row["input_ids"]), 0),
                )
            )
            made = model(input_ids=ids, attention_mask=mask, output_router_logits=True, use_cache=False)
            logits, targets = made.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            own = (
                torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
                / trained_tokens
            )
            loss = own + 0.5 * made.aux_loss / 4
            loss.backward()
            total += float(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: tensor.numpy() for name, tensor in get_peft_model_state_dict(model).items()}


def relative(found, expected):
    difference = sum(((found[name] - expected[name]) ** 2).sum() for name in expected) ** 0.5
    return (
        difference / sum((tensor**2).sum() for name, tensor in expected.items() if ".lora_B." in name) ** 0.5
    )


def test_losses_and_weights_are_those_of_peft_alone(inputs, trained):
    _, result, out = trained
    losses, expected = ranks.run(1, plain, inputs)
    assert [step.loss for step in result.steps] == pytest.approx(losses, rel=1e-5)
    found = tensors(out)
    assert found.keys() == expected.keys()
    assert relative(found, expected) < 1e-4


def test_names_are_those_that_peft_and_vllm_read(trained):
    """vLLM (lora/lora_model.py, lora/model_manager.py: _stack_moe_lora_weights, _convert_3d_to_2d_moe_lora).

    It takes `experts.base_layer` for gate_up_proj and `experts` for down_proj, with lora_A of (experts x
    rank, in) and lora_B of (out, rank x experts), of every layer that has one of the two.
    """
    _, _, out = trained
    found, prefix = tensors(out), "base_model.model.model.layers.0.mlp.experts"
    shapes = {name: tensor.shape for name, tensor in found.items() if name.startswith(prefix)}
    assert shapes == {
        f"{prefix}.base_layer.lora_A.weight": (16, 64),
        f"{prefix}.base_layer.lora_B.weight": (64, 16),
        f"{prefix}.lora_A.weight": (16, 32),
        f"{prefix}.lora_B.weight": (64, 16),
    }
    assert not [name for name in found if ".gate." in name], "no router"
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert config["target_parameters"] == ["experts.down_proj", "experts.gate_up_proj"]
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


def gated(recipe, out, inputs):
    rows = data.heldout_rows(inputs / "dataset", 8)
    return gate.check(recipe, out, inputs / "dataset", rows, lambda: loading.exported_model(recipe, out))


def test_a_fault_in_one_expert_of_one_layer_is_found(inputs, trained, tmp_path):
    from safetensors.numpy import save_file

    recipe, _, out = trained
    gated(recipe, out, inputs)
    damaged = shutil.copytree(out, tmp_path / "out")
    found = tensors(damaged)
    # Columns of lora_B are (rank, expert): PEFT's get_delta_factors.
    found["base_model.model.model.layers.2.mlp.experts.lora_B.weight"][5, 3] *= 1.01
    save_file(found, damaged / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    # As an export would have written it that mistook one number.
    written = Export.read(damaged / MANIFEST)
    (damaged / MANIFEST).unlink()
    write_manifest(recipe, damaged / "adapter", None)
    assert Export.read(damaged / MANIFEST).files != written.files
    with pytest.raises(
        ExportError, match=r"layers\.2\.mlp\.experts\.down_proj, expert 3: its exported adapter is"
    ):
        gated(recipe, damaged, inputs)


@pytest.fixture(scope="module")
def artifact(inputs, tmp_path_factory):
    recipe = recipe_for(inputs)
    return write_artifact(tmp_path_factory.mktemp("artifact"), recipe, inputs / "dataset")


def test_it_merges_expert_by_expert(artifact, tmp_path):
    made = merging.merge(artifact, tmp_path / "merged")
    assert made.experts == 2 * 4 * 4
    assert made.candidates[0].divergence < 1e-8
    assert merging.merge(artifact, tmp_path / "half", dtype="bfloat16").experts == 32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_expert_that_was_not_merged_is_found(dtype, artifact, tmp_path, monkeypatch):
    layers = merging._layers

    def without_one(trained):
        for name, layer, delta, magnitude in layers(trained):
            if name == "model.layers.1.mlp.experts.gate_up_proj":
                delta = delta.clone()
                delta[2] = 0
            yield name, layer, delta, magnitude

    monkeypatch.setattr(merging, "_layers", without_one)
    with pytest.raises(
        ExportError, match=r"layers\.1\.mlp\.experts\.gate_up_proj, expert 2: .* of its adapter is in"
    ):
        merging.merge(artifact, tmp_path / "merged", dtype=dtype)
    assert not (tmp_path / "merged").exists()


def test_adapters_on_experts_are_not_combined(artifact, tmp_path):
    with pytest.raises(ExportError, match="has target_parameters, which PEFT does not combine correctly"):
        combining.combine([artifact, artifact], tmp_path / "both", how="linear")


def by_peft_alone(inputs, folder):
    """Store an adapter that PEFT made, with values everywhere; return its numbers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(inputs / "tiny", dtype="float32"), config)
    model.save_pretrained(folder)
    return experts.fingerprints(model).tolist()


def continued(recipe, inputs, out):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    fit(recipe, inputs, out)
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(inputs / "tiny", dtype="float32"), out / "adapter"
    )
    return experts.fingerprints(model).tolist()


def test_an_adapter_of_peft_alone_is_trained_further(inputs, tmp_path):
    import torch

    before = ranks.run(1, by_peft_alone, inputs, tmp_path / "theirs")
    method = METHOD | {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "adapter": str(tmp_path / "theirs"),
    }
    still = TRAINED | {"learning_rate": 1e-9, "max_steps": 1}
    recipe = recipe_for(inputs, method=method, training=still)
    assert initial_adapter.problems(recipe) == []
    after = ranks.run(1, continued, recipe, inputs, tmp_path / "out")
    assert experts.farthest(torch.tensor(before), torch.tensor(after))[0] < 1e-5
    without = recipe_for(inputs, method=method | {"experts": False, "lora_dropout": 0})
    assert (
        "method.experts: False, but the adapter of method.adapter adapts experts"
        in initial_adapter.problems(without)[0]
    )
    with pytest.raises(RecipeError, match=r"method\.experts: False"):
        planner.make(without)


@pytest.mark.parametrize(
    ("method", "sharding"),
    [
        (METHOD, "none"),
        # Its checkpoints have the experts in one tensor, as the model has, and not as they are published.
        ("full", "none"),
        pytest.param(METHOD, "fsdp", marks=pytest.mark.slow),
    ],
    ids=["lora", "full", "lora fsdp"],
)
def test_it_resumes_to_the_bit(method, sharding, inputs, tmp_path):
    changes = {
        "checkpoints": {"folder": str(tmp_path / "kept"), "save_steps": 1},
        "training": TRAINED | {"max_steps": 4},
    }
    recipe = recipe_for(inputs, sharding, method, **changes)
    calm = recipe_for(inputs, sharding, method, training=TRAINED | {"max_steps": 4})
    world_size = planner.make(recipe).world_size
    whole = ranks.run(world_size, fit_and_die, calm, inputs, tmp_path / "calm", 1)
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(world_size, fit_and_die, recipe, inputs, tmp_path / "killed", 1, 3)
    resumed = ranks.run(world_size, fit_and_die, recipe, inputs, tmp_path / "resumed", 1)
    assert resumed.resumed_from_step == 2
    assert [step.loss for step in resumed.steps] == [step.loss for step in whole.steps]
    mine, theirs = tensors(tmp_path / "resumed"), tensors(tmp_path / "calm")
    assert all((mine[name] == theirs[name]).all() for name in theirs)


def scored(recipe, inputs, out):
    from flytune.evaluation.score import score

    return score(recipe, out, inputs / "dataset")


def test_the_load_of_experts_is_measured_and_shown(inputs, trained):
    from flytune.report import page
    from tests.support.stages import plan_for

    recipe, result, out = trained
    metrics = ranks.run(1, scored, recipe, inputs, out)
    assert [load.layer for load in metrics.expert_loads] == [0, 1, 2, 3]
    rows = data.heldout_rows(inputs / "dataset", recipe.evaluation.max_samples)
    # Each token goes to two of four experts; padding to none.
    chosen = 2 * sum(len(row["input_ids"]) for row in rows)
    assert {sum(counts) for load in metrics.expert_loads for counts in (load.base, load.tuned)} == {chosen}
    assert any(load.base != load.tuned for load in metrics.expert_loads)
    assert metrics.untrained_experts == []
    manifest_of = data.read_manifest(inputs / "dataset")
    shown = page.render(recipe, plan_for(recipe), manifest_of, result, metrics, broken=[])
    assert "Load of the experts" in shown
    assert "An even load is 25 % for each of 4 experts" in shown


def test_an_expert_that_got_no_token_in_training_is_named(trained, tmp_path):
    from safetensors.numpy import save_file

    from flytune.evaluation import expert_load
    from flytune.records import Metrics

    recipe, _, out = trained
    idle = shutil.copytree(out, tmp_path / "out")
    found = tensors(idle)
    for name in (".base_layer.lora_B", ".lora_B"):
        factor = found[f"base_model.model.model.layers.1.mlp.experts{name}.weight"]
        factor.reshape(len(factor), 4, 4)[:, :, 2] = 0
    save_file(found, idle / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    named = expert_load.untrained(loading.exported_model(recipe, idle))
    assert sorted((one.parameter, one.experts) for one in named) == [
        ("model.layers.1.mlp.experts.down_proj", [2]),
        ("model.layers.1.mlp.experts.gate_up_proj", [2]),
    ]
    fields = {"samples": 0, "tokens": 0, "loaded_as": "float32", "answers": [], "seconds": 1.0}
    metrics = Metrics.model_validate(fields | {"untrained_experts": named})
    assert "2 adapters of experts are still as at the start" in metrics.untrained_warning
    assert Metrics.model_validate(fields).untrained_warning == ""
