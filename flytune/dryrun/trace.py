"""One training step of the real model, layers, adapters and FSDP2, on fake tensors: sizes without memory or
arithmetic.

It patches libraries while it runs, and starts a fake process group: call it in a subprocess (dryrun.run).
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from flytune import patches
from flytune.dryrun import cuda_kernels, layers, partitions, passes, quantized
from flytune.dryrun.allocations import (
    COMMUNICATION,
    GATHERED,
    GRADIENTS,
    KINDS,
    MASTERS,
    OPTIMIZER,
    PARAMETERS,
    AllocationLedger,
    Life,
    local,
)
from flytune.dryrun.case import Case, DryRun, PeakStorage
from flytune.dryrun.partitions import Partitions
from flytune.models import loading, sharded_loading, vocabulary
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import OPTIMIZERS
from training_estimates.degrees import Degrees


@contextmanager
def fake_group(degrees: Degrees) -> Iterator[None]:
    """Start a process group in which this process is rank 0 and the others do not exist."""
    if degrees.world == 1:
        yield
        return
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=degrees.world)
    if degrees.replicas == 1:
        mesh = init_device_mesh("cpu", (degrees.shards,))
    else:
        sizes = (degrees.replicas, degrees.shards)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicas", "shards"))
    try:
        # A mesh reads its ranks, which a fake group does not have.
        with patches.torch.FSDP_MESH.replaced(lambda *_, **__: mesh):
            yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def masks(case: Case) -> Iterator[None]:
    """Give attention the masks that it gets in training: masks of fake tensors cannot depend on values."""
    if case.recipe.data.packing and not passes.is_flash(case):
        yield
    elif passes.is_flash(case):
        # It gets the borders of samples, and makes no mask of them.
        with patches.transformers.MASKS.replaced(lambda *_, **__: None):
            yield
    else:
        # Positions that count up are one sample.
        with patches.transformers.PACKED_SAMPLES.replaced(lambda *_, **__: None):
            yield


# Sizes of blocks that CUDA's caching allocator hands out are multiples of it
# (c10/cuda/CUDACachingAllocator.h, kMinBlockSize).
CUDA_BLOCK = 512
LARGEST = 10

_Pair = tuple[Any, ...]
"""A parameter and its gradient."""


def trace(case: Case, every_layer: bool = False) -> DryRun:
    """Build the model as training does, and run one step; of layers that repeat, a few (layers.py) unless
    `every_layer`."""
    started = time.monotonic()
    with _faked(case):
        ledger = None if every_layer else _few_layers(case)
        ledger = ledger or _all_layers(case)
        drawn = _drawn_bytes(case)
    return _result(case, ledger, drawn, time.monotonic() - started)


def ledger_of(case: Case) -> AllocationLedger:
    """Return the ledger of the step that `trace` runs."""
    with _faked(case):
        return _few_layers(case) or _all_layers(case)


@contextmanager
def _faked(case: Case) -> Iterator[None]:
    """Replace what fake tensors cannot do, and start a group of processes that do not exist."""
    kernels = cuda_kernels.cuda() if _on_cuda(case) else nullcontext()
    group = fake_group(case.sharding.layout.degrees(case.degrees.world, case.degrees.nodes))
    with group, masks(case), cuda_kernels.any_dtype(), _four_bits(case), kernels:
        yield


def _all_layers(case: Case) -> AllocationLedger:
    """Return the ledger of a step of which every layer is traced."""
    model = _adapted(case)
    zero = partitions.of(case, model)
    ledger, model = _ledger(case), _shard(case, model, zero)
    with ledger.watch(fake=True):
        _passes(case, model, ledger, zero)
        _finish(case, model, _trained(model), ledger, zero)
    return ledger


def _few_layers(case: Case) -> AllocationLedger | None:
    """Return the ledger of a step of which few layers are traced; None where layers do not repeat."""
    if _has_copy(case):
        return None  # a layer of the one model has no part in the passes of the other
    larger = _adapted(case)
    if (repetition := layers.find(larger)) is None:
        return None
    smaller, complete = _adapted(case), partitions.of(case, larger)
    traces = []
    for model, units in ((larger, repetition.units - 1), (smaller, repetition.units)):
        count = layers.leave_out(model, repetition, units)
        zero = complete and complete.again()
        model, ledger = _shard(case, model, zero), _ledger(case)
        traced = layers.Trace(ledger, repetition, count)
        with ledger.watch(fake=True), traced.noted(model):
            _passes(case, model, ledger, zero)
            traces.append(traced)
            if len(traces) == 1:
                continue
            if not traced.predicts(traces[0]):
                return None
            copies = traced.extend(repetition.units)
            _finish(case, model, _with_copies(_trained(model), copies, ledger), ledger, zero)
    return ledger


def _with_copies(
    trained: list[_Pair], copies: Mapping[int, list[Life]], ledger: AllocationLedger
) -> list[_Pair]:
    """Return trained parameters with those of the layers that were left out, as their lives in the ledger
    have them."""
    import torch

    result = []
    for pair in trained:
        result.append(pair)
        lives = [copies.get(id(ledger.life_of(tensor)), []) for tensor in pair]
        for lives_of_copy in zip(*lives, strict=True):
            ledger.paused = True
            pair_of_copies = tuple(torch.empty_like(tensor) for tensor in pair)
            ledger.paused = False
            for tensor, life in zip(pair_of_copies, lives_of_copy, strict=True):
                ledger.adopt(tensor, life)
            result.append(pair_of_copies)
    return result


def _four_bits(case: Case) -> AbstractContextManager[None]:
    return quantized.on_fake_tensors(_on_cuda(case)) if case.recipe.method.name == "qlora" else nullcontext()


def _on_cuda(case: Case) -> bool:
    return case.profile.kernels == "cuda"


def _ledger(case: Case) -> AllocationLedger:
    return AllocationLedger(CUDA_BLOCK if _on_cuda(case) else 1)


def _local_model(case: Case) -> Any:
    # FlashAttention's package is not needed: cuda_kernels.cuda() replaces sdpa by its buffers.
    sdpa = {"attn_implementation": "sdpa"} if passes.is_flash(case) else {}
    # Its folder has no tokenizer; frequencies take the same memory whatever they are.
    added: dict[str, Any] = {"extra_special_tokens": [], "rope_scaling": None}
    return case.recipe.model.model_copy(update={"name_or_path": case.config, "revision": None} | sdpa | added)


def _base(case: Case) -> Any:
    """Return the base model on the meta device; with the head that is trained."""
    dtype = case.profile.weight_dtype or case.sharding.load_dtype
    model = sharded_loading.meta_model(_local_model(case), dtype, case.head)
    model.config.use_cache = False
    case.head.complete(model, lambda: 0)
    return model


def _has_copy(case: Case) -> bool:
    return case.objective.reference() == "copy"


def _reference_model(case: Case) -> Any:
    """Return the second, frozen model; None if the objective has none."""
    if not _has_copy(case):
        return None
    model = _base(case).requires_grad_(False).eval()
    passes.prepare(case, model)
    return model


def _adapted(case: Case) -> Any:
    """Return the model on the meta device with its adapters."""
    import torch
    from peft import get_peft_model

    recipe, sharding = case.recipe, case.sharding
    model = _base(case)
    if recipe.method.name == "qlora":
        model = quantized.replace_layers(model, recipe, sharding.quant_storage)
    if recipe.method.name != "full":
        with torch.device("meta"):
            # Which tokens are trained has no effect on memory.
            added = list(range(len(recipe.model.extra_special_tokens)))
            config = loading.peft_config(recipe, model, added)
            config.init_lora_weights = True  # of meta tensors there are no singular values
            model = get_peft_model(model, config)
            vocabulary.allow_loss(model)
            if sharding.precision != "pure":
                loading.train_in_float32(model)
    return model


def _shard(case: Case, model: Any, zero: Partitions | None) -> Any:
    """Set checkpointing, loss and sharding as flytune.training.trainer.build does."""
    import torch

    recipe, sharding = case.recipe, case.sharding
    if recipe.method.name == "qlora":
        quantized.pack(model)
    if zero is not None:
        zero.cast(model)
    passes.prepare(case, model)
    if recipe.training.activation_checkpointing:
        if recipe.method.name != "full":
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    sharding.shard(SimpleNamespace(model=model, accelerator=SimpleNamespace(device=torch.device("cpu"))))
    return model.train()


def _passes(case: Case, model: Any, ledger: AllocationLedger, zero: Partitions | None) -> None:
    """Load the model, and run forward and backward."""
    reference = _load(case, model, ledger, zero)
    if zero is not None:
        zero.before_forward(ledger)
    with ledger.paths(model), passes.divided(case):
        loss = passes.forward(case, model, reference, ledger)
        ledger.stage("backward")
        loss.backward()
        del loss
    if zero is not None:
        zero.after_backward()
    ledger.mark((parameter.grad for parameter in model.parameters() if parameter.grad is not None), GRADIENTS)


def _drawn_bytes(case: Case) -> int:
    """Return the peak while answers are drawn, without the optimizer's states; 0 where none are."""
    if case.objective.draws() is None:
        return 0
    model = _adapted(case)
    zero = partitions.of(case, model)
    ledger, model = _ledger(case), _shard(case, model, zero)
    with ledger.watch(fake=True):
        reference = _load(case, model, ledger, zero)
        passes.draw(case, model, ledger)
        del reference
    return max(ledger.totals(partitions.on_host(case)))


