"""metrics.json: what came of asking base and tuned model the same."""

from pydantic import Field

from flytune.schema import Record, Strict


class Score(Strict):
    """Held-out loss of one model: nats a token, over trained tokens only, with a 95 % confidence interval."""

    loss: float
    loss_low: float
    loss_high: float
    perplexity: float
    perplexity_low: float
    perplexity_high: float


class Answer(Strict):
    """One held-out prompt, answered greedily."""

    prompt: str
    reference: str
    base: str
    tuned: str
    base_f1: float = 0.0
    """Words shared with the reference (flytune.evaluation.breakdown.f1), 0 to 1."""
    tuned_f1: float = 0.0
    base_stopped: bool = True
    """By itself, before evaluation.max_new_tokens."""
    tuned_stopped: bool = True


class Part(Strict):
    """The held-out samples of one source or of one range of lengths: loss in nats a token."""

    kind: str
    """`source` or `length`."""
    name: str
    samples: int
    tokens: int
    base_loss: float
    tuned_loss: float
    difference: float
    """tuned - base, paired by sample, with a 95 % interval."""
    difference_low: float
    difference_high: float


class Wins(Strict):
    """How often each model was the better one."""

    tuned: int
    base: int
    ties: int


class TaskScore(Strict):
    """One metric of one task of lm-evaluation-harness, of base and tuned model on the same documents."""

    task: str
    metric: str
    """With the harness's filter: exact_match,strict-match."""
    higher_is_better: bool
    base: float
    base_stderr: float | None
    tuned: float
    tuned_stderr: float | None
    documents: int
    num_fewshot: int = 0


class Metrics(Record):
    """metrics.json: base and tuned model on the same held-out tokens."""

    base: Score
    tuned: Score
    loss_difference: float
    """tuned - base, paired by sample; negative is better."""
    loss_difference_low: float
    loss_difference_high: float
    samples: int
    tokens: int
    """Trained tokens scored."""
    loaded_as: str
    """How base and tuned model were loaded: the dtype, or `nf4` for an adapter on a 4-bit base."""
    answers: list[Answer]
    seconds: float
    tasks: list[TaskScore] = Field(default=[])
    parts: list[Part] = Field(default=[])
    sample_wins: Wins | None = None
    """By the loss of each held-out sample."""
    answer_wins: Wins | None = None
    """By the words that each answer shares with its reference."""

    def unstopped(self, model: str) -> int:
        """Answers of `base` or `tuned` that were cut at max_new_tokens."""
        return sum(not getattr(answer, f"{model}_stopped") for answer in self.answers)

    @property
    def never_stops(self) -> bool:
        """Whether the tuned model hardly ever ends an answer, and less often than its base."""
        return self.unstopped("tuned") > max(self.unstopped("base"), 0.9 * len(self.answers))

    @property
    def is_better(self) -> bool:
        """Whether the tuned model's loss is lower beyond doubt: the whole interval lies below zero."""
        return self.loss_difference_high < 0
