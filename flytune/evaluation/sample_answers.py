"""What base and tuned model are asked to go on with."""

from dataclasses import dataclass
from typing import Any

from flytune.evaluation import breakdown
from flytune.models import generation
from flytune.models.scoring import IGNORED, Row
from flytune.recipe.sections import Evaluation
from flytune.records.metrics import Answer


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

    def side_by_side(self, base: list[generation.Answer], tuned: list[generation.Answer]) -> list[Answer]:
        """What both said to each prompt."""
        pairs = zip(self.prompts, base, tuned, strict=True)
        return [self._answer(*pair) for pair in pairs]

    def _answer(self, asked: tuple[list[int], list[int]], base: generation.Answer, tuned: generation.Answer) -> Answer:
        prompt, reference = map(self.text, asked)
        return Answer(
            prompt=prompt,
            reference=reference,
            base=base.text.strip(),
            tuned=tuned.text.strip(),
            base_f1=breakdown.f1(base.text, reference),
            tuned_f1=breakdown.f1(tuned.text, reference),
            base_stopped=base.finish_reason == "stop",
            tuned_stopped=tuned.finish_reason == "stop",
        )


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
