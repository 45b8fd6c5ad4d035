"""Tiny vision-language models with random weights, each with the tokenizer, the processor and the shape of
chat template of its type."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytune.selftest.tiny_model import SENTENCES, train_tokenizer

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 32,
    # Nothing of a frozen tower is dropped out.
    "attention_dropout": 0.5,
}
QWEN_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}

PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part %}{{ 'IMAGE' }}"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Template as Qwen's: text as it is, or parts in their order."""
PARTS_ALONE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ 'IMAGE' }}{% endif %}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""Template as SmolVLM's and Idefics3's: parts alone, and other text before an image."""
TRIMMED = (
    "{% for message in messages %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<|im_start|>' + role + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ 'IMAGE' }}"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"
)
"""Template as Gemma 3's: each part is trimmed."""
IMAGES_FIRST = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ 'IMAGE\\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\\n' + part['text'] }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Template as LLaVA's: the images of a message before its texts."""


Made = tuple[Any, Any, dict[str, Any], str]
"""Configuration, image processor, settings of the processor, and the text of an image in the template."""
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def _qwen2_5_vl(tokenizer: Any) -> Made:
    from transformers import Qwen2_5_VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tower = QWEN_TOWER | {"fullatt_block_indexes": [1], "window_size": 32}
    config = Qwen2_5_VLConfig(
        text_config=_text(tokenizer) | {"rope_parameters": ROPE},
        vision_config=tower,
        **_ids(tokenizer, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>"),
        **_ids(tokenizer, vision_start_token_id="<|vision_start|>", vision_end_token_id="<|vision_end|>"),
    )
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=256, max_pixels=4096)
    return config, images, {"processor_class": "Qwen2_5_VLProcessor"}, _QWEN_IMAGE


def _qwen3_vl(tokenizer: Any) -> Made:
    from transformers import Qwen3VLConfig
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tower = QWEN_TOWER | {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    config = Qwen3VLConfig(
        text_config=_text(tokenizer) | {"rope_parameters": ROPE, "head_dim": 16},
        vision_config=tower,
        **_ids(tokenizer, image_token_id="<|image_pad|>", video_token_id="<|video_pad|>"),
        **_ids(tokenizer, vision_start_token_id="<|vision_start|>", vision_end_token_id="<|vision_end|>"),
    )
    images = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=256, max_pixels=4096)
    return config, images, {"processor_class": "Qwen3VLProcessor"}, _QWEN_IMAGE


def _gemma3(tokenizer: Any) -> Made:
    from transformers import Gemma3Config
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    config = Gemma3Config(
        text_config=_text(tokenizer) | {"head_dim": 16, "sliding_window": 512, "query_pre_attn_scalar": 16},
        vision_config=TOWER,
        mm_tokens_per_image=4,
        **_ids(tokenizer, boi_token_index="<start_of_image>", eoi_token_index="<end_of_image>"),
        **_ids(tokenizer, image_token_index="<image_soft_token>"),
    )
    size = {"height": 32, "width": 32}
    settings = {"processor_class": "Gemma3Processor", "image_seq_length": 4}
    return config, Gemma3ImageProcessorPil(size=size), settings, "<start_of_image>"


def _smolvlm(tokenizer: Any) -> Made:
    from transformers import SmolVLMConfig
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    config = SmolVLMConfig(
        text_config=_text(tokenizer) | {"model_type": "llama", "head_dim": 16},
        vision_config=TOWER,
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    images = SmolVLMImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return config, images, {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}, "<image>"


def _idefics3(tokenizer: Any) -> Made:
    from transformers import Idefics3Config
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    config = Idefics3Config(
        text_config=_text(tokenizer) | {"model_type": "llama", "head_dim": 16},
        vision_config=TOWER,
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
        **_ids(tokenizer, image_token_id="<image>"),
    )
    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return config, images, {"processor_class": "Idefics3Processor", "image_seq_len": 4}, "<image>"


def _llava(tokenizer: Any) -> Made:
    from transformers import LlavaConfig
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    config = LlavaConfig(
        text_config=_text(tokenizer) | {"model_type": "llama"},
        vision_config=TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
        **_ids(tokenizer, image_token_index="<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    size = {"height": 32, "width": 32}
    images = LlavaImageProcessorPil(size={"shortest_edge": 32}, crop_size=size)
    settings = {"processor_class": "LlavaProcessor", "patch_size": 8, "num_additional_image_tokens": 1}
    return config, images, settings | {"vision_feature_select_strategy": "default"}, "<image>"


def _llava_onevision(tokenizer: Any) -> Made:
    from transformers import LlavaOnevisionConfig
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )

    pinpoints = [[32, 32], [32, 64], [64, 32], [64, 64]]
    config = LlavaOnevisionConfig(
        text_config=_text(tokenizer) | {"model_type": "qwen2"},
        vision_config=TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        image_grid_pinpoints=pinpoints,
        vision_feature_layer=-1,
        **_ids(tokenizer, image_token_index="<image>", video_token_index="<|video_pad|>"),
    )
    size = {"height": 32, "width": 32}
    images = LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=pinpoints)
    settings = {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16}
    settings |= {"vision_feature_select_strategy": "full", "video_token": "<|video_pad|>"}
    return config, images, settings, "<image>"


def _mistral3(tokenizer: Any) -> Made:
    from transformers import Mistral3Config
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    config = Mistral3Config(
        text_config=_text(tokenizer) | {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        vision_config=TOWER | {"model_type": "pixtral", "head_dim": 16},
        spatial_merge_size=2,
        **_ids(tokenizer, image_token_index="[IMG]"),
    )
    images = PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size=8)
    return (
        config,
        images,
        {"processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 2},
        "[IMG]",
    )


TYPES: dict[str, tuple[Callable[[Any], Made], str]] = {
    "qwen2_5_vl": (_qwen2_5_vl, PARTS),
    "qwen3_vl": (_qwen3_vl, PARTS),
    "gemma3": (_gemma3, TRIMMED),
    "smolvlm": (_smolvlm, PARTS_ALONE),
    "idefics3": (_idefics3, PARTS_ALONE),
    "llava": (_llava, IMAGES_FIRST),
    "llava_onevision": (_llava_onevision, IMAGES_FIRST),
    "mistral3": (_mistral3, PARTS),
}
"""Each type's configuration and processor, and its template, in which IMAGE stands for its image."""
"""Types whose processor needs no library that this environment lacks."""
_TOKENS = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
    "<global-img>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)


_GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}


def write(folder: Path, model_type: str, seed: int = 0) -> Path:
    """Write the folder of a tiny model of this type; return it."""
    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = train_tokenizer(SENTENCES, 512)
    tokenizer.add_tokens(list(_TOKENS), special_tokens=True)
    make, template = TYPES[model_type]
    config, images, settings, image = make(tokenizer)
    tokenizer.chat_template = template.replace("IMAGE", image)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    images.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(settings))
    tokenizer.save_pretrained(folder)
    if model_type == "gemma3":
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": _GEMMA_TOKENS}))
    return folder


def around(model_type: str, replacement: str) -> str:
    """Return the text of an image as the template of a type and its processor write it."""
    is_qwen = model_type in ("qwen2_5_vl", "qwen3_vl")
    return f"<|vision_start|>{replacement}<|vision_end|>" if is_qwen else replacement


def _text(tokenizer: Any) -> dict[str, Any]:
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    return TEXT | {"vocab_size": len(tokenizer)} | special


def _ids(tokenizer: Any, **tokens: str) -> dict[str, int]:
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
