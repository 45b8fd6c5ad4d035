"""Memory of one GPU in each phase of a run, in closed form, from the sizes of the model and the way it is
trained.

Every constant has a unit and a source, here, in model_states.py and in activations.py;
docs/measured/memory.md has the errors. No constant belongs to one run or one publication: differences between
frameworks are the fields of framework.py.
"""

from dataclasses import dataclass, replace

from training_estimates import activations, contrast, decoding, model_states, towers
from training_estimates.workload import BYTES, Workload

GIB = 2**30
# GiB outside torch's allocator: a CUDA context with the kernels of torch, and NCCL's buffers where there are
# peers.
CUDA_CONTEXT_GIB, NCCL_GIB = 0.55, 0.9
# What the caching allocator cannot give back when memory is short, as a share of the parts that come and go
# within a step (activations, logits, gathered units), twice: see UNMOVABLE. Medians of the published runs
# with fixed shapes and without expandable segments that name both figures (reserved less outside less
# allocated, over those parts), in groups of cause: logits of all tokens are the largest blocks, and are asked
# for in 2 and 4 bytes; gathering parameters mixes sizes. The first is above its median, 0.12, by the verdicts
# on published runs near the limit (docs/measured/memory.md).
FRAGMENTATION, FRAGMENTATION_SHARDED, FRAGMENTATION_LOGITS = 0.14, 0.2, 0.4
# What it holds where there is room, by causes that a simulation of the allocator shows
# (benchmarks/allocator.py): a share of the same parts, since segments are not joined; where parameters are
# gathered, those units once more, on a stream of their own.
CACHED, CACHED_SHARDED, CACHED_UNITS = 0.12, 0.16, 1.0
# While the loss has logits of all tokens, which fit into no segment of a layer: the share of one layer's
# bytes that stays cached, and float32 copies of the logits whose segments nothing else can use (the 16-bit
# ones; of several shifted rows, which are a token shorter than what follows, almost one more).
CACHED_LAYER, CACHED_LOGITS, CACHED_SHIFTED_LOGITS = 0.4, 0.5, 1.25
# The first six were fitted together, on two thirds of the published runs with fixed shapes. Where lengths
# vary and segments cannot grow, float32 copies of the longest row's logits in segments that were made for
# shorter ones: the simulated allocator over 100 rows of LoRA on Yi-6B, lengths below 512 and 1,024 of a
# log-normal distribution (4.3 to 9.3, two draws of each).
CACHED_LENGTHS = 7.0
# Bytes a token and vocabulary entry beyond which a loss has logits in float32 beside those in 16 bits.
WHOLE_LOGITS = 6
# The part of it that stays when memory is short and the allocator has released what it can: a judgement, by
# the verdicts on published runs near the limit.
UNMOVABLE = 0.5

_MOVING = ("activations", "logits and loss", "gathered units", "KV cache", "tower")
TRAINING = ("first step", "steady step")
DRAW = "draw answers"
TOWER, VECTORS = "tower", "vectors"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one GPU: phase -> component -> bytes, at the moment of the phase when most is held."""

    phases: dict[str, dict[str, float]]
    held: float
    """Peak of bytes that the allocator reserves: allocated ones, and free segments that it keeps."""
    unmovable: float
    """The same after it has released all it can, as it does before it fails."""
    outside: dict[str, float]
    """Memory beside the allocator's: CUDA's context and NCCL's buffers."""
    holes: dict[str, float]
    """Bytes of `held` by phase that cannot be released: `unmovable` less allocated bytes."""

    @property
    def allocated(self) -> float:
        """The peak of training, as torch.cuda.max_memory_allocated counts it."""
        return max(sum(self.phases[phase].values()) for phase in (*TRAINING, DRAW) if phase in self.phases)

    @property
    def needed(self) -> float:
        """Smallest GPU memory with which the run does not fail."""
        return self.unmovable + sum(self.outside.values())

    @property
    def tables(self) -> dict[str, dict[str, float]]:
        """Phase -> component -> bytes, with memory beside the allocator's: those of the fullest phase add up
        to `needed`."""
        return {
            phase: parts | {"fragmentation": self.holes[phase]} | self.outside
            for phase, parts in self.phases.items()
        }

    def reserved(self, capacity: float) -> float:
        """Return the peak as torch.cuda.max_memory_reserved counts it on a GPU of `capacity` bytes."""
        outside = sum(self.outside.values())
        return max(self.allocated, min(self.held, capacity - outside))

    def on_device(self, capacity: float) -> float:
        """Return the peak as the driver counts it (nvidia-smi)."""
        return self.reserved(capacity) + sum(self.outside.values())


