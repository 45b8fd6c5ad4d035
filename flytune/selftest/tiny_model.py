"""A tiny Llama and a tiny mixture of experts, with random weights and a tokenizer of their own, made without
a download."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

END_OF_TEXT, PAD = "<|endoftext|>", "<|pad|>"
SPECIAL_TOKENS = [END_OF_TEXT, "<|im_start|>", "<|im_end|>", PAD]

# ChatML with generation marks around the trained text. The end token is inside the generation block: a model
# that is not trained on it never stops.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

EXPERTS = 16
"""Experts of each layer of the mixture."""

SENTENCES = [
    "Return the sum of two numbers.",
    "Open the file and return a stream; raise OSError if it cannot be opened.",
    "Describe this Python function of the module `json`:",
    "Serialize an object to a JSON formatted string.",
    "The quick brown fox jumps over the lazy dog.",
    "Split the path into a pair: head and tail, where tail is everything after the final slash.",
    "Return True if all elements of the iterable are true, or if the iterable is empty.",
    "What is the capital of France? Paris is the capital of France.",
]


def write(
    folder: Path, corpus: Iterable[str], mixture: Path | None = None, *, vocab_size: int = 512, seed: int = 0
) -> Path:
    """Write a model folder (config, safetensors, tokenizer with a chat template) with about 0.9M weights;
    return it.

    Args:
        corpus: texts that the tokenizer is trained on.
        mixture: a folder for a mixture of experts with the same tokenizer.
        vocab_size: largest number of tokens, with special tokens and the 256 bytes.
        seed: seed of the weights.
    """
    import torch

    tokenizer = train_tokenizer(corpus, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random_model(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if mixture:
        write_mixture(mixture, tokenizer, seed)
    return folder


def write_mixture(folder: Path, tokenizer: "PreTrainedTokenizerBase", seed: int = 0, **fields: Any) -> Path:
    """Write the folder of a mixture of experts (Qwen3-MoE, about 0.4M weights); return it.

    A token's embedding names the two experts of every layer that it goes to, far from the others: rounding
    changes no choice of a router, and processes with other tokens use other experts. `fields` are further
    ones of its configuration.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "mlp_only_layers": [0],
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen3MoeConfig(**(sizes | _fields_of(tokenizer) | fields))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
        embedding = model.model.embed_tokens.weight.normal_(std=0.2)
        embedding[:, :EXPERTS] = 0.0
        for token in range(len(tokenizer)):
            first, second = experts_of(token)
            embedding[token, first], embedding[token, second] = 2.0, 1.0
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.copy_(torch.eye(EXPERTS, config.hidden_size))
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _fields_of(tokenizer: "PreTrainedTokenizerBase") -> dict[str, Any]:
    """Return the fields of a model's configuration that follow from its tokenizer."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    length = tokenizer.model_max_length
    return {"vocab_size": len(tokenizer), "max_position_embeddings": length, "dtype": "float32", **special}


def experts_of(token: int) -> tuple[int, int]:
    """Return the experts that a token of the mixture goes to."""
    first = token % EXPERTS
    return first, (first + 1 + token // EXPERTS % (EXPERTS - 1)) % EXPERTS


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerBase":
    """Train a byte-level BPE tokenizer with eos <|im_end|>, pad <|pad|> and ChatML, which adds no tokens
    itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token="<|im_end|>",
        pad_token=PAD,
        extra_special_tokens=["<|im_start|>"],
        model_max_length=1024,
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def random_model(tokenizer: "PreTrainedTokenizerBase") -> "LlamaForCausalLM":
    """Return a model of four layers of width 128, with grouped queries, tied embeddings and random weights.

    The weights come from torch's current random state.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **_fields_of(tokenizer),
    )
    return LlamaForCausalLM(config)
