"""training.json and the lines of steps.jsonl: the record of a training run."""

from pydantic import Field

from flytune.schema import Record, Strict

PARTS = ("data", "forward", "backward", "update", "eval", "other")
"""Parts of the time of a step."""

STEPS = "steps.jsonl"
"""File with one line per logged step: next to the checkpoints during the run, in the artifact afterwards."""


class GpuUse(Strict):
    """Samples of NVML between two logged steps, over the GPUs of the first node; None where no GPU reports the figure."""

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
    """Mean loss over the trained tokens of the global batch, in nats."""
    eval_loss: float | None = None
    """Loss of the live model on the held-out samples, in nats per trained token; None if it was not scored."""
    learning_rate: float
    grad_norm: float | None
    """Norm of the gradients before clipping."""
    seconds: float
    """Seconds since the previous logged step (for the first, since the start of training); the sum of the parts below."""
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
    """Peak memory since the previous logged step, of the fullest GPU or of the host; see TrainingResult.memory_kind."""
    memory_reserved_bytes: int | None = None
    """Peak memory that the allocator reserved on that GPU since the previous logged step."""
    reward_accuracy: float | None = Field(default=None, exclude_if=lambda value: value is None)
    """Share of the trained pairs since the previous logged step whose chosen answer has the larger reward; of pairs only."""
    reward_margin: float | None = Field(default=None, exclude_if=lambda value: value is None)
    """Mean reward of their chosen answers less that of the rejected ones."""
    gpu: GpuUse | None = Field(default=None, exclude_if=lambda gpu: gpu is None)
    """Use of the GPUs since the previous logged step; left out of the line if there was no sample."""

    @property
    def other_seconds(self) -> float:
        """Seconds of logging, checkpoints and everything else between the parts."""
        parts = (self.data_seconds, self.forward_seconds, self.backward_seconds, self.update_seconds, self.eval_seconds)
        return max(0.0, self.seconds - sum(parts))


class TrainingResult(Record):
    """training.json: the result of a training run."""

    steps: list[Step]
    seconds: float
    """Seconds of the training loop, without loading and exporting."""
    tokens: int
    world_size: int
    memory_kind: str
    """Kind of memory in all figures: `GPU memory allocated` or `host memory (RSS)`."""
    peaks: dict[str, int] = Field(default={})
    """Peak bytes by phase (flytune.records.plan.PHASES), of the process with the largest peak."""
    reserved_peaks: dict[str, int] = Field(default={})
    """Peak bytes that the allocator reserved on that GPU, by phase; empty without a GPU."""
    trained_parameters: int
    total_parameters: int
    heldout_loss: float | None
    """Loss of the live model on the first held-out samples, before the export; the gate compares the export with it."""
    resumed_from_step: int = 0
    """Step of the checkpoint that the run resumed from; 0 for a run from the start."""
    stopped_early: str | None = None
    """Reason why the recipe's budget ended the run before its last step."""
    early_stopping: str | None = None
    """Reason why the recipe's early stopping ended the run before its last step."""
    exported_step: int | None = None
    """Step whose weights were exported; None in records of version 0.1.0, which always exported the last."""
    exported_eval_loss: float | None = None
    """Loss of those weights on the held-out samples in training, in nats per trained token; None if they were not scored."""
    versions: dict[str, str] = Field(default={})
    """Versions of Flytune and of the libraries that computed it, and the hash of requirements.lock; empty before 0.2.0."""
    attempt: str = ""
    """Attempt in the names of its checkpoints; empty if it only exported, so that its checkpoints are kept."""

    @property
    def exported(self) -> str:
        """Exported step as a phrase, with its eval_loss if it was scored in training."""
        if self.exported_step is None:
            return "the last step"
        loss = "" if self.exported_eval_loss is None else f", eval_loss {self.exported_eval_loss:.4f}"
        last = self.steps[-1].step if self.steps else max(self.resumed_from_step, self.exported_step)
        return f"step {self.exported_step} of {last}{loss}"

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all processes, without padding."""
        return self.tokens / self.seconds if self.seconds else 0.0