def memory(workload: Workload, states: model_states.States | None = None) -> Memory:
    """Return the memory of one GPU, by phase and component; `states` are the workload's model states, if they
    are at hand."""
    lasting, batch = states or model_states.of(workload), activations.count(workload)
    moments = _moments(workload, lasting, batch)
    resident = lasting.resident | {"cuBLAS": workload.workspaces}
    if workload.reference == "copy":
        resident["reference model"] = model_states.reference_bytes(workload)
    if workload.decoding and workload.decoding.teacher:
        resident["teacher"] = decoding.teacher_bytes(workload)
    trained = {**resident, VECTORS: contrast.kept_bytes(workload)}
    steady = {**trained, **lasting.optimizer}
    # The first update is the first to have the optimizer's states.
    first = [*moments[:-1], {**moments[-1], **lasting.optimizer}]
    copies = {"autocast copies": lasting.copies}
    evaluated = {
        "activations": max(batch.working, activations.scores_bytes(workload)) + batch.stream,
        "logits and loss": batch.loss,
        "gathered units": lasting.root,
    }
    row = workload.framework.evaluated_row * workload.sequence_length * workload.outputs
    evaluated["logits and loss"] = max(evaluated["logits and loss"], row)
    if workload.decoding and workload.decoding.evaluated_at_a_time:
        # The live model answers the held-out prompts.
        answering = decoding.held_bytes(workload, workload.decoding.evaluated_at_a_time)
        evaluated = {
            name: max(evaluated.get(name, 0.0), answering.get(name, 0.0))
            for name in {**evaluated, **answering}
        }
    unit = max(model_states.layer_unit(workload), model_states.root_unit(workload))
    written = {"gathered units": unit if workload.layout.shards_parameters else 0.0}
    drawn = _drawn(workload, lasting)
    phases = {
        # The first batch is scored twice before the first step (training/loss_check.py).
        "load": resident | copies | {"loading": lasting.load},
        "first step": _fullest(trained, first),
        "steady step": _fullest(steady, moments),
        **({DRAW: steady | copies | drawn} if drawn else {}),
        "evaluate": steady | copies | evaluated,
        "save": steady | written,
        "export": steady | written,
    }
    phases = {
        phase: {name: size for name, size in parts.items() if size >= 1} for phase, parts in phases.items()
    }
    share = _fragmentation(workload, batch)
    totals = [(sum(steady.values()) + sum(parts.values()), _moving(parts)) for parts in moments]
    drawing = [sum(phases[DRAW].values()) + UNMOVABLE * share * _moving(drawn)] if drawn else []
    holes = {phase: UNMOVABLE * share * _moving(parts) for phase, parts in phases.items()}
    for phase, base, parts_of in (("first step", trained, first), ("steady step", steady, moments)):
        least = max(sum(parts.values()) + UNMOVABLE * share * _moving(parts) for parts in parts_of)
        holes[phase] = sum(base.values()) + least - sum(phases[phase].values())
    # The first update's states occupy the memory of activations, in pieces; the next step allocates it again.
    refilled = totals[-1][0] + max(moving for _, moving in totals)
    outside = {"CUDA context": CUDA_CONTEXT_GIB * GIB}
    if workload.degrees.world > 1:
        outside["NCCL"] = NCCL_GIB * GIB
    return Memory(
        phases=phases,
        held=max(refilled, *_cached(workload, lasting, batch, totals), *drawing),
        unmovable=max(*drawing, *(total + UNMOVABLE * share * moving for total, moving in totals)),
        outside=outside,
        holes=holes,
    )


def _drawn(workload: Workload, lasting: model_states.States) -> dict[str, float]:
    """Return components beside the states while answers are drawn; none where none are."""
    if workload.decoding is None:
        return {}
    held = decoding.held_bytes(workload, workload.decoding.at_a_time)
    if workload.decoding.by_vllm:
        # What it has drawn is scored by a forward pass, and by the loss of a step.
        scored = activations.count(replace(workload, micro_batch=workload.decoding.at_a_time))
        held = {"activations": scored.working + scored.stream, "logits and loss": scored.loss}
    if workload.decoding.teacher:
        # It scores them when all are drawn.
        scored = activations.count(decoding.of_teacher(workload))
        held["activations"] = max(held["activations"], scored.working + scored.stream)
        held["logits and loss"] = max(held["logits and loss"], scored.loss)
    return {**held, "gathered units": lasting.root + lasting.units}


