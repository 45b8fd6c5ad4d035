"""Tiny configurations of the model types that transformers (5.23) builds as causal language models.

Each has every kind of layer of its type: the lists of kinds (layer_types, mlp_layer_types, ...) are
shortened, not replaced.
"""

from typing import Any

from flytune.models import model_types

VOCABULARY = 128
"""Tokens of each configuration; 0 pads, 1 begins and 2 ends."""

_VOCABULARIES = ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")

SIZES: dict[str, Any] = {
    # Width and depth, by the names that configurations have for them.
    "vocab_size": VOCABULARY,
    "decoder_vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "unpadded_vocab_size": VOCABULARY,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "emb_dim": 64,
    "embedding_size": 64,
    "input_embedding_size": 64,
    "output_embedding_size": 64,
    "word_embed_proj_dim": 64,
    "embedding_dim": 64,
    "lru_width": 64,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "dim_model_base": 64,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_blocks": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_layers_per_stack": 1,
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "dff": 96,
    "dim_ff": 96,
    "d_inner": 96,
    "ffn_hidden_size": 96,
    "feed_forward_size": 96,
    "dense_intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "max_seq_len": 512,
    "context_length": 512,
    "original_max_position_embeddings": 512,
    "max_target_positions": 512,
    "model_max_length": 512,
    # Attention.
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "num_query_groups": 2,
    "head_dim": 16,
    "d_head": 16,
    "dim_head": 16,
    "kv_channels": 16,
    "rotary_dim": 8,
    "attention_head_size": 16,
    "query_pre_attn_scalar": 16,
    "swa_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_v_head_dim": 16,
    "sliding_window": 8,
    "sliding_window_size": 8,
    "window_size": 8,
    "local_attention": 16,
    "attention_window_size": 8,
    "attention_chunk_size": 8,
    "keep_window_size": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_topk": 8,
    "index_topk_blocks": 2,
    "index_block_size": 8,
    "d_rel": 4,
    "rel_extent": 16,
    # Experts.
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "router_hidden_size": 16,
    "zero_expert_num": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 3,
    # Recurrent and convolution layers.
    "mamba_d_state": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_head": 16,
    "mamba_headdim": 16,
    "mamba_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_ssm": 128,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "n_groups": 1,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "block_size": 16,
    # Parts for images and sound.
    "image_size": 32,
    "patch_size": 8,
    "vision_output_dim": 64,
    "projection_dim": 64,
    # Nothing is random but the weights.
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "residual_dropout": 0.0,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout": 0.0,
    "activation_dropout": 0.0,
    "resid_dropout": 0.0,
    "embed_dropout": 0.0,
    "layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "dropout_p": 0.0,
    "lsh_attention_probs_dropout_prob": 0.0,
    "local_attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
"""Small sizes, for each configuration that has an attribute of that name."""

_QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 8,
    "ple_layer_ids": [1],
    "ple_embed_dim": 64,
    "heads_per_ngram": 2,
    "hc_lowrank": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 3},
    "beam": {"num_key_value_heads": 4},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        "num_hidden_layers": 2,
    },
    "dots3_note_text": {
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "head_dim": 24,
        "per_layer_config": {
            "02": {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "kv_lora_rank": 32,
                "qk_nope_head_dim": 16,
            },
        },
    },
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "intermediate_size": [96] * 4,
    },
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 64, "model_patch_size": 24, "mm_posemb_size": 16}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": None},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"head_dim": 16},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "roc_bert": {
        "pronunciation_embed_dim": 32,
        "pronunciation_vocab_size": 32,
        "shape_embed_dim": 32,
        "shape_vocab_size": 32,
    },
    "xlstm": {"chunk_size": 8, "hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""Further fields of a type: valid combinations, and layers of each kind where its configuration has no list
of them."""

NOT_BUILT = {
    "blt": "reads bytes in patches that a second model chooses: it has no tokens of a tokenizer",
    "dots3_note": "an image and audio model; its text decoder is dots3_note_text",
    "gemma3n": "its image encoder needs timm; its text decoder is gemma3n_text",
    "gemma4_assistant": "a draft model for speculative decoding, which reads the states of another model",
    "gemma4_unified_assistant": "a draft model for speculative decoding, which reads the states of another "
    "model",
    "git": "captions of images: its logits have places for the image",
    "musicgen": "music from text: its class is built of three models' configurations",
    "musicgen_melody": "music from text: its class is built of three models' configurations",
    "reformer": "its axial positions need rows of one exact length",
}
"""Model types without a tiny configuration here, with the reason."""

MODEL_TYPES = sorted(model_types.table().keys() - NOT_BUILT)
"""Model types that tiny_config knows: those of flytune/models/model_types.json, which are transformers'."""


def tiny_config(model_type: str, vocabulary: int = VOCABULARY) -> Any:
    """Return a new tiny configuration of a model type, with that many tokens."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    own = OVERRIDES.get(model_type, {})
    sizes = _with_vocabulary(_sizes(kind), vocabulary)
    for name, value in own.items():
        inner = sizes.get(name) if isinstance(value, dict) else None
        sizes[name] = inner | value if isinstance(inner, dict) else value
    return kind(**sizes)


def _with_vocabulary(sizes: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Return sizes, of parts too, with another number of tokens."""
    return {
        name: _with_vocabulary(value, vocabulary)
        if isinstance(value, dict)
        else vocabulary
        if name in _VOCABULARIES
        else value
        for name, value in sizes.items()
    }


def _sizes(kind: Any) -> dict[str, Any]:
    """Return the small sizes of a kind of configuration, and of those that it contains."""
    default = kind()
    values = default.to_dict()
    sizes = {
        name: size
        for name, size in SIZES.items()
        if name in values and (values[name] is not None or name in ("num_key_value_heads", "sliding_window"))
    }
    if "kv_lora_rank" in values:  # Multi-head latent attention: one key head for each query head, of parts.
        sizes = {name: size for name, size in sizes.items() if name != "head_dim"} | {
            "num_key_value_heads": 4
        }
    for name, part in getattr(default, "sub_configs", {}).items():
        if isinstance(part, type) and hasattr(part, "sub_configs"):
            sizes[name] = _sizes(part)
        elif getattr(default, name, None) is not None:
            sizes[name] = _sizes(type(getattr(default, name))) | {
                "model_type": getattr(default, name).model_type
            }
    return sizes | _layers(values)


def _layers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the lists of kinds of layers with one layer of each kind, in the order in which they come, and
    at least 3."""
    depth = values.get("num_hidden_layers")
    lists = {
        n: v
        for n, v in values.items()
        if isinstance(v, list) and v and len(v) == depth and isinstance(v[0], str)
    }
    if not lists:
        return {}
    first = {layer: index for index, layer in reversed(list(enumerate(zip(*lists.values(), strict=True))))}
    chosen = sorted(first.values())
    chosen += [chosen[-1]] * (3 - len(chosen))
    return {name: [kinds[index] for index in chosen] for name, kinds in lists.items()} | {
        "num_hidden_layers": len(chosen)
    }
