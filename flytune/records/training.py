"""training.json and the lines of steps.jsonl: the record of a training run."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field

from flytune.records.attempt import Attempt
from flytune.records.figures import ACCURACY, LOSS, MARGIN, Figure
from flytune.records.plan import Plan
from flytune.schema import Record, Strict, omitted

PARTS = ("data", "forward", "backward", "update", "eval", "other")
"""Parts of the time of a step."""

STEPS = "steps.jsonl"
"""File with one line per logged step: next to the checkpoints during the run, in the artifact afterwards."""
ROLLOUTS = "rollouts.jsonl"
"""File of an artifact with some of the answers that the model has drawn in training."""
LIVE = "FLYTUNE_LIVE_STEPS"
"""Variable with the name of a file that gets the path of STEPS, for a face that shows a run while it
trains."""


class GpuUse(Strict):
    """Samples of NVML between two logged steps, over the GPUs of the first node; None where no GPU reports
    the figure."""

    utilization: float | None = None
    """Mean percentage of time in which a kernel ran, as nvidia-smi has it."""
    utilization_max: float | None = None
    power_watts: float | None = None
    """Mean power of a GPU, in watts."""
    power_watts_max: float | None = None
    memory_used_bytes: float | None = None
    """Mean memory in use on a GPU: that of all processes, with what CUDA and the driver take."""
    memory_used_bytes_max: float | None = None
    temperature: float | None = None
    """Mean temperature of a GPU, in degrees Celsius."""
    temperature_max: float | None = None


class Step(Strict):
    """A logged optimizer step, one line of steps.jsonl. Times and memory are those of the first process."""

    step: int
    epoch: float
    loss: float
    """Objective's mean loss over the global batch, in the unit of its figure (TrainingResult.figures): of sft
    in nats per trained token."""
    eval_loss: float | None = None
    """The same loss of the live model on the held-out samples; None if it was not scored."""
    learning_rate: float
    grad_norm: float | None
    """Norm of the gradients before clipping."""
    seconds: float
    """Seconds since the previous logged step (for the first, since the start of training); the sum of the
    parts below."""
    data_seconds: float
    """Seconds of fetching the micro batches."""
    forward_seconds: float
    backward_seconds: float
    """Seconds of the backward passes, including the reduction of gradients between processes."""
    update_seconds: float
    """Seconds of clipping, optimizer and learning rate schedule."""
    eval_seconds: float
    """Seconds of scoring the live model."""
    tokens: int
    """Number of tokens read since the previous logged step by all processes, without padding."""
    tokens_per_second: float
    """Tokens per second of all processes, without the time of scoring."""
    memory_bytes: int
    """Peak memory since the previous logged step, of the fullest GPU or of the host; see
    TrainingResult.memory_kind."""
    memory_reserved_bytes: int | None = None
    """Peak memory that the allocator reserved on that GPU since the previous logged step."""
    reward_accuracy: float | None = omitted(None)
    """Share of the trained pairs since the previous logged step whose chosen answer has the larger reward; of
    pairs only."""
    reward_margin: float | None = omitted(None)
    """Mean reward of their chosen answers less that of the rejected ones; of labelled answers, of the micro
    batches with both labels."""
    accuracy: float | None = omitted(None)
    """Share of the trained texts since the previous logged step whose labels are right; of classifiers."""
    reward: float | None = omitted(None)
    """Mean reward of the answers that the model has drawn since the previous logged step; of objectives that
    draw some."""
    rewards: dict[str, float] = omitted({})
    """Mean of each of its rewards, by name, without weights."""
    equal_rewards: float | None = omitted(None)
    """Share of the prompts whose answers all have the same reward, so that they have no gradient."""
    answer_tokens: float | None = omitted(None)
    """Mean number of tokens of those answers."""
    truncated: float | None = omitted(None)
    """Share of those answers that no end marker has ended."""
    entropy: float | None = omitted(None)
    """Mean entropy of the trained tokens, in nats."""
    kl: float | None = omitted(None)
    """Estimated KL divergence from the reference, in nats a token; only with a reference."""
    importance_mean: float | None = omitted(None)
    """Mean importance weight of those answers, between the engine that has drawn them and the trained model;
    only with another engine than the model."""
    importance_max: float | None = omitted(None)
    """Largest of these weights, before it was cut."""
    importance_cut: float | None = omitted(None)
    """Share of these weights that were outside of their bounds."""
    rollout_seconds: float | None = omitted(None)
    """Seconds of drawing and judging those answers, which are part of data_seconds."""
    gpu: GpuUse | None = omitted(None)
    """Use of the GPUs since the previous logged step; left out of the line if there was no sample."""

    @property
    def other_seconds(self) -> float:
        """Seconds of logging, checkpoints and everything else between the parts."""
        parts = (
            self.data_seconds,
            self.forward_seconds,
            self.backward_seconds,
            self.update_seconds,
            self.eval_seconds,
        )
        return max(0.0, self.seconds - sum(parts))


class TrainingResult(Record):
    """training.json: the result of a training run, all of its attempts together where a field does not say
    otherwise.

    Records of version 0.1.0 have the figures of the attempt that finished.
    """

    steps: list[Step]
    """Logged steps from the first on, each once: of a step that was trained again, its last training."""
    figures: list[Figure] = Field(default=[])
    """Figures of the objective that the steps have; empty in records of earlier releases (see `logged`)."""
    seconds: float
    """Seconds of the training loops, without loading and exporting; those of steps that were trained again
    are included."""
    tokens: int
    """Number of tokens read in `steps`."""
    world_size: int
    """Number of processes of the last attempt."""
    memory_kind: str
    """Kind of memory in all figures: `GPU memory allocated` or `host memory (RSS)`."""
    peaks: dict[str, int] = Field(default={})
    """Peak bytes by phase (flytune.records.plan.PHASES), of the process with the largest peak."""
    reserved_peaks: dict[str, int] = Field(default={})
    """Peak bytes that the allocator reserved on that GPU, by phase; empty without a GPU."""
    attempts: list[Attempt] = Field(default=[])
    """All attempts in their order, the last one finished the run; empty before 0.2.0."""
    trained_parameters: int
    total_parameters: int
    heldout_loss: float | None
    """Loss of the live model on the first held-out samples, before the export; the gate compares the export
    with it."""
    resumed_from_step: int = 0
    """Step of the checkpoint that the last attempt resumed from; 0 for one from the start."""
    stopped_early: str | None = None
    """Reason why the recipe's budget ended the run before its last step."""
    early_stopping: str | None = None
    """Reason why the recipe's early stopping ended the run before its last step."""
    exported_step: int | None = None
    """Step whose weights were exported; None in records of version 0.1.0, which always exported the last."""
    exported_eval_loss: float | None = None
    """The objective's loss of those weights on the held-out samples in training; None if they were not
    scored."""
    teacher_loss: float | None = omitted(None)
    """Loss of the teacher on the held-out samples, in nats per trained token; of distillation only."""
    teacher_commit: str | None = omitted(None)
    """Commit of a teacher on the hub."""
    versions: dict[str, str] = Field(default={})
    """Versions of Flytune and of the libraries that computed it, and the hash of requirements.lock; empty
    before 0.2.0."""
    attempt: str = ""
    """Last attempt in the names of its checkpoints; empty if it only exported, so that its checkpoints are
    kept."""
    rope: dict[str, Any] = omitted({})
    """Keys of the base's config.json that model.rope_scaling has changed, with their values; empty without
    it."""

    @property
    def logged(self) -> list[Figure]:
        """Return the figures that the steps have, of any release."""
        has_pairs = any(step.reward_accuracy is not None for step in self.steps)
        earlier = [LOSS.model_copy(update={"unit": "per pair"}), ACCURACY, MARGIN] if has_pairs else [LOSS]
        return self.figures or earlier

    @property
    def exported(self) -> str:
        """Exported step as a phrase, with its eval_loss if it was scored in training."""
        if self.exported_step is None:
            return "the last step"
        loss = "" if self.exported_eval_loss is None else f", eval_loss {self.exported_eval_loss:.4f}"
        last = self.steps[-1].step if self.steps else max(self.resumed_from_step, self.exported_step)
        return f"step {self.exported_step} of {last}{loss}"

    @property
    def first_step(self) -> int:
        """Number of steps before the first logged one that no log has, as the checkpoint that was resumed
        from had none."""
        return self.resumed_from_step if self.steps and self.steps[0].step > self.resumed_from_step else 0

    @property
    def step_seconds(self) -> float:
        """Seconds of the logged steps, each counted once."""
        return sum(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all processes, without padding, over the logged steps."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def held_seconds(self) -> float:
        """Seconds for which all attempts held their machines; before 0.2.0 those of the training loop."""
        return sum(attempt.held_seconds for attempt in self.attempts) if self.attempts else self.seconds

    @property
    def repeated_steps(self) -> int:
        """Number of steps that were trained again, because an attempt was lost before it saved them."""
        trained = sum(attempt.last_step - attempt.resumed_from_step for attempt in self.attempts)
        return max(0, trained - self.attempts[-1].last_step) if self.attempts else 0

    def price(self, price_per_hour: float) -> float:
        """Return the price of the machines' time; `price_per_hour` is the plan's, for records without
        attempts."""
        if not self.attempts:
            return self.seconds / 3600 * price_per_hour
        return sum(attempt.held_seconds / 3600 * attempt.price_per_hour for attempt in self.attempts)

    def steps_of(self, attempt: Attempt) -> list[Step]:
        """Return the logged steps that are of one attempt: those that no later one has trained again."""
        later = [
            other.resumed_from_step
            for other in self.attempts
            if other.number > attempt.number and other.last_step
        ]
        last = min([attempt.last_step, *later])
        return [step for step in self.steps if attempt.resumed_from_step < step.step <= last]

    def as_planned(self, plan: Plan) -> Self:
        """Return the record of the attempts with the plan's machines and batches alone; of all, if these have
        no step."""
        kept = [attempt for attempt in self.attempts if attempt.is_of(plan)]
        steps = [step for kept_attempt in kept for step in self.steps_of(kept_attempt)]
        if not steps or len(kept) == len(self.attempts):
            return self
        update = {
            "peaks": highest([kept_attempt.peaks for kept_attempt in kept]),
            "reserved_peaks": highest([kept_attempt.reserved_peaks for kept_attempt in kept]),
        }
        tokens = sum(step.tokens for step in steps)
        return self.model_copy(update={"attempts": kept, "steps": steps, "tokens": tokens, **update})


def highest(peaks: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the largest peak of each phase."""
    return {
        phase: max(peak.get(phase, 0) for peak in peaks)
        for phase in dict.fromkeys(name for peak in peaks for name in peak)
    }
