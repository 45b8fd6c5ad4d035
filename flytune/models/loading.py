"""Base models and adapters as torch modules: loaded the same way for training, for the gate and for
evaluation."""

import importlib
import inspect
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

from flytune import patches, process_setup
from flytune.errors import RecipeError
from flytune.models import (
    adapter_files,
    adapter_targets,
    base,
    heads,
    host_memory,
    rope,
    safetensors_files,
    tokenizers,
    vocabulary,
)
from flytune.models.library_errors import named
from flytune.recipe import Model, Recipe
from flytune.records.contents import CONTENTS

log = logging.getLogger(__name__)


def base_model(recipe: Recipe, dtype: str, quant_storage: str = "uint8", **load_arguments: Any) -> Any:
    """Return the recipe's base model in `dtype`, with rows for its added tokens; for qlora quantized, ready
    for an adapter.

    For a reward model it is a sequence classifier with one output; a base without that head gets its first
    values.

    `quant_storage` is the dtype that 4-bit weights are packed into; `load_arguments` go to from_pretrained
    (device_map, max_memory). Only safetensors are read.

    Raises:
        RecipeError: the files make no sense to transformers. OSErrors and RuntimeErrors, which those of a
            storage and of a device are too, stay as they are.
    """
    if recipe.method.name == "qlora":
        load_arguments["quantization_config"] = quantization(recipe, quant_storage)
    head = heads.head_of(recipe)
    with named(
        f"model.name_or_path: {recipe.model.name_or_path}: cannot be loaded",
        RecipeError,
        (OSError, RuntimeError),
    ):
        model, read = head.loader().from_pretrained(
            base.local_name(recipe.model),
            revision=recipe.model.revision,
            dtype=dtype,
            attn_implementation=recipe.model.attn_implementation,
            trust_remote_code=recipe.model.trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            **head.arguments,
            **rope.arguments(recipe.model),
            **load_arguments,
        )
    # transformers does so itself, but not under ZeRO-3 (5.23, integrations/deepspeed.py).
    safetensors_files.keep_used_conversions(model, getattr(model, "_weight_conversions", None))
    vocabulary.grow(model, recipe.model)
    drawn = head.draw(model, read["missing_keys"], recipe.training.seed)
    _warn_of_missing(recipe, {*read["missing_keys"]} - drawn)
    if recipe.method.name == "qlora":
        from peft import prepare_model_for_kbit_training

        # Norms and embeddings become float32, in training and at every reload, so that both compute the same.
        # The Trainer switches on gradient checkpointing.
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return rope.of_batch_alone(_keep_quantized(model))


def _warn_of_missing(recipe: Recipe, names: Iterable[str]) -> None:
    """Warn of parameters that the files have no values for, once on each node."""
    missing = sorted(names)
    if missing and os.environ.get("LOCAL_RANK", "0") == "0":
        others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        log.warning(
            "model.name_or_path: %s has no values for %s%s: they are random; check that its files are of "
            "this type of model",
            recipe.model.name_or_path,
            ", ".join(missing[:3]),
            others,
        )


def _keep_quantized(model: Any) -> Any:
    """Keep 4-bit layers from repacking their weights when a CPU with AVX512-BF16 first evaluates them.

    From then on bitsandbytes 0.50 (nn/modules.py, Linear4bit.forward) computes with a bfloat16 kernel, in
    training too: the kernel has no gradient, its results differ from training's, and `dequantize_4bit`
    misreads the repacked weights. Each layer holds the choice in an attribute, which is set here on every
    CPU, so that all CPUs run the same code.
    """
    for layer in model.modules():
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return model


def local_folder(model: Model) -> Path:
    """Return the folder of the base model's files on this node; they are fetched once per node."""
    name = base.local_name(model)
    folder = Path(name)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    # The hub's cache locks each file: the first process of the node downloads it, the others use it.
    return Path(snapshot_download(name, revision=model.revision, allow_patterns=["*.safetensors", "*.json"]))


def commit(model: Model, local: bool = False) -> str | None:
    """Return the commit of `model.revision` on the hub; with `local`, that of the downloaded files.

    None for a folder or an address; the revision itself if it cannot be resolved.
    """
    if not base.is_on_hub(model):
        return None
    from transformers.utils.hub import resolve_revision

    resolution = resolve_revision(model.name_or_path, model.revision, local_files_only=local)
    return getattr(resolution, "resolved", resolution)


def quantization(recipe: Recipe, storage: str = "uint8") -> Any:
    """Return the format of a qlora base: 4 bits (Dettmers et al. 2023), computing in model.dtype, or LLM.int8
    (2022)."""
    import torch
    from transformers import BitsAndBytesConfig

    method = recipe.method
    if method.load_in_8bit:
        _say_casts_once()
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=method.llm_int8_threshold)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=method.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=method.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=getattr(torch, recipe.model.dtype),
        bnb_4bit_quant_storage=getattr(torch, storage),
    )


@cache
def _say_casts_once() -> None:
    """Let 8-bit layers say once that they cast their inputs, which they repeat at every product."""
    messages: list[str] = []

    def is_new(record: logging.LogRecord) -> bool:
        if "inputs will be cast" not in str(record.msg):
            return True
        messages.append(str(record.msg))
        return len(messages) == 1

    logging.getLogger("bitsandbytes.autograd._functions").addFilter(is_new)


