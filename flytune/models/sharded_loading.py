"""Sharded loading: each process reads its own rows of a model's weights from the files; no process holds the
whole model.

The model is built on the meta device (`meta_model`), where parameters have a shape and no memory; fully_shard
shards it there; then `load_weights` reads the rows of each parameter that this process holds.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flytune import patches
from flytune.errors import RecipeError, TrainingError
from flytune.models import base as models_base
from flytune.models import rope, safetensors_files, vocabulary
from flytune.models.heads import LANGUAGE_MODEL, Head
from flytune.models.scoring import innermost
from flytune.recipe import Model

logger = logging.getLogger(__name__)

# Names that module wrappers add to the path: checkpoint_wrapper, torch.compile, PEFT.
_WRAPPERS = re.compile(
    r"(?<![^.])(?:_checkpoint_wrapped_module|_orig_mod|base_layer|token_adapter|original_module|modules_to_save\.\w+)\."
)


def meta_model(model: Model, dtype: str, head: Head = LANGUAGE_MODEL, seed: int = 0) -> Any:
    """Return the model of `model` with parameters in `dtype` on the meta device, and real buffers on the CPU.

    A new head gets the seed's first values where the files have none.

    Buffers (rotary frequencies, embedding scales) and parameters that a model keeps in float32 are as
    from_pretrained makes them. A buffer that its model computes only in `__init__` is zero here, and
    undefined in from_pretrained.

    Raises:
        RecipeError: the model's weights are quantized already.
    """
    import torch
    from transformers import GenerationConfig
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.initialization import meta_device_safe_creation_ops

    name = models_base.local_name(model, weights=False)
    config = models_base.configuration(model)
    if quantization := getattr(config, "quantization_config", None):
        raise RecipeError(
            f"model.name_or_path {model.name_or_path}: its weights are quantized "
            f"({quantization.get('quant_method')}), and fsdp reads 16- or 32-bit weights only; name the "
            "model that was quantized"
        )
    rope.put(config, model)
    text = config.get_text_config()
    stored_rows, text.vocab_size = text.vocab_size, vocabulary.wanted_rows(model, text.vocab_size)
    kind = head.loader()
    for argument, value in head.arguments.items():
        setattr(config, argument, value)
    with torch.device("meta"), meta_device_safe_creation_ops():
        built = kind.from_config(
            config,
            dtype=dtype,
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
        )
    for module in built.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                # meta_device_safe_creation_ops makes what a model draws itself (DiffLlama's lambdas) on the
                # CPU, and load_weights reads meta parameters only.
                module._parameters[key] = torch.nn.Parameter(
                    parameter.to("meta"), requires_grad=parameter.requires_grad
                )
    if plan := built._get_dtype_plan(getattr(torch, dtype)):
        kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in plan))
        for key, parameter in built.named_parameters():
            if kept.search(key):
                parameter.data = parameter.data.float()
    _compute_buffers(built)
    # Before fully_shard, which changes the model's classes that they are found by.
    built._weight_conversions = get_model_conversion_mapping(built)
    # Tables with rows for added tokens are longer than those in the files.
    built._stored_rows = stored_rows
    built._drawn = head.sources(built, seed)
    try:
        built.generation_config = GenerationConfig.from_pretrained(name, revision=model.revision or "main")
    except OSError:
        logger.debug("%s has no generation_config.json", model.name_or_path)
    return rope.of_batch_alone(built.eval())


def _compute_buffers(model: Any) -> None:
    """Compute the buffers of a model on the meta device by the model's own initialization."""
    import torch

    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = torch.zeros_like(buffer, device="cpu")
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # Skips it, and draws no random numbers.
    model.initialize_weights()


@contextmanager
def real_adapters() -> Iterator[None]:
    """Let PEFT add real, initialized adapters to a model on the meta device within the block.

    PEFT initializes an adapter on the CPU, then moves it to the device of its layer; meta would drop the
    values. They are those of the same seed on a real model.
    """
    import torch

    original, measure = patches.torch.MODULE_TO.current(), patches.peft.MAGNITUDES.current()

    def to(self: Any, *arguments: Any, **named: Any) -> Any:
        device, dtype, _, _ = torch._C._nn._parse_to(*arguments, **named)
        if device is None or device.type != "meta":
            return original(self, *arguments, **named)
        return self if dtype is None else original(self, dtype)

    def update_layer(
        self: Any, *, base_layer: Any, lora_A: Any, lora_B: Any, scaling: float, **named: Any
    ) -> None:
        if base_layer.weight.is_meta:  # load_adapter_values computes the norms
            self.weight = torch.nn.Parameter(torch.empty(len(base_layer.weight)))
        else:
            measure(self, base_layer=base_layer, lora_A=lora_A, lora_B=lora_B, scaling=scaling, **named)

    with patches.torch.MODULE_TO.replaced(to), patches.peft.MAGNITUDES.replaced(update_layer):
        yield


