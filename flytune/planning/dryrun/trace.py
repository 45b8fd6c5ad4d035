"""One training step of the real model, layers, adapters and FSDP2, on fake tensors: sizes without memory or arithmetic.

It patches libraries while it runs, and starts a fake process group: call it in a subprocess (dryrun.run).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

from flytune.data import Collator
from flytune.models import host_memory, loading, sharded_loading, vocabulary
from flytune.planning.dryrun import cuda_kernels
from flytune.planning.dryrun.allocations import FORWARD, GRADIENTS, KINDS, OPTIMIZER, PARAMETERS, Ledger, local
from flytune.planning.dryrun.case import Case, DryRun, Storage
from flytune.sharding import sharding_of

# Sizes of blocks that CUDA's caching allocator hands out are multiples of it (c10/cuda/CUDACachingAllocator.h, kMinBlockSize).
CUDA_BLOCK = 512
LARGEST = 10


def trace(case: Case) -> DryRun:
    """Build the model as training does, and run one step."""
    started = time.monotonic()
    on_cuda = case.profile.kernels == "cuda"
    ledger = Ledger(CUDA_BLOCK if on_cuda else 1)
    with _fake_group(case.world_size), _masks(case), cuda_kernels.cuda() if on_cuda else nullcontext():
        model = _build(case)
        with ledger.watch(fake=True):
            ledger.stage("load")
            sharded_loading.allocate(model, "cpu")
            ledger.mark([*model.parameters(), *model.buffers()], PARAMETERS)
            with ledger.paths(model):
                _step(case, model, ledger)
    return _result(case, ledger, time.monotonic() - started)


@contextmanager
def _fake_group(world_size: int) -> Iterator[None]:
    """Start a process group in which this process is rank 0 and the others do not exist."""
    if world_size == 1:
        yield
        return
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp._fully_shard import _fsdp_init
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    try:
        # A mesh reads its ranks, which a fake group does not have.
        with mock.patch.object(_fsdp_init, "init_device_mesh", return_value=mesh):
            yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _masks(case: Case) -> Iterator[None]:
    """Give attention the masks that it gets in training: masks of fake tensors cannot depend on values."""
    from transformers import masking_utils

    if case.recipe.data.packing and not _is_flash(case):
        yield
    elif _is_flash(case):
        # It gets the borders of samples, and makes no mask of them.
        with mock.patch.dict(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, sdpa=lambda *_, **__: None):
            yield
    else:
        # Positions that count up are one sample.
        with mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None):
            yield


def _is_flash(case: Case) -> bool:
    return case.recipe.model.attn_implementation.startswith("flash")


def _local_model(case: Case) -> Any:
    # FlashAttention's package is not needed: cuda_kernels.cuda() replaces sdpa by its buffers.
    sdpa = {"attn_implementation": "sdpa"} if _is_flash(case) else {}
    # Its folder has no tokenizer.
    added: dict[str, Any] = {"extra_special_tokens": []}
    return case.recipe.model.model_copy(update={"name_or_path": case.config, "revision": None} | sdpa | added)


def _build(case: Case) -> Any:
    """The model on the meta device: adapters, checkpointing, loss and sharding as in flytune.training.trainer.build."""
    import torch
    from peft import get_peft_model
    from trl.trainer.utils import add_fused_lm_head

    recipe, sharding = case.recipe, sharding_of(case.recipe)
    base = model = sharded_loading.meta_model(_local_model(case), case.profile.weight_dtype or sharding.load_dtype(recipe))
    model.config.use_cache = False
    if recipe.method.name != "full":
        with torch.device("meta"):
            # Which tokens are trained has no effect on memory.
            added = list(range(len(recipe.model.extra_special_tokens)))
            config = loading.peft_config(recipe, model, added)
            config.init_lora_weights = True  # of meta tensors there are no singular values
            model = get_peft_model(model, config)
            vocabulary.allow_loss(model)
            if sharding.precision(recipe) != "pure":
                loading.train_in_float32(model)
    if case.profile.loss == "chunked":
        add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
        if case.profile.kernels == "cpu":
            host_memory.use_small_loss_tiles()
    if recipe.training.activation_checkpointing:
        if recipe.method.name != "full":
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    sharding.shard(SimpleNamespace(model=model, accelerator=SimpleNamespace(device=torch.device("cpu"))), recipe)
    return model.train()


def _step(case: Case, model: Any, ledger: Ledger) -> None:
    ledger.stage(FORWARD)
    loss = _loss(case, model, _batch(case))
    ledger.stage("backward")
    loss.backward()
    del loss
    trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
    ledger.mark((parameter.grad for parameter in trained), GRADIENTS)
    ledger.stage("optimizer")
    ledger.module = "optimizer"
    _update(case, trained, ledger)
    model.zero_grad()


def _update(case: Case, trained: list[Any], ledger: Ledger) -> None:
    """Clip gradients and run AdamW's step as the Trainer does: fused, or torch's default on the device (CUDA: foreach).

    It uses the local shard of each parameter: DTensor would do the same, more slowly.
    """
    import torch

    parameters = []
    for parameter in trained:
        parameters.append(torch.nn.Parameter(local(parameter.detach())))
        parameters[-1].grad = local(parameter.grad)
    on_cuda = case.profile.kernels == "cuda"
    torch.nn.utils.clip_grad_norm_(parameters, case.recipe.training.max_grad_norm, foreach=on_cuda)
    fused = "fused" in sharding_of(case.recipe).optimizer(case.recipe)
    optimizer = torch.optim.AdamW(parameters, fused=fused or None, foreach=None if fused else on_cuda)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    ledger.mark((value for value in states if isinstance(value, torch.Tensor)), OPTIMIZER)


def _batch(case: Case) -> dict[str, Any]:
    data, flash = case.recipe.data, _is_flash(case)
    row: dict[str, list[int]] = {"input_ids": [1] * data.max_length, "labels": [1] * data.max_length}
    if data.packing:
        row["seq_lengths"] = [data.max_length]
    batch = Collator(0, data.max_length, flatten=flash)([row] * case.micro_batch)
    if flash or (case.profile.fixed_length and not data.packing):
        kept = {"input_ids", "labels"}
        return {key: value for key, value in batch.items() if key in kept}
    return batch


def _loss(case: Case, model: Any, batch: dict[str, Any]) -> Any:
    """Return the loss as TRL's compute_loss computes it, or as the model does."""
    import torch
    from accelerate.utils.operations import convert_to_fp32

    dtype, fused = case.recipe.model.dtype, case.profile.loss == "chunked"
    autocast = case.profile.autocast and dtype != "float32"
    with torch.autocast("cpu", dtype=getattr(torch, dtype)) if autocast else nullcontext():
        outputs = model(**batch, use_cache=False, **({"fused_lm_head": True} if fused else {}))
    if autocast:
        outputs = convert_to_fp32(outputs)
    if not fused:
        return outputs.loss
    loss = (-outputs.log_probs).sum() / outputs.label_mask.sum().clamp(min=1)
    outputs.entropy.detach().sum(), outputs.is_top1.sum()
    return loss


