"""Writing the trained weights as a Hugging Face folder with a manifest of its files; export/gate.py checks
both."""

import copy
import json
import math
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune.export import companion_files
from flytune.export.folder import ExportProgress, Written, write_manifest
from flytune.files import sha256_of, written_atomically
from flytune.models import loading, pissa, published
from flytune.recipe import Recipe
from flytune.sharding import sharding_of

MAX_FILE_BYTES = 5_000_000_000
# torch.compile inserts this into parameters' names.
_WRAPPERS = re.compile(r"(?<![^.])_orig_mod\.")
_LAYER = re.compile(r".*?\.\d+\.")


def write(
    trainer: Any,
    recipe: Recipe,
    tokenizer: Path,
    out: Path,
    weights: str | None = None,
    max_file_bytes: int | None = None,
) -> Path:
    """Write the export of a live trainer: `out/model` or `out/adapter`, and its manifest. Every process must
    call it.

    Args:
        weights: identity of the weights (Saver.weights_at): complete files that an earlier call with the same
            identity left in `out` are not written again. None writes everything.
        max_file_bytes: largest size of a file of weights; MAX_FILE_BYTES by default. A layer is never split.

    Returns: the folder written.
    """
    folder = out / ("model" if recipe.method.name == "full" else "adapter")
    limit = max_file_bytes or MAX_FILE_BYTES
    progress = ExportProgress()
    if trainer.is_world_process_zero():
        progress = ExportProgress.of(folder, weights and f"{weights} in files of {limit} bytes")
    progress = write_weights(trainer, recipe, tokenizer, folder, progress, limit)
    if trainer.is_world_process_zero():
        write_manifest(recipe, folder, loading.commit(recipe.model, local=True), progress)
    trainer.accelerator.wait_for_everyone()
    return folder


def write_weights(
    trainer: Any,
    recipe: Recipe,
    tokenizer: Path,
    folder: Path,
    progress: ExportProgress | None = None,
    limit: int = MAX_FILE_BYTES,
    writes: bool | None = None,
) -> ExportProgress:
    """Write the trained weights of a live trainer; every process must call it, and the first one writes.

    `folder` receives the complete model in recipe.model.dtype with its tokenizer, or the adapter in PEFT's
    layout. The first process never holds more than one file's tensors. The trainer is not changed: it may
    train on.

    Args:
        progress: the complete files, which are not written again; None writes all, and hashes none of them.
        limit: largest size of a file of weights in bytes. A layer is never split.
        writes: whether this process writes, where it is not the first one alone; not with `progress`.

    Returns: the progress with the files that were written, on the first process.
    """
    import torch

    strategy, model = sharding_of(recipe), trainer.accelerator.unwrap_model(trainer.model)
    full = recipe.method.name == "full"
    hashed = progress is not None
    first = trainer.is_world_process_zero() if writes is None else writes
    progress = progress or ExportProgress()
    strategy.before_gather(trainer.model_wrapped)
    # Tied weights are one parameter and are written once, under the name that from_pretrained ties the other
    # to.
    parameters = {
        _WRAPPERS.sub("", name): parameter
        for name, parameter in model.named_parameters()
        if full or parameter.requires_grad
    }
    dtype = getattr(torch, recipe.model.dtype) if full else torch.float32
    files = _files(parameters, dtype.itemsize, limit) if full else [list(parameters)]
    if first:
        folder.mkdir(parents=True, exist_ok=bool(progress.files))
    there = _agreed(list(progress.files), trainer.args.world_size)
    # A file is hashed, on one core, while the GPUs gather the next one.
    unhashed: list[tuple[str, list[str], Any]] = []
    bar = tqdm(total=len(parameters), desc="export", unit=" tensors", delay=2, disable=not first)
    with bar, ThreadPoolExecutor(max_workers=1) as hashing:
        for number, names in enumerate(files, 1):
            if not full:
                file = "adapter_model.safetensors"
            elif len(files) == 1:
                file = "model.safetensors"
            else:
                file = f"model-{number:05}-of-{len(files):05}.safetensors"
            bar.update(len(names))
            if file in there:
                continue
            state = _gathered(strategy, {name: parameters[name] for name in names}, dtype, keep=first)
            if not first:
                continue
            if full:
                state = _published(model, state, last=number == len(files))
            else:
                state = _adapter(trainer, model, state)
            progress = _with_hashes(progress, folder, unhashed)
            _save(state, folder / file)
            digest = hashing.submit(sha256_of, folder / file) if hashed else None
            unhashed.append((file, list(state), digest))
            del state  # the next file's weights are gathered into the same memory
        progress = _with_hashes(progress, folder, unhashed)
    if first:
        if full:
            index = {name: file for file, written in progress.files.items() for name in written.names}
            _write_config(model, recipe, index, sum(map(elements, parameters.values())), folder)
        else:
            _write_adapter_config(model, recipe, folder)
        # Some tokenizers have a subfolder: additional_chat_templates.
        shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
        companion_files.write(recipe, model.config, folder)
    return progress


