"""Answers that a model has drawn in training: a line of rollouts/STEP.jsonl, and of an artifact's
rollouts.jsonl."""

from typing import Annotated

from pydantic import Field

from flytune.schema import Strict, omitted

_Token = Annotated[int, Field(ge=0)]


class Rollout(Strict):
    """One completion."""

    tokens: list[_Token]
    text: str
    """Tokens as text, without special tokens: what rewards have judged."""
    log_probs: list[float]
    """Log-probability of each token when it was drawn."""
    trained_log_probs: list[float] = omitted([])
    """Log-probability of each token by the trained model before the step, where another engine drew it."""
    rewards: list[float]
    """Value of each of the recipe's rewards."""
    truncated: bool
    """True if no end marker was drawn."""


class Group(Strict):
    """The completions of one prompt."""

    step: int
    """Optimizer step that trains them, from 1 on."""
    prompt: list[_Token]
    """Tokens of the prompt."""
    text: str = ""
    """The prompt as text, without special tokens; empty in ledgers that were written without it."""
    completions: list[Rollout]
    made_by: dict[str, str] = omitted({})
    """Keys of what the completions and their rewards follow from: the rows, the drawing, the rewards and the
    weights; empty in ledgers of earlier releases."""
