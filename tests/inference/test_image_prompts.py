"""Prompts with images: each is answered as the model answers it alone, in batches, from a merged folder, in a
conversation, and by the card's code."""

import base64
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from flytune.adapters import merging
from flytune.cli import main
from flytune.errors import DataError
from flytune.inference import prompts
from flytune.inference.batch import InferenceModel, PromptFormat
from flytune.inference.conversation import Conversation
from flytune.models import Generation, images, tokenizers
from flytune.recipe import Recipe
from flytune.stages import local
from tests.support import vision_models
from tests.support.vision_rows import COLORS, content, write_rows

TEXT = {"type": "text", "text": "Which color?"}
LIMIT = Generation(max_new_tokens=6)


def asked(*names):
    parts = [{"type": "image", "image": name} for name in names]
    return {"messages": [{"role": "user", "content": [*parts, TEXT]}]}


def draw(folder, name, color, size=(40, 56)):
    Image.new("RGB", size, COLORS[color]).save(folder / name)


def seen(file):
    """Return an image as the model sees it."""
    return images.opened(file.read_bytes(), 3000, "x")


def write(folder, *rows):
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """A function that returns the artifact of an adapter on a tiny model of a type."""
    made = {}

    def artifact(model_type):
        if model_type not in made:
            folder = tmp_path_factory.mktemp(model_type)
            base = vision_models.write(folder / model_type, model_type)
            changes = {"method": "lora", "training.max_steps": 2, "data.max_pixels": 3000}
            with pytest.MonkeyPatch.context() as patched:
                patched.setenv("FLYTUNE_OUT", str(folder / "artifacts"))
                made[model_type] = Path(
                    local.run(Recipe.model_validate(content(base, write_rows(folder, 12), **changes)))
                )
        return made[model_type]

    return artifact


def answers(capsys, artifact, file, *options):
    command = ["infer", str(artifact), "--prompts", str(file), "--max-new-tokens", "6", *options]
    assert main(command) == 0
    return [json.loads(line)["answer"] for line in capsys.readouterr().out.splitlines()]