def _gathered(strategy: Any, parameters: dict[str, Any], dtype: Any, keep: bool) -> dict[str, Any]:
    """Gather parameters, which every process takes part in; return them in host memory on one that keeps
    them."""
    state = {}
    for name, parameter in parameters.items():
        complete = strategy.gather(parameter)
        if keep:
            state[name] = complete.detach().to("cpu", dtype, copy=True)
    return state


def _with_hashes(
    progress: ExportProgress, folder: Path, unhashed: list[tuple[str, list[str], Any]]
) -> ExportProgress:
    """Return the progress with the files that were being hashed, and empty their list."""
    while unhashed:
        file, names, digest = unhashed.pop(0)
        progress = progress.with_file(
            folder, file, Written(sha256=digest.result() if digest else "", names=names)
        )
    return progress


def _agreed(files: list[str], world_size: int) -> list[str]:
    """Return the first process's list on every process: gathering needs all of them, so all must skip the
    same files."""
    if world_size == 1:
        return files
    import torch.distributed

    agreed = [files]
    torch.distributed.broadcast_object_list(agreed, src=0)
    return agreed[0]


def elements(parameter: Any) -> int:
    """Return the number of elements of a parameter over all processes, for ZeRO-3's empty ones and packed
    4-bit ones too."""
    if hasattr(parameter, "ds_numel"):
        return int(parameter.ds_numel)
    return int(
        math.prod(parameter.quant_state.shape) if hasattr(parameter, "quant_state") else parameter.numel()
    )


def _files(parameters: Mapping[str, Any], width: int, limit: int) -> list[list[str]]:
    """Group names into files of at most `limit` bytes, or of one layer where that is larger; the order is
    kept.

    Parameters that transformers converts back into the published layout (fused experts, for example) are
    within one layer.
    """
    files: list[list[str]] = [[]]
    size, last_layer = 0, ""
    for name, parameter in parameters.items():
        match = _LAYER.match(name)
        layer = match.group() if match else name
        bytes_ = elements(parameter) * width
        if files[-1] and layer != last_layer and size + bytes_ > limit:
            files.append([])
            size = 0
        files[-1].append(name)
        size += bytes_
        last_layer = layer
    return files


def _published(model: Any, state: dict[str, Any], last: bool) -> dict[str, Any]:
    """Return the tensors of one file in the published layout; the last file has the buffers too."""
    from transformers.core_model_loading import revert_weight_conversion

    if last:
        persistent = model.state_dict().keys()
        state |= {name: buffer.cpu() for name, buffer in model.named_buffers() if name in persistent}
    return dict(revert_weight_conversion(model, state))


def _adapter(trainer: Any, model: Any, state: dict[str, Any]) -> dict[str, Any]:
    from peft import get_peft_model_state_dict

    # Head and embedding that are trained as one tensor are one parameter, and PEFT reads both.
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same = first[id(parameter)]
        if same in state and name not in state:
            state[name] = state[same].clone()
    factors = dict(get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False))
    return pissa.as_lora(factors, getattr(trainer, "initial_factors", {}))


def _save(state: dict[str, Any], file: Path) -> None:
    """Write a file of weights; it gets its name only when it is complete."""
    from safetensors.torch import save_file

    with written_atomically(file) as temporary:
        save_file(
            {name: tensor.contiguous() for name, tensor in state.items()},
            str(temporary),
            metadata={"format": "pt"},
        )


def _write_config(model: Any, recipe: Recipe, index: dict[str, str], total: int, folder: Path) -> None:
    if len(set(index.values())) > 1:
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        content = {"metadata": {"total_parameters": total, "total_size": size}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps(content, indent=2, sort_keys=True) + "\n"
        )
    # The live model may be float32 and sharded; the files hold the recipe's dtype. fully_shard has replaced
    # the model's class by a subclass. The live model's own configuration stays: it may train on.
    config = copy.deepcopy(model.config)
    if recipe.model.trust_remote_code and model._auto_class:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, str(folder), config=config)
    published.write_config(
        config, recipe.model, recipe.model.dtype, type(model).__name__.removeprefix("FSDP"), folder
    )
    if model.can_generate():
        published.write_generation_config(model.generation_config, recipe.model, folder)


def _write_adapter_config(model: Any, recipe: Recipe, folder: Path) -> None:
    config = copy.copy(model.peft_config["default"])
    if recipe.method.is_pissa:
        config = pissa.config_as_lora(config)
    # Loading the adapter alone then loads the base that it was trained on.
    config.base_model_name_or_path = recipe.model.name_or_path
    config.revision = loading.commit(recipe.model, local=True)
    config.inference_mode = True
    # The order of PEFT's sets of names differs from process to process.
    for name, value in vars(config).items():
        if isinstance(value, set):
            setattr(config, name, sorted(value))
    config.save_pretrained(str(folder))
