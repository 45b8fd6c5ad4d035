"""Memory and time of what reads images, compared with the tensors that transformers' towers keep."""

import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from flytune.hardware import accelerator_named
from flytune.models import images, tokenizers
from tests.support import vision_models
from tests.support.plans import recipe_of, workload_of
from training_estimates import counting, memory, step_time, towers


def patches_and_kept(model, inputs):
    """Return the patches that pass each layer of a model's tower, and the bytes that its layers keep for
    their backward pass."""
    layers = [
        part
        for name, part in model.named_modules()
        if re.search(r"(visual|vision).*\.(blocks|layers)\.\d+$", name)
    ]
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    inside, patches, storages, kept = [], [], {}, []

    def enter(layer, arguments):
        inside.append(layer)
        patches.append(arguments[0].numel() // arguments[0].shape[-1])

    def leave(layer, arguments, result):
        inside.pop()

    def pack(tensor):
        if inside and tensor.data_ptr() not in weights:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            # While it lives, no other tensor has its address.
            kept.append(tensor)
        return tensor

    for layer in layers:
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.base_model.get_image_features(**inputs)
    return sum(patches) // len(layers), sum(storages.values())


def written(model_type, folder):
    """Write a tiny base; return it, the inputs of a fixed picture and its workload."""
    base = vision_models.write(folder / "base", model_type)
    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32).train()
    for part in model.modules():
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    processor = images.Processor(str(base), None, tokenizers.load(base))
    inputs = processor.inputs([[images.fixed()]], torch.zeros((1, 0), dtype=torch.int64))
    sizes = counting.count(json.loads((base / "config.json").read_text()))
    work = replace(
        workload_of(recipe_of()),
        geometry=sizes,
        micro_batch=1,
        weight_dtype="float32",
        compute_dtype="float32",
        trains_tower=True,
        checkpointing="none",
    )
    return model, {name: value for name, value in inputs.items() if name not in images.TYPES}, work


@pytest.mark.parametrize("model_type", vision_models.TYPES)
def test_a_trained_layer_keeps_what_the_closed_form_counts(model_type, tmp_path):
    model, inputs, work = written(model_type, tmp_path)
    patches, kept = patches_and_kept(model, inputs)
    trained = replace(work, image_tokens=round(patches / work.geometry.tower.patches_of_token))
    # Norms keep two numbers a patch, and rotary angles are kept once for all layers.
    assert 1 <= kept / towers.kept_bytes(trained) < 1.06


@pytest.mark.parametrize("model_type", vision_models.TYPES)
def test_attention_has_as_many_operations_as_the_closed_form_counts(model_type, tmp_path, monkeypatch):
    model, inputs, work = written(model_type, tmp_path)
    attention, operations = torch.nn.functional.scaled_dot_product_attention, []

    def counted(query, key, *arguments, **options):
        operations.append(4 * query.numel() * key.shape[-2])
        return attention(query, key, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    patches, _ = patches_and_kept(model, inputs)
    tower, side = work.geometry.tower, images.fixed().width
    work = replace(work, image_tokens=round(patches / tower.patches_of_token), image_pixels=side**2)
    # CLIP's class token, beside some hundred patches, is not counted.
    further = model_type == "llava"
    lengths = sum(layers * (length + further) for layers, length in towers.attention_lengths(work))
    assert sum(operations) == 4 * tower.hidden_size * patches * lengths


def test_a_frozen_tower_takes_time_and_a_trained_one_memory_too(tmp_path):
    base = vision_models.write(tmp_path / "base", "qwen2_5_vl")
    sizes = counting.count(json.loads((base / "config.json").read_text()))
    text = replace(workload_of(recipe_of(method="full")), geometry=sizes)
    frozen = replace(text, image_tokens=text.sequence_length)
    trained = replace(frozen, trains_tower=True)
    gpu = accelerator_named("H100")
    steps = [step_time.step(work, gpu) for work in (text, frozen, trained)]
    assert steps[0].forward < steps[1].forward == steps[2].forward
    assert steps[0].backward == steps[1].backward < steps[2].backward
    of_text, of_frozen, of_trained = (
        memory.memory(work).phases["steady step"].get(memory.TOWER, 0.0) for work in (text, frozen, trained)
    )
    assert of_text == of_frozen == 0 < of_trained
    # A tower that needs more while it reads than a step does afterwards decides.
    wide = sizes.tower.model_copy(update={"intermediate_size": 100_000})
    reading = replace(frozen, geometry=sizes.model_copy(update={"tower": wide}))
    assert memory.memory(reading).phases["steady step"][memory.TOWER] == towers.working_bytes(reading)
