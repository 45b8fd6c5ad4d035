"""Bytes of one GPU that a batch does not change: weights, gradients, optimizer, and what the sharding
gathers.

A full fine-tune and an adapter beside a frozen base, each under no sharding, DDP, FSDP, ZeRO (Rajbhandari et
al. 2020) and layers spread over GPUs; differences between frameworks are the fields of framework.py.
"""

from dataclasses import dataclass

from training_estimates import zero
from training_estimates.activations import quantized_head, stream_bytes
from training_estimates.sizes import Geometry
from training_estimates.workload import BYTES, Workload

# Bytes of a quantized weight without its scales.
PACKED = {"nf4": 0.5, "nf4_double": 0.5, "fp4": 0.5, "fp4_double": 0.5, "gptq4": 0.5, "int8": 1.0}
# Bytes of scales for each weight. NF4 and FP4: a float32 for each block of 64; with double quantization 8
# bits for each block and 32 for each 256 blocks (Dettmers et al. 2023, §3). GPTQ: 16 bits of scale and 4 of
# zero for each 128 weights. LLM.int8 (Dettmers et al. 2022) has a float32 for each row of a matrix
# (ROW_SCALE).
_DOUBLE = (8 / 64 + 32 / (64 * 256)) / 8
SCALES = {
    "nf4": 4 / 64,
    "nf4_double": _DOUBLE,
    "fp4": 4 / 64,
    "fp4_double": _DOUBLE,
    "gptq4": 20 / 128 / 8,
    "int8": 0.0,
}
ROW_SCALE = 4
# Bytes of an adapter's parameter: PEFT keeps adapters in float32 (autocast_adapter_dtype), others in the
# dtype of the base.
ADAPTER = 4
# Layers whose parameters FSDP holds gathered: in forward the one that computes and one in flight
# (limit_all_gathers), in backward the one that computes and the one fetched ahead (BACKWARD_PRE; FSDP2 the
# same).
UNITS_AT_WORK = 2


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of one GPU that do not depend on the batch."""

    resident: dict[str, float]
    """Bytes that are always there."""
    copies: float
    """16-bit copies of trained weights, which autocast keeps from their first use until a forward pass
    ends."""
    optimizer: dict[str, float]
    """Bytes that are there after the first update."""
    gradients: float
    """Gradients of all trained parameters, at the end of backward."""
    root: float
    """Parameters gathered during the loss: embedding and head under FSDP and ZeRO-3."""
    units: float
    """Parameters gathered in addition while a layer is computed."""
    unit_gradients: float
    """Gradients of a layer before they are sharded."""
    update: float
    """Temporaries of the update."""
    load: float
    """Bytes beside the resident ones while the model is loaded."""
    offloaded: float
    """Bytes of one process in host memory or on the NVMe disk instead of on its GPU."""
    paged: float
    """Optimizer states in unified memory: all may be in host memory, as only those of the tensor at work must
    be on the GPU."""
    on_disk: float = 0.0
    """Bytes of those offloaded that are on the NVMe disk."""
    buffers: float = 0.0
    """Bytes of one process in host memory for copies to and from the NVMe disk."""


def stored_bytes(workload: Workload) -> int:
    """Return the bytes of one trained weight between steps.

    With mixed precision, accelerate makes parameters that FSDP trains float32 (accelerator.py, "upcasted low
    precision parameters"); FSDP2 by itself keeps their dtype.
    """
    upcast = workload.framework.upcasts and workload.precision == "policy"
    return 4 if upcast else BYTES[workload.weight_dtype]


def quantized_bytes(geometry: Geometry, quantization: str) -> float:
    """Return the bytes of all quantized layers, scales included; the 16 or 256 numbers of a format's table
    are left out."""
    return geometry.quantizable_parameters * PACKED[quantization] + scale_bytes(geometry, quantization)


def scale_bytes(geometry: Geometry, quantization: str) -> float:
    """Return the bytes of the scales of all quantized layers."""
    if quantization == "int8":
        rows = sum(linear.count * linear.columns for linear in geometry.linears if linear.quantizable)
        return float(ROW_SCALE * rows)
    return geometry.quantizable_parameters * SCALES[quantization]


def base_bytes(workload: Workload) -> float:
    """Return the bytes of the frozen base model in a process that holds all of it."""
    sizes, width = workload.geometry, BYTES[workload.weight_dtype]
    if workload.quantization == "none":
        return float(sizes.parameters * width)
    # Under FSDP, parameters that preparing for k-bit training made float32 are gathered in the compute dtype.
    rest_width = 4 if workload.kbit_float32 or workload.framework.prepares_kbit else width
    rest = (sizes.parameters - sizes.quantizable_parameters) * rest_width
    # Each number of a quantized head is packed instead.
    saved = width - PACKED[workload.quantization] - SCALES[workload.quantization]
    return quantized_bytes(sizes, workload.quantization) + rest - saved * quantized_head(workload)


def reference_bytes(workload: Workload) -> float:
    """Return the bytes of a second, frozen model that each process holds, in the dtype that weights are
    loaded in."""
    return float(workload.geometry.parameters * BYTES[workload.weight_dtype])


def _unsharded_bytes(workload: Workload) -> float:
    """Return the bytes of the base that FSDP and ZeRO-3 do not shard: bitsandbytes keeps scales beside the
    parameters."""
    kept = workload.layout.shards_parameters and workload.quantization not in ("none", "gptq4")
    return scale_bytes(workload.geometry, workload.quantization) if kept else 0.0


def _working_copy(workload: Workload) -> float:
    """Return the bytes of the largest linear layer as it is dequantized for a product, one layer at a time.

    4 bits: for each product, in the dtype that it computes in. 8 bits: for the gradient of a product's input,
    in the dtype of that input (bitsandbytes, MatMul8bitLt.backward); the columns of outliers, a thousandth
    (LLM.int8's paper, §4), are less.
    """
    width = stream_bytes(workload) if workload.quantization == "int8" else BYTES[workload.compute_dtype]
    sizes = [linear.rows * linear.columns for linear in workload.geometry.linears if linear.quantizable]
    return float(width * max(sizes, default=0))


def state_bytes(workload: Workload, width: float) -> float:
    """Return the bytes of the optimizer's states for all trained parameters, which have `width` bytes each.

    torch's AdamW keeps two moments in the dtype of the parameter, Lion (Chen et al. 2023) one. bitsandbytes:
    float32, or 8 bits and a float32 for each block of 256, with 32 bits for an embedding (transformers,
    Trainer.create_optimizer). Adafactor (Shazeer and Stern 2018, §3): a number for each row and column of a
    matrix, and for each number of a vector.
    """
    optimizer = workload.optimizer
    if optimizer.factored:
        return 4.0 * _factored(workload)
    state_width = 2 * width if optimizer.state_bytes is None else optimizer.state_bytes
    trains_embedding = workload.method == "full" or "embedding" in workload.lora_targets
    if optimizer.embedding_bytes is None or not trains_embedding:
        return state_width * workload.trained
    table = workload.geometry.table_parameters
    return state_width * (workload.trained - table) + optimizer.embedding_bytes * table


def _factored(workload: Workload) -> int:
    """Return the number of rows and columns of all trained matrices, and of the numbers of all vectors."""
    sizes = workload.geometry
    of_table = sizes.vocab_size + sizes.hidden_size
    if workload.method == "full":
        of_linears = sum(linear.count * (linear.rows + linear.columns) for linear in sizes.linears)
        return of_linears + sizes.embedding_parameters // sizes.table_parameters * of_table + sizes.extra
    of_adapters = sum(
        adapted.count * (adapted.rows + adapted.columns + 2 * workload.rank(adapted))
        for adapted in workload.adapted
    )
    tables = [name for name in ("embedding", "head") if name in workload.lora_targets]
    return round(of_adapters) + len(tables) * of_table


def reentrant(workload: Workload) -> bool:
    """Return whether FSDP's units are gathered within a checkpointed backward pass."""
    return workload.checkpointing != "none" and workload.framework.reentrant


def layer_unit(workload: Workload) -> float:
    """Return the bytes of one gathered layer."""
    sizes = workload.geometry
    if workload.quantization == "none":
        return sizes.layer_parameters * BYTES[workload.compute_dtype]
    packed = sizes.quantizable_parameters / max(1, sizes.linear_parameters)
    width = packed * PACKED[workload.quantization] + (1 - packed) * BYTES[workload.compute_dtype]
    return sizes.layer_parameters * width


def root_unit(workload: Workload) -> float:
    """Return the bytes of embedding and head as they are gathered."""
    return float(workload.geometry.embedding_parameters * BYTES[workload.compute_dtype])


def of(workload: Workload) -> States:
    """Return the states of a workload on one GPU, whatever the batch."""
    if workload.layout.deepspeed:
        return _zero(workload)
    degrees, sizes = workload.degrees, workload.geometry
    is_sharded = workload.layout.shards_parameters
    shards = degrees.gpus_per_process * (degrees.shards if is_sharded else 1)
    full = workload.method == "full"
    width = stored_bytes(workload) if full else _adapter_bytes(workload)
    gradients = workload.trained * width / shards
    states = state_bytes(workload, width) / shards
    paged = states if workload.optimizer.paged else 0.0
    update = _update_bytes(workload, width, gradients, paged)
    states -= paged
    resident = _resident_bytes(workload, shards, gradients)
    offloaded = 0.0
    if workload.offload != "none" and is_sharded:
        offloaded = sum(resident.values()) + states + gradients
        resident = dict.fromkeys(resident, 0.0)
        states = gradients = update = 0.0
    if workload.quantization != "none":
        resident["quantization"] = _working_copy(workload)
    unit = layer_unit(workload) if is_sharded else 0.0
    units = UNITS_AT_WORK if workload.framework.prefetches and not reentrant(workload) else 1
    is_cast = workload.precision == "autocast" and BYTES[workload.weight_dtype] == 4
    has_copies = full and is_cast and not is_sharded
    return States(
        resident=resident,
        copies=2.0 * (sizes.linear_parameters + sizes.embedding_parameters) if has_copies else 0.0,
        optimizer={"optimizer": states},
        gradients=gradients,
        root=root_unit(workload) if is_sharded else 0.0,
        units=units * unit,
        unit_gradients=unit if full else 0.0,
        update=update,
        load=_loading(workload, shards) if workload.quantization != "none" else 0.0,
        offloaded=offloaded,
        paged=paged,
    )


def _resident_bytes(workload: Workload, shards: int, gradients: float) -> dict[str, float]:
    """Return the bytes that are always there; `gradients` are those of all trained parameters on one GPU."""
    resident: dict[str, float] = {}
    if workload.method == "full":
        resident["weights"] = workload.geometry.parameters * stored_bytes(workload) / shards
    else:
        if workload.framework.gathers_adapters and workload.layout.shards_parameters:
            # FSDP wraps only the linear layers, and gathers all other parameters, frozen and trained, as one
            # unit: "no sharding benefit" in litgpt's own notes. Full weights beside the shards.
            resident["gathered whole"] = base_bytes(workload)
        whole = _unsharded_bytes(workload)
        resident["weights"] = (base_bytes(workload) - whole) / shards + whole
        # Each trained number has one of its gradient, of the same width.
        resident["adapters"] = gradients
    if workload.layout.copies_gradients:
        # torch's Reducer copies gradients into buckets, unless gradient_as_bucket_view is set.
        resident["buckets"] = gradients
    return resident


def _update_bytes(workload: Workload, width: float, gradients: float, paged: float) -> float:
    """Return the bytes of the update's temporaries, for trained parameters of `width` bytes each."""
    optimizer = workload.optimizer
    # foreach makes one tensor list of the size of the parameters: the root of the second moment
    # (torch/optim/adamw.py).
    update = gradients if optimizer.implementation == "foreach" and not optimizer.in_backward else 0.0
    if optimizer.factored:
        # The squared gradient and the update in float32, and of 16-bit weights both they and their gradient
        # as well.
        update = (2 if width == 4 else 4) * 4.0 * workload.largest_trained
    if paged:
        # The states of one tensor are fetched for its update.
        update += paged * workload.largest_trained / (workload.trained or 1.0)
    return update


def _loading(workload: Workload, shards: int) -> float:
    """Return the bytes beside the resident ones while a base is loaded that is quantized meanwhile.

    bitsandbytes quantizes only complete matrices: each process holds all of the base before it is sharded.
    What is not quantized becomes float32, one parameter after another: last a table of words, whose 16-bit
    values exist meanwhile (docs/measured/gpu.md).
    """
    if workload.layout.shards_parameters:
        return (base_bytes(workload) - _unsharded_bytes(workload)) * (1 - 1 / shards)
    if not workload.kbit_float32:
        return 0.0
    return float(BYTES[workload.weight_dtype] * workload.geometry.table_parameters)


def _adapter_bytes(workload: Workload) -> float:
    """Return the average bytes of one trained parameter beside a frozen base.

    PEFT makes adapters in float32; layers that it trains fully (modules_to_save) are copies in the dtype of
    the base, which Flytune makes float32 too.
    """
    base = BYTES[workload.weight_dtype]
    if not workload.framework.float32_adapters or not workload.trained:
        return base
    copies = ADAPTER if workload.framework.float32_copies else base
    return ADAPTER + (copies - ADAPTER) * workload.fully_trained / workload.trained


def _zero(workload: Workload) -> States:
    layout, shards, width = workload.layout, workload.degrees.shards, BYTES[workload.compute_dtype]
    full, trained = workload.method == "full", float(workload.trained)
    parts = zero.ZeroParts(layout, shards, trained, width, resident_only=workload.on_cpu)
    base = float(workload.geometry.parameters * width) if full else base_bytes(workload)
    adapters = 0.0 if full else trained * width
    part = shards if layout.shards_parameters else 1
    on_device = workload.optimizer_on == "none"
    whole = 0.0 if full else _unsharded_bytes(workload)
    resident = {"weights": (base - whole) / part + whole, "adapters": adapters / part}
    if workload.parameters_on != "none":
        resident["weights"] = 0.0
    if layout.shards_parameters and layout.persistent:
        resident["parameters that are not sharded"] = _persistent(workload) * width * (1 - 1 / shards)
    if on_device:
        resident["master copies"] = parts.master_bytes
    resident["buckets"] = parts.bucket_bytes
    # The update of a partition (stage 3: of a sub group of it) has its gradients in float32.
    lists = 2 if workload.optimizer.implementation == "foreach" else 1
    update = max(4.0 * parts.updated * lists, parts.update_bytes) if on_device else 0.0
    # The moments are float32 like the master copies that they belong to; under offload they are those of
    # DeepSpeed's Adam.
    moments = (state_bytes(workload, 4) if on_device else zero.MOMENTS * trained) / shards
    paged = moments if workload.optimizer.paged and on_device else 0.0
    if paged:
        # A partition (stage 3: a sub group) is one tensor, whose states are fetched together.
        update += paged * min(1.0, layout.sub_group * shards / trained) if layout.shards_parameters else paged
    # Gradients wait for the optimizer where its states are; parameters are sharded under stage 3 alone.
    away = {"none": 0.0, "cpu": 0.0, "nvme": 0.0}
    away[workload.optimizer_on] += trained * (width + zero.MASTER) / shards + moments
    away[workload.parameters_on] += base / part
    buffers = 4.0 * layout.optimizer_buffers * min(layout.sub_group, trained / shards)
    if workload.parameters_on == "nvme":
        buffers += width * (
            layout.parameter_buffers + min(layout.parameters_in_host, workload.geometry.parameters / shards)
        )
    return States(
        resident=resident,
        copies=0.0,
        optimizer={"optimizer": moments - paged if on_device else 0.0},
        gradients=parts.gradient_bytes if on_device or not layout.shards_parameters else 0.0,
        root=0.0,
        units=parts.live_bytes(base, workload.geometry.table_parameters),
        unit_gradients=0.0,
        update=update,
        load=(base - whole) * (1 - 1 / part) if workload.quantization != "none" else 0.0,
        offloaded=away["cpu"] + away["nvme"],
        paged=paged,
        on_disk=away["nvme"],
        buffers=buffers,
    )


def _persistent(workload: Workload) -> float:
    """Return parameters of the linear layers that are too small to be sharded."""
    return float(
        sum(
            linear.parameters
            for linear in workload.geometry.linears
            if linear.rows * linear.columns < workload.layout.persistent
        )
    )
