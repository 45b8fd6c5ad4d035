"""4-bit layers of bitsandbytes on fake tensors: their sizes, and the workspace of their products; nothing is
quantized."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from flytune import patches
from flytune.models import loading
from flytune.recipe import OptimizerKind, Recipe

# Numbers in bitsandbytes' tables for 8-bit states (functional.py, create_dynamic_map).
TABLE = 256
# Numbers of a parameter below which its states have 32 bits, numbers of an 8-bit state that share a scale,
# and numbers from which states are paged (bitsandbytes, optim/optimizer.py: min_8bit_size, init_state,
# get_state_buffer).
LEAST_8BIT, BLOCK, LEAST_PAGED = 4096, 256, 100_000
_tables: dict[str, Any] = {}
"""bitsandbytes' tables for 8-bit states by their names, while layers compute with fake tensors."""


def replace_layers(model: Any, recipe: Recipe, storage: str) -> Any:
    """Make those linear layers of a model on the meta device 4-bit layers that transformers quantizes, ready
    for adapters."""
    from peft import prepare_model_for_kbit_training
    from transformers.quantizers.auto import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(loading.quantization(recipe, storage), pre_quantized=False)
    quantizer._process_model_before_weight_loading(model, device_map=None)
    model.is_loaded_in_4bit = True
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def pack(model: Any) -> None:
    """Give 4-bit layers on the meta device weights of the size that they are stored in; adapters have been
    added."""
    import torch

    for layer in layers(model).values():
        numbers = layer.weight.numel()
        packed = (numbers + 1) // (2 * layer.quant_storage.itemsize)
        weight = torch.empty(packed, 1, dtype=layer.quant_storage, device="meta")
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)


def layers(model: Any) -> dict[str, Any]:
    """Return the 4-bit layers by their paths."""
    return {name: layer for name, layer in model.named_modules() if loading.is_quantized(layer)}


def scales(layer: Any, recipe: Recipe) -> list[Any]:
    """Set the scales of a layer, as bitsandbytes makes them, and return them: each process holds all of
    them."""
    import torch
    from bitsandbytes import functional

    method = recipe.method
    weight = torch.empty(layer.out_features, layer.in_features, dtype=getattr(torch, recipe.model.dtype))
    _, state = functional.quantize_4bit(
        weight,
        compress_statistics=method.bnb_4bit_use_double_quant,
        quant_type=method.bnb_4bit_quant_type,
        quant_storage=layer.quant_storage,
    )
    layer.quant_state = state
    inner = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *inner]


def optimizer_states(
    parameters: list[Any], kind: OptimizerKind, on_cuda: bool, embeddings: set[int]
) -> list[Any]:
    """Return the states that bitsandbytes keeps in the device's own memory (optim/optimizer.py, init_state).

    Args:
        embeddings: storages of the parameters whose states transformers keeps in 32 bits (trainer.py,
            create_optimizer).
    """
    import torch

    states = [torch.empty(TABLE), torch.empty(TABLE)] if kind.bits == 8 else []
    moments = 2 if kind.algorithm == "adamw" else 1
    for parameter in parameters:
        if kind.paged and on_cuda and parameter.numel() >= LEAST_PAGED:
            continue  # in unified memory
        small = (
            kind.bits == 32
            or parameter.numel() < LEAST_8BIT
            or parameter.untyped_storage()._cdata in embeddings
        )
        states += [
            torch.empty_like(parameter, dtype=torch.float32 if small else torch.uint8) for _ in range(moments)
        ]
        if not small:
            states += [torch.empty(-(-parameter.numel() // BLOCK)) for _ in range(moments)]
    return states


@contextmanager
def on_fake_tensors(on_cuda: bool) -> Iterator[None]:
    """Let 4-bit layers compute with fake tensors; on CUDA with the workspace of its kernels."""

    def attach(layer: Any) -> None:
        layer.weight.quant_state = layer.quant_state

    def multiply(x: Any, weight: Any, *, bias: Any, quant_state: Any) -> Any:
        return product.apply(x, weight, bias, quant_state)

    product = _product()
    _tables.clear()
    with (
        patches.bitsandbytes.QUANT_STATE.replaced(attach),
        patches.bitsandbytes.PRODUCT.replaced(multiply) if on_cuda else nullcontext(),
        patches.bitsandbytes.TABLES.replaced(_tables),
    ):
        yield


def make_table() -> Any:
    """Return the table for scales of scales, which each layer copies: made by bitsandbytes, its values would
    be read."""
    import torch

    _tables["dynamic"] = torch.empty(TABLE)
    return _tables["dynamic"]


def _product() -> Any:
    import torch
    from bitsandbytes import functional

    class Product(torch.autograd.Function):
        """Product with a 4-bit weight for more than 1,536 tokens: dequantized first (backends/cuda/ops.py).

        For fewer tokens some GPUs have kernels without that workspace.
        """

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any, state: Any) -> Any:
            ctx.weight, ctx.state = weight, state
            nested = (
                [torch.empty_like(state.absmax, dtype=torch.float32) for _ in range(2)]
                if state.nested
                else []
            )
            full = torch.empty(state.shape, dtype=x.dtype)
            del nested
            return torch.nn.functional.linear(x, full, bias)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            full = functional.dequantize_4bit(ctx.weight.view(-1, 1), ctx.state).to(gradient.dtype)
            return torch.matmul(gradient, full), None, None, None

    return Product
