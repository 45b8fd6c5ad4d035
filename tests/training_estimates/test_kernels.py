"""Tests of the bytes of kernels against those that torch's own operations read and write, forward and
backward."""

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from benchmarks.frameworks import TRANSFORMERS
from training_estimates.framework import AUTOCAST_ADAPTERS
from training_estimates.kernels import EAGER, NORM_WEIGHT, SCORES

TOKENS, WIDTH = 256, 128


class Moved(TorchDispatchMode):
    """Adder of the bytes that operations read and write; of an expanded tensor those that are stored."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        made = operation(*arguments, **(named or {}))
        if not operation.is_view and operation not in (
            torch.ops.aten.detach.default,
            torch.ops.aten._unsafe_view.default,
        ):
            for tensor in tree_leaves((arguments, named, made)):
                if isinstance(tensor, torch.Tensor):
                    stored = [
                        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride
                    ]
                    self.bytes += tensor.element_size() * torch.Size(stored).numel()
        return made


def moved(compute, numbers):
    """Return the bytes of a forward and of a backward pass, over `numbers`."""
    with Moved() as forward:
        made = compute()
    made = made if isinstance(made, tuple) else (made,)
    gradients = [torch.randn_like(one) for one in made]
    with Moved() as backward:
        torch.autograd.backward(made, gradients)
    return forward.bytes / numbers, backward.bytes / numbers


def hidden(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def test_a_norm_moves_what_is_counted():
    norm, states = LlamaRMSNorm(WIDTH).to(torch.bfloat16), hidden(1, TOKENS, WIDTH)
    norm.weight.requires_grad_(False)
    forward, frozen = moved(lambda: norm(states), TOKENS * WIDTH)
    assert forward == pytest.approx(EAGER.norm.forward, rel=0.03)
    # Beside the norm's own: the sums with the residual stream's gradient, and of those behind the norm.
    assert frozen == pytest.approx(EAGER.norm.backward - 6 - 9, rel=0.03)
    norm.weight.requires_grad_(True)
    states.grad = None
    _, trained = moved(lambda: norm(states), TOKENS * WIDTH)
    assert trained - frozen == pytest.approx(NORM_WEIGHT, rel=0.03)


def test_a_rotation_and_an_activation_move_what_is_counted():
    queries, keys = hidden(1, 8, TOKENS, WIDTH), hidden(1, 8, TOKENS, WIDTH)
    turned = torch.randn(1, TOKENS, WIDTH, dtype=torch.bfloat16)
    found = moved(lambda: apply_rotary_pos_emb(queries, keys, turned, turned), 2 * 8 * TOKENS * WIDTH)
    assert found == pytest.approx(EAGER.rotary, rel=0.06)
    gate, up = hidden(TOKENS, WIDTH), hidden(TOKENS, WIDTH)
    assert moved(lambda: nn.functional.silu(gate) * up, TOKENS * WIDTH) == pytest.approx(
        EAGER.activation, rel=0.03
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_attention_that_stores_its_scores_moves_what_is_counted(dtype):
    layer = nn.Module()
    layer.num_key_value_groups = 1
    # Heads of few numbers, so that scores are nearly all that moves.
    states = [hidden(1, 8, TOKENS, 2, dtype=dtype) for _ in range(3)]
    mask = torch.zeros(1, 1, 1, TOKENS, dtype=dtype)
    found = moved(lambda: eager_attention_forward(layer, *states, mask, 1.5)[0], 8 * TOKENS**2)
    assert found == pytest.approx(SCORES, rel=0.05)


@pytest.mark.parametrize("is_autocast", [True, False], ids=["autocast", "pure"])
def test_an_adapter_moves_what_is_counted(is_autocast):
    counted = AUTOCAST_ADAPTERS if is_autocast else TRANSFORMERS.pure_adapters
    inputs, outputs = 96, 320

    def passes(adapted):
        layer = nn.Linear(inputs, outputs, bias=False).to(torch.bfloat16).requires_grad_(False)
        if adapted:
            layer = LoraLinear(layer, "default", LoraConfig(), r=1, lora_alpha=2, lora_dropout=0.0)
            layer.lora_A.float(), layer.lora_B.float()
        states = hidden(8 * TOKENS, inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            return moved(lambda: layer(states), 8 * TOKENS)

    for found, bare, of_input, of_output in zip(
        passes(True), passes(False), counted.inputs, counted.outputs, strict=True
    ):
        assert found - bare == pytest.approx(of_input * inputs + of_output * outputs, rel=0.03)
