"""The trainer of a run: TRL's trainer of the objective on a prepared data set, laid out as the recipe's
sharding says.

TRL averages its figures over micro batches, as if each had equally many tokens or rows, and counts one that
has none as 0: the figure of a step would follow from the micro batch. LogMeans are means over all that was
trained.

A resumed optimizer has the settings of its checkpoint's recipe; OptimizerSettings are this recipe's, under
every sharding. States and position are the checkpoint's.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flytune import data, patches
from flytune.console import step_lines
from flytune.data import Collator, order
from flytune.errors import TrainingError
from flytune.export.write import write_weights
from flytune.hardware import Shape
from flytune.models import (
    host_memory,
    initial_adapter,
    liger,
    loading,
    own_logits,
    pissa,
    published,
    sharded_loading,
    towers,
    vocabulary,
)
from flytune.models.images import StoredImages
from flytune.models.sequence_parallel import COMPLETE, SequenceGroup
from flytune.objectives import OBJECTIVES
from flytune.objectives.bound import BoundRecipe
from flytune.recipe import Recipe, run_length
from flytune.records import Plan
from flytune.records.plan import SAVE
from flytune.sentences import counted
from flytune.training import bitsandbytes_states, callbacks, trackers, watchdog
from flytune.training.attempt_notes import Notes
from flytune.training.checkpoints import resume
from flytune.training.loss_guards import LearningGuard, LossGuard
from flytune.training.run_state import RunState


class LogMeans:
    """Means over trained tokens or rows, weighted by how many of them each micro batch has."""

    def __init__(self, log_counts: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """`log_counts` returns, by the name in TRL's logs, the number of tokens or rows of a micro batch:
        int64 ()."""
        self._log_counts = log_counts
        self._counts: list[dict[str, Any]] = []

    def count(self, batch: dict[str, Any]) -> None:
        """Count a micro batch before its forward pass."""
        self._counts.append(self._log_counts(batch))

    def weigh(self, metrics: dict[str, list[float]], accelerator: Any) -> None:
        """Replace the values of the micro batches in TRL's `metrics` by their mean, in place; none where
        nothing was counted.

        Every process calls it after equally many micro batches.
        """
        import torch

        batches, self._counts = self._counts, []
        if not batches or not batches[0]:
            return
        table = torch.stack([torch.stack([*counts.values()]) for counts in batches])
        of_all_processes = accelerator.reduce(table, reduction="sum").T.tolist()
        for name, counts in zip(batches[0], of_all_processes, strict=True):
            values = metrics.pop(name, [])
            if len(values) < len(counts):
                # TRL has no value of a micro batch without a row of the label.
                counts = [count for count in counts if count]
            if values and sum(counts):
                total = sum(value * count for value, count in zip(values, counts, strict=True) if count)
                metrics[name] = [total / sum(counts)]


class OptimizerSettings:
    """Settings of an optimizer and its schedule, read before a checkpoint is loaded."""

    def __init__(self, optimizer: Any, schedule: Any) -> None:
        self._groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._base_rates = list(schedule.base_lrs)
        self._clipping = [(clipped, clipped.clip_grad) for clipped in _clipping(optimizer)]

    def restore(self, optimizer: Any, schedule: Any) -> None:
        """Put the settings back into what a checkpoint was loaded into, with the learning rates of the
        schedule's position."""
        schedule.base_lrs = list(self._base_rates)
        factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
        rates = [rate * factor for rate, factor in zip(self._base_rates, factors, strict=True)]
        schedule._last_lr = rates
        for group, settings, rate in zip(optimizer.param_groups, self._groups, rates, strict=True):
            group.update(settings | {"lr": rate})
        for clipped, most in self._clipping:
            clipped.clip_grad = most