@dataclass(frozen=True)
class _Slot:
    """Parameter or persistent buffer; a tied one has several names and places."""

    tensor: Any
    is_buffer: bool
    names: list[str] = field(default_factory=list)
    """Names in a checkpoint, without those of wrappers."""
    places: list[tuple[Any, str]] = field(default_factory=list)
    """Modules and attribute names."""


def load_weights(model: Any, folder: Path, device: str | None = None) -> None:
    """Load this process's part of each parameter of `model` on the meta device from the safetensors in
    `folder`.

    Parameters may be plain, or DTensors as fully_shard makes them on any mesh, with checkpoint wrappers and
    PEFT adapters. Real parameters are left as they are. Persistent buffers are read completely. dtypes are
    converted while reading. Besides the loaded model, memory holds CHUNK_BYTES, or the tensors of one
    parameter that transformers converts.

    Call it after fully_shard and before creating an optimizer: parameters become new objects. Processes do
    not wait for each other.

    Args:
        model: a model of `meta_model`.
        folder: folder with model.safetensors, or with model.safetensors.index.json and its files.
        device: device of the parameters; by default that of the model's mesh. Under CPUOffloadPolicy: "cpu".

    Raises:
        TrainingError: there are no safetensors; a file is missing or truncated; a parameter is in no file,
            has another shape there, or has two values although the model ties them.
    """
    import torch

    base = innermost(model)
    slots = _slots(base)
    sources = _sources(folder, base, slots)
    slots = [slot for slot in slots if slot.tensor.is_meta or (slot.is_buffer and slot.names[0] in sources)]
    _check_found(slots, sources, folder)
    device = device or _mesh_device(model)
    with torch.no_grad(), _progress(slots) as progress:
        for slot in sorted(
            slots, key=lambda slot: min(sources[name].order for name in slot.names if name in sources)
        ):
            progress.update(_load_slot(slot, sources, device))
    if left := [
        name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta
    ]:
        raise TrainingError(f"{_enumerate(left)}: without values although all of {folder} was read")


def load_adapter_values(model: Any, folder: Path) -> None:
    """Load what PEFT takes from the base into the adapter of a model on the meta device that is not sharded
    yet.

    Rows that are trained one by one, and DoRA's magnitudes: the norms of the rows of each adapted weight,
    which each process reads completely, one after the other.
    """
    import torch
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    by_row = [layer for _, layer in vocabulary.row_layers(base)]
    norms = [
        layer for layer in base.modules() if isinstance(layer, LoraLayer) and layer.lora_magnitude_vector
    ]
    if not by_row and not norms:
        return
    slots = _slots(base)
    sources = _sources(folder, base, slots)
    names = {id(slot.tensor): name for slot in slots for name in slot.names if name in sources}

    def read(table: Any, rows: slice) -> Any:
        index, part = (
            (rows, slice(0, table.shape[1])),
            torch.empty(rows.stop - rows.start, table.shape[1], dtype=table.dtype),
        )
        name = names[id(table)]
        sources[name].read(safetensors_files.ParameterPart(name, tuple(table.shape), index, part))
        return part

    for layer in by_row:
        table = layer.get_base_layer().weight
        for adapter, ids in layer.token_indices.items():
            rows = torch.cat([read(table, slice(token, token + 1)) for token in ids])
            delta = layer.trainable_tokens_delta[adapter]
            layer.trainable_tokens_original[adapter] = rows
            layer.trainable_tokens_delta[adapter] = torch.nn.Parameter(rows.to(delta.dtype, copy=True))
    for adapted in norms:
        weight: Any = adapted.get_base_layer().weight
        norm = torch.linalg.norm(read(weight, slice(0, len(weight))).float(), dim=1)
        magnitudes: Any = adapted.lora_magnitude_vector
        for magnitude in magnitudes.values():
            magnitude.weight.data.copy_(norm)