def _load(case: Case, model: Any, ledger: AllocationLedger, zero: Partitions | None) -> Any:
    """Load the model, and return the reference model beside it, if there is one."""
    import torch

    ledger.stage("load")
    reference = _reference_model(case)
    for module in (model, reference) if reference is not None else (model,):
        sharded_loading.allocate(module, "cpu")
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            _loaded(ledger, tensor, name.rpartition(".")[0])
    draws = case.objective.draws()
    if draws and draws.teacher:
        # It scores the drawn answers before the forward pass, whose activations are not there yet.
        dtype = getattr(torch, draws.teacher.dtype)
        model.teacher_weights = torch.empty(read_geometry(draws.teacher).parameters, dtype=dtype)
        _loaded(ledger, model.teacher_weights, "teacher")
    if case.recipe.method.name == "qlora":
        model.table_of_scales = quantized.make_table()  # kept as long as the model
        for name, layer in quantized.layers(model).items():
            for tensor in quantized.scales(layer, case.recipe):
                _loaded(ledger, tensor, name)
    if case.sharding.estimated_as.copies_gradients:
        # torch's Reducer has buckets for all gradients, of which each parameter's part is recorded here.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.bucket = torch.empty_like(parameter)
                _loaded(ledger, parameter.bucket, name.rpartition(".")[0], COMMUNICATION)
    if zero is not None:
        zero.load(model, ledger)
    return reference


