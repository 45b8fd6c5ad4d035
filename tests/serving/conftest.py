"""Artifact of an adapter on the tiny model, with the models that a server may have in its place."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from flytune.models import probe
from flytune.recipe import Recipe
from flytune.selftest import tiny_model
from flytune.selftest.tiny_model import CHATML, train_tokenizer
from tests.support.stages import seal
from tests.support.tiny import tiny_base, tiny_recipe


@dataclass
class Trained:
    """An artifact, and models by what they are."""

    folder: Path
    models: dict[str, Any]
    tokenizer: Any
    other_tokenizer: Any
    other_template: Any


def rounded(model: Any) -> Any:
    """Return a copy whose weights are rounded to 6 bits of the largest one in each row."""
    import torch

    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            step = weight.abs().amax(dim=-1, keepdim=True).clamp_min(1e-9) / 31
            weight.copy_((weight / step).round() * step)
    return model


@pytest.fixture(scope="package")
def trained(tmp_path_factory):
    """Provide a merged adapter as it was trained, its base, and others."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("served")
    base = tiny_base(folder)
    tokenizer = AutoTokenizer.from_pretrained(base)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=1, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(copy.deepcopy(plain), config).eval()
    prompts = probe.tokenized(tokenizer)
    answers = replace(probe.ask(model, prompts), **probe._without_adapter(model, model, prompts))
    artifact = folder / "artifact"
    tokenizer.save_pretrained(artifact)
    answers.write(artifact / probe.PROBE)
    recipe = Recipe.model_validate(
        tiny_recipe(base, folder / "rows.jsonl", {"method": "lora", "name": "ours"})
    )
    (artifact / "recipe.yaml").write_text(recipe.to_yaml())
    (artifact / "adapter_model.safetensors").write_bytes(b"weights")
    seal(artifact)
    models = {"trained": merged(model, 1.0), "base": plain, "halved": merged(model, 0.5)}
    models |= {"doubled": merged(model, 2.0), "quantized": rounded(merged(model, 1.0))}
    other = tiny_model.write(folder / "other", tiny_model.SENTENCES, seed=1)
    models["other"] = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    template = AutoTokenizer.from_pretrained(base)
    template.chat_template = CHATML.replace("<|im_start|>assistant", "<|im_start|>model")
    others = train_tokenizer(["another text that makes other tokens, 12 345"], 300)
    return Trained(artifact, models, tokenizer, others, template)


def merged(model: Any, scale: float) -> Any:
    """Return a copy of an adapter merged into its base at a share of its scale."""
    from peft.helpers import rescale_adapter_scale

    model = copy.deepcopy(model)
    with rescale_adapter_scale(model, scale):
        return model.merge_and_unload().eval()
