"""The self-test's tiny Llama, briefly pre-trained, for short runs that still learn something."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from flytune.errors import DataError
from flytune.files import written_atomically
from flytune.selftest import random_model, train_tokenizer
from flytune.selftest.tiny_model import END_OF_TEXT
from flytune.sentences import counted

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

BLOCK, BATCH, LEARNING_RATE = 128, 4, 2.5e-3

_log = logging.getLogger(__name__)


def build(out: Path, corpus: Iterable[str], steps: int = 150, seed: int = 0, vocab_size: int = 4096) -> Path:
    """Make the model folder `out` (config, safetensors, tokenizer with a chat template), and return it.

    Args:
        out: an existing model is not changed.
        corpus: texts; the tokenizer is trained on all of them, the model on a random part.
        steps: optimizer steps of BATCH x BLOCK tokens; with 0 the weights stay random.
        seed: seed of the weights and of the order of the text.
        vocab_size: largest number of tokens, with special tokens and the 256 bytes.
    """
    import torch

    if (out / "config.json").exists():
        return out
    texts = list(corpus)
    tokenizer = train_tokenizer(texts, vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = random_model(tokenizer)
        if steps:
            _pretrain(model, _blocks(tokenizer, texts), steps)
    with written_atomically(out, keep_existing=True) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return out


def _blocks(tokenizer: "PreTrainedTokenizerBase", texts: list[str]) -> "torch.Tensor":
    """Return the concatenated texts as rows of BLOCK tokens: [rows, BLOCK]."""
    import torch

    rows = tokenizer([text + END_OF_TEXT for text in texts], verbose=False)["input_ids"]
    ids = [token for row in rows for token in row]
    if len(ids) < BLOCK:
        raise DataError(
            f"the corpus has {counted(len(ids), 'token')}; pre-training needs at least {BLOCK}: add text, or "
            "set steps=0"
        )
    blocks = len(ids) // BLOCK
    return torch.tensor(ids[: blocks * BLOCK]).view(blocks, BLOCK)


def _pretrain(model: "LlamaForCausalLM", blocks: "torch.Tensor", steps: int) -> None:
    """Train on next tokens with AdamW and a one-cycle learning rate."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=0.1
    )
    model.train()
    loss = torch.tensor(0.0)
    with tqdm(
        _batches(blocks, steps),
        desc="pre-training the tiny model",
        total=steps,
        unit="step",
        disable=steps < 20,
    ) as bar:
        for batch in bar:
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
    _log.info("tiny model: %d steps, last loss %.2f nats a token", steps, loss.item())


def _batches(blocks: "torch.Tensor", steps: int) -> Iterator["torch.Tensor"]:
    """Yield `steps` random batches, [BATCH, BLOCK] each."""
    import torch

    for _ in range(steps):
        yield blocks[torch.randint(len(blocks), (BATCH,))]
