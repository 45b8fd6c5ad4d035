"""Tokenizers, chat templates and data requests for the tests of flytune.data."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flytune import data
from flytune.data.check import Check
from flytune.data.contract import CONTRACT, Contract
from flytune.data.formats import Chat
from flytune.recipe import Data, DataRequest, Model
from flytune.records import Manifest
from tests.support.tiny import write_rows

SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "<|pad|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
TEXT = [
    "The quick brown fox jumps over the lazy dog. ",
    "user assistant system\n\n### Response:\n",
    "foobar foobar foobar fizz ",
    "[INST] ok [/INST] ",
]

_HEAD = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
CHATML = (
    _HEAD + "{{ message['content'] + '<|im_end|>' }}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_CALLING = CHATML.replace(
    "message['content']", "message['content'] ~ (message.tool_calls | tojson if message.tool_calls else '')"
)
CHATML_MARKED = (
    _HEAD
    + "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% "
    "endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n"
    "' }}{% endfor %}"
)
CHATML_TRIMMED = CHATML.replace("message['content']", "message['content'] | trim")
LLAMA2 = (
    "{% for message in messages %}{% set content = message['content'].strip() %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\n"
    "\n"
    "' + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + "
    "content %}{% endif %}{{ content }}{% endfor %}"
)
UNENDED = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
SHOUTING = CHATML.replace("message['content']", "message['content'] | upper")


def byte_level(texts: list[str], vocabulary: int, special: list[str], adds_space: bool = False) -> Any:
    """Return a byte-level BPE tokenizer trained on `texts`, without a post-processor."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_folder(
    folder: Path,
    template: str | None = CHATML,
    *,
    adds_bos: bool = False,
    trim: bool = False,
    more: Sequence[str] = (),
    **tokens: str | None,
) -> Path:
    """Save a byte-level BPE tokenizer with `more` special tokens; `tokens` overrides bos_token, eos_token
    ..."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    backend = byte_level(TEXT * 20, 450, SPECIAL)
    steps = [processors.ByteLevel(trim_offsets=trim)]
    if adds_bos:
        steps.append(
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))])
        )
    backend.post_processor = processors.Sequence(steps)
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<|pad|>", **tokens}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{name: token for name, token in named.items() if token}
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, *more]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def chat(*contents: str) -> Chat:
    """Return messages of user and assistant in turn."""
    return Chat(
        [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]
    )


def request(tokenizer: Path, **options: Any) -> DataRequest:
    """Return a data request, by default with heldout_fraction 0.3."""
    section = Data(**{"heldout_fraction": 0.3, **options})
    return DataRequest(model=Model(name_or_path=str(tokenizer)), data=section, fingerprint="0" * 64)


def prepared(tokenizer: Path, rows: list[Any], folder: Path, **options: Any) -> Manifest:
    """Write rows as rows.jsonl beside a folder, and prepare them in it."""
    path = write_rows(folder.with_name("rows.jsonl"), rows)
    return data.prepare(request(tokenizer, path=str(path), **options), folder)


def checks_of(folder: Path) -> dict[str, Check]:
    """Return the lines of the contract of prepared data, by their names."""
    return {check.name: check for check in Contract.read(folder / CONTRACT).checks}


def stored(folder: Path, split: str) -> list[dict[str, list[int]]]:
    """Return all samples of a split from its shards."""
    from pyarrow import parquet

    return [
        row
        for file in sorted((folder / split).glob("*.parquet"))
        for row in parquet.read_table(file).to_pylist()
    ]
