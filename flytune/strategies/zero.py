"""DeepSpeed ZeRO: optimizer states (1), gradients (2) and parameters (3) are partitioned over the processes.

Memory per parameter follows Rajbhandari et al. 2020 (ZeRO), §3 and figure 1: 16-bit weights and gradients, and 12 bytes
of float32 master weights and Adam moments; with float32 weights DeepSpeed keeps the master copy all the same.
"""

import json
from pathlib import Path
from typing import Any

from flytune.models import Geometry
from flytune.recipe import Recipe
from flytune.shapes import Shape
from flytune.strategies.strategy import WHILE_LOADING, Strategy, weight_bytes
from flytune.workload import BYTES

CONFIGS = Path(__file__).resolve().parents[2] / "deepspeed_configs"
_SUFFIX = {"none": "", "cpu": "_offload", "nvme": "_nvme"}


class Zero(Strategy):
    """One stage."""

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

    def states(self, geometry: Geometry, recipe: Recipe, world_size: int) -> dict[str, float]:
        trained, width = geometry.trained(recipe.method), BYTES[recipe.model.dtype]
        adapters = 0 if recipe.method.name == "full" else trained
        base = weight_bytes(geometry, recipe, recipe.model.dtype)
        weights = base + float(adapters * width)
        gradients, optimizer = float(trained * width), 12.0 * trained
        bucket = _bucket_elements(self.config(recipe)) * width
        on_device = recipe.sharding.offload == "none"
        states = {
            "weights": weights / world_size if self.stage == 3 else weights,
            "gradients": gradients / world_size if self.stage >= 2 else gradients,
            "optimizer": optimizer / world_size if on_device else 0.0,
            "buckets": float(min(bucket, gradients)),
        }
        if self.stage == 3:
            live = self.config(recipe)["zero_optimization"]["stage3_max_live_parameters"]
            states["gathered parameters"] = float(min(live * width, weights))
            if recipe.method.name == "qlora":
                # Each process quantizes the whole model, and keeps its part.
                states[WHILE_LOADING] = base * (1 - 1 / world_size)
        return states

    def host_states(self, geometry: Geometry, recipe: Recipe) -> float:
        if recipe.sharding.offload != "cpu":
            return 0.0
        return self._offloaded(geometry, recipe)

    def disk_states(self, geometry: Geometry, recipe: Recipe) -> float:
        return self._offloaded(geometry, recipe) if recipe.sharding.offload == "nvme" else 0.0

    def _offloaded(self, geometry: Geometry, recipe: Recipe) -> float:
        trained, width = geometry.trained(recipe.method), BYTES[recipe.model.dtype]
        # Gradients wait there for the optimizer; parameters do under stage 3 alone.
        return trained * (width + 12.0) + (geometry.parameters * width if self.stage == 3 else 0.0)

    def config(self, recipe: Recipe) -> dict[str, Any]:
        """The DeepSpeed configuration; `auto` values are the Trainer's to fill in."""
        name = f"zero{self.stage}{_SUFFIX[recipe.sharding.offload]}.json"
        return dict(json.loads((CONFIGS / name).read_text(encoding="utf-8")))

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

        # DeepSpeed would compile its shared-memory op now (18 s; a stale lock hangs for ever), and look for MPI.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # zero.Init, which shards the model at load, needs the process group.
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)

    def check(self, trainer: Any) -> str | None:
        stage = trainer.model_wrapped.zero_optimization_stage() if trainer.is_deepspeed_enabled else 0
        return None if stage == self.stage else f"DeepSpeed runs at stage {stage}"


def _bucket_elements(config: dict[str, Any]) -> int:
    zero = config["zero_optimization"]
    size = zero.get("reduce_bucket_size", 500_000_000)
    # `auto` is hidden_size squared: smaller than any model here is sensitive to.
    return int(zero.get("allgather_bucket_size", 0)) + (0 if size == "auto" else int(size))


class Zero1(Zero):
    """Optimizer states."""

    name, stage, offloads = "zero1", 1, ("none", "cpu")


class Zero2(Zero):
    """Optimizer states and gradients."""

    name, stage, offloads = "zero2", 2, ("none", "cpu")


class Zero3(Zero):
    """Optimizer states, gradients and parameters."""

    name, stage, offloads = "zero3", 3, ("none", "cpu", "nvme")

    def quant_storage(self, recipe: Recipe) -> str:
        return recipe.model.dtype

    def load_arguments(self, recipe: Recipe, shape: Shape) -> dict[str, Any]:
        # A device map is refused: zero.Init says where parameters go.
        return {}

    def gather(self, parameter: Any) -> Any:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
