"""Batch inference beside plain transformers loops, on the same prompts, one after the other in one process.

`python -m benchmarks.inference --model FOLDER` has a causal language model with a chat template sum up
docstrings of the standard library, of many lengths (long ones cut), greedily, in float32: one by one; in
batches in their order; and as Flytune does, in batches of similar length. The last column counts answers that
equal those of one by one. The better of two runs counts.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from demo import docstrings, inputs
from flytune.models import Generation
from flytune.models import generation as models_generation

HOME = Path(".demo")
LONGEST = 400
"""Largest number of tokens of a prompt."""


def plain(
    model: Any, tokenizer: Any, prompts: list[str], batch_size: int, max_new_tokens: int
) -> list[tuple[str, int]]:
    """Answer as the documentation of transformers shows: in batches in the order of the file, padded on the
    left."""
    import torch

    said: list[tuple[str, int]] = []
    wishes = {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": tokenizer.pad_token_id}
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(
            prompts[start : start + batch_size], return_tensors="pt", padding=True, add_special_tokens=False
        )
        with torch.no_grad():
            output = model.generate(**batch, **wishes)
        for answer in output[:, batch["input_ids"].shape[1] :].tolist():
            end = next((at for at, token in enumerate(answer) if token == tokenizer.eos_token_id), None)
            said.append((tokenizer.decode(answer[:end], skip_special_tokens=True), len(answer[:end])))
    return said


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of the better of two runs, and its result."""
    best, said = float("inf"), None
    for _ in range(2):
        started = time.perf_counter()
        said = run()
        best = min(best, time.perf_counter() - started)
    return best, said


def main() -> None:
    """Measure, and show the table."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(HOME / inputs.BASE_MODEL))
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--quick", action="store_true", help="four prompts, answers of eight tokens")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.max_new_tokens = 4, 8
    inputs.make(HOME)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    documents, texts = list(docstrings.plain_text()), []
    for number in range(options.prompts):
        document = documents[number * len(documents) // options.prompts]
        content = tokenizer.decode(
            tokenizer(f"Sum this up in a sentence.\n\n{document}")["input_ids"][:LONGEST]
        )
        chat = [{"role": "user", "content": content}]
        texts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    generation = Generation(batch_size=options.batch_size, max_new_tokens=options.max_new_tokens)
    ends = [tokenizer.eos_token_id]
    size, most = options.batch_size, options.max_new_tokens
    ways: dict[str, Callable[[], list[tuple[str, int]]]] = {
        "one by one": lambda: plain(model, tokenizer, texts, 1, most),
        f"batches of {size}, in order": lambda: plain(model, tokenizer, texts, size, most),
        f"flytune, batches of {size}": lambda: [
            (found.text, found.answer_tokens)
            for found in models_generation.answer(model, tokenizer, prompts, generation, ends)
        ],
    }
    lengths = sorted(map(len, prompts))
    title = (
        f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, {options.max_new_tokens} of "
        "an answer at most"
    )
    table = Table(title=title, title_justify="left")
    for name in ("", "seconds", "answer tokens/s", "answers as one by one"):
        table.add_column(name, justify="left" if not name else "right")
    first: list[tuple[str, int]] = []
    for name, way in ways.items():
        seconds, said = timed(way)
        first = first or said
        tokens = sum(count for _, count in said)
        same = sum(mine == theirs for mine, theirs in zip(said, first, strict=True))
        table.add_row(name, f"{seconds:.1f}", f"{tokens / seconds:.1f}", f"{same} of {len(said)}")
    Console().print(table)


if __name__ == "__main__":
    main()
