"""The record of a training run: training.json and the lines of steps.jsonl."""

from pydantic import Field

from flytune.schema import Record, Strict

PARTS = ("data", "forward", "backward", "update", "eval", "other")

STEPS = "steps.jsonl"
"""One line a logged step; beside the checkpoints while the run goes on, in the artifact afterwards."""


class Step(Strict):
    """One logged optimizer step: a line of steps.jsonl. Times and memory are those of the first process."""

    step: int
    epoch: float
    loss: float
    """Mean over the trained tokens of the global batch, in nats."""
    eval_loss: float | None = None
    """Of the live model on the held-out samples, in nats a trained token; None where it was not scored."""
    learning_rate: float
    grad_norm: float | None
    """Before clipping."""
    seconds: float
    """Since the previous logged step (since the start of training, for the first). Its parts follow."""
    data_seconds: float
    """Fetching the micro batches."""
    forward_seconds: float
    backward_seconds: float
    """With the reduction of gradients between processes."""
    update_seconds: float
    """Clipping, optimizer and schedule."""
    eval_seconds: float
    """Scoring the live model."""
    tokens: int
    """Read since the previous logged step, over all processes, padding not counted."""
    tokens_per_second: float
    """Over all processes; the time for scoring is left out."""
    memory_bytes: int
    """Peak since the previous logged step: of its fullest GPU, or of its host memory; see TrainingResult.memory_kind."""
    memory_reserved_bytes: int | None = None
    """Peak since the previous logged step of what the allocator has taken from that GPU."""

    @property
    def other_seconds(self) -> float:
        """Logging, checkpoints, and what is between the parts."""
        parts = (self.data_seconds, self.forward_seconds, self.backward_seconds, self.update_seconds, self.eval_seconds)
        return max(0.0, self.seconds - sum(parts))


class TrainingResult(Record):
    """training.json: what a training run did."""

    steps: list[Step]
    seconds: float
    """Of the training loop, loading and saving not included."""
    tokens: int
    world_size: int
    memory_kind: str
    """`GPU memory allocated` or `host memory (RSS)`."""
    peaks: dict[str, int] = Field(default={})
    """Peak bytes by phase (flytune.records.plan.PHASES), of the process that held most of that kind."""
    reserved_peaks: dict[str, int] = Field(default={})
    """What the allocator had taken of that GPU; empty without one."""
    trained_parameters: int
    total_parameters: int
    heldout_loss: float | None
    """Of the live model on the first held-out samples, before export; the gate holds the export against it."""
    resumed_from_step: int = 0
    stopped_early: str | None = None
    """Why not all steps were trained, where the recipe's budget ended the run."""
    attempt: str = ""
    """As its checkpoints are named; empty where it has trained no step of its own, and they stay."""

    @property
    def tokens_per_second(self) -> float:
        """Over all processes, padding not counted."""
        return self.tokens / self.seconds if self.seconds else 0.0
