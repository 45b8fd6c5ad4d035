"""How much memory one process of a run needs: a closed form, from the model's sizes alone.

Every constant has a unit and a source. `measured.md` in docs says how far it is off.
"""

from flytune import activations
from flytune.closed_form import CUDA_CONTEXT_GIB, NCCL_GIB
from flytune.models import Geometry
from flytune.recipe import Recipe
from flytune.records import Component
from flytune.shapes import GIB, Shape
from flytune.strategies.strategy import WHILE_LOADING, Strategy
from flytune.workload import Workload

# GiB of a Python process that has imported torch, transformers and trl, without a model (RSS, CPU build).
PROCESS_GIB = 1.0
# The share of a GPU's memory that fragmentation of the allocator may take: batches of varying length, batches of one length
# (packing) with expandable segments.
FRAGMENTATION = 0.1
FRAGMENTATION_PACKED = 0.02


def components(recipe: Recipe, strategy: Strategy, shape: Shape, workload: Workload) -> list[Component]:
    """The memory table of one process in a step of `workload`, largest first; bytes on one GPU (on a cpu shape: of one rank).

    What a batch does not change is the strategy's to say; what a batch adds is counted over the layers' code
    (activations.py). Under device_map a process has several GPUs: states and activations are an equal part of them each.
    """
    parts = {name: float(size) for name, size in strategy.states(workload.geometry, recipe, shape.world_size).items()}
    batch = activations.count(workload)
    recomputed = recipe.training.activation_checkpointing
    parts["activations"] = (batch.stream if recomputed else batch.kept) * workload.geometry.num_hidden_layers
    if recipe.data.packing and not recipe.model.attn_implementation.startswith("flash"):
        # The mask that keeps packed samples apart: one byte a pair of tokens, and a copy in 16 bits.
        parts["attention mask"] = 3.0 * workload.tokens * recipe.data.max_length
    parts["loss"] = batch.loss
    if loading := parts.pop(WHILE_LOADING, 0.0):
        # There are no activations yet, and no loss.
        parts[WHILE_LOADING] = max(0.0, loading - parts["activations"] - parts["loss"])
    spread = strategy.gpus_per_process(shape)
    parts = {name: size / spread for name, size in parts.items()}
    # One layer at a time is computed again, in full, wherever it lies.
    parts["layer at work"] = batch.working + (batch.kept if recomputed else 0.0)
    if shape.is_gpu:
        parts["CUDA and NCCL"] = (CUDA_CONTEXT_GIB + (NCCL_GIB if shape.world_size > spread else 0)) * GIB
        parts["fragmentation"] = (FRAGMENTATION_PACKED if recipe.data.packing else FRAGMENTATION) * shape.gpu_memory_gib * GIB
    else:
        parts["process"] = PROCESS_GIB * GIB
    table = [Component(name=name, bytes=round(size)) for name, size in parts.items() if size >= 1]
    return sorted(table, key=lambda component: -component.bytes)


def host_bytes(recipe: Recipe, geometry: Geometry, strategy: Strategy, shape: Shape) -> float:
    """Bytes of host memory that a node needs beside /dev/shm: what is offloaded to it, and its processes."""
    return PROCESS_GIB * GIB * shape.processes + strategy.host_states(geometry, recipe) / shape.nodes


def available_bytes(shape: Shape) -> int:
    """What one process may use: a GPU's memory; on a cpu shape its share of the node's, less /dev/shm."""
    if shape.is_gpu:
        return round(shape.gpu_memory_gib * GIB)
    return round((shape.memory_gib - shape.shared_memory_gib) * GIB / shape.processes)
