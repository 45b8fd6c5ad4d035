"""The trained weights as a Hugging Face folder, and the gate that holds the folder against what was trained."""

import json
import shutil
from pathlib import Path
from typing import Any

from flytune.errors import ExportError
from flytune.heldout import GATE_SAMPLES
from flytune.recipe import Recipe
from flytune.records import TrainingResult
from flytune.strategies import strategy_of

MAX_SHARD_SIZE = "5GB"
# Nats a token. A full fine-tune's live weights are float32 and its 16-bit export rounds them; kernels differ between
# training and evaluation. Seen on the demo's models: docs/measured.md. A tensor that is lost costs whole nats.
LOSS_BOUND = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}


def write(trainer: Any, recipe: Recipe, tokenizer: Path, out: Path) -> Path:
    """Writes the trained weights of a live trainer; every process must call it, the first one writes.

    `out/model` holds the whole model in recipe.model.dtype with its tokenizer, or `out/adapter` the adapter in PEFT's layout.

    Returns: the folder written.
    """
    import torch

    strategy, model = strategy_of(recipe), trainer.accelerator.unwrap_model(trainer.model)
    full = recipe.method.name == "full"
    state: dict[str, torch.Tensor] = {}
    # Tied weights are one parameter and so come once, under the name that from_pretrained ties the other to.
    for name, parameter in model.named_parameters():
        if full or parameter.requires_grad:
            gathered = strategy.gather(parameter)
            if trainer.is_world_process_zero():
                state[name] = gathered.detach().to("cpu", getattr(torch, recipe.model.dtype) if full else None, copy=True)
    folder = out / ("model" if full else "adapter")
    if trainer.is_world_process_zero():
        folder.mkdir(parents=True)
        _write_model(model, state, recipe, folder) if full else _write_adapter(model, state, folder)
        for file in sorted(tokenizer.iterdir()):
            shutil.copy(file, folder / file.name)
    trainer.accelerator.wait_for_everyone()
    return folder


def _write_model(model: Any, state: dict[str, Any], recipe: Recipe, folder: Path) -> None:
    persistent = model.state_dict().keys()
    state |= {name: buffer.cpu() for name, buffer in model.named_buffers() if name in persistent}
    model.save_pretrained(str(folder), state_dict=state, max_shard_size=MAX_SHARD_SIZE)
    # save_pretrained writes the live model's dtype, float32 in a full fine-tune; the files hold the recipe's. The cache is
    # off during checkpointed training; a model that is used needs it.
    model.config.dtype, model.config.use_cache = recipe.model.dtype, True
    model.config.save_pretrained(str(folder))


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
