"""DeepSpeed ZeRO: optimizer states (1), gradients (2) and parameters (3) are partitioned over the
processes."""

import json
import os
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from flytune import json_core, patches
from flytune.files import SETTINGS
from flytune.hardware import Shape, load_cluster
from flytune.recipe import OptimizerKind
from flytune.records import Plan
from flytune.sentences import counted
from flytune.sharding import deepspeed_config, operators
from flytune.sharding.base import NOTHING_PAGED, UNSHARDED_COPY, ShardingBase
from flytune.sharding.deepspeed_config import DeepSpeedConfig
from training_estimates.layout import Layout
from training_estimates.workload import Precision

CONFIGS = SETTINGS / "deepspeed_configs"
_SUFFIX = {"none": "", "cpu": "_offload", "nvme": "_nvme"}


class Zero(ShardingBase):
    """A stage of DeepSpeed ZeRO."""

    stage: int
    no_reference_copy = UNSHARDED_COPY
    float32_masters = "DeepSpeed keeps float32 master copies of 16-bit weights"
    resizes = False
    # DeepSpeed casts norms and embeddings back to 16 bits.
    kbit_float32 = False
    divides_sequences = True
    # It reads its states as one file each.
    loads_whole_states = True
    traceable = True
    # Its engine imports Muon whatever the optimizer is.
    libraries = ("deepspeed.runtime.zero.muon.muon_optimizer",)

    def problems(self) -> list[str]:
        if self.recipe.sharding.config is None:
            return []
        return deepspeed_config.problems(self.recipe.sharding.config, self.recipe, self.optimizer, self.stage)

    def misfit(self, shape: Shape) -> str | None:
        if shape.world_size < 2:
            return "partitions over processes, and the shape has one"
        if self.recipe.sharding.offload != "nvme":
            return None
        if not shape.nvme:
            return "offloads to NVMe, and the shape's disk is none"
        paths = [path for path in _nvme_paths(self.content) if path is not None]
        cluster = load_cluster()
        # On a person's own machine too: the recipe may be a stranger's, and DeepSpeed makes folders at any
        # path.
        for path in paths:
            if not _is_scratch(path) and not (
                os.path.normpath(path) == path and cluster.volume_at(path, shape.name)
            ):
                return (
                    f"offloads to nvme_path {path}, which no pod has; leave it out for the scratch disk, "
                    "or mount a volume"
                )
        return None

    def batch_problem(self, micro_batch: int, accumulation: int) -> str | None:
        config = self.recipe.sharding.config or {}
        planned = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": accumulation}
        for name, ours in planned.items():
            if config.get(name, "auto") not in ("auto", ours):
                return f"sharding.config has {name}: {config[name]}, and the plan {ours}"
        return None

    @property
    def layout(self) -> Layout:
        return _layout(super().layout, json.dumps(self.content))

    def reasons(self) -> list[str]:
        if self.recipe.sharding.config is None:
            return []
        layout = self.layout
        parts = [
            f"buckets of {layout.bucket:,} elements"
            + (", two of them (overlap_comm)" if layout.overlaps else "")
        ]
        if layout.shards_parameters:
            parts.append(
                f"{counted(layout.live, 'parameter')} gathered at most, {layout.sub_group:,} updated at a "
                "time"
            )
        offload = self.recipe.sharding.offload
        devices = {"optimizer": layout.optimizer_on or offload}
        if layout.shards_parameters:
            devices["parameters"] = layout.parameters_on or offload
        parts += [f"{what} offloaded to {device}" for what, device in devices.items() if device != "none"]
        return [f"sharding.config: stage {self.stage}, {', '.join(parts)}"]

    def optimizer_problem(self, kind: OptimizerKind) -> str | None:
        if kind.bits == 8:
            return (
                "DeepSpeed flattens the parameters that it partitions, and the embedding's states would "
                "be of 8 bits too"
            )
        if kind.algorithm == "adafactor":
            return (
                "DeepSpeed flattens the parameters that it partitions, and Adafactor's states are of "
                "rows and columns"
            )
        if (self.layout.optimizer_on or self.recipe.sharding.offload) == "none":
            return None
        if kind.paged:
            return NOTHING_PAGED
        # accelerate makes its Adam of any other, and fails to make its Lion (map_pytorch_optim_to_deepspeed).
        return None if kind.algorithm == "adamw" else "DeepSpeed updates offloaded states with its own AdamW"

    @property
    def load_dtype(self) -> str:
        # DeepSpeed makes the float32 master weights itself.
        return self.recipe.model.dtype

    @property
    def precision(self) -> Precision:
        # DeepSpeed computes in the dtype of its own 16-bit weights.
        return "pure"

    @property
    def content(self) -> dict[str, Any]:
        """DeepSpeed configuration as it is written: the recipe's own, or the one in deepspeed_configs/."""
        if self.recipe.sharding.config is not None:
            return self.recipe.sharding.config
        return _shipped(f"zero{self.stage}{_SUFFIX[self.recipe.sharding.offload]}.json")

    def config(self) -> dict[str, Any]:
        """Return the DeepSpeed configuration; the Trainer fills in `auto` values."""
        config = deepspeed_config.filled(self.content, self.recipe)
        for part in config["zero_optimization"].values():
            if isinstance(part, dict) and part.get("device") == "nvme":
                # TMPDIR is the scratch disk, whose path only the pod knows.
                part.setdefault("nvme_path", f"{tempfile.gettempdir()}/flytune-nvme")
        return config

    def arguments(self, shape: Shape) -> dict[str, Any]:
        config = self.config()
        if not shape.is_gpu:
            # Memory is pinned for copies to a GPU.
            for part in ("offload_optimizer", "offload_param"):
                config["zero_optimization"].get(part, {}).pop("pin_memory", None)
        return {"deepspeed": config, "ddp_backend": None if shape.is_gpu else "gloo"}

    def before_load(self, device_type: str) -> None:
        if device_type == "cuda":
            # Where nvidia-ml-py is installed, DeepSpeed takes free memory from NVML, and fails for a
            # CUDA_VISIBLE_DEVICES of UUIDs (_get_nvml_gpu_id). Without it, it takes torch's figures.
            patches.deepspeed.MANAGEMENT_LIBRARY.install(None)
        else:
            # Otherwise DeepSpeed compiles its shared-memory op (18 s) and looks for MPI.
            patches.deepspeed.SHARED_MEMORY.install(False)
        offload = self.layout.optimizer_on or self.recipe.sharding.offload
        if offload != "none":
            operators.load(offload)
        if device_type != "cuda":
            import deepspeed

            # zero.Init, which shards the model at load, needs the process group.
            deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)

    def check(self, trainer: Any) -> str | None:
        stage = trainer.model_wrapped.zero_optimization_stage() if trainer.is_deepspeed_enabled else 0
        return None if stage == self.stage else f"DeepSpeed runs at stage {stage}"