def _loaded(ledger: AllocationLedger, tensor: Any, path: str, kind: str = PARAMETERS) -> None:
    """Set kind and module of a tensor that is there from the start."""
    if life := ledger.life_of(tensor):
        life.kind, life.module = kind, path


def _trained(model: Any) -> list[_Pair]:
    """Return the local shards of trained parameters with their gradients."""
    return [
        (local(parameter.detach()), local(parameter.grad))
        for parameter in model.parameters()
        if parameter.grad is not None
    ]


def _embeddings(model: Any) -> set[int]:
    """Return the storages of trained tables, by which `_update` knows them."""
    import torch

    tables = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    return {local(table.detach()).untyped_storage()._cdata for table in tables}


def _finish(
    case: Case, model: Any, trained: list[_Pair], ledger: AllocationLedger, zero: Partitions | None
) -> None:
    """Update the trained parameters, and free their gradients."""
    import torch

    if zero is None:
        _update(case, trained, ledger, _embeddings(model))
        model.zero_grad()
        return
    ledger.stage("optimizer")
    ledger.module = "optimizer"
    zero.before_update(ledger)
    weights = [weight for weight, _ in trained]  # those of layers that were left out have no other reference
    trained.clear()
    model.zero_grad()
    masters = [torch.nn.Parameter(master) for master in zero.held[MASTERS]]
    if OPTIMIZER in partitions.on_host(case):
        # DeepSpeed's own Adam updates them there.
        ledger.mark([copy for master in masters for copy in (master.clone(), master.clone())], OPTIMIZER)
    else:
        _step(case, masters, ledger, set(), zero)
    zero.after_update()
    del weights


