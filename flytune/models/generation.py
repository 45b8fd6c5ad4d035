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
    ends = {tokenizer.eos_token_id}
    for number in ids if isinstance(ids, list) else [ids]:
        if number is not None and (type(number) is not int or number < 0):
            raise ExportError(
                f"generation_config.json: eos_token_id: must be ids of tokens; found {number!r:.60}"
            )
        ends.add(number)
    if tokenizer.chat_template is not None:
        ends.add(_end_marker_of_chats(tokenizer))
    return sorted(ends - {None})


def _end_marker_of_chats(tokenizer: Any) -> int | None:
    """Return the token that the chat template adds after an answer; None if it adds no special one."""
    # A private-use character, which no template contains.
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\ue000"}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("\ue000")[2].lstrip()
    except chat_templates.TemplateError as error:
        # Rows that are not chats are not rendered, so it may never have worked.
        log.debug("no end marker of the chat template: %s", error)
        return None
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
    # A word of the template is not a marker.
    return tokens[0] if tokens and tokens[0] in tokenizer.added_tokens_decoder else None


def padding_token(tokenizer: Any, ends: Sequence[int]) -> int:
    """Return the token that pads prompts: as padding is masked, any serves."""
    return next(int(token) for token in (tokenizer.pad_token_id, *ends, 0) if token is not None)


def configure(model: Any, tokenizer: Any, generation: Generation, ends: list[int]) -> int:
    """Give a model the settings of generation, and none of its own; return the token that pads prompts."""
    from transformers import GenerationConfig

    pad = padding_token(tokenizer, ends)
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
    return pad


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

    An answer ends where the model has no further positions. Sampled answers depend on generation.seed, `salt`
    and the prompts alone.

    Args:
        ends: tokens that end an answer (end_markers).
        bar: progress bar, which advances by the prompts of each batch.
        salt: text that makes other random numbers of the same seed.
        rows: the held-out rows of the prompts, where they have images.

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
            # The first prompt of a batch is its longest.
            left = max(1, limit.tokens - len(prompts[batch[0]]))
            model.generation_config.max_new_tokens = min(generation.max_new_tokens, left)
        input_ids = padded([prompts[index] for index in batch], pad, left=True)
        mask = padded([[1] * len(prompts[index]) for index in batch], 0, left=True)
        inputs = {"input_ids": input_ids, "attention_mask": mask}
        if rows:
            inputs |= images.inputs_of([rows[index] for index in batch], input_ids)
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
    end = next((index for index, token in enumerate(tokens) if token in ends), None)
    kept = tokens[:end]
    text = str(tokenizer.decode(kept, skip_special_tokens=True))
    return GeneratedAnswer(text, len(prompt), len(kept), "length" if end is None else "stop")
