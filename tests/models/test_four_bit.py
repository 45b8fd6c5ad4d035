"""4-bit layers on CPUs for which bitsandbytes repacks weights: with AVX512-BF16 it does so at the first evaluation.

`repack` makes bitsandbytes take any CPU for such a one; the repacking itself runs everywhere. Where the switch is not in force,
these tests fail on every CPU.
"""

import pytest

from flytune import data
from flytune.adapters import merging
from flytune.hardware import shape_named
from flytune.models import loading, probe
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.training import loop
from tests.support import ranks
from tests.support.stages import recipe_for
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four-bit")
    recipe = Recipe.model_validate(tiny_recipe(tiny_base(folder), write_pairs(folder / "pairs.jsonl", 64)))
    data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), folder / "dataset")
    return folder


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


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_scoring_in_mid_training_changes_no_gradient(sharding, inputs, tmp_path):
    def norms(**changes):
        folder = tmp_path / str(len(changes))
        changes |= {"method": "qlora", "sharding": sharding, "checkpoints.folder": str(folder), "training.max_steps": 4}
        size = 1 if sharding in ("none", "device_map") else 2
        changes |= {"hardware.shape": f"cpu-{size}", "training.global_batch_size": 8}
        recipe = Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))
        return [(step.loss, step.grad_norm) for step in ranks.run(size, fit_here, recipe, inputs, folder / "out").steps]

    scored = norms(**{"evaluation.eval_steps": 1, "evaluation.max_samples": 3})
    assert scored == norms()
    assert min(norm for _, norm in scored) > 0


def export_and_merge(recipe, inputs, out):
    fit_here(recipe, inputs, out)
    import torch

    exported = loading.exported_model(recipe, out, device_map={"": "cpu"}).eval()
    before = {name: layer.weight.detach().clone() for name, layer in layers_of(exported).items()}
    live = probe.Answers.read(out / probe.PROBE)
    answers = probe.ask(exported, live.prompts)
    kept = all(torch.equal(before[name], layer.weight) for name, layer in layers_of(exported).items())
    merged = merging._merged(recipe, exported, "dequantized 4-bit weights")
    again = probe.ask(merged.eval(), live.prompts)
    return kept, *(float(probe.distance(live.logits, found.logits).max()) for found in (answers, again))


def test_export_and_merge_read_the_weights_that_were_trained_on(inputs, tmp_path):
    changes = {"method": "qlora", "sharding": "device_map", "checkpoints.folder": str(tmp_path / "checkpoints")}
    recipe = Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))
    kept, exported, merged = ranks.run(1, export_and_merge, recipe, inputs, tmp_path / "out")
    assert kept
    assert exported <= 1e-5
    assert merged <= 1e-4
