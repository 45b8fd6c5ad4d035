"""What base and tuned model are asked to go on with, and what they say."""

from dataclasses import dataclass
from typing import Any

from flytune import breakdown
from flytune.heldout import IGNORED, Row, padded
from flytune.metrics import Answer
from flytune.run_sections import Evaluation


@dataclass(frozen=True)
class Said:
    """One answer, without what follows its end marker."""

    text: str
    stopped: bool
    """By itself, before max_new_tokens."""


@dataclass(frozen=True)
class Questions:
    """What is asked of each model: to rate the held-out rows, and to go on after the prompts."""

    wish: Evaluation
    rows: list[Row]
    tokenizer: Any
    prompts: list[tuple[list[int], list[int]]]
    """Prompt and reference answer."""
    ends: list[int]
    """Tokens that end an answer."""
    pad: int

    @classmethod
    def of(cls, wish: Evaluation, rows: list[Row], tokenizer: Any) -> "Questions":
        """Of the held-out rows; the first `sample_answers` of them are prompts."""
        ends = sorted({tokenizer.eos_token_id, *(_end_marker(row, tokenizer) for row in rows)} - {None})
        # Padding is masked in any case; any token will do.
        pad = next(token for token in (tokenizer.pad_token_id, *ends, 0) if token is not None)
        prompts = [_prompt(row, tokenizer) for row in rows[: wish.sample_answers]]
        return cls(wish, rows, tokenizer, prompts, ends, pad)

    def text(self, tokens: list[int]) -> str:
        """Tokens for people: no special tokens, no space around."""
        return _text(self.tokenizer, tokens)

    def side_by_side(self, base: list[Said], tuned: list[Said]) -> list[Answer]:
        """What both said to each prompt."""
        pairs = zip(self.prompts, base, tuned, strict=True)
        return [self._answer(*pair) for pair in pairs]

    def _answer(self, asked: tuple[list[int], list[int]], base: Said, tuned: Said) -> Answer:
        prompt, reference = map(self.text, asked)
        return Answer(
            prompt=prompt,
            reference=reference,
            base=base.text,
            tuned=tuned.text,
            base_f1=breakdown.f1(base.text, reference),
            tuned_f1=breakdown.f1(tuned.text, reference),
            base_stopped=base.stopped,
            tuned_stopped=tuned.stopped,
        )


def generate(model: Any, prompts: list[list[int]], questions: Questions) -> list[Said]:
    """Greedy continuations, without what follows an end marker."""
    import torch
    from transformers import GenerationConfig

    # The model's own generation config would sample; a new one keeps nothing of it.
    model.generation_config = GenerationConfig(eos_token_id=questions.ends or None, pad_token_id=questions.pad)
    device = next(model.parameters()).device
    input_ids = padded(prompts, questions.pad, left=True).to(device)
    mask = padded([[1] * len(prompt) for prompt in prompts], 0, left=True).to(device)
    wanted = questions.wish.max_new_tokens
    with torch.no_grad():
        output = model.generate(input_ids=input_ids, attention_mask=mask, do_sample=False, max_new_tokens=wanted)
    said = []
    for answer in output[:, input_ids.shape[1] :].tolist():
        end = next((at for at, token in enumerate(answer) if token in questions.ends), None)
        said.append(Said(questions.text(answer[:end]), stopped=end is not None))
    return said


def _prompt(row: Row, tokenizer: Any) -> tuple[list[int], list[int]]:
    """What stands before the first trained token, and the trained run that answers it; halves of a plain text."""
    input_ids, labels = row["input_ids"], row["labels"]
    start = next((at for at, label in enumerate(labels) if label != IGNORED), len(labels))
    if not _text(tokenizer, input_ids[:start]):
        half = max(1, len(input_ids) // 2)
        return input_ids[:half], input_ids[half:]
    end = next((at for at in range(start, len(labels)) if labels[at] == IGNORED), len(labels))
    return input_ids[:start], input_ids[start:end]


def _end_marker(row: Row, tokenizer: Any) -> int | None:
    """The special token that ends a sample's last answer (<|im_end|>), unless the answer was cut off before it."""
    # Templates put a line break after it, which is trained on too.
    for label in reversed(row["labels"]):
        if label != IGNORED and tokenizer.decode([label]).strip():
            return label if label in tokenizer.added_tokens_decoder else None
    return None


def _text(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()