def _clipping(optimizer: Any) -> list[Any]:
    """Return DeepSpeed's optimizer below accelerate's, which clips gradients itself; no other does."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return [inner] if hasattr(inner, "clip_grad") else []


@functools.cache
def trainer_class(objective: str) -> Any:
    """Return RunTrainer, TRL's trainer of an objective with what Flytune changes in it. TRL is imported
    here."""
    with loading.importing():
        from transformers import PrinterCallback
        from transformers.integrations.deepspeed import deepspeed_load_checkpoint

        trl_trainer = OBJECTIVES[objective].trainer_class()

    class RunTrainer(trl_trainer):  # type: ignore[misc, valid-type]
        """TRL's trainer of one run.

        The parts of a step are measured in its methods. transformers' Trainer fetches all micro batches of an
        optimizer step in get_batch_samples; training_step is forward (compute_loss) and backward, gradient
        reduction included; what follows, up to on_step_end, is the update: clipping, optimizer, schedule.
        """

        def __init__(self, run: RunState, guard: LossGuard, stream: order.Stream, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.run, self.guard, self.learning = run, guard, LearningGuard()
            self.sequence: SequenceGroup | None = None
            self.log_means = LogMeans(run.objective.log_counts)
            # TRL accepts only its own kinds of data set; from here on the Trainer only reads it.
            self.train_dataset = stream
            # It prints the logs as they are.
            self.remove_callback(PrinterCallback)
            self.callback_handler.callbacks = callbacks.in_order(self, self.callback_handler.callbacks)

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            return bitsandbytes_states.adapt(super().create_optimizer(*args, **kwargs))

        def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
            schedule = super().create_scheduler(*args, **kwargs)
            # The last moment before DeepSpeed loads a checkpoint into the optimizer.
            self.optimizer_settings = OptimizerSettings(self.optimizer, schedule)
            return schedule

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                self.optimizer_settings.restore(self.optimizer, self.lr_scheduler)

        def end_at(self, step: int) -> None:
            """Train no step after `step`."""
            self.train_dataset.steps = self.args.max_steps = step

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            with self.run.recorder.clock.during("data", then="other"):
                batches, items = super().get_batch_samples(*args, **kwargs)
            self.run.recorder.count_tokens(batches)
            return batches, items

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            shared = self.sequence.computing(inputs, self.args.device) if self.sequence else nullcontext()
            with shared, self.run.recorder.clock.during("forward", then="update"):
                return super().training_step(model, inputs, *args, **kwargs)

        def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
            norm = super()._get_grad_norm(*args, **kwargs)
            self.learning.count(norm)
            return norm

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self.log_means.count(inputs)
            with self.run.recorder.clock.during("forward", then="backward"):
                return super().compute_loss(model, inputs, *args, **kwargs)

        def log(self, *args: Any, **kwargs: Any) -> None:
            self.log_means.weigh(self._metrics["train"], self.accelerator)
            super().log(*args, **kwargs)

        def load_weights(self, checkpoint: Path) -> None:
            """Replace the trained weights by those of a checkpoint, as a resume reads them. Every process
            calls it."""
            if self.is_deepspeed_enabled:
                is_full = self.run.recipe.method.name == "full"
                deepspeed_load_checkpoint(self.model_wrapped, str(checkpoint), load_module_strict=is_full)
            else:
                self._load_from_checkpoint(
                    str(checkpoint), self.model_wrapped if self.is_fsdp_enabled else None
                )

        def _issue_warnings_after_load(self, load_result: Any) -> None:
            """Warn of what a checkpoint lacks; tied weights are in it once, under another name."""
            tied = getattr(self.model, "all_tied_weights_keys", None) or {}
            load_result.missing_keys[:] = [name for name in load_result.missing_keys if name not in tied]
            if self.run.recipe.method.name == "full" and load_result.missing_keys:
                names = load_result.missing_keys
                raise TrainingError(
                    f"the checkpoint has no values for {counted(len(names), 'weight')} of the model "
                    f"({names[0]}), which would be the base's: an earlier version stored them under "
                    "published names; train from the start, under another checkpoints.name"
                )
            super()._issue_warnings_after_load(load_result)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            run, write = self.run, functools.partial(super()._save_checkpoint, model, trial)
            weights = None if run.stopper.is_signalled else self._write_weights
            with run.stopper.timing_save(), run.peaks.during(SAVE):
                run.saver.save(write, self.state.global_step, run.recorder, run.stopper.spent, weights)

        def _write_weights(self, folder: Path) -> None:
            with self.run.stopper.timing_gather():
                write_weights(self, self.run.recipe, self.run.dataset / "tokenizer", folder)

    return RunTrainer


def build(run: RunState, notes: Notes) -> tuple[Any, Path | None]:
    """Make the trainer of a run: arguments first, then the process group, then the model (ZeRO-3 shards it at
    load).

    Args:
        notes: the notes of earlier attempts.

    Returns: the trainer, and the checkpoint that it resumes from, if there is one. Where possible, weights
        that a checkpoint holds are not read from the base model's files.
    """
    from transformers import set_seed

    recipe, sharding, plan = run.recipe, run.sharding, notes.applied(run.plan)
    args = _checked_arguments(run, plan)
    run.saver.begin(args)
    resumed = run.saver.resume(sharding.resizes)
    run.attempt.resume(args, run.saver.resumed_step)
    sharding.before_load(args.device.type)
    loading.import_libraries(*sharding.libraries)
    load = functools.partial(_loaded, run, plan)
    if sharding.reads_slices:
        random_weights = run.head, recipe.training.seed
        model = sharded_loading.meta_model(recipe.model, sharding.load_dtype, *random_weights)
    else:
        model = load()
    _set_behavior(model, recipe)
    # For the adapter's first weights: the same on every rank, whatever loading the model has drawn.
    set_seed(recipe.training.seed)
    tokenizer = data.stored_tokenizer(run.dataset, recipe.model.trust_remote_code)
    images = data.shards.stored_images(run.dataset) if recipe.data.images else None
    _set_parts(model, run, tokenizer, images)
    rows = data.load(run.dataset, "train")
    rows = run.reference.beside(rows) if run.reference else rows
    stream = _stream(run, notes, rows)
    args.max_steps = stream.steps
    sequence, copies = None, plan.degrees.copies
    if copies > 1:
        sequence = SequenceGroup(copies, args.ddp_timeout_delta)
        stream.share(copies, plan.per_device_train_batch_size)
    if args.process_index == 0:
        for note in run_length.notes(recipe, stream.steps, len(rows) * run.objective.repeats()):
            step_lines.show(f"{recipe.name}: {note}")
    collator = run.objective.collator(tokenizer.pad_token_id) or Collator(
        tokenizer.pad_token_id,
        recipe.data.max_length,
        flatten=recipe.model.attn_implementation.startswith("flash_attention"),
        images=images,
        part=sequence.part if sequence else COMPLETE,
    )
    guard = _loss_guard(run, notes, stream, args)
    trainer, first_values = _trl_trainer(
        run,
        load,
        guard=guard,
        stream=stream,
        model=model,
        args=args,
        train_dataset=rows,
        data_collator=collator,
        processing_class=tokenizer,
    )
    _set_weights(trainer, run, resumed, first_values)
    if sequence:
        trainer.sequence = sequence
        # Otherwise dropout would leave out the same numbers in each part of a sample.
        set_seed(recipe.training.seed + sequence.part.number)
    return trainer, resumed


def _checked_arguments(run: RunState, plan: Plan) -> Any:
    """Return TRL's arguments, which start the process group.

    Raises:
        TrainingError: the group has another number of processes than the plan.
    """
    if not run.shape.is_gpu:
        host_memory.use_small_loss_tiles()
    args = arguments(run, plan, run.shape, run.saver.home)
    if args.world_size != plan.world_size:
        raise TrainingError(
            f"rank {args.process_index}: the plan is for {counted(plan.world_size, 'process', 'processes')}, "
            f"{args.world_size} were started; "
            "the run does not continue: its global batch would not be the recipe's"
        )
    return args


def _loaded(run: RunState, plan: Plan) -> Any:
    """Return the base model as the sharding loads it."""
    sharding = run.sharding
    load_arguments = sharding.load_arguments(plan, run.shape)
    return loading.base_model(run.recipe, sharding.load_dtype, sharding.quant_storage, **load_arguments)


def _set_behavior(model: Any, recipe: Recipe) -> None:
    """Set what the model does in training, and under which names it is saved.

    Raises:
        TrainingError: it has no activation checkpointing, which the recipe wants.
    """
    if recipe.training.activation_checkpointing and not model.supports_gradient_checkpointing:
        # The plan refuses the types that it knows.
        raise TrainingError(
            f"training.activation_checkpointing: {type(model).__name__} of {recipe.model.name_or_path} has "
            "none; set it to false"
        )
    if recipe.method.name == "full":
        patches.transformers.SAVED_NAMES.on(
            model, functools.partial(model.save_pretrained, save_original_format=False)
        )
    model.config.use_cache = False
    if recipe.training.router_aux_loss_coef is not None and hasattr(model, "router_aux_loss_coef"):
        # TRL changes the configuration, from which the model has taken its own already.
        model.router_aux_loss_coef = recipe.training.router_aux_loss_coef


def _set_parts(model: Any, run: RunState, tokenizer: Any, images: StoredImages | None) -> None:
    """Set the model's padding, its head, and its tower."""
    # TRL sets the model's pad token only where it makes the collator; an export needs it too.
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if model.can_generate():
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        published.make_savable(model)
    run.head.freeze(model, run.recipe)
    is_shared = run.sharding.layout.shards_parameters and run.plan.world_size > 1
    # A tower that is trained has gradients of zero in a step without images, however many processes there
    # are: without any, the optimizer would leave its momentum out.
    if images and (is_shared or run.recipe.model.vision == "train"):
        towers.run_always(model, images.processor)


