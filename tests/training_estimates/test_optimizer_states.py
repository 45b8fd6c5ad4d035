"""Bytes of optimizer states, compared with the states that the optimizers make."""

import weakref

import pytest

from flytune.hardware import shape_named
from flytune.models import loading
from flytune.objectives.bound import BoundRecipe
from flytune.planning import requirements, workloads
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import OPTIMIZERS, Recipe
from flytune.records.plan import LOAD, STEP
from flytune.sharding import sharding_of
from tests.support.paths import ROOT
from tests.support.tiny import tiny_recipe
from training_estimates import memory, model_states


def work_of(recipe, shape="cpu-1"):
    row = shape_named(shape)
    return workloads.workload(recipe, read_geometry(recipe.model), row, 1, 1)


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if name not in ("adamw_torch", "adamw_bnb_8bit")]
)
def test_states_have_the_bytes_that_are_counted(name, method, base, tmp_path):
    import torch
    from peft import get_peft_model
    from transformers import Trainer, TrainingArguments

    recipe = Recipe.model_validate(tiny_recipe(base, base, {"training.optim": name, "method": method}))
    model = loading.base_model(recipe, "float32")
    if method == "lora":
        model = get_peft_model(model, loading.peft_config(recipe, model))
    args = TrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True)
    optimizer = Trainer(model=model, args=args).create_optimizer()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3) if parameter.requires_grad else None
    optimizer.step()
    # The maps from 8 bits to numbers are one for all parameters.
    kept = [value for state in optimizer.state.values() for key, value in state.items() if "qmap" not in key]
    made = sum(value.nbytes for value in kept if isinstance(value, torch.Tensor) and value.numel() > 1)
    # bitsandbytes keeps states below 4,096 numbers, of norms and small adapters, in 32 bits.
    few = (
        {id(p): p.numel() for p in optimizer.state if p.numel() < 4096} if OPTIMIZERS[name].bits == 8 else {}
    )
    counted = model_states.state_bytes(work_of(recipe), 4)
    more = sum(few.values()) * (work_of(recipe).optimizer.embedding_bytes or 0)
    assert counted <= made + 1
    assert made == pytest.approx(counted, rel=0.01, abs=more)


def test_adafactor_updates_one_tensor_at_a_time_with_two_or_four_of_its_size():
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from transformers.optimization import Adafactor

    class Peak(TorchDispatchMode):
        live, peak = 0, 0

        def __init__(self, own):
            super().__init__()
            self.seen = {tensor.untyped_storage()._cdata for tensor in own}

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            storage = made.untyped_storage() if isinstance(made, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.seen:
                self.seen.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
            return made

        def free(self, key, size):
            self.seen.discard(key)
            self.live -= size

    for dtype, times in ((torch.float32, 2), (torch.bfloat16, 4)):
        parameter = torch.nn.Parameter(torch.ones(256, 256, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        optimizer = Adafactor(
            [parameter], lr=1e-3, scale_parameter=False, relative_step=False, weight_decay=0.1
        )
        with Peak([parameter, parameter.grad]) as seen:
            optimizer.step()
        assert seen.peak == pytest.approx(times * 4 * parameter.numel(), rel=0.02)


def shipped(**training):
    recipe = Recipe.from_yaml(ROOT / "recipes" / "llama-2-70b-full-fsdp.yaml").model_dump()
    recipe["sharding"]["offload"] = "none"
    return Recipe.model_validate(recipe | {"training": recipe["training"] | training})


def test_paged_states_are_counted_on_the_host_and_those_of_one_tensor_on_the_gpu():
    shape = shape_named("a100-80gb-8x2")
    plain, paged = (
        work_of(shipped(optim=name), shape.name) for name in ("adamw_torch_fused", "paged_adamw_32bit")
    )
    there = model_states.of(paged)
    share = plain.geometry.parameters / 16
    assert model_states.of(plain).optimizer["optimizer"] == there.paged == 8 * share
    assert there.optimizer["optimizer"] == model_states.of(plain).paged == 0
    assert there.update - model_states.of(plain).update == pytest.approx(8 * paged.largest_trained / 16)
    assert memory.memory(plain).needed - memory.memory(paged).needed > 7.9 * share
    _, host, *_ = requirements.of(BoundRecipe(shipped(optim="paged_adamw_32bit")), shape, paged, there)
    assert host.phases[STEP]["paged optimizer states"] == round(8 * there.paged)
    assert "paged optimizer states" not in host.phases[LOAD]


def test_bfloat16_masters_take_half_the_memory_of_states_and_checkpoints():
    shape = "a100-80gb-8x2"
    full, half = (work_of(shipped(master_dtype=dtype), shape) for dtype in ("float32", "bfloat16"))
    for of in (
        lambda states: states.resident["weights"],
        lambda states: states.gradients,
        lambda states: states.optimizer["optimizer"],
    ):
        assert of(model_states.of(half)) == of(model_states.of(full)) / 2
    assert requirements.checkpoint_bytes(full) == 12 * full.trained
    assert requirements.checkpoint_bytes(half) == 6 * half.trained


def test_the_page_of_recipes_has_the_bytes_that_are_counted():
    page = (
        (ROOT / "docs/recipes.md")
        .read_text(encoding="utf-8")
        .partition("## Optimizers")[2]
        .partition("\n## ")[0]
    )
    rows = [
        line.split(" | ") for line in page.splitlines() if line.startswith("| ") and "`training" not in line
    ]
    shown = {
        name: row[1] for row in rows for name in row[0].removeprefix("| ").partition(" (")[0].split(", ")
    }
    assert set(shown) == set(OPTIMIZERS)
    for name, text in shown.items():
        made = workloads.optimizer(sharding_of(shipped(optim=name)), shape_named("a100-80gb-8x2"))
        if not made.factored:
            each = 8.0 if made.state_bytes is None else made.state_bytes
            assert text == f"{each:.3g}" + (", paged" if made.paged else "")
