"""Vision-language models from rows with images to an artifact: the loss of plain transformers, equal weights
after an interruption and with every sharding, and a tower that nobody asked to train."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from flytune.errors import ExportError
from flytune.export import gate
from flytune.models import images, loading, tokenizers
from flytune.recipe import Recipe
from flytune.records import TrainingResult
from flytune.stages import local
from tests.support import interrupted, vision_models
from tests.support.vision_rows import content, write_rows

pytestmark = pytest.mark.slow
TOWER = ("visual.", "vision_tower.", "vision_model.", "projector.", "connector.")


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A function that returns the folder of a tiny model of a type."""
    made = {}

    def base(model_type):
        if model_type not in made:
            made[model_type] = vision_models.write(tmp_path_factory.mktemp("base") / model_type, model_type)
        return made[model_type]

    return base


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("FLYTUNE_OUT", str(tmp_path / "artifacts"))


def tensors(artifact):
    return load_file(Path(artifact) / "model.safetensors")


def plain_loss(base, rows):
    """Return the mean loss of the answers' tokens by transformers alone, of each row by itself."""
    tokenizer = tokenizers.load(base)
    processor = images.Processor(str(base), None, tokenizer)
    model = AutoModelForImageTextToText.from_pretrained(base, dtype="float32").eval()
    total, count = 0.0, 0
    for line in rows.read_text().splitlines():
        question, answer = json.loads(line)["messages"]
        picture = Image.open(rows.parent / question["content"][0]["image"]).convert("RGB")
        question = question | {"content": [{"type": "image"}, question["content"][1]]}
        line_answer = answer["content"]
        answer = answer | {"content": [{"type": "text", "text": line_answer}]}
        text = tokenizer.apply_chat_template([question, answer], tokenize=False)
        text = text.replace(processor.token, *processor.replacements([picture]))
        encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        first, end = (text.rindex(part) for part in (line_answer, "<|im_end|>"))
        trained = [place for place, (_, stop) in enumerate(encoded["offset_mapping"]) if first < stop]
        trained = trained[: len([place for place in trained if encoded["offset_mapping"][place][0] <= end])]
        ids = torch.tensor([encoded["input_ids"]])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            found = model(**inputs, **processor.inputs([[picture]], ids))
        log_probs = found.logits[0].log_softmax(-1)
        total -= sum(float(log_probs[place - 1, ids[0, place]]) for place in trained)
        count += len(trained)
    return total / count


@pytest.mark.parametrize("model_type", vision_models.TYPES)
def test_the_first_loss_is_that_of_transformers_and_the_tower_stays(model_type, bases, tmp_path):
    base, rows = bases(model_type), write_rows(tmp_path, 4)
    changes = {"data.heldout_fraction": 0, "evaluation.sample_answers": 0, "training.max_steps": 2}
    artifact = local.run(Recipe.model_validate(content(base, rows, **changes)))
    first = TrainingResult.read(Path(artifact) / "training.json").steps[0]
    assert first.loss == pytest.approx(plain_loss(base, rows), rel=1e-5)
    before, after = tensors(base), tensors(artifact)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any(part in name for part in TOWER for name in changed)
    for name in ("preprocessor_config.json", "processor_config.json"):
        assert (Path(artifact) / name).read_bytes() == (base / name).read_bytes()


def test_the_tower_is_trained_where_the_recipe_says_so(bases, tmp_path):
    base = bases("qwen2_5_vl")
    changes = {"model.vision": "train", "training.max_steps": 2}
    artifact = local.run(Recipe.model_validate(content(base, write_rows(tmp_path, 12), **changes)))
    before, after = tensors(base), tensors(artifact)
    assert any("visual." in name and not torch.equal(before[name], after[name]) for name in before)