def _stream(run: RunState, notes: Notes, rows: Any) -> order.Stream:
    """Return the rows in the order of training, without those that earlier attempts left out.

    Raises:
        TrainingError: they are too few for the schedule, or for the checkpoint.
    """
    recipe, objective = run.recipe, run.objective
    stream = order.Stream(
        rows,
        recipe.training,
        run.row_kind,
        objective.repeats(),
        has_places=objective.draws() is not None,
    )
    stream.left_out, stream.joined = notes.left_out, objective.joined()
    if wrong := recipe.training.schedule_problem(stream.steps):
        raise TrainingError(f"training.{wrong}")
    resume.check_length(run.saver.resumed_step, stream.steps)
    return stream


def _loss_guard(run: RunState, notes: Notes, stream: order.Stream, args: Any) -> LossGuard:
    leave_out = functools.partial(run.attempt.leave_out, order=run.saver.order)
    can_overflow = run.recipe.model.dtype == "float16"
    return LossGuard(run.recipe.training, stream, notes, leave_out, args, can_overflow=can_overflow)


def _trl_trainer(run: RunState, load: Callable[[], Any], **parts: Any) -> tuple[Any, dict[str, Any]]:
    """Return RunTrainer of these parts, and the first values of the adapter's parameters that TRL has
    rounded, by their names."""
    recipe, objective = run.recipe, run.objective
    kind = trainer_class(objective.name)
    head = own_logits.chosen(kind, recipe.model.trust_remote_code)
    recording = initial_adapter.recorded_first_values(own_logits.trl_module(kind))
    adapters = sharded_loading.real_adapters() if run.sharding.reads_slices else nullcontext()
    with adapters, vocabulary.collected_rows(), head, recording as first_values:
        peft_config = loading.peft_config(recipe, parts["model"])
        trainer = kind(run=run, peft_config=peft_config, **parts, **objective.trainer_arguments(load))
    if objective.head_outputs:
        # TRL's loss divides by the tokens of the whole batch if it gets their number, whatever the model's
        # own loss does. Otherwise a token of a short sample counts more than one of a long sample.
        trainer.model_accepts_loss_kwargs = True
    return trainer, first_values


