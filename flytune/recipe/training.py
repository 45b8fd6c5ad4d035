"""The section `training` of a recipe."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from flytune import limits
from flytune.recipe import optimizers, schedules
from flytune.recipe.sections import Factor, Section
from flytune.schema import Positive


class Training(Section):
    """The optimizer, its schedule, and the supervision of training."""

    learning_rate: Annotated[float, Field(ge=limits.LEAST_LEARNING_RATE, le=limits.LEARNING_RATE)]
    global_batch_size: Annotated[int, Field(gt=0, le=limits.BATCH)]
    """Samples (with data.packing: blocks) of one optimizer step over all processes; accumulation follows from
    it."""
    per_device_train_batch_size: Annotated[int, Field(gt=0, le=limits.MICRO_BATCH)] | None = None
    """Largest number of samples of one forward pass; by default the largest that fits."""
    auto_find_batch_size: bool = False
    """Halve that number in the next attempt after a GPU ran out of memory, with the same global batch."""
    num_train_epochs: Annotated[float, Field(gt=0, le=limits.EPOCHS)] = 1.0
    max_steps: Positive | None = None
    """Number of optimizer steps, instead of num_train_epochs."""
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "constant",
        "constant_with_warmup",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ] = "cosine"
    lr_scheduler_kwargs: dict[str, int | float | str] = Field(default={})
    """Arguments of the schedule (docs/recipes.md): {min_lr_rate: 0.1} of cosine_with_min_lr."""
    warmup_steps: Annotated[float, Field(ge=0, le=limits.COUNT)] = 0.03
    """Number of warm-up steps; below 1, their share of all steps."""
    weight_decay: Annotated[float, Field(ge=0, le=limits.FACTOR)] = 0.0
    max_grad_norm: Annotated[float, Field(ge=limits.LEAST_FACTOR, le=limits.FACTOR)] = 1.0
    optim: Literal[
        "auto",
        "adamw_torch_fused",
        "adamw_torch",
        "adamw_8bit",
        "adamw_bnb_8bit",
        "paged_adamw_8bit",
        "paged_adamw_32bit",
        "lion_32bit",
        "lion_8bit",
        "paged_lion_32bit",
        "paged_lion_8bit",
        "adafactor",
        "sgd",
    ] = "auto"
    """Optimizer; `auto` is paged_adamw_8bit for qlora, adamw_torch_fused otherwise."""
    adam_beta1: Annotated[float, Field(ge=0, le=limits.DECAY)] = 0.9
    """Decay rate of the first moment of AdamW and Lion."""
    adam_beta2: Annotated[float, Field(ge=0, le=limits.DECAY)] = 0.999
    """Decay rate of the second moment of AdamW, and of Lion's only one (0.99 in its paper)."""
    adam_epsilon: Annotated[float, Field(gt=0, le=limits.EPSILON)] = 1e-8
    """Term that AdamW adds to the root of the second moment."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights that the optimizer updates, of their gradients and AdamW's moments; bfloat16 only
    for full."""
    activation_checkpointing: bool = True
    """Recompute activations in the backward pass instead of storing them."""
    neftune_noise_alpha: Annotated[float, Field(ge=limits.LEAST_FACTOR, le=limits.FACTOR)] | None = None
    """Scale of the uniform noise on the embeddings of training samples (NEFTune); none by default, 5 to 15 in
    its paper."""
    torch_compile: bool = False
    """Compile each decoder layer: the first steps take minutes longer, the others are faster."""
    use_liger_kernel: bool = False
    """Compute norms, rotation and MLP of each decoder layer with Liger's kernels, one for each."""
    probe_longest: bool = False
    """Train the longest samples in the first step, which then shows if the memory suffices; warm-up reduces
    their weight."""
    logging_steps: Positive = 1
    """Optimizer steps between two logged steps."""
    router_aux_loss_coef: Factor | None = None
    """Factor of the balance loss of a mixture of experts; by default that of the model's config.json, 0
    leaves it out."""
    hang_minutes: Annotated[float, Field(ge=limits.LEAST_MINUTES, le=limits.MINUTES)] = 10.0
    """Minutes after which a step that is also ten times slower than any before ends the attempt, with a stack
    of each rank."""
    ddp_timeout: Positive | None = None
    """Seconds after which a collective that not all processes reach fails; by default more than all limits of
    hang_minutes."""
    max_loss_jump: Annotated[float, Field(gt=1, le=limits.FACTOR)] | None = None
    """Factor over the median of the last 16 logged losses from which a loss is treated like NaN."""
    on_bad_loss: Literal["stop", "skip"] = "stop"
    """Reaction to a bad loss; with `skip` the next attempt resumes from the last checkpoint and skips the
    data since, at most three times."""
    seed: Annotated[int, Field(ge=0, le=limits.SEED)] = 42
    """Seed of the order of samples, new adapters and dropout."""

    @model_validator(mode="after")
    def _skip_needs_each_step(self) -> Self:
        if self.on_bad_loss == "skip" and self.logging_steps > 1:
            raise ValueError("on_bad_loss: skip needs the loss of each step; set logging_steps to 1")
        return self

    @model_validator(mode="after")
    def _kernels_are_of_one_kind(self) -> Self:
        if self.use_liger_kernel and self.torch_compile:
            raise ValueError(
                "use_liger_kernel: torch_compile makes kernels of its own for these layers; set one of them"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_has_its_arguments(self) -> Self:
        if wrong := optimizers.problem(self.optim, self.changed()):
            raise ValueError(wrong)
        return self

    @model_validator(mode="after")
    def _decay_leaves_weights(self) -> Self:
        if (share := self.learning_rate * self.weight_decay) >= 1:
            raise ValueError(
                f"weight_decay: {self.weight_decay:g} x learning_rate {self.learning_rate:g} is {share:g}: "
                "each step would subtract all of each weight, or more; lower it (0.1 is usual)"
            )
        return self

    @field_validator("lr_scheduler_kwargs")
    @classmethod
    def _integers(cls, value: dict[str, Any]) -> dict[str, Any]:
        # Between tasks, Flyte may make floats of integers: the key of a run must not depend on that.
        return {
            name: int(number) if isinstance(number, float) and number.is_integer() else number
            for name, number in value.items()
        }

    @model_validator(mode="after")
    def _schedule_has_its_arguments(self) -> Self:
        if wrong := schedules.problem(self.lr_scheduler_type, self.lr_scheduler_kwargs, self.learning_rate):
            raise ValueError(wrong)
        if self.max_steps and (wrong := self.schedule_problem(self.max_steps)):
            raise ValueError(wrong)
        return self

    def schedule_problem(self, steps: int) -> str | None:
        """Return why the schedule does not fit into a run of `steps` optimizer steps; None if it does."""
        return schedules.length_problem(
            self.lr_scheduler_type, self.lr_scheduler_kwargs, self.warmup_steps, steps
        )
