"""Quantized bases: their formats, and 4-bit layers on CPUs for which bitsandbytes repacks weights.

With AVX512-BF16 it does so at the first evaluation. `repack` makes bitsandbytes take any CPU for such a one;
the repacking itself runs everywhere. Where the switch is not in force, these tests fail on every CPU.
"""

import json
import shutil

import pytest

from flytune.adapters import merging
from flytune.evaluation import score as evaluation_score
from flytune.hardware import shape_named
from flytune.models import base_problems, loading, probe
from flytune.planning import planner
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import Method, Model, Recipe
from flytune.records import Export
from flytune.training import loop
from tests.support import ranks
from tests.support.stages import recipe_for
from tests.support.tiny import tiny_recipe
from training_estimates import model_states


def repack():
    """Let bitsandbytes believe that this CPU has AVX512-BF16."""
    from bitsandbytes.nn import modules

    modules.has_avx512bf16 = lambda: True


def layers_of(model):
    from bitsandbytes.nn import Linear4bit

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear4bit)}


def forward_both_ways(base, dtype):
    import torch

    repack()
    recipe = recipe_for(base, "qlora", **{"model.dtype": dtype})
    model = loading.base_model(recipe, dtype, device_map={"": "cpu"})
    layers = layers_of(model)
    drawn = torch.Generator().manual_seed(0)
    different = []
    for name, layer in layers.items():
        given = torch.randn(3, 5, layer.in_features, generator=drawn).to(getattr(torch, dtype))
        trained = layer.train()(given.requires_grad_())
        with torch.no_grad():
            scored = layer.eval()(given.detach())
        again = layer.train()(given)
        (gradient,) = torch.autograd.grad(again.float().square().sum(), given)
        if not (torch.equal(trained, scored) and torch.equal(trained, again) and gradient.abs().sum() > 0):
            different.append(name)
    return len(layers), different


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_4_bit_layer_computes_the_same_in_training_and_in_evaluation(dtype, inputs):
    found, different = ranks.run(1, forward_both_ways, inputs / "tiny", dtype)
    assert found == 28  # four decoder layers of seven
    assert different == []


def fit_here(recipe, inputs, out):
    repack()
    plan = planner.make(recipe)
    return loop.fit(recipe, plan, shape_named(plan.shape), inputs / "dataset", out)


SHARDINGS = [
    "none",
    "device_map",
    "zero3",
    "fsdp",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "zero1", "zero2")),
]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_scoring_in_mid_training_changes_no_gradient(sharding, inputs, tmp_path):
    def norms(**changes):
        folder = tmp_path / str(len(changes))
        changes |= {
            "method": "qlora",
            "sharding": sharding,
            "checkpoints.folder": str(folder),
            "training.max_steps": 4,
        }
        size = 1 if sharding in ("none", "device_map") else 2
        changes |= {"hardware.shape": f"cpu-{size}", "training.global_batch_size": 8}
        recipe = Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))
        return [
            (step.loss, step.grad_norm)
            for step in ranks.run(size, fit_here, recipe, inputs, folder / "out").steps
        ]

    scored = norms(**{"evaluation.eval_steps": 1, "evaluation.max_samples": 3})
    assert scored == norms()
    assert min(norm for _, norm in scored) > 0


FORMATS = {
    "nf4_double": {},
    "nf4": {"bnb_4bit_use_double_quant": False},
    "fp4_double": {"bnb_4bit_quant_type": "fp4"},
    "fp4": {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False},
    "int8": {"load_in_8bit": True},
}


def held(base, method):
    """Return bytes of packed weights and of their scales, and the formats and thresholds of the layers."""
    recipe = recipe_for(base, {"name": "qlora", **method}, **{"model.dtype": "float32"})
    model = loading.base_model(recipe, "float32", device_map={"": "cpu"})
    packed, scales, kinds = 0, 0, set()
    for layer in filter(loading.is_quantized, model.modules()):
        packed += layer.weight.nbytes
        if type(layer).__name__ == "Linear8bitLt":
            scales += layer.weight.SCB.nbytes
            kinds.add(("int8", layer.state.threshold))
        else:
            state = layer.weight.quant_state
            scales += state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
            kinds.add((state.quant_type, state.nested))
    return packed, scales, kinds


@pytest.mark.parametrize("name", FORMATS)
def test_a_base_takes_the_bytes_that_the_plan_counts(name, inputs):
    method = FORMATS[name] | ({"llm_int8_threshold": 5.0} if name == "int8" else {})
    packed, scales, kinds = held(inputs / "tiny", method)
    geometry = read_geometry(Model(name_or_path=str(inputs / "tiny")))
    assert Method(name="qlora", **method).quantized == name
    assert packed == model_states.PACKED[name] * geometry.quantizable_parameters
    # The scales of a matrix' last 256 blocks are rounded up.
    assert scales == pytest.approx(model_states.scale_bytes(geometry, name), abs=4 * 28)
    assert kinds == {("int8", 5.0) if name == "int8" else (name[:3], name.endswith("_double"))}


