"""metrics.json: the evaluation of base and tuned model on the same samples."""

from pydantic import Field

from flytune.schema import Record, Strict


class Score(Strict):
    """Held-out loss of one model in nats per token, over trained tokens only, with a 95 % confidence interval."""

    loss: float
    loss_low: float
    loss_high: float
    perplexity: float
    perplexity_low: float
    perplexity_high: float


class Answer(Strict):
    """The greedy answers of both models to one held-out prompt."""

    prompt: str
    reference: str
    base: str
    tuned: str
    base_f1: float = 0.0
    """F1 score of the words shared with the reference (flytune.evaluation.breakdown.f1), 0 to 1."""
    tuned_f1: float = 0.0
    base_stopped: bool = True
    """True if the answer ended with an end marker, before evaluation.max_new_tokens."""
    tuned_stopped: bool = True


class Part(Strict):
    """The loss of the held-out samples of one source or one range of lengths, in nats per token."""

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
    """Counts of the comparisons that each model won."""

    tuned: int
    base: int
    ties: int
    rate: float | None = Field(default=None, exclude_if=lambda value: value is None)
    """Win rate of the tuned model, ties counted as half; None for a single comparison and in older records."""
    rate_low: float | None = Field(default=None, exclude_if=lambda value: value is None)
    rate_high: float | None = Field(default=None, exclude_if=lambda value: value is None)


class TaskScore(Strict):
    """One metric of one task of lm-evaluation-harness, for base and tuned model on the same documents."""

    task: str
    metric: str
    """Metric with the harness's filter: exact_match,strict-match."""
    higher_is_better: bool
    base: float
    base_stderr: float | None
    tuned: float
    tuned_stderr: float | None
    documents: int
    num_fewshot: int = 0


class LabelReward(Strict):
    """Rewards of the held-out answers with one label, with 95 % intervals over the answers."""

    label: bool
    """True for desirable answers."""
    answers: int
    reward: float
    """Mean reward."""
    reward_low: float
    reward_high: float
    moved: float
    """Share of answers whose log-probability moved as the label says: up of desirable ones, down of undesirable ones."""
    moved_low: float
    moved_high: float


class RewardScore(Strict):
    """Rewards that a reward model gives to the answers of the held-out pairs, with 95 % intervals over the pairs."""

    pairs: int
    accuracy: float
    """Share of pairs whose chosen answer has the larger reward."""
    accuracy_low: float
    accuracy_high: float
    margin: float
    """Mean reward of the chosen answer less that of the rejected one."""
    margin_low: float
    margin_high: float


class Preference(RewardScore):
    """Preferences of both models between the answers of the held-out pairs, with 95 % intervals over the pairs.

    Of answers with labels, a pair is any desirable answer with any undesirable one, whose log-probabilities are compared for
    each token; read chosen as desirable, and rejected as undesirable. The intervals are over the answers.

    The reward of an answer is beta times the difference of its log-probability, tuned minus base (Rafailov et al. 2023, eq. 5);
    the base is the reference, whose own rewards are all 0.
    """

    beta: float
    base: float
    """Share of pairs whose chosen answer is more probable than the rejected one to the base model."""
    base_low: float
    base_high: float
    tuned: float
    """The same share of the tuned model."""
    tuned_low: float
    tuned_high: float
    labels: list[LabelReward] = Field(default=[], exclude_if=lambda labels: not labels)
    """Rewards of desirable and of undesirable answers; empty for pairs."""


class Metrics(Record):
    """metrics.json: base and tuned model on the same held-out tokens; of pairs on the chosen answers, of labelled answers
    on the desirable ones.

    Of a reward model, losses are those of pairs, in nats per pair. Its base has no head of rewards: `base` is the loss of a
    model that prefers nothing, log 2. Perplexities have no meaning there.
    """

    base: Score
    tuned: Score
    loss_difference: float
    """Mean of tuned - base, paired by sample; negative means that tuning helped."""
    loss_difference_low: float
    loss_difference_high: float
    samples: int
    tokens: int
    """Number of scored trained tokens."""
    loaded_as: str
    """Precision in which both models were loaded: the dtype, or `nf4`, `fp4` or `int8` for an adapter on a quantized base."""
    answers: list[Answer]
    seconds: float
    tasks: list[TaskScore] = Field(default=[])
    parts: list[Part] = Field(default=[])
    sample_wins: Wins | None = None
    """Comparisons of the loss of each held-out sample."""
    answer_wins: Wins | None = None
    """Comparisons of the words that each answer shares with its reference."""
    preference: Preference | None = Field(default=None, exclude_if=lambda preference: preference is None)
    """Preferences between the answers of the held-out pairs; None for an objective without pairs."""

    reward: RewardScore | None = Field(default=None, exclude_if=lambda reward: reward is None)
    """Rewards of the held-out pairs; None for a model that is no reward model."""

    def unstopped(self, model: str) -> int:
        """Return the number of answers of `base` or `tuned` that were cut at max_new_tokens."""
        return sum(not getattr(answer, f"{model}_stopped") for answer in self.answers)

    @property
    def never_stops(self) -> bool:
        """True if the tuned model hardly ever ends an answer, and less often than its base."""
        return self.unstopped("tuned") > max(self.unstopped("base"), 0.9 * len(self.answers))

    @property
    def is_better(self) -> bool:
        """True if the tuned model is significantly better: a loss interval below zero, or a margin of pairs above zero.

        A reward model must choose more than half of the pairs correctly.
        """
        if self.reward is not None:
            return self.reward.accuracy_low > 0.5
        return self.loss_difference_high < 0 if self.preference is None else self.preference.margin_low > 0
