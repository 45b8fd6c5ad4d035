"""FSDP2: parameters, gradients and optimizer states sharded over the processes, each parameter by rows."""

import dataclasses
import functools
import os
from typing import Any

from flytune import patches
from flytune.hardware import Shape
from flytune.recipe import OptimizerKind
from flytune.sentences import counted
from flytune.sharding.base import NOTHING_PAGED, UNSHARDED_COPY, ShardingBase
from training_estimates.layout import Layout
from training_estimates.workload import Precision

PREFETCHED_LAYERS = 1
"""Layers that are gathered while one computes; more would hide slower networks, and hold as many more
gathered layers."""


class FullyShardedDataParallel(ShardingBase):
    """torch.distributed.fsdp.fully_shard, applied to each decoder layer."""

    name = "fsdp"
    no_drawn_answers = None
    estimated_as = Layout(
        name="fsdp2",
        shards_optimizer=True,
        shards_gradients=True,
        shards_parameters=True,
        gathers_in_backward=True,
    )
    offloads = ("none", "cpu")
    no_8bit_base = (
        "fully_shard makes plain parameters of 8-bit ones, and bitsandbytes' layers lose the "
        "scales of their rows"
    )
    no_reference_copy = UNSHARDED_COPY
    async_checkpoint = True
    # TRL leaves the preparation out where FSDP shards the model (SFTTrainer: is_sharded_qlora).
    kbit_float32 = False
    traceable = True
    replicates = True
    divides_sequences = True
    packed_selftests = divided_selftests = ("lora",)
    grouped_selftests = ("full", "lora", "qlora")
    mixture_selftests = (("chats", "experts"), ("packed", "experts"), ("chats", "balance"))

    def misfit(self, shape: Shape) -> str | None:
        if shape.world_size < 2:
            return "shards over processes, and the shape has one"
        replicas = self.degrees(shape).replicas
        if shape.world_size % replicas or shape.world_size == replicas:
            able = [count for count in range(1, shape.world_size) if shape.world_size % count == 0]
            return (
                f"with sharding.replicas {replicas} shards in groups of equally many processes, two or more, "
                f"and the shape has {shape.world_size} in all; replicas that go: "
                f"{', '.join(map(str, able))}"
            )
        return None

    @property
    def layout(self) -> Layout:
        replicas = self.recipe.sharding.replicas
        groups = replicas if isinstance(replicas, int) else None
        return dataclasses.replace(super().layout, replicas=groups)

    def optimizer_problem(self, kind: OptimizerKind) -> str | None:
        if kind.bits == 8:
            return (
                "FSDP2 shards no 8-bit optimizer states (each block of 256 has a scale, and processes "
                "cut blocks)"
            )
        if kind.algorithm == "adafactor":
            return (
                "transformers' Adafactor keeps plain states, which torch does not combine with sharded "
                "gradients"
            )
        if kind.paged and self.recipe.sharding.offload != "none":
            return NOTHING_PAGED
        return None

    @property
    def precision(self) -> Precision:
        return "policy"

    @property
    def reads_slices(self) -> bool:
        # bitsandbytes quantizes only complete matrices.
        return self.recipe.method.name != "qlora"

    @property
    def quant_storage(self) -> str:
        return self.recipe.model.dtype

    def arguments(self, shape: Shape) -> dict[str, Any]:
        offload = self.recipe.sharding.offload == "cpu"
        backend = None if shape.is_gpu else "gloo"
        if shape.is_gpu and offload:
            backend = "cpu:gloo,cuda:nccl"
        return {
            "fsdp": True,
            "fsdp_config": {
                "state_dict_type": "SHARDED_STATE_DICT",
                # `shard` has already wrapped the model.
                "auto_wrap_policy": "NO_WRAP",
                "cpu_offload": offload,
                # All shardings use the Trainer's checkpointing: FSDP's draws another dropout when it
                # recomputes a layer, and renames modules, so that PEFT finds no adapter to save.
                "activation_checkpointing": False,
            },
            # Each layer is compiled in `shard`.
            "torch_compile": False,
            # Gradients that are not reduced until the last micro batch would take their full size on every
            # GPU.
            "accelerator_config": {
                "gradient_accumulation_kwargs": {"sync_each_batch": self.recipe.method.name == "full"}
            },
            # Norms of gradients in host memory are reduced there, by gloo.
            "ddp_backend": backend,
        }

    def before_load(self, device_type: str) -> None:
        if device_type == "cuda":
            return
        from accelerate.utils import DistributedType

        # Accelerate runs FSDP on accelerators only, and silently uses DDP elsewhere. For tests and laptops,
        # this makes it believe that there are several; `check` verifies the result.
        patches.accelerate.DISTRIBUTED_TYPE.install(DistributedType.MULTI_GPU)

    def shard(self, trainer: Any) -> None:
        import torch
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        model, accelerator = trainer.model, trainer.accelerator
        dtype = getattr(torch, self.recipe.model.dtype)
        offload = CPUOffloadPolicy(pin_memory=accelerator.device.type == "cuda")
        policies: dict[str, Any] = {
            # Reduced in float32: bfloat16 sums of many ranks' gradients lose small values.
            "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
            "offload_policy": offload if self.recipe.sharding.offload == "cpu" else OffloadPolicy(),
        }
        if (mesh := self._mesh(accelerator.device.type)) is not None:
            policies["mesh"] = mesh
        layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
        for layer in layers:
            if self.recipe.training.torch_compile:
                layer.compile()
            fully_shard(layer, **policies)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        # PEFT's layers that train tables, or rows of them, compute `weight`.
        tied = head is not None and _table(head).weight is _table(embedding).weight
        # An encoder's embedding and its norm are one of the layers.
        sharded = {module for layer in layers for module in layer.modules()}
        if not tied and embedding not in sharded:
            fully_shard(embedding, **policies)
        # TRL's loss uses the head outside its forward: one unit with the norm before it gathers both.
        tail = [
            module
            for module in (_last_norm(model), embedding if tied else None, head)
            if module is not None and module not in sharded
        ]
        if tail:
            fully_shard(tail, reshard_after_forward=False, **policies)
        fully_shard(model, **policies)
        for index, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + PREFETCHED_LAYERS])
            layer.set_modules_to_backward_prefetch(layers[max(0, index - PREFETCHED_LAYERS) : index][::-1])

    def _mesh(self, device_type: str) -> Any:
        """Return the mesh of groups and the processes of each; None if there is one group. Processes of a
        group follow each other, so that a group is within a node where it has no more processes than that."""
        import torch.distributed

        world = torch.distributed.get_world_size()
        nodes = world // int(os.environ.get("LOCAL_WORLD_SIZE", world))
        degrees = self.layout.degrees(world, nodes)
        if degrees.replicas == 1:
            return None
        # A dry run has replaced what makes a mesh: its other processes do not exist.
        make = patches.torch.FSDP_MESH.current()
        return make(device_type, (degrees.replicas, degrees.shards), mesh_dim_names=("replicas", "shards"))

    def ready(self, trainer: Any) -> None:
        if self.recipe.sharding.offload == "cpu":
            # Gradients in host memory are kept and zeroed: page-locked memory is slow to allocate.
            patches.transformers.ZERO_GRAD.on(
                trainer.model, functools.partial(trainer.model.zero_grad, set_to_none=False)
            )
        for index, parameter in enumerate(trainer.model.parameters()):
            local = parameter.to_local()
            if not local.numel():
                # Accelerate identifies the optimizer's parameters by address, and all empty shards have the
                # address 0.
                patches.accelerate.EMPTY_SHARD.on(parameter._local_tensor, functools.partial(int, -1 - index))

    def before_gather(self, model: Any) -> None:
        # The root and the head keep the full parameters of the last forward pass, in its compute dtype.
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()

    def gather(self, parameter: Any) -> Any:
        return parameter.detach().to(parameter.device_mesh.device_type).full_tensor()

    def check(self, trainer: Any) -> str | None:
        from torch.distributed.tensor import DTensor

        full = [
            name for name, parameter in trainer.model.named_parameters() if not isinstance(parameter, DTensor)
        ]
        if not trainer.is_fsdp_enabled:
            return "the Trainer does not know of it"
        return (
            f"{full[0]} and {counted(len(full) - 1, 'more parameter is', 'more parameters are')} not sharded"
            if full
            else None
        )


def _table(layer: Any) -> Any:
    """Return the base's layer below those of PEFT."""
    return getattr(layer, "original_module", layer)


def _last_norm(model: Any) -> Any:
    """Return the norm between the last decoder layer and the head, a child of the decoder."""
    decoder = model.get_decoder()
    norms = [child for child in decoder.children() if "norm" in type(child).__name__.lower()]
    return norms[-1] if norms else None