def _sources(folder: Path, base: Any, slots: list[_Slot]) -> dict[str, Any]:
    """Return the source of each tensor that the files have; tables that added tokens made longer get rows for
    them."""
    tensors = {name: slot.tensor for slot in slots for name in slot.names}
    sources = safetensors_files.sources(safetensors_files.TensorFiles(folder), base, tensors)
    drawn: dict[str, Any] = getattr(base, "_drawn", {})
    return drawn | vocabulary.grown_sources(sources, tensors, getattr(base, "_stored_rows", None))


def allocate(model: Any, device: str | None = None) -> None:
    """Allocate every parameter without values, for a checkpoint to be loaded into; otherwise as
    `load_weights`."""
    import torch

    device = device or _mesh_device(model)
    for slot in _slots(model):
        if slot.tensor.is_meta:
            value = torch.nn.Parameter(
                torch.empty_like(slot.tensor, device=device), requires_grad=slot.tensor.requires_grad
            )
            for module, name in slot.places:
                module._parameters[name] = value


def _mesh_device(model: Any) -> str:
    from torch.distributed.tensor import DTensor

    return next((p.device_mesh.device_type for p in model.parameters() if isinstance(p, DTensor)), "cpu")


def _slots(base: Any) -> list[_Slot]:
    slots: dict[int, _Slot] = {}
    for path, module in base.named_modules(remove_duplicate=False):
        buffers = {
            name: buffer
            for name, buffer in module._buffers.items()
            if name not in module._non_persistent_buffers_set
        }
        for name, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is not None:
                slot = slots.setdefault(id(tensor), _Slot(tensor, is_buffer=name in buffers))
                slot.names.append(_WRAPPERS.sub("", f"{path}.{name}" if path else name))
                slot.places.append((module, name))
    return list(slots.values())


def _check_found(slots: list[_Slot], sources: Mapping[str, Any], folder: Path) -> None:
    if missing := [slot.names[0] for slot in slots if not any(name in sources for name in slot.names)]:
        raise TrainingError(
            f"{_enumerate(missing)}: in no file of {folder}; config.json and weights are not of the same "
            "model"
        )


def _enumerate(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _load_slot(slot: _Slot, sources: Mapping[str, Any], device: str) -> int:
    """Read this process's part of one parameter, and return its bytes."""
    import torch

    value = (
        slot.tensor
        if slot.is_buffer and not slot.tensor.is_meta
        else torch.empty_like(slot.tensor, device=device)
    )
    first, *others = [name for name in dict.fromkeys(slot.names) if name in sources]
    part = _part(first, value)
    sources[first].read(part)
    for other in others:
        again = _part(other, torch.empty_like(value))
        sources[other].read(again)
        if not torch.equal(part.local, again.local):
            raise TrainingError(
                f"{first} and {other}: one parameter by config.json, two values in "
                f"{sources[first].order[0].parent}; set tie_word_embeddings in config.json to false"
            )
    if not slot.is_buffer:
        value = torch.nn.Parameter(value, requires_grad=slot.tensor.requires_grad)
    for module, name in slot.places:
        (module._buffers if slot.is_buffer else module._parameters)[name] = value
    return int(part.local.nbytes)


def _part(name: str, value: Any) -> safetensors_files.ParameterPart:
    """Return the part of `value` on this process; DTensor divides rows as torch.chunk does: the last
    processes may get none."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = tuple(value.shape)
    if not isinstance(value, DTensor):
        return safetensors_files.ParameterPart(name, shape, tuple(slice(0, size) for size in shape), value)
    sizes, starts = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    index = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    return safetensors_files.ParameterPart(name, shape, index, value.to_local())


def _progress(slots: list[_Slot]) -> Any:
    import torch.distributed
    from torch.distributed.tensor import DTensor
    from tqdm import tqdm

    is_first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    locals_ = [slot.tensor.to_local() if isinstance(slot.tensor, DTensor) else slot.tensor for slot in slots]
    total = sum(local.nbytes for local in locals_)
    return tqdm(desc="Reading weights", total=total, unit="B", unit_scale=True, delay=2, disable=not is_first)
