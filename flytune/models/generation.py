"""What a model says to tokenized prompts: asked in batches of like length, padded on the left, ended at the end markers."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from flytune.errors import OutOfMemory, RecipeError
from flytune.models.scoring import padded
from flytune.recipe.sections import Positive
from flytune.schema import Strict, mistakes


class Generation(Strict):
    """How answers are made."""

    max_new_tokens: Positive = 128
    """Of an answer."""
    batch_size: Positive = 8
    """Prompts that are answered together."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 takes the likeliest token each time; above, tokens are drawn."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Drawn from the likeliest tokens that have so much probability together."""
    seed: int = 0
    """Of what is drawn."""
    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of rows that may be bad: they are left out, and listed in bad_rows.jsonl. 0 stops at the first."""

    @model_validator(mode="wrap")
    @classmethod
    def _all_mistakes(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise RecipeError.of("generation", mistakes(error, cls)) from None


@dataclass(frozen=True)
class Answer:
    """What a model said."""

    text: str
    prompt_tokens: int
    answer_tokens: int
    """Without the end marker."""
    finish_reason: str
    """`stop` where the model ended by itself, `length` where max_new_tokens ended it."""


def end_markers(tokenizer: Any, model: Any) -> list[int]:
    """The tokens after which an answer is over: EOS, the model's own, and what the chat template puts behind an answer."""
    own = model.generation_config.eos_token_id if model.generation_config else None
    ends = {tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
    if tokenizer.chat_template is not None:
        # A character for private use, which no template knows.
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\ue000"}]
        behind = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("\ue000")[2].lstrip()
        first = next(iter(tokenizer(behind, add_special_tokens=False)["input_ids"]), None) if behind else None
        # Words of a template are no marker.
        ends.add(first if first in tokenizer.added_tokens_decoder else None)
    return sorted(ends - {None})


def answer(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    generation: Generation,
    ends: list[int],
    bar: Any = None,
    salt: str = "",
) -> list[Answer]:
    """The model's answers to tokenized prompts, in their order; asked in batches of like length, the longest first.

    Drawn answers follow from generation.seed, `salt` and the prompts.

    Raises:
        OutOfMemory: a batch does not fit into a GPU.
    """
    import torch
    from transformers import GenerationConfig

    # Padding is masked in any case; any token will do.
    pad = next(token for token in (tokenizer.pad_token_id, *ends, 0) if token is not None)
    drawn = {"do_sample": True, "temperature": generation.temperature, "top_p": generation.top_p, "top_k": 0}
    # The model's own generation config would sample; a new one keeps nothing of it.
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None,
        pad_token_id=pad,
        max_new_tokens=generation.max_new_tokens,
        **(drawn if generation.temperature else {"do_sample": False}),
    )
    # Of the prompts as well: equal ones in other parts, or to another adapter, draw answers of their own.
    digest = hashlib.sha256(f"{generation.seed} {salt} {list(prompts)}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    device = next(model.parameters()).device
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    found: dict[int, Answer] = {}
    for start in range(0, len(order), generation.batch_size):
        batch = order[start : start + generation.batch_size]
        input_ids = padded([prompts[index] for index in batch], pad, left=True).to(device)
        mask = padded([[1] * len(prompts[index]) for index in batch], 0, left=True).to(device)
        try:
            with torch.no_grad():
                output = model.generate(input_ids=input_ids, attention_mask=mask)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"batch_size {generation.batch_size}: {len(batch)} prompts of {input_ids.shape[1]:,} tokens and their answers "
                f"do not fit into the GPU; give a smaller batch_size, or a larger shape ({str(error)[:200]})"
            ) from error
        for index, tokens in zip(batch, output[:, input_ids.shape[1] :].tolist(), strict=True):
            found[index] = _answer(tokenizer, prompts[index], tokens, ends)
        if bar is not None:
            bar.update(len(batch))
    return [found[index] for index in range(len(prompts))]


def _answer(tokenizer: Any, prompt: list[int], tokens: list[int], ends: list[int]) -> Answer:
    end = next((at for at, token in enumerate(tokens) if token in ends), None)
    said = tokens[:end]
    text = str(tokenizer.decode(said, skip_special_tokens=True))
    return Answer(text, len(prompt), len(said), "length" if end is None else "stop")