def alone(model, text, *pictures):
    """Return the answer to one rendered prompt, by a plain call; images are <image> in it."""
    form = model.own_format
    for replacement in form.processor.replacements(pictures) if pictures else []:
        text = text.replace("<|image_pad|>", replacement.replace("<|image_pad|>", "\0"), 1)
    ids = torch.tensor([form.tokenizer(text.replace("\0", "<|image_pad|>"))["input_ids"]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= form.processor.inputs([pictures], ids) if pictures else {}
    with torch.no_grad():
        output = model.model.generate(
            **inputs, do_sample=False, max_new_tokens=6, eos_token_id=form.ends, pad_token_id=0
        )
    return form.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
ASSISTANT = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
def test_a_batch_of_prompts_with_many_images_one_and_none(artifacts, tmp_path, capsys):
    artifact = artifacts("qwen2_5_vl")
    draw(tmp_path, "red.png", "red")
    draw(tmp_path, "blue.png", "blue", (96, 24))
    rows = [asked("red.png"), asked("red.png", "blue.png"), asked(), asked("blue.png")]
    found = answers(capsys, artifact, write(tmp_path, *rows))
    red, blue = (
        images.opened((tmp_path / f"{name}.png").read_bytes(), 3000, "x") for name in ("red", "blue")
    )
    model = InferenceModel(artifact, {})
    expected = [
        alone(model, f"<|im_start|>user\n{IMAGE * len(shown)}Which color?{ASSISTANT}", *shown)
        for shown in ([red], [red, blue], [], [blue])
    ]
    assert found == expected
    assert len(set(found)) > 1, "the model does not look at the images"
    merging.merge(artifact, tmp_path / "merged")
    assert answers(capsys, tmp_path / "merged", write(tmp_path, *rows)) == expected


@pytest.mark.parametrize("names", [["red.png"], []])
def test_a_token_of_an_image_in_a_question_is_refused(names, tmp_path):
    # The model would look for an image more than there is, and end with all other rows of its batch.
    base = vision_models.write(tmp_path / "gemma3", "gemma3")
    draw(tmp_path, "red.png", "red")
    tokenizer = tokenizers.load(base)
    processor = images.Processor(str(base), None, tokenizer)
    form = PromptFormat(tokenizer, prompts.Columns(with_images=True), [1], processor)
    parts = [{"type": "image", "image": name} for name in names]
    question = {"type": "text", "text": "What is an <image_soft_token>?"}
    row = {"messages": [{"role": "user", "content": [*parts, question]}]}
    digests = [images.store((tmp_path / name).read_bytes(), tmp_path) for name in names]
    with pytest.raises(DataError, match="row 1: the row's own text has a token that stands for a part"):
        form.prompt({"row": row, "where": "row 1", "images": digests, "folder": str(tmp_path)})


@pytest.mark.slow
def test_images_in_a_parquet_file_are_bytes(artifacts, tmp_path, capsys):
    artifact = artifacts("qwen2_5_vl")
    draw(tmp_path, "red.png", "red")
    (expected,) = answers(capsys, artifact, write(tmp_path, asked("red.png")))
    image = (tmp_path / "red.png").read_bytes()
    rows = [{"question": "<image>Which color?", "image": {"bytes": image, "path": "red.png"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    out = tmp_path / "out.parquet"
    command = ["infer", str(artifact), "--prompts", str(tmp_path / "prompts.parquet"), "--out", str(out)]
    assert main([*command, "--max-new-tokens", "6"]) == 0
    (answered,) = pyarrow.parquet.read_table(out).to_pylist()
    assert answered["answer"] == expected
    assert answered["image"] == {"bytes": base64.b64encode(image).decode(), "path": "red.png"}


@pytest.mark.slow
def test_a_row_with_an_image_that_cannot_be_read_is_named(artifacts, tmp_path, capsys):
    draw(tmp_path, "red.png", "red")
    (tmp_path / "cut.png").write_bytes((tmp_path / "red.png").read_bytes()[:60])
    file = write(tmp_path, asked("red.png"), asked("cut.png"))
    command = ["infer", str(artifacts("qwen2_5_vl")), "--prompts", str(file)]
    assert main(command) == 1
    assert "prompts.jsonl:2: cut.png: cannot be read as an image" in capsys.readouterr().err
    assert len(answers(capsys, artifacts("qwen2_5_vl"), file, "--max-bad-fraction", "0.5")) == 1


@pytest.mark.slow
def test_a_conversation_about_images(artifacts, tmp_path, monkeypatch, capsys):
    artifact = artifacts("qwen2_5_vl")
    draw(tmp_path, "red.png", "red")
    draw(tmp_path, "blue.png", "blue", (96, 24))
    talk = Conversation(InferenceModel(artifact, {}), LIMIT)
    red, blue = (
        images.opened((tmp_path / f"{name}.png").read_bytes(), 3000, "x") for name in ("red", "blue")
    )
    talk.add_image(tmp_path / "red.png")
    first = talk.answer("Which color?", lambda text: None)
    start = f"<|im_start|>user\n{IMAGE}Which color?{ASSISTANT}"
    assert first == alone(talk.model, start, red)
    talk.add_image(tmp_path / "blue.png")
    second = talk.answer("And this?", lambda text: None)
    again = f"{start}{first}<|im_end|>\n<|im_start|>user\n{IMAGE}And this?{ASSISTANT}"
    assert second == alone(talk.model, again, red, blue)
    with pytest.raises(DataError, match="none.png: No such file or directory; name an image file"):
        talk.add_image(tmp_path / "none.png")
    lines = f"/image {tmp_path / 'red.png'}\nWhich color?\n/image none.png\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", str(artifact), "--max-new-tokens", "6"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{first}\n"
    assert "none.png: No such file" in printed.err


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llava", "gemma3"])
def test_the_card_s_code_answers_as_flytune_does(model_type, artifacts, tmp_path, capsys):
    artifact = artifacts(model_type)
    draw(tmp_path, "photo.png", "green", (48, 56))
    row = {"messages": [{"role": "user", "content": [{"type": "image", "image": "photo.png"}]}]}
    row["messages"][0]["content"].append({"type": "text", "text": "What is this?"})
    command = ["infer", str(artifact), "--prompts", str(write(tmp_path, row)), "--max-new-tokens", "128"]
    assert main(command) == 0
    expected = json.loads(capsys.readouterr().out)["answer"]
    card = (artifact / "README.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", card, re.DOTALL))
    code = code.replace('"photo.png"', repr(str(tmp_path / "photo.png")))
    done = subprocess.run([sys.executable, "-c", code], cwd=artifact, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"answer {expected}\n"
    assert "--lora-modules tiny=." in card
    assert not re.search("gguf|text-generation-launcher", card)


def test_a_model_of_text_refuses_images_and_one_of_images_refuses_videos():
    reading = prompts.Columns(with_images=True)
    row = {**asked(), "images": ["a.png"]}
    with pytest.raises(DataError, match="column images has content, and this model was trained on text"):
        prompts.Columns().question(row, "here")
    marked = reading.with_marks(row, "here")
    assert images_in(reading.question(marked, "here")) == 1
    with pytest.raises(DataError, match="column video has content, and .* trained on text and images"):
        reading.question({**marked, "video": "a.mp4"}, "here")
    continued = reading.with_marks({"prompt": "See <image>", "image": "a.png"}, "here")
    with pytest.raises(DataError, match="prompt is text to continue, without images"):
        reading.question(continued, "here")


def images_in(chat):
    return sum(message["content"].count("\U0010ff7f") for message in chat)
