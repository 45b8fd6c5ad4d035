"""The trained weights as a Hugging Face folder, and the gate that holds the folder against what was trained."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune.errors import ExportError
from flytune.heldout import GATE_SAMPLES
from flytune.recipe import Recipe
from flytune.records import TrainingResult
from flytune.strategies import strategy_of

MAX_FILE_BYTES = 5_000_000_000
# torch.compile puts a name of its own into parameters' names.
_WRAPPERS = re.compile(r"(?<![^.])_orig_mod\.")
_LAYER = re.compile(r".*?\.\d+\.")
# Nats a token. A full fine-tune's live weights are float32 and its 16-bit export rounds them; kernels differ between
# training and evaluation. Seen on the demo's models: docs/measured.md. A tensor that is lost costs whole nats.
LOSS_BOUND = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}


def write(trainer: Any, recipe: Recipe, tokenizer: Path, out: Path) -> Path:
    """Writes the trained weights of a live trainer; every process must call it, the first one writes.

    `out/model` holds the whole model in recipe.model.dtype with its tokenizer, or `out/adapter` the adapter in PEFT's layout.
    The first process never holds more than one file's tensors.

    Returns: the folder written.
    """
    import torch

    strategy, model = strategy_of(recipe), trainer.accelerator.unwrap_model(trainer.model)
    full, first = recipe.method.name == "full", trainer.is_world_process_zero()
    folder = out / ("model" if full else "adapter")
    if first:
        folder.mkdir(parents=True)
    strategy.before_gather(model)
    # Tied weights are one parameter and so come once, under the name that from_pretrained ties the other to.
    parameters = {_WRAPPERS.sub("", name): parameter for name, parameter in model.named_parameters()}
    parameters = {name: parameter for name, parameter in parameters.items() if full or parameter.requires_grad}
    dtype = getattr(torch, recipe.model.dtype) if full else torch.float32
    files = _files(parameters, dtype.itemsize) if full else [list(parameters)]
    index: dict[str, str] = {}
    with tqdm(total=len(parameters), desc="export", unit=" tensors", delay=2, disable=not first) as bar:
        for number, names in enumerate(files, 1):
            state: dict[str, torch.Tensor] = {}
            for name in names:
                gathered = strategy.gather(parameters[name])
                if first:
                    state[name] = gathered.detach().to("cpu", dtype, copy=True)
                bar.update()
            if first and full:
                file = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
                index |= dict.fromkeys(_write_model(model, state, folder / file, last=number == len(files)), file)
            elif first:
                _write_adapter(model, state, folder)
    if first:
        if full:
            _write_config(model, recipe, index, sum(map(elements, parameters.values())), folder)
        for path in sorted(tokenizer.iterdir()):
            shutil.copy(path, folder / path.name)
    trainer.accelerator.wait_for_everyone()
    return folder


def elements(parameter: Any) -> int:
    """Elements of a parameter, all processes' together: ZeRO-3 leaves an empty one behind, 4-bit packs two into a byte."""
    if hasattr(parameter, "ds_numel"):
        return int(parameter.ds_numel)
    return int(math.prod(parameter.quant_state.shape) if hasattr(parameter, "quant_state") else parameter.numel())


def _files(parameters: Mapping[str, Any], width: int) -> list[list[str]]:
    """Names by the file they go to, in order: files of MAX_FILE_BYTES at most, or of one layer where that is larger.

    What transformers converts back into the published layout (fused experts, say) lies within one layer.
    """
    files: list[list[str]] = [[]]
    size, unit = 0, ""
    for name, parameter in parameters.items():
        layer = _LAYER.match(name)
        new = (layer.group() if layer else name) != unit
        unit, bytes_ = layer.group() if layer else name, elements(parameter) * width
        if files[-1] and new and size + bytes_ > MAX_FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += bytes_
    return files


def _write_model(model: Any, state: dict[str, Any], file: Path, last: bool) -> list[str]:
    """One file of the model, in the published layout; with the buffers, the last. Returns the names in it."""
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    if last:
        persistent = model.state_dict().keys()
        state |= {name: buffer.cpu() for name, buffer in model.named_buffers() if name in persistent}
    state = revert_weight_conversion(model, state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, str(file), metadata={"format": "pt"})
    return list(state)


