"""Generation of answers to tokenized prompts: in batches of similar length, padded on the left, up to an end
marker."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, model_validator

from flytune import limits
from flytune.errors import ExportError, OutOfMemory, RecipeError
from flytune.mistakes import mistakes
from flytune.models import chat_templates, images, positions
from flytune.models.scoring import Row, padded
from flytune.schema import Strict
from flytune.sentences import counted

log = logging.getLogger(__name__)


class Generation(Strict):
    """Settings of generation."""

    max_new_tokens: Annotated[int, Field(gt=0, le=limits.TOKENS)] = 128
    """Maximum tokens of an answer."""
    batch_size: Annotated[int, Field(gt=0, le=limits.MICRO_BATCH)] = 8
    """Prompts in one batch."""
    temperature: Annotated[float, Field(ge=0, le=limits.FACTOR)] = 0.0
    """Sampling temperature; 0 decodes greedily."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Cumulative probability of the most likely tokens that are sampled from."""
    seed: Annotated[int, Field(ge=-limits.SEED, le=limits.SEED)] = 0
    """Seed of sampling."""
    max_bad_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of rows that may be bad; they are skipped, and listed in bad_rows.jsonl. 0 stops at the first
    bad row."""

    @model_validator(mode="wrap")
    @classmethod
    def _all_mistakes(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            raise RecipeError.of("generation", mistakes(error, cls)) from None


@dataclass(frozen=True)
class GeneratedAnswer:
    """Answer of a model."""

    text: str
    prompt_tokens: int
    answer_tokens: int
    """Tokens of the answer without the end marker."""
    finish_reason: str
    """`stop` if the model ended the answer, `length` if max_new_tokens did."""


def end_markers(tokenizer: Any, model: Any) -> list[int]:
    """Return the tokens that end an answer: EOS, the model's own, and the one that the chat template adds
    after an answer.

    Raises:
        ExportError: the model's own are not ids of tokens.
    """
    ids = model.generation_config.eos_token_id if model.generation_config else None
    owns = ids if isinstance(ids, list) else [ids]
    if wrong := [number for number in owns if number is not None and (type(number) is not int or number < 0)]:
        raise ExportError(
            f"generation_config.json: eos_token_id: must be ids of tokens; found {wrong[0]!r:.60}"
        )
    ends = {tokenizer.eos_token_id, *owns}
    if tokenizer.chat_template is not None:
        # A private-use character, which no template contains.
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\ue000"}]
        try:
            behind = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("\ue000")[2].lstrip()
        except (
            chat_templates.TemplateError
        ) as error:  # rows that are not chats are not rendered, so it may never have worked
            log.debug("no end marker of the chat template: %s", error)
            behind = ""
        first = next(iter(tokenizer(behind, add_special_tokens=False)["input_ids"]), None) if behind else None
        # A word of the template is not a marker.
        ends.add(first if first in tokenizer.added_tokens_decoder else None)
    return sorted(ends - {None})


def configure(model: Any, tokenizer: Any, generation: Generation, ends: list[int]) -> int:
    """Give a model the settings of generation, and none of its own; return the token that pads prompts."""
    from transformers import GenerationConfig

    # Padding is masked, so any token serves.
    pad = next(token for token in (tokenizer.pad_token_id, *ends, 0) if token is not None)
    sampling: dict[str, Any] = {"do_sample": False}
    if generation.temperature:
        sampling = {
            "do_sample": True,
            "temperature": generation.temperature,
            "top_p": generation.top_p,
            "top_k": 0,
        }
    # The model's own generation config may sample; a new one has none of its settings.
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None,
        pad_token_id=pad,
        max_new_tokens=generation.max_new_tokens,
        **sampling,
    )
    return int(pad)


def answer(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    generation: Generation,
    ends: list[int],
    bar: Any = None,
    salt: str = "",
    rows: Sequence[Row] = (),
) -> list[GeneratedAnswer]:
    """Return the model's answers to tokenized prompts, in their order; batches have similar lengths, the
    longest first.

    An answer ends where the model has no further positions.

    `rows` are the held-out rows of the prompts, where they have images.

    Sampled answers depend on generation.seed, `salt` and the prompts alone.

    Raises:
        OutOfMemory: a batch does not fit into a GPU.
    """
    import torch

    pad = configure(model, tokenizer, generation, ends)
    # The prompts are part of the seed, so that other parts and other adapters sample other answers.
    digest = hashlib.sha256(f"{generation.seed} {salt} {list(prompts)}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    device = next(model.parameters()).device
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    answers: dict[int, GeneratedAnswer] = {}
    limit = positions.of_model(model)
    for start in range(0, len(order), generation.batch_size):
        batch = order[start : start + generation.batch_size]
        if limit and limit.is_bound:
            left = max(1, limit.tokens - len(prompts[batch[0]]))
            model.generation_config.max_new_tokens = min(generation.max_new_tokens, left)
        input_ids = padded([prompts[index] for index in batch], pad, left=True)
        mask = padded([[1] * len(prompts[index]) for index in batch], 0, left=True)
        inputs = images.inputs_of([rows[index] for index in batch], input_ids) if rows else {}
        inputs = {"input_ids": input_ids, "attention_mask": mask} | inputs
        try:
            with torch.no_grad():
                output = model.generate(**{name: values.to(device) for name, values in inputs.items()})
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"batch_size {generation.batch_size}: {counted(len(batch), 'prompt')} of "
                f"{counted(input_ids.shape[1], 'token')} and their answers "
                f"do not fit into the GPU; give a smaller batch_size, or a larger shape ({str(error)[:200]})"
            ) from error
        for index, tokens in zip(batch, output[:, input_ids.shape[1] :].tolist(), strict=True):
            answers[index] = _answer(tokenizer, prompts[index], tokens, ends)
        if bar is not None:
            bar.update(len(batch))
    return [answers[index] for index in range(len(prompts))]


def _answer(tokenizer: Any, prompt: list[int], tokens: list[int], ends: list[int]) -> GeneratedAnswer:
    end = next((at for at, token in enumerate(tokens) if token in ends), None)
    kept = tokens[:end]
    text = str(tokenizer.decode(kept, skip_special_tokens=True))
    return GeneratedAnswer(text, len(prompt), len(kept), "length" if end is None else "stop")
