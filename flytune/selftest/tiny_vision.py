"""A small vision-language model with random weights, made without a download."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flytune.files import written_atomically
from flytune.selftest.tiny_model import train_tokenizer

SIDE = 56
"""Width and height of the images that it is made for, in pixels: 16 tokens each."""
_TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}
"""Tokens of images and videos, by the fields of the configuration that name them."""
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen2.5-VL's form of chats."""


def write(folder: Path, corpus: Iterable[str], seed: int = 0) -> None:
    """Write a Qwen2.5-VL of about a million random weights, with its processor and a tokenizer of 512 tokens
    that is trained on `corpus`."""
    import torch
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = train_tokenizer(corpus, 512)
    tokenizer.add_tokens(list(_TOKENS.values()), special_tokens=True)
    tokenizer.chat_template = _TEMPLATE
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
        **{field: tokenizer.convert_tokens_to_ids(token) for field, token in _TOKENS.items()},
    )
    with torch.random.fork_rng(devices=[]), written_atomically(folder, keep_existing=True) as out:
        torch.manual_seed(seed)
        Qwen2_5_VLForConditionalGeneration(config).save_pretrained(out)
        tokenizer.save_pretrained(out)
        Qwen2VLImageProcessorPil(patch_size=7, min_pixels=196, max_pixels=SIDE * SIDE).save_pretrained(out)
        processor = {"processor_class": "Qwen2_5_VLProcessor"}
        (out / "processor_config.json").write_text(json.dumps(processor) + "\n", encoding="utf-8")