def _set_weights(trainer: Any, run: RunState, resumed: Path | None, first_values: dict[str, Any]) -> None:
    """Shard the model, and set its weights: of the adapter that the recipe names, and of the base; but not
    what the checkpoint `resumed` has."""
    recipe, sharding = run.recipe, run.sharding
    if recipe.method.name != "full":
        _prepare_adapter(trainer.model, run, first_values)
    if sharding.reads_slices and recipe.method.name != "full":
        sharded_loading.load_adapter_values(trainer.model, loading.local_folder(recipe.model))
    if recipe.method.is_pissa and trainer.is_world_process_zero():
        # The checkpoint of a resumed run belongs to the same values: they follow from the base.
        trainer.initial_factors = pissa.snapshot(trainer.model)
    if recipe.method.adapter and not resumed:
        initial_adapter.load_weights(trainer.model, recipe.method)
    sharding.shard(trainer)
    if sharding.reads_slices:
        device = "cpu" if recipe.sharding.offload == "cpu" else None
        if resumed and recipe.method.name == "full":
            sharded_loading.allocate(trainer.model, device)
        else:
            sharded_loading.load_weights(trainer.model, loading.local_folder(recipe.model), device)
    sharding.ready(trainer)


def _prepare_adapter(model: Any, bound: BoundRecipe, first_values: dict[str, Any]) -> None:
    """Complete what PEFT and TRL made: float32 parameters, the head's bias, checkpoints without frozen
    tables."""
    vocabulary.allow_loss(model)
    for name, parameter in model.named_parameters():
        if name in first_values:
            # TRL has rounded it to bfloat16; a resume would load it in float32 and compute otherwise.
            parameter.data = first_values[name].to(parameter.device)
    # DeepSpeed has float32 copies of its own.
    if bound.recipe.method.name == "qlora" or bound.sharding.precision != "pure":
        loading.train_in_float32(model)
    # Otherwise PEFT stores embedding and head in each checkpoint where the base's vocabulary has grown.
    patches.peft.SAVED_TABLES.on(model, functools.partial(model.save_pretrained, save_embedding_layers=False))