def test_8_bit_layers_report_the_dtype_of_their_inputs_once(inputs, caplog):
    import torch

    recipe = recipe_for(
        inputs / "tiny", {"name": "qlora", "load_in_8bit": True}, **{"model.dtype": "float32"}
    )
    model = loading.base_model(recipe, "float32", device_map={"": "cpu"}).eval()
    for _ in range(2):
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert sum("inputs will be cast" in record.getMessage() for record in caplog.records) <= 1


def export_and_merge(recipe, inputs, out):
    fit_here(recipe, inputs, out)
    import torch

    metrics = evaluation_score.score(recipe, out, inputs / "dataset")  # the gate is its first part
    exported = loading.exported_model(recipe, out, device_map={"": "cpu"}).eval()
    quantized = {name: layer for name, layer in exported.named_modules() if loading.is_quantized(layer)}
    assert len(quantized) == 28
    before = {name: layer.weight.detach().clone() for name, layer in quantized.items()}
    live = probe.Answers.read(out / probe.PROBE)
    answers = probe.ask(exported, live.prompts)
    kept = all(torch.equal(before[name], layer.weight) for name, layer in quantized.items())
    merged = merging._merged(
        recipe,
        exported,
        f"dequantized {8 if recipe.method.load_in_8bit else 4}-bit weights",
        recipe.model.dtype,
    )
    again = probe.ask(merged.eval(), live.prompts)
    distances = [float(probe.distance(live.logits, found.logits).max()) for found in (answers, again)]
    return kept, metrics.loaded_as, *distances


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_training_export_evaluation_and_merge_read_the_same_weights(name, inputs, tmp_path):
    changes = {"method": {"name": "qlora", **FORMATS[name]}, "sharding": "device_map"}
    changes |= {"checkpoints.folder": str(tmp_path / "checkpoints")}
    recipe = Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))
    kept, loaded_as, exported, merged = ranks.run(1, export_and_merge, recipe, inputs, tmp_path / "out")
    assert kept
    assert loaded_as == name.removesuffix("_double")
    assert Export.read(tmp_path / "out" / "export.json").quantized == name
    assert exported <= 1e-5
    # 8-bit layers round their inputs too, which the merged model does not.
    assert merged <= (2e-2 if name == "int8" else 1e-4)


def offloaded_gradients(base):
    """Return the adapters' parameters with and without a gradient: of two plain layers, and of two that hooks
    fetch."""
    import torch
    from accelerate.hooks import attach_align_device_hook
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(target_modules="all-linear")
    )
    for layer in model.get_base_model().model.layers[2:]:
        attach_align_device_hook(
            layer, execution_device="cpu", offload=True, weights_map=dict(layer.state_dict())
        )
    tokens = torch.tensor([[1, 2, 3, 4]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    adapters = {
        name: parameter.grad is not None for name, parameter in model.named_parameters() if "lora" in name
    }
    parts = [[has for name, has in adapters.items() if f".{number}." in name] for number in range(4)]
    return [(sum(part), len(part) - sum(part)) for part in (parts[0] + parts[1], parts[2] + parts[3])]


def test_adapters_of_offloaded_layers_get_no_gradients(inputs):
    """The reason for refusing llm_int8_enable_fp32_cpu_offload: where this fails, accelerate has learned to
    train them."""
    assert offloaded_gradients(inputs / "tiny") == [(28, 0), (0, 28)]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["ddp", "zero2"])
def test_an_8_bit_base_trains_on_two_processes_as_on_one(sharding, inputs, tmp_path):
    losses = []
    for name, size in (("device_map", 1), (sharding, 2)):
        changes = {"method": {"name": "qlora", "load_in_8bit": True, "lora_dropout": 0.0}, "sharding": name}
        changes |= {"hardware.shape": f"cpu-{size}", "training.global_batch_size": 8}
        changes |= {"checkpoints.folder": str(tmp_path / f"checkpoints-{name}")}
        recipe = Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))
        losses.append(
            [step.loss for step in ranks.run(size, fit_here, recipe, inputs, tmp_path / name).steps]
        )
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize(
    ("published", "written", "remedy"),
    [
        ({"load_in_8bit": True}, {}, "write load_in_8bit: true"),
        (
            {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            {"load_in_8bit": True},
            "write load_in_8bit: false",
        ),
        # The defaults of transformers where config.json names no format.
        (
            {"load_in_4bit": True},
            {},
            'write bnb_4bit_quant_type: "fp4", bnb_4bit_use_double_quant: false',
        ),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"bnb_4bit_use_double_quant": False}, None),
    ],
)
def test_a_base_that_is_quantized_already_is_trained_in_the_format_that_the_recipe_says(
    published, written, remedy, inputs, tmp_path
):
    base = shutil.copytree(inputs / "tiny", tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    section = {"quant_method": "bitsandbytes", **published}
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    method = Method.model_validate({"name": "qlora", **written})
    recipe = recipe_for(base, "qlora").model_copy(update={"method": method})
    problems = base_problems.of_base(recipe, read_geometry(recipe.model), in_slices=False)
    assert [remedy in problem for problem in problems] == ([True] if remedy else [])