def _write_config(model: Any, recipe: Recipe, index: dict[str, str], total: int, folder: Path) -> None:
    if len(set(index.values())) > 1:
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        content = {"metadata": {"total_parameters": total, "total_size": size}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    # The live model may be float32 and sharded, with its cache off; the files hold the recipe's dtype, and a model that is
    # used needs its cache. fully_shard has put a class of its own before the model's.
    config = model.config
    config.dtype, config.use_cache = recipe.model.dtype, True
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(str(folder))
    if model.can_generate():
        model.generation_config.save_pretrained(str(folder))
    if recipe.model.trust_remote_code and model._auto_class:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, str(folder), config=config)


def _write_adapter(model: Any, state: dict[str, Any], folder: Path) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    config = model.peft_config["default"]
    save_file(
        get_peft_model_state_dict(model, state_dict=state), str(folder / "adapter_model.safetensors"), metadata={"format": "pt"}
    )
    inference_mode, config.inference_mode = config.inference_mode, True
    config.save_pretrained(str(folder))
    config.inference_mode = inference_mode


def verify(folder: Path) -> int:
    """Reads an exported folder again, tensor by tensor, and holds it against its own configuration.

    Returns: how many tensors were read.

    Raises:
        ExportError: names the tensor that is missing, unknown, of another shape, empty, not finite, or all zero.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    expected = _adapter_shapes(folder) if (folder / "adapter_config.json").is_file() else _model_shapes(folder)
    found: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(file), framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    tensor, shape = tensors.get_tensor(name), expected.get(name)
                    where = f"{file.name}: {name}"
                    if shape is not None and list(tensor.shape) != shape:
                        raise ExportError(f"{where}: expected shape {shape}, found {list(tensor.shape)}; nothing was stored")
                    if shape is None and expected:
                        raise ExportError(f"{where}: the model has no such tensor; nothing was stored")
                    if tensor.numel() == 0:
                        raise ExportError(f"{where}: empty; nothing was stored")
                    if not torch.isfinite(tensor).all():
                        bad = int((~torch.isfinite(tensor)).sum())
                        raise ExportError(f"{where}: {bad} of {tensor.numel()} values are not finite; nothing was stored")
                    if not tensor.any() and not name.endswith(".bias"):
                        raise ExportError(f"{where}: all zero, so it was never trained or never gathered; nothing was stored")
                    found.add(name)
        except SafetensorError as error:
            raise ExportError(f"{file.name}: cut short or damaged ({error}); nothing was stored") from None
    if missing := sorted(expected.keys() - found):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ExportError(
            f"{folder.name}: {missing[0]}{more}: expected by the configuration, found in no file; nothing was stored"
        )
    if not found:
        raise ExportError(f"{folder.name}: no tensors in *.safetensors; nothing was stored")
    return len(found)


def check_loss(recipe: Recipe, trained: Path, nll: Any, tokens: Any) -> None:
    """Holds the reloaded export's held-out loss against the live model's, as training.json recorded it before the export.

    `nll` and `tokens` are those of the reloaded model, in stored order: summed nats and scored tokens of each sample.

    Raises:
        ExportError: they differ by more than rounding the weights to the recipe's dtype can explain.
    """
    live = TrainingResult.read(trained / "training.json").heldout_loss
    if live is None:
        return
    found = float(nll[:GATE_SAMPLES].sum() / tokens[:GATE_SAMPLES].sum())
    if not abs(found - live) <= LOSS_BOUND[recipe.model.dtype]:
        raise ExportError(
            f"{trained.name}: the exported model's loss on the first {GATE_SAMPLES} held-out samples is {found:.4f}, the live "
            f"model's was {live:.4f} (bound {LOSS_BOUND[recipe.model.dtype]}): what was exported is not what was trained; "
            "nothing was stored"
        )


def _model_shapes(folder: Path) -> dict[str, list[int]]:
    """Names and shapes of the parameters that the folder's config.json asks for, tied ones once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(folder)))
    return {name: list(parameter.shape) for name, parameter in model.named_parameters()}


def _adapter_shapes(folder: Path) -> dict[str, list[int]]:
    """Names and shapes of an adapter cannot be known without its base; each lora_A needs its lora_B, of the same rank."""
    from safetensors import SafetensorError, safe_open

    rank = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    shapes: dict[str, list[int]] = {}
    try:
        with safe_open(str(folder / "adapter_model.safetensors"), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                shape = list(tensors.get_slice(name).get_shape())
                shapes[name] = [rank, *shape[1:]] if ".lora_A." in name else [*shape[:-1], rank]
    except (SafetensorError, OSError) as error:
        raise ExportError(f"adapter_model.safetensors: missing, cut short or damaged ({error}); nothing was stored") from None
    return shapes | {
        name.replace(".lora_A.", ".lora_B."): shapes.get(name.replace(".lora_A.", ".lora_B."), []) for name in shapes
    }
