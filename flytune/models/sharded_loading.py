"""Gives each process its own rows of a model's weights, read straight from the files; no process ever holds the model.

The model is built on the meta device (`meta_model`), where parameters have a shape and no memory; fully_shard divides it
there; then `load_weights` reads the rows that this process holds of every parameter.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flytune.errors import RecipeError, TrainingError
from flytune.models import base as models_base
from flytune.models import safetensors_files
from flytune.recipe.sections import Model

logger = logging.getLogger(__name__)

# What wraps a module puts a name of its own into the path: checkpoint_wrapper, torch.compile, PEFT.
_WRAPPERS = re.compile(r"(?<![^.])(?:_checkpoint_wrapped_module|_orig_mod|base_layer|original_module|modules_to_save\.\w+)\.")


def meta_model(model: Model, dtype: str) -> Any:
    """The causal language model of `model` with parameters in `dtype` on the meta device, and real buffers on the CPU.

    Buffers (rotary frequencies, embedding scales) and the parameters that a model keeps in float32 are as from_pretrained
    makes them. A buffer that its model computes nowhere but in `__init__` is zero here, and undefined there.

    Raises:
        RecipeError: the model's weights are quantized already.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.initialization import meta_device_safe_creation_ops

    name = models_base.local_name(model, weights=False)
    config = AutoConfig.from_pretrained(name, revision=model.revision, trust_remote_code=model.trust_remote_code)
    if quantization := getattr(config, "quantization_config", None):
        raise RecipeError(
            f"model.name_or_path {model.name_or_path}: its weights are quantized ({quantization.get('quant_method')}), and"
            " fsdp reads 16- or 32-bit weights only; name the model that they were made from"
        )
    with torch.device("meta"), meta_device_safe_creation_ops():
        built = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=model.attn_implementation, trust_remote_code=model.trust_remote_code
        )
    if plan := built._get_dtype_plan(getattr(torch, dtype)):
        kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in plan))
        for name, parameter in built.named_parameters():
            if kept.search(name):
                parameter.data = parameter.data.float()
    _compute_buffers(built)
    # Found now, by the model's classes: fully_shard changes those.
    built._weight_conversions = get_model_conversion_mapping(built)
    try:
        built.generation_config = GenerationConfig.from_pretrained(name, revision=model.revision or "main")
    except OSError:
        logger.debug("%s has no generation_config.json", model.name_or_path)
    return built.eval()


def _compute_buffers(model: Any) -> None:
    """Makes the buffers of a model on the meta device real: the model's own initialization computes them."""
    import torch

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # Leaves it, and the random numbers, alone.
    model.initialize_weights()


@contextmanager
def real_adapters() -> Iterator[None]:
    """Within it, PEFT puts real, initialized adapters onto a model on the meta device.

    PEFT initializes an adapter on the CPU, then moves it to the device of its layer, where meta would drop the values. They
    are the values that the same seed gives on a real model.
    """
    import torch

    original = torch.nn.Module.to

    def to(self: Any, *arguments: Any, **named: Any) -> Any:
        device, dtype, _, _ = torch._C._nn._parse_to(*arguments, **named)
        if device is None or device.type != "meta":
            return original(self, *arguments, **named)
        return self if dtype is None else original(self, dtype)

    torch.nn.Module.to = to  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.to = original  # type: ignore[method-assign]


@dataclass(frozen=True)
class _Slot:
    """A parameter or persistent buffer; a tied one has several names and places."""

    tensor: Any
    is_buffer: bool
    names: list[str] = field(default_factory=list)
    """As in a checkpoint, without what wrappers add."""
    places: list[tuple[Any, str]] = field(default_factory=list)
    """Modules and attributes."""


