"""How much memory one process of a run needs: a closed form, from the model's sizes alone.

Every constant has a unit and a source. `measured.md` in docs says how far it is off.
"""

from flytune.models import Geometry
from flytune.recipe import Recipe
from flytune.records import Component
from flytune.shapes import GIB, Shape
from flytune.strategies.strategy import WHILE_LOADING, Strategy

# Bytes per token and hidden unit that one decoder layer keeps for backward in 16 bits, with an attention that does not
# store its scores (Korthikanti et al. 2022, "Reducing Activation Recomputation", equation 1, without its 5as/h term).
LAYER_ACTIVATION = 34
# Bytes per token and hidden unit that a checkpointed layer keeps: its 16-bit input.
CHECKPOINT = 2
# The same where the residual stream is float32: after prepare_model_for_kbit_training, and under autocast.
CHECKPOINT_FLOAT32 = 4
# Bytes per token and hidden unit around TRL's chunked loss, which never builds the logits of all tokens.
CHUNKED_LOSS = 4
# GiB outside torch's allocator: a CUDA context, and NCCL's buffers where there are peers.
CUDA_CONTEXT_GIB = 0.55
NCCL_GIB = 0.9
# GiB of a Python process that has imported torch, transformers and trl, without a model (RSS, CPU build).
PROCESS_GIB = 1.0
# The share of a GPU's memory that fragmentation of the allocator may take: batches of varying length, batches of one length
# (packing) with expandable segments.
FRAGMENTATION = 0.1
FRAGMENTATION_PACKED = 0.02


def components(recipe: Recipe, geometry: Geometry, strategy: Strategy, shape: Shape, micro_batch: int) -> list[Component]:
    """The memory table of one process, largest first; bytes on one GPU (on a cpu shape: of one rank).

    Under device_map a process has several GPUs: states and activations are an equal part of them each.
    """
    parts = {name: float(size) for name, size in strategy.states(geometry, recipe, shape.world_size).items()}
    tokens = micro_batch * recipe.data.max_length
    unit = tokens * geometry.hidden_size * (2 if recipe.model.dtype == "float32" else 1)
    layers = geometry.num_hidden_layers
    if recipe.training.activation_checkpointing:
        wide = recipe.method.name == "qlora" or "autocast copies" in parts
        parts["activations"] = float(unit * (CHECKPOINT_FLOAT32 if wide else CHECKPOINT) * layers)
    else:
        parts["activations"] = float(unit * LAYER_ACTIVATION * layers)
    if recipe.data.packing and not recipe.model.attn_implementation.startswith("flash"):
        # The mask that keeps packed samples apart: one byte a pair of tokens, and a copy in 16 bits.
        parts["attention mask"] = 3.0 * tokens * recipe.data.max_length
    parts["loss"] = float(unit * CHUNKED_LOSS)
    if loading := parts.pop(WHILE_LOADING, 0.0):
        # There are no activations yet, and no loss.
        parts[WHILE_LOADING] = max(0.0, loading - parts["activations"] - parts["loss"])
    spread = strategy.gpus_per_process(shape)
    parts = {name: size / spread for name, size in parts.items()}
    if recipe.training.activation_checkpointing:
        # One layer at a time is computed again, in full, wherever it lies.
        parts["layer at work"] = float(unit * LAYER_ACTIVATION)
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
