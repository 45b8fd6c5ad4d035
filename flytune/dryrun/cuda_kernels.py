"""Allocations of CUDA's kernels where a CPU's differ, for fake tensors: nothing is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flytune import patches

# FlashAttention 2 rounds sequence lengths and head sizes up in its backward buffers
# (csrc/flash_attn/flash_api.cpp, mha_bwd).
SEQUENCE_BLOCK = 128
HEAD_BLOCK = 32


@contextmanager
def any_dtype() -> Iterator[None]:
    """Let products of many experts' matrices be of any dtype: torch's shape function knows bfloat16, its
    kernels all.

    transformers computes experts in the dtype of their weights, which autocast leaves float32
    (integrations/moe.py).
    """
    from torch import _meta_registrations

    def product(mat_a: Any, mat_b: Any, *, offs: Any, out_dtype: Any, **_: Any) -> Any:
        return _meta_registrations._create_grouped_mm_output_tensor(mat_a, mat_b, offs, out_dtype)

    with patches.torch.GROUPED_PRODUCT.replaced(product):
        yield


@contextmanager
def cuda() -> Iterator[None]:
    """Replace attention without a mask by FlashAttention's allocations, TRL's loss by its Triton kernels',
    and dropout."""
    import torch
    from transformers.integrations import sdpa_attention
    from trl.kernels import chunked_logprob

    flash, masked = _flash_attention(), sdpa_attention.sdpa_attention_forward

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **named: Any
    ) -> tuple[Any, None]:
        if attention_mask is not None:
            return masked(module, query, key, value, attention_mask, **named)
        return flash.apply(query, key, value), None

    class Compact:
        """TRL's selection of trained positions: at worst a copy of all."""

        @staticmethod
        def apply(hidden: Any, weight: Any, bias: Any, targets: Any, *rest: Any) -> Any:
            import torch

            places = torch.empty(hidden.shape[0], dtype=torch.int64)
            return chunked_logprob.ChunkedLogProbFunction.apply(
                hidden[places], weight, bias, targets[places], *rest
            )

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        """Drop out as one kernel does (ATen/native/cuda/Dropout.cu): its mask has a byte for each number."""
        return torch.native_dropout(input, p, True)[0] if training and p else input

    with (
        patches.transformers.ATTENTION.replaced(attention),
        # In Triton a tile is reduced in place; its products are added by a matrix multiplication with float32
        # output.
        patches.trl.FORWARD_TILE.replaced(nothing),
        patches.trl.BACKWARD_TILE.replaced(nothing),
        patches.trl.ADD_PRODUCT.replaced(nothing),
        patches.trl.SELECTED_LOSS.replaced(Compact),
        patches.torch.DROPOUT.replaced(dropout),
    ):
        yield


def _flash_attention() -> Any:
    import torch

    class FlashAttention(torch.autograd.Function):
        """Tensors as FlashAttention 2 makes them: [batch, heads, length, head size] in, [batch, length,
        heads, size] out."""

        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            if torch.is_autocast_enabled(query.device.type):
                dtype = torch.get_autocast_dtype(query.device.type)
                query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            batch, heads, length, _ = query.shape
            # Values of multi-head latent attention are narrower than queries and keys; torch's
            # memory-efficient kernel, which takes them, is counted like FlashAttention.
            output = query.new_empty(batch, length, heads, value.shape[-1])
            ctx.save_for_backward(
                query, key, value, output, query.new_empty(batch, heads, length, dtype=torch.float32)
            )
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            query, key, value, _, _ = ctx.saved_tensors
            batch, heads, length, size = query.shape
            gradient = gradient.contiguous()
            rounded = _up(length, SEQUENCE_BLOCK)
            buffers = [query.new_empty(batch, heads, rounded, dtype=torch.float32)]
            buffers.append(query.new_empty(batch, rounded, heads, _up(size, HEAD_BLOCK), dtype=torch.float32))
            gradients = [torch.empty_like(tensor) for tensor in (query, key, value)]
            if key.shape[1] != heads:
                # Gradients for each query's head, which are then summed over heads that share a key.
                buffers += [
                    query.new_empty(batch, length, heads, tensor.shape[-1]) for tensor in (key, value)
                ]
            del buffers
            return tuple(gradients)

    return FlashAttention


def _up(value: int, block: int) -> int:
    return -(-value // block) * block