def is_quantized(module: Any) -> bool:
    """Return whether a module is a layer of bitsandbytes; an adapter's module around one is not."""
    return type(module).__module__.partition(".")[0] == "bitsandbytes" and hasattr(module, "weight")


def dequantized(layer: Any) -> Any:
    """Return the weights that a quantized layer stands for, float32 of shape (out, in); None for other
    layers.

    8-bit layers also quantize their inputs, so that their results are not exactly those of these weights.
    """
    from bitsandbytes import functional

    if (state := getattr(layer.weight, "quant_state", None)) is not None:
        return functional.dequantize_4bit(layer.weight.data, state).float()
    if hasattr(layer.weight, "SCB"):
        # The first product moves weights and scales of the rows into the layer's state.
        scales = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
        return functional.int8_vectorwise_dequant(layer.weight.data, scales).float()
    return None


def train_in_float32(model: Any) -> None:
    """Make trained parameters float32, in place; PEFT copies a table that it trains completely in the dtype
    of the base."""
    import torch

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


def weights_folder(folder: Path) -> Path:
    """Return the folder of the weights: model/ or adapter/ of a training's output, the root of an
    artifact."""
    if (folder / CONTENTS).is_file():
        return folder  # Checked were the files at its root.
    return next((folder / name for name in ("model", "adapter") if (folder / name).is_dir()), folder)


def is_adapter(folder: Path) -> bool:
    """Return whether an artifact or a training's output is an adapter, not a model."""
    return (weights_folder(folder) / "adapter_config.json").is_file()


def exported_model(recipe: Recipe, trained: Path, **load_arguments: Any) -> Any:
    """Return the model of a training's output or an artifact; an adapter is loaded on its base model.

    Raises:
        ValueError: tensors of an adapter have no place in the model, or are missing.
    """
    folder = str(weights_folder(trained))
    if is_adapter(trained):
        loaded = base_model(recipe, recipe.model.dtype, **load_arguments)
        heads.head_of(recipe).complete(
            loaded,
            lambda: tokenizers.load(folder, trust_remote_code=recipe.model.trust_remote_code).pad_token_id,
        )
        return adapter_files.put(loaded, Path(folder))
    loader = heads.head_of(recipe).loader()
    exported = loader.from_pretrained(
        folder,
        dtype=recipe.model.dtype,
        attn_implementation=recipe.model.attn_implementation,
        trust_remote_code=recipe.model.trust_remote_code,
        use_safetensors=True,
        **load_arguments,
    )
    return rope.of_batch_alone(exported)


def device_map() -> str | dict[str, str | int]:
    """Return the device map for inference in one process: all GPUs, the only one, or the CPU."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus > 1:
        return "auto"
    return {"": 0 if gpus else "cpu"}


@contextmanager
def importing() -> Iterator[None]:
    """Import libraries in this block without garbage collection, and without torch's compiler, which few runs
    ever call."""
    with process_setup.paused():
        compiled = patches.torch.COMPILE.current()  # torch is imported here

        def at_first_call(function: Any = None, **options: Any) -> Any:
            if not inspect.isfunction(function):
                return compiled(function, **options)
            make = cache(partial(compiled, function, **options))
            return wraps(function)(lambda *arguments, **named: make()(*arguments, **named))

        with patches.torch.COMPILE.replaced(at_first_call):
            yield


def import_libraries(*names: str) -> None:
    """Import transformers and other libraries that load models, and set up this process for them.

    Keeps freed tensors out of the heap, and the tokenizers' notice about forks out of the log.
    """
    host_memory.return_freed_blocks()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with importing():
        for name in ("transformers.modeling_utils", *names):
            importlib.import_module(name)


def peft_config(recipe: Recipe, model: Any, added: list[int] | None = None) -> Any:
    """Return PEFT's configuration of the recipe's adapter; None for full training.

    Args:
        model: the base model, for the names of its embedding and head.
        added: ids of the recipe's added tokens; by default, the tokenizer's.

    Raises:
        RecipeError: a name or pattern of layers matches none of the model, or it has no such head.
    """
    if recipe.method.name == "full":
        return None
    adapter_targets.check(recipe, model)
    from peft import LoraConfig

    method = recipe.method
    return LoraConfig(
        r=method.r,
        lora_alpha=method.lora_alpha,
        lora_dropout=method.lora_dropout,
        **adapter_targets.fields(model, method),
        use_dora=method.use_dora,
        use_rslora=method.use_rslora,
        init_lora_weights=method.init_lora_weights,  # type: ignore[arg-type]  # pissa_niter_16
        rank_pattern=dict(method.rank_pattern),
        alpha_pattern=dict(method.alpha_pattern),
        task_type=heads.head_of(recipe).task_type,
        **(vocabulary.peft_fields(method, recipe.model, model, added) | _trained_head(recipe, model)),
    )


def _trained_head(recipe: Recipe, model: Any) -> dict[str, Any]:
    """Return PEFT's field of the head that is trained beside an adapter."""
    modules = heads.head_of(recipe).trained_beside(model)
    return {"modules_to_save": modules} if modules else {}
