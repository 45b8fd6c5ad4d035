"""`make demo-images`: a small vision-language model learns to name drawn figures, from a recipe to an
artifact, on this machine, without a hub or a GPU."""

import json
import random
import sys
from pathlib import Path
from typing import Any

from demo.__main__ import run_one
from flytune.files import written_atomically
from flytune.records import Metrics
from flytune.selftest import train_tokenizer

RECIPE = Path("recipes/demo-images.yaml")
MODEL, ROWS = Path("models/tiny-vision"), Path("data/figures/figures.jsonl")
COLORS = {"red": (210, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 210), "black": (20, 20, 20)}
FIGURES = ("circle", "square", "triangle")
SIZE, FIGURES_DRAWN = 56, 360
TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen2.5-VL's form of chats."""


def make(folder: Path) -> None:
    """Make the model and the drawn figures below `folder`, except those that exist."""
    if not (folder / MODEL).exists():
        write_model(folder / MODEL)
    if not (folder / ROWS).exists():
        write_rows(folder / ROWS)


def write_rows(file: Path, count: int = FIGURES_DRAWN, seed: int = 0) -> None:
    """Draw `count` figures as PNG beside `file`, and write a question and its answer about each."""
    from PIL import Image, ImageDraw

    draw = random.Random(seed)
    rows = []
    file.parent.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        color, figure = draw.choice(list(COLORS)), draw.choice(FIGURES)
        left, top, size = draw.randrange(4, 24), draw.randrange(4, 24), draw.randrange(20, 30)
        box = (left, top, left + size, top + size)
        picture = Image.new("RGB", (SIZE, SIZE), "white")
        pencil = ImageDraw.Draw(picture)
        if figure == "circle":
            pencil.ellipse(box, fill=COLORS[color])
        elif figure == "square":
            pencil.rectangle(box, fill=COLORS[color])
        else:
            pencil.polygon(
                [(left, top + size), (left + size, top + size), (left + size / 2, top)], fill=COLORS[color]
            )
        picture.save(file.parent / f"{number:03}.png")
        question = [{"type": "image", "image": f"{number:03}.png"}, {"type": "text", "text": "What is this?"}]
        answer = f"A {color} {figure}."
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            }
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_model(folder: Path, seed: int = 0) -> None:
    """Write a Qwen2.5-VL of about a million random weights, with its tokenizer and processor."""
    import torch
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    texts = ["What is this?", *(f"A {color} {figure}." for color in COLORS for figure in FIGURES)]
    tokenizer = train_tokenizer(texts, 512)
    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    named = dict(zip(("vision_start", "vision_end", "image", "video"), TOKENS, strict=True))
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
    }
    tower = {
        "depth": 2,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_heads": 4,
        "patch_size": 7,
        "out_hidden_size": 128,
        "fullatt_block_indexes": [0, 1],
        "window_size": 56,
    }
    config = Qwen2_5_VLConfig(
        text_config=text | special,
        vision_config=tower,
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in named.items()},
    )
    with torch.random.fork_rng(devices=[]), written_atomically(folder, keep_existing=True) as out:
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(out)
        tokenizer.save_pretrained(out)
        Qwen2VLImageProcessorPil(patch_size=7, min_pixels=196, max_pixels=SIZE * SIZE).save_pretrained(out)
        processor = {"processor_class": "Qwen2_5_VLProcessor"}
        (out / "processor_config.json").write_text(json.dumps(processor) + "\n", encoding="utf-8")


def verdict(metrics: Metrics) -> str:
    """Return the held-out perplexity of both models, and how many sample answers are right."""
    perplexity = metrics.figure("perplexity")
    assert perplexity.base is not None, "a language model has one"
    right = sum(answer.tuned == answer.reference for answer in metrics.answers)
    return (
        f"held-out perplexity {perplexity.base.value:.1f} -> {perplexity.tuned.value:.2f}; "
        f"{right} of {len(metrics.answers)} sample answers are right"
    )


def main() -> int:
    """Run the demo; return 1 if the tuned model is not better than its base."""
    return 0 if run_one(RECIPE, "a model learns to name drawn figures", make, verdict).is_better else 1


if __name__ == "__main__":
    sys.exit(main())