def load_weights(model: Any, folder: Path, device: str | None = None) -> None:
    """Gives each parameter of `model` on the meta device what this process holds of it, from the safetensors in `folder`.

    Parameters may be plain, or DTensors as fully_shard makes them on any mesh; with checkpoint wrappers and PEFT adapters
    around. Real ones are left alone. Persistent buffers are read whole. dtypes are converted as they are read. Beyond the
    filled model, memory holds CHUNK_BYTES, or what one parameter is made of where transformers converts it.

    Call it after fully_shard and before an optimizer: parameters become new objects. No process waits for another in it.

    Args:
        model: as meta_model builds it.
        folder: with model.safetensors, or with model.safetensors.index.json and its files.
        device: where parameters go; by default the device of the model's mesh. Under CPUOffloadPolicy: "cpu".

    Raises:
        TrainingError: no safetensors; a file is missing or cut; a parameter is in no file, has another shape there, or has
            two values although the model ties them.
    """
    import torch

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    slots = _slots(base)
    files = safetensors_files.Files(folder)
    sources = safetensors_files.sources(files, base, {name: slot.tensor for slot in slots for name in slot.names})
    slots = [slot for slot in slots if slot.tensor.is_meta or (slot.is_buffer and slot.names[0] in sources)]
    _check_found(slots, sources, folder)
    device = device or _mesh_device(model)
    with torch.no_grad(), _progress(slots) as progress:
        for slot in sorted(slots, key=lambda slot: min(sources[name].order for name in slot.names if name in sources)):
            progress.update(_load_slot(slot, sources, device))
    if left := [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]:
        raise TrainingError(f"{_listed(left)}: without values although all of {folder} was read")


def allocate(model: Any, device: str | None = None) -> None:
    """As `load_weights`, but nothing is read: every parameter gets memory without values, for a checkpoint to fill."""
    import torch

    device = device or _mesh_device(model)
    for slot in _slots(model):
        if slot.tensor.is_meta:
            value = torch.nn.Parameter(torch.empty_like(slot.tensor, device=device), requires_grad=slot.tensor.requires_grad)
            for module, name in slot.places:
                module._parameters[name] = value


def _mesh_device(model: Any) -> str:
    from torch.distributed.tensor import DTensor

    return next((p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor)), "cpu")


def _slots(base: Any) -> list[_Slot]:
    slots: dict[int, _Slot] = {}
    for path, module in base.named_modules(remove_duplicate=False):
        buffers = {name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is not None:
                slot = slots.setdefault(id(tensor), _Slot(tensor, is_buffer=name in buffers))
                slot.names.append(_WRAPPERS.sub("", f"{path}.{name}" if path else name))
                slot.places.append((module, name))
    return list(slots.values())


def _check_found(slots: list[_Slot], sources: Mapping[str, Any], folder: Path) -> None:
    if missing := [slot.names[0] for slot in slots if not any(name in sources for name in slot.names)]:
        raise TrainingError(f"{_listed(missing)}: in no file of {folder}; config.json and weights are not of the same model")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _load_slot(slot: _Slot, sources: Mapping[str, Any], device: str) -> int:
    """Reads this process's part of one parameter; how many bytes that is."""
    import torch

    value = slot.tensor if slot.is_buffer and not slot.tensor.is_meta else torch.empty_like(slot.tensor, device=device)
    first, *others = [name for name in dict.fromkeys(slot.names) if name in sources]
    part = _part(first, value)
    sources[first].read(part)
    for other in others:
        again = _part(other, torch.empty_like(value))
        sources[other].read(again)
        if not torch.equal(part.local, again.local):
            raise TrainingError(
                f"{first} and {other}: one parameter by config.json, two values in {sources[first].order[0].parent};"
                " set tie_word_embeddings in config.json to false"
            )
    if not slot.is_buffer:
        value = torch.nn.Parameter(value, requires_grad=slot.tensor.requires_grad)
    for module, name in slot.places:
        (module._buffers if slot.is_buffer else module._parameters)[name] = value
    return int(part.local.nbytes)


def _part(name: str, value: Any) -> safetensors_files.Part:
    """What this process holds of `value`; DTensor divides rows as torch.chunk does, the last processes may get none."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(value.shape)
    if not isinstance(value, DTensor):
        return safetensors_files.Part(name, shape, tuple(slice(0, size) for size in shape), value)
    sizes, starts = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    index = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    return safetensors_files.Part(name, shape, index, value.to_local())


def _progress(slots: list[_Slot]) -> Any:
    import torch.distributed
    from torch.distributed.tensor import DTensor
    from tqdm import tqdm

    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    locals_ = [slot.tensor.to_local() if isinstance(slot.tensor, DTensor) else slot.tensor for slot in slots]
    total = sum(local.nbytes for local in locals_)
    return tqdm(desc="Reading weights", total=total, unit="B", unit_scale=True, delay=2, disable=not is_first)