def _moments(
    workload: Workload, lasting: model_states.States, batch: activations.Activations
) -> list[dict[str, float]]:
    """Return components beside the states at the fullest moments of a step: loss, last layer, first layer,
    update."""
    layers = workload.geometry.num_hidden_layers
    recomputed = workload.checkpointing != "none"
    # Offloaded checkpoints leave the GPU but for the layers that are copied at the moment, each way.
    deep = 2 * model_states.UNITS_AT_WORK if workload.checkpointing == "offloaded" else layers
    kept = deep * batch.stream if recomputed else layers * batch.kept
    kept /= workload.degrees.gpus_per_process
    at_work = (batch.kept if recomputed else 0.0) + batch.working
    head = workload.geometry.table_parameters * BYTES[workload.compute_dtype]
    all_gradients = lasting.gradients / layers if workload.optimizer.in_backward else lasting.gradients
    accumulated = 0.0 if workload.accumulation == 1 or workload.optimizer.in_backward else lasting.gradients
    head_gradient = (
        float(head)
        if workload.method == "full"
        and workload.head_outputs is None
        and not workload.layout.shards_parameters
        else 0.0
    )
    gathered = lasting.root + lasting.units + lasting.unit_gradients
    # Autocast's copies end with the forward pass; what is not recomputed keeps those of its layers for
    # backward, and recomputing makes those of one layer.
    copied = 2.0 * workload.geometry.layer_parameters if lasting.copies else 0.0
    held = copied if recomputed else lasting.copies
    at_loss = {
        "activations": kept,
        "logits and loss": batch.loss,
        "gathered units": lasting.root,
        "gradients": accumulated,
    }
    last = {
        "activations": kept + at_work,
        "gathered units": gathered,
        "gradients": max(accumulated, head_gradient),
    }
    at_loss |= {"trained tables": _head_table(workload), "autocast copies": lasting.copies}
    last |= {"autocast copies": held}
    retained = layers * workload.framework.retained_streams * batch.stream
    lowest = batch.stream + at_work + retained
    # The gradient of an embedding is dense, also where rows of it are trained.
    table = float(head) if {"embedding"} & {*workload.lora_targets, *workload.tables_by_row} else 0.0
    first = {
        "activations": lowest,
        "gathered units": gathered,
        "gradients": all_gradients,
        "trained tables": table,
    }
    first |= {"autocast copies": copied}
    moments = [at_loss, last, first]
    if workload.image_tokens:
        for moment in moments:
            moment[TOWER] = towers.kept_bytes(workload)
        gradients = all_gradients if workload.trains_tower else accumulated
        moments.append({TOWER: towers.working_bytes(workload), "gradients": gradients})
    if (
        workload.method == "full"
        and workload.geometry.tie_word_embeddings
        and not workload.layout.shards_parameters
    ):
        # The embedding's own gradient is as large as the head's, to which it is added.
        trained_tables = float(workload.geometry.table_parameters * model_states.stored_bytes(workload))
        moments += [
            {"activations": 2 * batch.stream, "gradients": all_gradients, "trained tables": trained_tables}
        ]
    if workload.contrast:
        moments += [{"loss of the vectors": contrast.loss_bytes(workload) - contrast.kept_bytes(workload)}]
    return [*moments, {"gradients": all_gradients, "step temporaries": lasting.update}]


def _head_table(workload: Workload) -> float:
    """Return the bytes of a head that is trained beside an adapter, while the loss is computed.

    TRL's loss sums the gradient of its weight in float32 (trl/kernels/chunked_logprob.py). Where rows are
    trained, PEFT copies the table for each forward pass, with the trained rows in it
    (tuners/trainable_tokens/layer.py).
    """
    if workload.method == "full" or not workload.trains_head:
        return 0.0
    by_row = bool(workload.tables_by_row) and "head" not in workload.lora_targets
    # Its gradient is cast to the dtype of the copy, too.
    width = 4 + (2 * BYTES[workload.compute_dtype] if by_row else 0)
    return float(workload.geometry.table_parameters * width)


def _fragmentation(workload: Workload, batch: activations.Activations) -> float:
    if batch.loss > WHOLE_LOGITS * workload.tokens * workload.geometry.vocab_size:
        return FRAGMENTATION_LOGITS
    return FRAGMENTATION_SHARDED if workload.layout.shards_parameters else FRAGMENTATION


def _cached(
    workload: Workload,
    lasting: model_states.States,
    batch: activations.Activations,
    totals: list[tuple[float, float]],
) -> list[float]:
    """Return bytes that the allocator reserves at the moments of a step, the loss first, where it has room
    for all it caches.

    Args:
        totals: allocated bytes at each moment, and those of them that come and go.
    """
    if workload.variable_length:
        # Blocks of one length do not fit another.
        share, logits = _fragmentation(workload, batch), workload.tokens * workload.geometry.vocab_size
        held = [total + share * moving for total, moving in totals]
        if batch.loss > WHOLE_LOGITS * logits and not workload.framework.expandable_segments:
            held[0] += CACHED_LENGTHS * BYTES["float32"] * logits
        return held
    share, units = CACHED, 0.0
    if workload.layout.shards_parameters:
        share, units = CACHED_SHARDED, CACHED_UNITS * lasting.units
    held = [total + share * moving + units for total, moving in totals]
    logits = workload.tokens * workload.geometry.vocab_size
    if batch.loss > WHOLE_LOGITS * logits:
        shifted = workload.framework.loss.shift_per_word > 0 and workload.micro_batch > 1
        copies = CACHED_SHIFTED_LOGITS if shifted else CACHED_LOGITS
        held[0] = (
            totals[0][0]
            + copies * BYTES["float32"] * logits
            + CACHED_LAYER * (batch.kept + batch.working)
            + units
        )
    return held


def _moving(parts: dict[str, float]) -> float:
    """Return bytes that are allocated and freed in different sizes; the update only has those of the
    parameters."""
    return sum(size for name, size in parts.items() if name in _MOVING)


def _fullest(base: dict[str, float], moments: list[dict[str, float]]) -> dict[str, float]:
    return base | max(moments, key=lambda parts: sum(parts.values()))