def _is_scratch(path: str) -> bool:
    """Return whether an absolute path is below a folder of temporary files, by its real name."""
    real = Path(os.path.realpath(path))
    return os.path.isabs(path) and any(
        real.is_relative_to(os.path.realpath(place)) for place in ("/tmp", tempfile.gettempdir())
    )


@cache
def _shipped(name: str) -> dict[str, Any]:
    return json_core.load_object((CONFIGS / name).read_bytes())


def _nvme_paths(content: dict[str, Any]) -> list[str | None]:
    parts = [content["zero_optimization"].get(part, {}) for part in ("offload_optimizer", "offload_param")]
    return [part.get("nvme_path") for part in parts if part.get("device") == "nvme"]


@cache
def _layout(base: Layout, config: str) -> Layout:
    zero = DeepSpeedConfig.model_validate(json_core.load(config)).zero_optimization
    optimizer, parameters = zero.offload_optimizer, zero.offload_param
    furthest = max(("none", "cpu", "nvme").index(part.device) for part in (optimizer, parameters))
    offload = ("none", "cpu", "nvme")[furthest]
    # `auto` is the square of the hidden size, which is less than the default of a Layout for models below
    # 14,142.
    bucket, persistent = zero.reduce_bucket_size, zero.stage3_param_persistence_threshold
    layout = replace(
        base,
        bucket=base.bucket if bucket == "auto" else bucket,
        overlaps=zero.overlaps,
        live=zero.stage3_max_live_parameters,
        sub_group=zero.sub_group_size,
        persistent=0 if persistent == "auto" or not base.shards_parameters else persistent,
        optimizer_on=None if optimizer.device == offload else optimizer.device,
        parameters_on=None
        if not base.shards_parameters or parameters.device == offload
        else parameters.device,
    )
    if optimizer.device == "nvme":
        layout = replace(layout, optimizer_buffers=optimizer.buffer_count)
    if parameters.device == "nvme":
        buffers = parameters.buffer_count * parameters.buffer_size
        layout = replace(layout, parameter_buffers=buffers, parameters_in_host=parameters.max_in_cpu)
    return layout


class Zero1(Zero):
    """Partitioned optimizer states."""

    name, stage, offloads = "zero1", 1, ("none", "cpu")
    estimated_as = Layout(name="zero1", deepspeed=True, shards_optimizer=True)


class Zero2(Zero):
    """Partitioned optimizer states and gradients."""

    name, stage, offloads = "zero2", 2, ("none", "cpu")
    no_drawn_answers = None
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
    divided_selftests = ("full",)
    mixture_selftests = (("chats", "experts"), ("packed", "experts"), ("chats", "balance"))
    # engine.py, _zero3_consolidated_16bit_state_dict
    saves_gathered = True
    # zero.Init partitions each parameter as it is made.
    loads_by_tensor = True
    no_8bit_base = (
        "bitsandbytes' 8-bit layers keep their complete weights beside the parameters, so that "
        "nothing is partitioned"
    )
    no_quantized_dora = (
        "DoRA reads the weights of a layer outside of it, where DeepSpeed cannot gather quantized ones"
    )

    @property
    def quant_storage(self) -> str:
        return self.recipe.model.dtype

    def load_arguments(self, plan: Plan, shape: Shape) -> dict[str, Any]:
        # transformers refuses a device map here: zero.Init places the parameters.
        return {}

    def before_gather(self, model: Any) -> None:
        # Where scoring runs the modules that a step runs, DeepSpeed has begun to fetch what a backward pass
        # would need next.
        model.empty_partition_cache()

    def gather(self, parameter: Any) -> Any:
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