def arguments(bound: BoundRecipe, plan: Plan, shape: Shape, checkpoints: Path) -> Any:
    """Return TRL's arguments of the objective that recipe, plan and sharding make together."""
    recipe, sharding, objective = bound.recipe, bound.sharding, bound.objective
    training, save_steps = recipe.training, recipe.checkpoints.save_steps
    if training.use_liger_kernel:
        liger.require()
    common: dict[str, Any] = {
        "output_dir": str(checkpoints),
        "learning_rate": training.learning_rate,
        "num_train_epochs": training.num_train_epochs,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": plan.per_device_train_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "lr_scheduler_type": training.lr_scheduler_type,
        "lr_scheduler_kwargs": training.lr_scheduler_kwargs,
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "optim": sharding.optimizer,
        "adam_beta1": training.adam_beta1,
        "adam_beta2": training.adam_beta2,
        "adam_epsilon": training.adam_epsilon,
        "seed": training.seed,
        "activation_checkpointing": training.activation_checkpointing,
        "neftune_noise_alpha": training.neftune_noise_alpha,
        "torch_compile": training.torch_compile,
        "use_liger_kernel": training.use_liger_kernel,
        "bf16": recipe.model.dtype == "bfloat16",
        "fp16": recipe.model.dtype == "float16",
        "use_cpu": not shape.is_gpu,
        "logging_steps": training.logging_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "save_strategy": "steps" if save_steps else "no",
        # With `auto`, the stopper decides; with `epoch`, the callback at the step's end. Below 1, it is a
        # share of all steps.
        "save_steps": save_steps if isinstance(save_steps, int | float) else sys.maxsize,
        # The data is prepared: it has labels, and no sample is longer than data.max_length.
        "max_length": None,
        "dataloader_pin_memory": shape.is_gpu,
        "ddp_timeout": training.ddp_timeout or watchdog.process_group_seconds(training.hang_minutes),
    }
    if training.router_aux_loss_coef is not None:
        common["router_aux_loss_coef"] = training.router_aux_loss_coef
    own_arguments = (
        objective.arguments() | trackers.arguments(recipe, checkpoints) | sharding.arguments(shape)
    )
    arguments_made = objective.arguments_class()(**(common | own_arguments))
    if arguments_made.n_gpu > 1:
        # A process may see GPUs that draw alone; transformers would spread each batch over all of them.
        arguments_made._n_gpu = 1
    if arguments_made.world_size > 1 and not shape.is_gpu:
        from torch.distributed.distributed_c10d import _set_pg_timeout

        # transformers leaves it out of a process group on CPUs (TrainingArguments._setup_devices).
        _set_pg_timeout(arguments_made.ddp_timeout_delta)
    return arguments_made