def test_the_gate_asks_about_a_picture(bases, tmp_path):
    changes = {"data.heldout_fraction": 0, "evaluation.sample_answers": 0, "training.max_steps": 2}
    recipe = Recipe.model_validate(content(bases("qwen2_5_vl"), write_rows(tmp_path, 4), **changes))
    artifact = Path(local.run(recipe))
    model = loading.exported_model(recipe, artifact)
    gate._check_answers(recipe, artifact, model)
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            parameter.add_(1.0)
    with pytest.raises(ExportError, match="what reads images is not what was trained"):
        gate._check_answers(recipe, artifact, model)
    settings = json.loads((artifact / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] //= 4
    (artifact / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ExportError, match="the exported processor writes"):
        gate._check_answers(recipe, artifact, model)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_an_adapter_is_on_the_language_model_alone(method, bases, tmp_path):
    artifact = local.run(
        Recipe.model_validate(content(bases("qwen2_5_vl"), write_rows(tmp_path, 12), method=method))
    )
    names = load_file(Path(artifact) / "adapter_model.safetensors")
    assert names
    assert all("language_model." in name for name in names)


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3", "fsdp"])
def test_two_processes_train_the_loss_of_one(sharding, bases, tmp_path):
    rows = write_rows(tmp_path, 24)
    losses = []
    for name, shape in (("none", "cpu-1"), (sharding, "cpu-2")):
        changes = {"sharding": name, "hardware.shape": shape, "checkpoints.name": name}
        artifact = local.run(Recipe.model_validate(content(bases("qwen2_5_vl"), rows, **changes)))
        losses.append([step.loss for step in TrainingResult.read(Path(artifact) / "training.json").steps])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert tensors(artifact).keys() == tensors(bases("qwen2_5_vl")).keys()


@pytest.mark.parametrize(
    ("sharding", "vision", "model_type"),
    [
        ("fsdp", "frozen", "llava_onevision"),
        ("zero3", "frozen", "smolvlm"),
        ("ddp", "train", "qwen3_vl"),
        ("fsdp", "train", "qwen3_vl"),
        ("zero3", "train", "qwen3_vl"),
    ],
)
def test_samples_without_an_image_leave_no_process_waiting(sharding, vision, model_type, bases, tmp_path):
    rows = write_rows(tmp_path, 4, text_rows=12)
    runs = []
    for name, shape in (("none", "cpu-1"), (sharding, "cpu-2")):
        changes = {
            "sharding": name,
            "hardware.shape": shape,
            "checkpoints.name": name,
            "model.vision": vision,
        }
        artifact = local.run(Recipe.model_validate(content(bases(model_type), rows, **changes)))
        losses = [step.loss for step in TrainingResult.read(Path(artifact) / "training.json").steps]
        runs.append((losses, tensors(artifact)))
    (plain, expected), (shared, weights) = runs
    assert shared == pytest.approx(plain, rel=1e-4)
    start = tensors(bases(model_type))
    update = sum(float((expected[name] - start[name]).square().sum()) for name in expected)
    difference = sum(float((weights[name] - expected[name]).square().sum()) for name in expected)
    assert update > 0
    assert difference < 1e-6 * update


def test_a_run_that_is_ended_goes_on_to_the_same_weights(bases, tmp_path):
    rows = write_rows(tmp_path, 24)
    recipe = content(bases("qwen2_5_vl"), rows, **{"training.max_steps": 40, "checkpoints.save_steps": 20})
    whole = content(bases("qwen2_5_vl"), rows, **{"training.max_steps": 40, "checkpoints.name": "whole"})
    code, log = interrupted.signalled(
        recipe, tmp_path, "^step 3/", lambda process: os.kill(process.pid, signal.SIGTERM)
    )
    assert code == 128 + signal.SIGTERM, log
    code, log = interrupted.run(recipe, tmp_path)
    assert (code, "attempt 2: resumes at step " in log) == (0, True), log
    one, other = tensors(log.splitlines()[-1]), tensors(local.run(Recipe.model_validate(whole)))
    assert all(torch.equal(one[name], other[name]) for name in other)