def _result(case: Case, ledger: Ledger, seconds: float) -> DryRun:
    """Return the peaks of the step that ran, and of the next, which is the same but has optimizer states from the start."""
    ledger.assign_kinds()
    host = {PARAMETERS, GRADIENTS, OPTIMIZER} if case.recipe.sharding.offload == "cpu" else set[str]()
    states = 0 if host else sum(life.bytes for life in ledger.lives if life.kind == OPTIMIZER)
    first, steady = ledger.totals(host), [total + states for total in ledger.totals(host | {OPTIMIZER})]
    spans = {name: (start, end) for name, start, end in ledger.spans()}
    phases = {"load": first[spans.pop("load")[1]]}
    for step, totals in (("first step", first), ("steady step", steady)):
        phases |= {f"{step}, {name}": max(totals[start : end + 1]) for name, (start, end) in spans.items()}
    last = max(spans, key=lambda name: phases[f"steady step, {name}"])
    peak = steady.index(phases[f"steady step, {last}"], spans[last][0])
    alive = [life for life in ledger.lives if life.kind == OPTIMIZER and not host]
    alive += [life for life in ledger.alive(peak) if life.kind not in host | {OPTIMIZER}]
    kinds = {kind: sum(life.bytes for life in alive if life.kind == kind) for kind in KINDS}
    largest = sorted(alive, key=lambda life: -life.bytes)[:LARGEST]
    return DryRun(
        phases=phases,
        kinds={kind: size for kind, size in kinds.items() if size},
        peak_bytes=steady[peak],
        peak_phase=f"steady step, {last}",
        peak_module=max(ledger.alive(peak), key=lambda life: life.born).module,
        largest=[Storage(bytes=one.bytes, kind=str(one.kind), module=one.module, operation=one.operation) for one in largest],
        host_bytes=sum(life.bytes for life in ledger.lives if life.kind in host),
        seconds=seconds,
    )
