"""Every key of a DeepSpeed configuration that the plan takes, in steps of two ranks."""

import copy

import pytest

from flytune.mistakes import alternatives, is_model
from flytune.recipe import Recipe
from flytune.sharding import sharding_of
from flytune.sharding.deepspeed_config import DeepSpeedConfig
from tests.support import ranks
from tests.support.recipes import content

BATCHES = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
OTHER = {
    "gradient_predivide_factor": [2.0],
    "communication_data_type": ["fp16", "bf16", "fp32"],
    "zero_optimization.overlap_comm": [True, False],
    "fp16.loss_scale": [8.0],
    "fp16.initial_scale_power": [0, 8],
    "comms_logger.prof_ops": [["all_reduce"]],
    "flops_profiler.recompute_fwd_factor": [1.0],
    "flops_profiler.module_depth": [-1, 0, 1],
    "zero_optimization.offload_optimizer.device": ["cpu"],
    "zero_optimization.offload_param.device": ["cpu"],
}
"""Values that are tried where they do not follow from a key's type."""
THE_RECIPES = {
    *BATCHES,
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
    "zero_optimization.stage",
    "optimizer.type",
    "optimizer.params",
    "scheduler.type",
    "scheduler.params",
    "zero_optimization.offload_optimizer.nvme_path",
    "zero_optimization.offload_param.nvme_path",
}
"""Keys whose values must be the recipe's (test_deepspeed_config.py), and those of a disk."""


def leaves(model, prefix=""):
    """Yield the dotted name and the field of each key."""
    for name, field in model.model_fields.items():
        sections = [alternative for alternative in alternatives(field.annotation) if is_model(alternative)]
        for section in sections:
            yield from leaves(section, f"{prefix}{name}.")
        if not sections:
            yield f"{prefix}{name}", field


def values_of(name, field):
    """Return the values of a key that are tried."""
    if name in OTHER:
        return OTHER[name]
    kinds = alternatives(field.annotation)
    if bool in kinds:
        return [True, False]
    assert int in kinds, f"{name}: no value of it is tried; write some into OTHER, or refuse the key"
    return [0, 1, 1000]


def cases(stage):
    """Return a configuration for each value of each key that the plan takes, and those that it refuses."""
    taken, refused = {"": {"zero_optimization": {"stage": stage}}}, []
    for name, field in leaves(DeepSpeedConfig):
        for value in [] if name in THE_RECIPES else values_of(name, field):
            config = {"zero_optimization": {"stage": stage}}
            *above, last = name.split(".")
            section = config
            for part in above:
                section = section.setdefault(part, {})
            section[last] = value
            if name.startswith(("comms_logger", "flops_profiler")):
                section.setdefault("enabled", True)
            if "offload_" in name:
                section.setdefault("device", "cpu")
            dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(name.partition(".")[0], "float32")
            own = content(sharding={"name": f"zero{stage}", "config": copy.deepcopy(config)})
            recipe = Recipe.model_validate(own | {"model": own["model"] | {"dtype": dtype}})
            if sharding_of(recipe).problems():
                refused.append(f"{name}={value}")
            else:
                for kind, its_dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
                    config.setdefault(kind, {})["enabled"] = dtype == its_dtype
                taken[f"{name}={value}"] = config
    return taken, refused


def steps(configs):
    """Return the losses of two steps with each configuration, on the first rank."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    # torch computes float16 on a CPU; DeepSpeed refuses it there by a table.
    kind = type(get_accelerator())
    kind.is_fp16_supported = lambda self: True
    kind.supported_dtypes = lambda self: [torch.float, torch.bfloat16, torch.float16]
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
    return {name: _steps(config) for name, config in configs.items()}


def _steps(config):
    import deepspeed
    import torch

    torch.manual_seed(0)
    dtypes = [
        dtype
        for kind, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
        if config.get(kind, {}).get("enabled")
    ]
    layers = [torch.nn.Embedding(16, 8), torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 16)]
    model = torch.nn.Sequential(*layers).to(*dtypes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = BATCHES | {
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings | config)[0]
    generator, losses = torch.Generator().manual_seed(torch.distributed.get_rank()), []
    for _ in range(4):
        ids = torch.randint(0, 16, (2, 4), generator=generator)
        loss = torch.nn.functional.cross_entropy(engine(ids).float().view(-1, 16), ids.view(-1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_value_that_the_plan_takes_trains_and_what_deepspeed_refuses_is_refused_before(stage):
    taken, refused = cases(stage)
    assert len(taken) > 70
    divisors = {"gradient_predivide_factor=2.0", "prescale_gradients=True"} if stage > 1 else set()
    decided = {name for name in refused if not name.endswith("=0") and "offload_param" not in name}
    assert decided == divisors | {
        "zero_optimization.compute_grad_norm=False",
        "zero_optimization.allgather_bucket_size=1",
    }
    found = ranks.run(2, steps, taken)
    plain = found.pop("")
    for name, losses in found.items():
        # float16, bfloat16 and their collectives round; a sum that is divided wrongly is off by far more.
        assert losses == pytest.approx(plain, abs=2e-3), name
