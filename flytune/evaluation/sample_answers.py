"""Held-out samples and prompts for base and tuned model, and their answers side by side."""

from dataclasses import dataclass
from typing import Any

from flytune.evaluation import breakdown
from flytune.models import Row, generation
from flytune.models.generation import padding_token
from flytune.models.images import STORED
from flytune.models.scoring import IGNORED
from flytune.recipe import Evaluation
from flytune.records import Answer


@dataclass(frozen=True)
class Questions:
    """The held-out rows that both models are scored on, and the prompts that both answer."""

    section: Evaluation
    """The recipe's evaluation section."""
    rows: list[Row]
    tokenizer: Any
    prompts: list[tuple[list[int], list[int]]]
    """Tokens of each prompt and of its reference answer."""
    asked: list[Row]
    """Rows of the prompts, up to the end of each, where they have images; else none."""
    ends: list[int]
    """Tokens that end an answer."""
    pad: int
    """Token that pads batches."""

    @classmethod
    def of(
        cls, section: Evaluation, rows: list[Row], tokenizer: Any, asked: int | None = None
    ) -> "Questions":
        """Return the questions of held-out rows; the first `sample_answers` give the prompts, at most
        `asked`."""
        ends = sorted({tokenizer.eos_token_id, *(_end_marker(row, tokenizer) for row in rows)} - {None})
        pad = padding_token(tokenizer, ends)
        chosen = rows[:asked][: section.sample_answers]
        prompts = [_prompt(row, tokenizer) for row in chosen]
        with_images = [
            row[STORED].of_tokens(row, prompt)
            for row, (prompt, _) in zip(chosen, prompts, strict=True)
            if STORED in row
        ]
        return cls(section, rows, tokenizer, prompts, with_images, ends, pad)

    def text(self, tokens: list[int]) -> str:
        """Decode tokens for readers, without special tokens and surrounding space."""
        return _text(self.tokenizer, tokens)

    def side_by_side(
        self, base: list[generation.GeneratedAnswer], tuned: list[generation.GeneratedAnswer]
    ) -> list[Answer]:
        """Return the answers of both models to each prompt."""
        pairs = zip(self.prompts, base, tuned, strict=True)
        return [self._answer(*pair) for pair in pairs]

    def _answer(
        self,
        question: tuple[list[int], list[int]],
        base: generation.GeneratedAnswer,
        tuned: generation.GeneratedAnswer,
    ) -> Answer:
        prompt, reference = map(self.text, question)
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
    """Return the tokens before the first trained one and the trained tokens that follow; of a plain text, its
    halves."""
    input_ids, labels = row["input_ids"], row["labels"]
    start = next((at for at, label in enumerate(labels) if label != IGNORED), len(labels))
    if not _text(tokenizer, input_ids[:start]):
        half = max(1, len(input_ids) // 2)
        return input_ids[:half], input_ids[half:]
    end = next((at for at in range(start, len(labels)) if labels[at] == IGNORED), len(labels))
    return input_ids[:start], input_ids[start:end]


def _end_marker(row: Row, tokenizer: Any) -> int | None:
    """Return the special token that ends a sample's last answer (<|im_end|>), or None if the answer was
    truncated."""
    # Templates put a trained line break after it.
    for label in reversed(row["labels"]):
        if label != IGNORED and tokenizer.decode([label]).strip():
            return label if label in tokenizer.added_tokens_decoder else None
    return None


def _text(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()
