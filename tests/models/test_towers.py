"""Frozen towers: what a plan counts as frozen is what a run freezes, and it stays as it is."""

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from flytune.models import heads, images, tokenizers, towers
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import Recipe
from tests.support import vision_models
from tests.support.vision_rows import content

TYPES = [
    name if name in ("qwen2_5_vl", "gemma3") else pytest.param(name, marks=pytest.mark.slow)
    for name in vision_models.TYPES
]


def loaded(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype="float32")


def inputs_of(folder, text="See IMAGE", *pictures):
    tokenizer = tokenizers.load(folder)
    processor = images.Processor(str(folder), None, tokenizer)
    (replacement,) = processor.replacements(pictures) if pictures else [""]
    text = text.replace("IMAGE", vision_models.around(folder.name, replacement))
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    seen = processor.inputs([pictures], ids) if pictures else {}
    return processor, {"input_ids": ids, "attention_mask": torch.ones_like(ids), **seen}


@pytest.mark.parametrize("model_type", TYPES)
def test_what_a_plan_counts_as_frozen_is_what_is_frozen(model_type, tmp_path):
    base = vision_models.write(tmp_path / model_type, model_type)
    for vision in ("frozen", "train"):
        recipe = Recipe.model_validate(content(base, tmp_path / "rows.jsonl", **{"model.vision": vision}))
        model, head = loaded(base), heads.head_of(recipe)
        head.freeze(model, recipe)
        frozen = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
        assert head.frozen(read_geometry(recipe.model), recipe) == frozen
        assert (frozen > 0) == (vision == "frozen")


@pytest.mark.parametrize("model_type", TYPES)
def test_gradients_pass_the_frozen_layers_of_a_language_model(model_type, tmp_path):
    base = vision_models.write(tmp_path / model_type, model_type)
    _, inputs = inputs_of(base, "See")
    gradients = []
    for is_quantized in (False, True):
        model = loaded(base)
        for name, parameter in model.named_parameters():
            if is_quantized and "proj" in name:
                # Of a matrix in 4 bits.
                parameter.requires_grad_(False)
        towers.freeze(model)
        model(**inputs).logits.square().sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_frozen_tower_drops_nothing_out_and_keeps_nothing(model_type, tmp_path):
    base = vision_models.write(tmp_path / model_type, model_type)
    _, inputs = inputs_of(base, "See IMAGE", Image.new("RGB", (48, 56), (200, 20, 20)))
    model = loaded(base)
    expected = model.eval()(**inputs).logits
    towers.freeze(model)
    model.train()
    model.enable_input_require_grads()
    torch.testing.assert_close(model(**inputs).logits, expected)
    features = model.base_model.get_image_features(
        **{
            name: value
            for name, value in inputs.items()
            if name not in (*images.TYPES, "input_ids", "attention_mask")
        }
    )
    assert not any(part.requires_grad for part in towers._tensors(features))


@pytest.mark.parametrize("model_type", TYPES)
def test_a_batch_without_an_image_runs_the_tower_to_no_effect(model_type, tmp_path):
    base = vision_models.write(tmp_path / model_type, model_type)
    processor, text = inputs_of(base, "See this.")
    _, pictured = inputs_of(base, "See IMAGE", Image.new("RGB", (48, 56), (200, 20, 20)))
    model = loaded(base).eval()
    expected = [model(**inputs).logits for inputs in (text, pictured)]
    towers.run_always(model, processor)
    decoder = {id(weight) for weight in model.get_decoder().parameters()}
    for inputs, logits in zip((text, pictured, text), (*expected, expected[0]), strict=True):
        model.zero_grad()
        found = model(**inputs).logits
        torch.testing.assert_close(found, logits)
        found.sum().backward()
        tower = [name for name, weight in model.named_parameters() if id(weight) not in decoder]
        assert tower
        if inputs is text:
            gradients = [model.get_parameter(name).grad for name in tower if "lm_head" not in name]
            assert any(gradient is not None for gradient in gradients)
            assert not any(gradient.any() for gradient in gradients if gradient is not None)
