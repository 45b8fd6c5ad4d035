"""DeepSpeed ZeRO: optimizer states (1), gradients (2) and parameters (3) are partitioned over the processes."""

import json
import tempfile
from pathlib import Path
from typing import Any

from flytune.hardware import Shape
from flytune.recipe import Recipe
from flytune.records import Plan
from flytune.sharding.base import Precision, ShardingBase
from flytune.sharding.layout import Layout

CONFIGS = Path(__file__).resolve().parents[2] / "deepspeed_configs"
_SUFFIX = {"none": "", "cpu": "_offload", "nvme": "_nvme"}


class Zero(ShardingBase):
    """A stage of DeepSpeed ZeRO."""

    stage: int
    no_8bit_optimizer = "DeepSpeed partitions float32 optimizer states, its own"
    resizes = False

    def misfit(self, recipe: Recipe, shape: Shape) -> str | None:
        if shape.world_size < 2:
            return "partitions over processes, and the shape has one"
        if recipe.sharding.offload == "nvme" and not shape.nvme:
            return "offloads to NVMe, and the shape's disk is none"
        return None

    def load_dtype(self, recipe: Recipe) -> str:
        # DeepSpeed makes the float32 master weights itself.
        return recipe.model.dtype

    def precision(self, recipe: Recipe) -> Precision:
        # DeepSpeed computes in the dtype of its own 16-bit weights.
        return "pure"

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """Return the DeepSpeed configuration; the Trainer fills in `auto` values."""
        name = f"zero{self.stage}{_SUFFIX[recipe.sharding.offload]}.json"
        config = dict(json.loads((CONFIGS / name).read_text(encoding="utf-8")))
        for part in config["zero_optimization"].values():
            if isinstance(part, dict) and part.get("device") == "nvme":
                # Not in the file: TMPDIR is the scratch disk, whose path only the pod knows.
                part["nvme_path"] = f"{tempfile.gettempdir()}/flytune-nvme"
        return config

    def arguments(self, recipe: Recipe, shape: Shape) -> dict[str, Any]:
        config = self.config(recipe)
        if not shape.is_gpu:
            # Memory is pinned for copies to a GPU.
            for part in ("offload_optimizer", "offload_param"):
                config["zero_optimization"].get(part, {}).pop("pin_memory", None)
        return {"deepspeed": config, "ddp_backend": None if shape.is_gpu else "gloo"}

    def before_load(self, device_type: str) -> None:
        if device_type == "cuda":
            return
        import deepspeed

        # Otherwise DeepSpeed compiles its shared-memory op here (18 s; a stale lock hangs forever) and looks for MPI.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # zero.Init, which shards the model at load, needs the process group.
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)

    def check(self, trainer: Any) -> str | None:
        stage = trainer.model_wrapped.zero_optimization_stage() if trainer.is_deepspeed_enabled else 0
        return None if stage == self.stage else f"DeepSpeed runs at stage {stage}"


class Zero1(Zero):
    """Partitioned optimizer states."""

    name, stage, offloads = "zero1", 1, ("none", "cpu")
    estimated_as = Layout(name="zero1", deepspeed=True, shards_optimizer=True)


class Zero2(Zero):
    """Partitioned optimizer states and gradients."""

    name, stage, offloads = "zero2", 2, ("none", "cpu")
    estimated_as = Layout(name="zero2", deepspeed=True, shards_optimizer=True, shards_gradients=True)


class Zero3(Zero):
    """Partitioned optimizer states, gradients and parameters."""

    name, stage, offloads = "zero3", 3, ("none", "cpu", "nvme")
    estimated_as = Layout(
        name="zero3",
        deepspeed=True,
        shards_optimizer=True,
        shards_gradients=True,
        shards_parameters=True,
        gathers_in_backward=True,
    )
    packed_selftests = ("lora",)
    no_quantized_dora = "DoRA reads the weights of a layer outside of it, where DeepSpeed cannot gather quantized ones"

    def quant_storage(self, recipe: Recipe) -> str:
        return recipe.model.dtype

    def load_arguments(self, recipe: Recipe, plan: Plan, shape: Shape) -> dict[str, Any]:
        # transformers refuses a device map here: zero.Init places the parameters.
        return {}

    def gather(self, parameter: Any) -> Any:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