def _update(case: Case, trained: list[_Pair], ledger: AllocationLedger, embeddings: set[int]) -> None:
    """Clip gradients and run the optimizer's step as the Trainer does: fused, or torch's default on the
    device (CUDA: foreach).

    It uses the local shard of each parameter: DTensor would do the same, more slowly.
    """
    import torch

    ledger.stage("optimizer")
    ledger.module = "optimizer"
    parameters = []
    for weights, gradient in trained:
        parameters.append(torch.nn.Parameter(weights))
        parameters[-1].grad = gradient
    torch.nn.utils.clip_grad_norm_(parameters, case.recipe.training.max_grad_norm, foreach=_on_cuda(case))
    _step(case, parameters, ledger, embeddings)


def _step(
    case: Case,
    parameters: list[Any],
    ledger: AllocationLedger,
    embeddings: set[int],
    zero: Partitions | None = None,
) -> None:
    """Run the optimizer's step; under ZeRO, one part of the master copies after the other has gradients."""
    import torch

    name = case.sharding.optimizer
    if OPTIMIZERS[name].library == "bitsandbytes":
        ledger.mark(
            quantized.optimizer_states(parameters, OPTIMIZERS[name], _on_cuda(case), embeddings), OPTIMIZER
        )
        return
    optimizer = _optimizer(name, parameters, _on_cuda(case))
    if zero is None:
        optimizer.step()
    else:
        for part in parameters:
            part.grad = zero.gradient_of(part)
            optimizer.step()
            part.grad = None
    states = [value for state in optimizer.state.values() for value in state.values()]
    ledger.mark((value for value in states if isinstance(value, torch.Tensor)), OPTIMIZER)


def _optimizer(name: str, parameters: list[Any], on_cuda: bool) -> Any:
    """Return an optimizer of torch or transformers, as the Trainer makes it
    (transformers/trainer_optimizer.py)."""
    import torch
    from transformers import Adafactor

    kind = OPTIMIZERS[name].algorithm
    if kind == "adafactor":
        return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)
    if kind == "sgd":
        return torch.optim.SGD(parameters, foreach=on_cuda)
    fused = "fused" in name
    return torch.optim.AdamW(parameters, fused=fused or None, foreach=None if fused else on_cuda)


def _result(case: Case, ledger: AllocationLedger, drawn: int, seconds: float) -> DryRun:
    """Return the peaks of the step that ran, and of the next, which is the same but has optimizer states from
    the start."""
    ledger.assign_kinds()
    host = partitions.on_host(case)
    states = 0 if OPTIMIZER in host else sum(life.bytes for life in ledger.lives if life.kind == OPTIMIZER)
    first, steady = ledger.totals(host), [total + states for total in ledger.totals(host | {OPTIMIZER})]
    spans = {name: (start, end) for name, start, end in ledger.spans()}
    loaded = spans.pop("load")[1]
    # Buckets are allocated after loading; ZeRO-3 gathers parameters for the forward pass.
    phases = {
        "load": first[loaded]
        - sum(life.bytes for life in ledger.alive(loaded) if life.kind in (COMMUNICATION, GATHERED))
    }
    for step, totals in (("first step", first), ("steady step", steady)):
        phases |= {f"{step}, {name}": max(totals[start : end + 1]) for name, (start, end) in spans.items()}
    last = max(spans, key=lambda name: phases[f"steady step, {name}"])
    peak = steady.index(phases[f"steady step, {last}"], spans[last][0])
    alive = [life for life in ledger.lives if life.kind == OPTIMIZER and OPTIMIZER not in host]
    alive += [life for life in ledger.alive(peak) if life.kind not in host | {OPTIMIZER}]
    kinds = {kind: sum(life.bytes for life in alive if life.kind == kind) for kind in KINDS}
    largest = sorted(alive, key=lambda life: -life.bytes)[:LARGEST]
    return DryRun(
        phases=phases,
        kinds={kind: size for kind, size in kinds.items() if size},
        peak_bytes=steady[peak],
        peak_phase=f"steady step, {last}",
        peak_module=max(ledger.alive(peak), key=lambda life: life.born).module,
        largest=[
            PeakStorage(
                bytes=storage.bytes,
                kind=str(storage.kind),
                module=storage.module,
                operation=storage.operation,
            )
            for storage in largest
        ],
        drawing_bytes=drawn + states if drawn else 0,
        host_bytes=sum(life.bytes for life in ledger.lives if life.kind in host),
        seconds=seconds,
    )
