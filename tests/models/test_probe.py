"""Tests of the fixed prompts that compare models."""

import torch

from flytune.models import probe
from tests.support.tiny import tiny_base


def test_two_models_asked_in_turn_leave_gradients_and_training_on(tmp_path):
    from transformers import AutoModelForCausalLM

    base = tiny_base(tmp_path)
    first, second = (AutoModelForCausalLM.from_pretrained(base).train() for _ in range(2))
    for _ in zip(probe.logits_of(first, [[1, 2]]), probe.logits_of(second, [[1, 2]]), strict=True):
        pass
    assert torch.is_grad_enabled()
    assert first.training
    assert second.training
