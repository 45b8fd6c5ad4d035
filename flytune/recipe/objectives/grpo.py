"""The section of objective grpo."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from flytune import limits
from flytune.recipe.objectives.base import OF_COMPARED_ANSWERS, ObjectiveSection
from flytune.recipe.objectives.engines import Engine, TransformersEngine
from flytune.recipe.rewards import MOST, OWN, Reward, RewardFunction
from flytune.recipe.sections import Factor
from flytune.row_names import PROMPTS, RowKindName

LossType = Literal["grpo", "dr_grpo", "dapo", "cispo"]
Share = Annotated[float, Field(gt=0, le=1)]
_CLIP_RANGES: dict[str, tuple[float, float]] = {
    "grpo": (0.2, 0.2),  # Shao et al. 2024, arXiv 2402.03300
    "dr_grpo": (0.2, 0.2),  # as in PPO (Schulman et al. 2017, arXiv 1707.06347)
    "dapo": (0.2, 0.28),  # Yu et al. 2025, arXiv 2503.14476
    "cispo": (
        0.2,
        5.0,
    ),  # Khatri et al. 2025 (ScaleRL), arXiv 2510.13786; it has no lower bound, and TRL ignores epsilon
}
_GSPO_CLIP_RANGE = (3e-4, 4e-4)
"""Clip range of ratios of whole answers (Zheng et al. 2025, arXiv 2507.18071)."""


class Grpo(ObjectiveSection):
    """Group relative policy optimization: the model answers prompts itself, and rewards say which answers are
    better."""

    row_kind: ClassVar[RowKindName] = PROMPTS
    usual_learning_rates: ClassVar[tuple[float, float]] = OF_COMPARED_ANSWERS
    formats = ()
    reads = "reads prompts (docs/objectives.md)"
    refused: ClassVar[dict[str, str]] = {
        "data.packing": "objective: {name} pads the answers that the model draws; remove it",
        "data.too_long: split": "but a piece of a prompt is none; objective: {name} takes drop or error",
        "data.completion_only_loss: false": "but objective: {name} trains answers alone; remove it",
        **{
            f"training.{field}": f"{reason}; with objective: {{name}} remove it"
            for field, reason in {
                "neftune_noise_alpha": "answers are drawn without its noise",
                "torch_compile": "not tested with drawing answers",
                "probe_longest": "the longest prompts say nothing about the longest answers",
                "use_liger_kernel": "Liger replaces the head that answers are drawn from",
            }.items()
        },
    }

    name: Literal["grpo"]
    """`grpo` trains answers that the model draws itself, by their rewards (docs/objectives.md)."""
    rewards: Annotated[list[Reward], Field(min_length=1, max_length=MOST)] = Field(
        default=[RewardFunction(name="exact_answer")]
    )
    """Functions that judge an answer, whose values are added with their weights; a name, or
    path/to/rewards.py:function."""
    group_size: Annotated[int, Field(ge=2, le=limits.LISTED)] = 8
    """Answers to each prompt of a step (TRL's num_generations); it divides training.global_batch_size, which
    counts answers."""
    max_completion_length: Annotated[int, Field(ge=1, le=limits.TOKENS)] = 256
    """Most tokens of an answer, also limited by what the prompt leaves of data.max_length."""
    temperature: Annotated[float, Field(ge=limits.LEAST_TEMPERATURE, le=limits.LARGEST_TEMPERATURE)] = 1.0
    """Divisor of the logits from which answers are drawn, and of those that are trained."""
    top_p: Share = 1.0
    """Draw from the most probable tokens that have this share of the probability together."""
    top_k: Annotated[int, Field(ge=0, le=limits.TOKENS)] = 0
    """Draw from so many of the most probable tokens; 0 from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Draw from tokens of at least this share of the largest probability."""
    beta: Factor = 0.0
    """Weight of the KL divergence from the reference model; with 0 there is none."""
    use_bias_correction_kl: bool = True
    """Multiply the KL term by the importance weights, so that its gradient is that of the reverse KL
    divergence (DeepSeek-V3.2, arXiv 2512.02556); false: the gradient of the estimator k3 itself, as in GRPO's
    paper."""
    loss_type: LossType = "dapo"
    """TRL's losses: the mean over an answer's tokens (grpo), or their sum over the most tokens (dr_grpo) or
    the step's (dapo, cispo)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Level of the importance weights: of each token, or of the answer as in GSPO."""
    epsilon: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Distance below 1 at which importance weights are cut; by default that of the loss's paper."""
    epsilon_high: Annotated[float, Field(gt=0, le=limits.FACTOR)] | None = None
    """Distance above 1 at which importance weights are cut, and for cispo their largest value; by default
    that of the paper."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Division of the advantages: by the standard deviation of the prompt's rewards, by that of the step's,
    or by nothing."""
    mask_truncated_completions: bool = False
    """Leave answers that did not end out of the loss."""
    disable_dropout: bool = False
    """Switch dropout off in training; answers are always drawn without it."""
    per_device_generation_batch_size: Annotated[int, Field(ge=1, le=limits.MICRO_BATCH)] | None = None
    """Answers that a process draws at a time; by default as many as a micro batch has."""
    eval_answers: Annotated[int, Field(ge=0, le=limits.LISTED)] = 4
    """Answers that both models draw to each held-out prompt for pass@1 and pass@k, beside the most probable
    one."""
    reward_seconds: Annotated[float, Field(ge=limits.LEAST_SECONDS, le=600)] = 5.0
    """Longest time that a reward may take for one answer."""
    engine: Engine = TransformersEngine()
    """Engine that draws the answers of a step: `transformers`, or `vllm` with its options."""

    def refusals(self, recipe: Any) -> list[str]:
        return self.engine.refusals(recipe)

    @field_validator("rewards", mode="before")
    @classmethod
    def _rewards_are_named(cls, value: object) -> object:
        if value == []:
            raise ValueError(
                f"name what judges the answers: {', '.join(OWN)}, or path/to/rewards.py:function "
                "(docs/objectives.md)"
            )
        return value

    @property
    def clip_range(self) -> tuple[float, float]:
        """Return the values of epsilon and epsilon_high: the recipe's, or those of the paper of the loss."""
        low, high = (
            _GSPO_CLIP_RANGE if self.importance_sampling_level == "sequence" else _CLIP_RANGES[self.loss_type]
        )
        return self.epsilon or low, self.epsilon_high or self.epsilon or high

    @property
    def own_code(self) -> list[str]:
        return [reward.name for reward in self.rewards if reward.code is not None]

    @property
    def own_places(self) -> list[str]:
        return [f"engine.{place}" for place in self.engine.own_places]

    @property
    def judged_by(self) -> "Grpo":
        return Grpo(
            name="grpo",
            rewards=self.rewards,
            reward_seconds=self.reward_seconds,
            max_completion_length=self.max_completion_length,
        )

    @property
    def reward_names(self) -> list[str]:
        return [reward.name for reward in self.rewards]

    def total(self, values: Sequence[float]) -> float:
        """Return the reward of an answer: the sum of its rewards' values times their weights."""
        return sum(reward.weight * value for reward, value in zip(self.rewards, values, strict=True))

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [reward.name for reward in self.rewards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(
                f"rewards: {', '.join(twice)}: named twice; name each once, or give a function another name"
            )
        if self.loss_type in ("dapo", "cispo") and self.importance_sampling_level == "sequence":
            raise ValueError(
                f"importance_sampling_level: sequence with loss_type: {self.loss_type}, which adds up "
                "tokens, would weigh answers by their lengths; write loss_type: grpo, as GSPO does"
            )
        if self.loss_type == "cispo" and self.epsilon is not None:
            raise ValueError("epsilon: loss_type: cispo has no lower bound of importance weights; remove it")
        if self.loss_type == "cispo" and self.epsilon_high is not None and self.epsilon_high < 1:
            raise ValueError(
                f"epsilon_high: {self.epsilon_high:g}: loss_type: cispo cuts importance weights at "
                "epsilon_high itself, and they are all 1, since each answer is trained once: the whole loss "
                "would be scaled down; write 1 or more"
            )
        if not self.use_bias_correction_kl and not self.beta:
            raise ValueError(
                "use_bias_correction_kl: with beta: 0 there is no KL divergence; remove it, or set beta"
            )
        return self
