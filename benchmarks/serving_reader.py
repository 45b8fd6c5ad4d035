"""Bases written and models read by the transformers of whatever interpreter runs this file; it imports
nothing of the project.

`python serving_reader.py write FOLDER` writes a tiny base of each family, as this version of transformers
does. `python serving_reader.py read FOLDER OUT` stores the logits and the tokens of every model in FOLDER.
"""

import json
import sys
from pathlib import Path
from typing import Any

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TEXTS = [
    "Add 12345 and 7:\n\n\n  then it's DON'T",
    "def f(x):\n\treturn  x['a'] + 1234567\r\n\r\n    # end  ",
    "Grüße, Привет, 你好，世界 \U0001f600 <|im_start|>user\nx<|im_end|>",
    "Question 3: add the numbers.",
]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
# Class of the tokenizer, and settings that are not those of the class: what is lost is seen.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("GPT2TokenizerFast", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    "qwen2": ("Qwen2TokenizerFast", {"rope_theta": 1e6, "num_key_value_heads": 2}),
    "mistral": ("LlamaTokenizerFast", {"rope_theta": 1e6, "sliding_window": None, "num_key_value_heads": 2}),
    "gemma3_text": (
        "PreTrainedTokenizerFast",
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "head_dim": 16,
            "num_key_value_heads": 2,
            "sliding_window": 32,
        },
    ),
    "qwen3": ("Qwen2TokenizerFast", {"rope_theta": 1e6, "num_key_value_heads": 2, "head_dim": 16}),
    "gpt_neox": ("GPTNeoXTokenizerFast", {"rotary_emb_base": 20000, "rotary_pct": 0.5}),
    "phi3": (
        "LlamaTokenizerFast",
        {
            "rope_theta": 2e4,
            "original_max_position_embeddings": 64,
            "rope_scaling": LONG,
            "num_key_value_heads": 2,
        },
    ),
}


def write(folder: Path) -> None:
    """Write a tiny base of each family below `folder`."""
    import torch
    import transformers

    for kind, (tokenizer_class, settings) in FAMILIES.items():
        tokenizer = getattr(transformers, tokenizer_class)(
            tokenizer_object=_tokenizer(tokenizer_class),
            bos_token=SPECIAL[0],
            unk_token=SPECIAL[0],
            eos_token=SPECIAL[2],
            pad_token=SPECIAL[3],
        )
        tokenizer.save_pretrained(folder / kind)
        ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3}
        config = transformers.AutoConfig.for_model(
            kind,
            vocab_size=len(tokenizer),
            max_position_embeddings=512,
            tie_word_embeddings=False,
            **ids,
            **SIZES,
            **settings,
        )
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)


def _tokenizer(tokenizer_class: str) -> Any:
    """Return a tokenizer with the rules of the class; those of the llama family are not those of its
    class."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    own = Tokenizer(models.BPE(byte_fallback="Llama" in tokenizer_class, unk_token=None))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if "Llama" in tokenizer_class:
        own.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        own.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        alphabet = sorted(set("".join(TEXTS)) | {"▁"})
    else:
        rules = SPLIT
        if "Qwen" in tokenizer_class:
            # transformers 5 takes its own class for all models of type qwen2, whatever their files name.
            rules, own.normalizer = SPLIT.replace("{1,3}", ""), normalizers.NFC()
        split = pre_tokenizers.Split(Regex(rules), "isolated")
        own.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        own.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    own.train_from_iterator(TEXTS * 4, trainer)
    return own


def read(folder: Path, out: Path) -> None:
    """Store logits and tokens of each model in `folder`, by its name."""
    import torch
    import transformers

    found: dict[str, Any] = {"version": transformers.__version__}
    for model in sorted(path for path in folder.iterdir() if (path / "config.json").is_file()):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(model)
            tokens = [list(tokenizer(text)["input_ids"]) for text in TEXTS]
            is_reward = "Sequence" in json.loads((model / "config.json").read_text())["architectures"][0]
            kind = (
                transformers.AutoModelForSequenceClassification
                if is_reward
                else transformers.AutoModelForCausalLM
            )
            loaded = kind.from_pretrained(model, attn_implementation="eager").float().eval()
            ids = torch.arange(4, 204)[None]
            with torch.no_grad():
                logits = loaded(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            found[model.name] = {"tokens": tokens, "logits": logits.flatten().tolist()}
        except Exception as error:  # noqa: BLE001 (what a version cannot read is a result)
            found[model.name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    write(Path(sys.argv[2])) if sys.argv[1] == "write" else read(Path(sys.argv[2]), Path(sys.argv[3]))
