"""Liger's layer kernels compute what the layers as written do: on a GPU, or on a CPU in Triton's interpreter.

pip install --no-deps liger-kernel==0.8.5 triton==3.9.0
TRITON_INTERPRET=1 pytest tests/gpu/test_liger.py
"""

import copy
import importlib.util
import os

import pytest
import torch

from tests.support import ranks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Importing Liger starts CUDA, and a process that has started CUDA cannot be forked: it is imported in the
# tests' own processes.
LACKING = importlib.util.find_spec("liger_kernel") is None or not (torch.cuda.is_available() or INTERPRETED)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(LACKING, reason="needs Liger and a GPU")]


def complete_interpreter():
    """Give Triton 3.9's interpreter, in this process, the rsqrt of CUDA's library, and have it take Python's
    floats."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter as own

    convert = own._implicit_cvt

    def tensor(values, dtype, kind):
        return tl.tensor(own.TensorHandle(values, dtype), kind)

    def converted(value):
        return (
            tensor(np.array([value], np.float32), tl.float32, tl.float32)
            if isinstance(value, float)
            else convert(value)
        )

    def rsqrt(x):
        return tensor((1 / np.sqrt(x.handle.data)).astype(x.handle.data.dtype), x.dtype, x.type)

    own._implicit_cvt = converted
    rms_norm.rsqrt = rsqrt


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_loss_and_gradients_are_equal(model_type):
    ranks.run(1, compare, model_type)


def compare(model_type):
    if INTERPRETED:
        complete_interpreter()
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.liger import apply_liger_kernel

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
    }
    torch.manual_seed(0)
    device = "cpu" if INTERPRETED else "cuda"
    config = AutoConfig.for_model(model_type, **sizes, num_key_value_heads=2, head_dim=16)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(device)
    fused = copy.deepcopy(plain)
    # As TRL's trainer does, whose loss replaces Liger's.
    apply_liger_kernel(fused, {"fused_linear_cross_entropy": False})
    assert (
        "Liger"
        in type(fused.model.layers[0].mlp.forward.__self__).__name__
        + fused.model.layers[0].mlp.forward.__qualname__
    )
    tokens = torch.randint(0, 128, (2, 16), device=device)
    losses = [model(input_ids=tokens, labels=tokens).loss for model in (plain, fused)]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-6)
    for loss in losses:
        loss.backward()
    for (name, one), other in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6, msg=name)
