"""The one training loop: TRL's SFTTrainer on a prepared data set, laid out as the recipe's strategy says."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flytune import data
from flytune.data import order
from flytune.data.collator import Collator
from flytune.errors import TrainingError
from flytune.export import write
from flytune.hardware import devices
from flytune.hardware.shapes import Shape
from flytune.models import host_memory, initial_adapter, loading, probe, scoring, sharded_loading
from flytune.planning import budget
from flytune.recipe.recipe import Recipe
from flytune.records.plan import EVALUATE, EXPORT, Plan
from flytune.records.training import TrainingResult
from flytune.sharding import strategy_of
from flytune.training import attempt_notes, preemption, trackers, watchdog
from flytune.training.checkpoints import Saver
from flytune.training.checkpoints.saver import CheckpointPublisher
from flytune.training.eval_loss import Scorer, live_loss, scored_rows
from flytune.training.loss_guard import LossGuard
from flytune.training.phase_notes import PhaseNotes
from flytune.training.preemption import Stopper
from flytune.training.step_log import Recorder, callback
from flytune.training.watchdog import Watch


def fit(
    recipe: Recipe,
    plan: Plan,
    shape: Shape,
    dataset: Path,
    out: Path,
    further: bool = True,
    publisher: Callable[[Recipe, str], CheckpointPublisher] | None = None,
) -> TrainingResult:
    """Trains and exports one run. Every process of the run calls it; the first one writes `out`.

    Args:
        dataset: a prepared data set, on this machine's disk.
        out: a new folder; receives model/ or adapter/, and training.json last.
        further: otherwise no step is trained: the newest whole checkpoint is exported as it is, and stays.
        publisher: makes what publishes the run's checkpoints of the recipe and the run's key; None publishes none.

    Raises:
        TrainingError: training failed; says what happened, on which rank, and whether the run goes on by itself.
    """
    recorder = Recorder(strategy_of(recipe), Scorer(recipe, dataset))
    stopper = Stopper(recipe.checkpoints, shape, budget.of(recipe.hardware, shape.total_price_per_hour))
    saver = Saver(recipe, data.read_manifest(dataset).content_sha256, publisher)
    phases = PhaseNotes(saver.ledger.storage.address, plan, lambda: stopper.is_signalled)
    recorder.peaks.on_enter = phases.enter
    with stopper.listening(), Watch(recipe.training.hang_minutes, recorder.peaks) as watch, phases.attempt(saver.newest_step):
        return _fit(recipe, plan, shape, dataset, out, further, saver, recorder, stopper, watch)


def _fit(
    recipe: Recipe,
    plan: Plan,
    shape: Shape,
    dataset: Path,
    out: Path,
    further: bool,
    saver: Saver,
    recorder: Recorder,
    stopper: Stopper,
    watch: Watch,
) -> TrainingResult:
    import torch

    loading.quiet()
    devices.settle_allocator()
    if shape.accelerator == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    elif recipe.sharding.offload != "none":
        # The optimizer runs on the host, where torchrun leaves each process one thread.
        torch.set_num_threads(max(1, shape.cpu // shape.processes))
    place = saver.ledger.storage.address
    kept = attempt_notes.read(place)
    trainer, resumed = build(recipe, kept.applied(plan), shape, dataset, saver, recorder)
    attempt_notes.check_agreed(kept, trainer.args)
    trainer.train_dataset.left_out = kept.left_out
    if not further:
        _end_at(saver.resumed_step, trainer)
    recorder.guard = LossGuard(recipe.training, can_overflow=recipe.model.dtype == "float16")
    recorder.guard.keep(place, kept, trainer.train_dataset, writes=trainer.is_world_process_zero())
    recorder.saved_step = saver.settled_step
    stopper.spent_before, saver.spent = saver.resumed_seconds, stopper.spent
    if resumed and stopper.is_used_up(saver.resumed_step, trainer.args):
        # Its end is here: the checkpoint is loaded, and no step is trained.
        trainer.train_dataset.steps = trainer.args.max_steps = saver.resumed_step
    trainer.add_callback(preemption.callback(stopper, trainer, saver))
    trainer.add_callback(watchdog.callback(watch))
    started = time.monotonic()
    try:
        trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    except torch.OutOfMemoryError as error:
        auto, step = recipe.training.auto_find_batch_size, trainer.state.global_step + 1
        raise attempt_notes.smaller(place, kept, trainer.args, step, is_noted=auto, error=error) from error
    stopper.end()
    seconds = time.monotonic() - started

    recorder.peaks.enter(EVALUATE)
    rows = scored_rows(dataset, min(scoring.GATE_SAMPLES, recipe.evaluation.max_samples))
    heldout_loss = live_loss(trainer, rows)
    recorder.score(heldout_loss, len(rows))
    probe.record(trainer, trainer.processing_class, out / probe.PROBE)
    recorder.peaks.enter(EXPORT)
    # Known where the last step was saved: an export that is cut off goes on from there.
    write.write(trainer, recipe, dataset / "tokenizer", out, saver.weights_at(trainer.state.global_step))
    parameters = [(parameter.requires_grad, write.elements(parameter)) for parameter in trainer.model.parameters()]
    result = TrainingResult(
        steps=recorder.steps,
        seconds=seconds,
        tokens=sum(step.tokens for step in recorder.steps),
        world_size=trainer.args.world_size,
        memory_kind="host memory (RSS)" if shape.accelerator == "cpu" else "GPU memory allocated",
        trained_parameters=sum(size for trained, size in parameters if trained),
        total_parameters=sum(size for _, size in parameters),
        heldout_loss=heldout_loss,
        **recorder.all_peaks(),
        resumed_from_step=saver.resumed_step,
        stopped_early=stopper.stopped_early,
        attempt=saver.ledger.attempt if further else "",
    )
    if trainer.is_world_process_zero():
        recorder.finish(out)
        result.write(out / "training.json")
    saver.finish()
    return result


def _end_at(step: int, trainer: Any) -> None:
    """Has a trainer that goes on from `step` train none further."""
    if not step:
        raise TrainingError("there is no whole checkpoint of this recipe and data, so there is nothing to export yet")
    trainer.train_dataset.steps = trainer.args.max_steps = step


def build(recipe: Recipe, plan: Plan, shape: Shape, dataset: Path, saver: Saver, recorder: Recorder) -> tuple[Any, Path | None]:
    """The SFTTrainer of a run: arguments first, then the process group, then the model (ZeRO-3 shards it at load).

    Returns: the trainer, and the checkpoint that it is to go on from, if there is one. Weights that a checkpoint brings are
        not read from the base model's files, where that can be helped.
    """
    from transformers import AutoTokenizer, set_seed
    from trl import SFTTrainer

    if not shape.is_gpu:
        host_memory.use_small_loss_tiles()
    strategy = strategy_of(recipe)
    args = arguments(recipe, plan, shape, saver.home)
    if args.world_size != plan.world_size:
        raise TrainingError(
            f"rank {args.process_index}: the plan is for {plan.world_size} processes, {args.world_size} were started; "
            "the run does not go on: its global batch would not be the recipe's"
        )
    saver.begin(args)
    resumed = saver.resume(strategy.resizes)
    strategy.before_load(args.device.type)
    sliced, dtype = strategy.reads_slices(recipe), strategy.load_dtype(recipe)
    if sliced:
        model = sharded_loading.meta_model(recipe.model, dtype)
    else:
        load_arguments = strategy.load_arguments(recipe, plan, shape)
        model = loading.base_model(recipe, dtype, strategy.quant_storage(recipe), **load_arguments)
    model.config.use_cache = False
    # Of the adapter's first weights: the same on every rank, whatever loading the model has drawn.
    set_seed(recipe.training.seed)
    tokenizer = AutoTokenizer.from_pretrained(str(dataset / "tokenizer"))
    # TRL tells the model its pad token only where it makes the collator; an export is to say it too.
    model.config.get_text_config().pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    flash = recipe.model.attn_implementation.startswith("flash_attention")
    rows = data.load(dataset, "train")
    stream = order.Stream(rows, recipe.training)
    args.max_steps = stream.steps
    with sharded_loading.real_adapters() if sliced else nullcontext():
        trainer = SFTTrainer(
            model=model,
            args=args,
            train_dataset=rows,
            data_collator=Collator(tokenizer.pad_token_id, recipe.data.max_length, flatten=flash),
            processing_class=tokenizer,
            peft_config=loading.peft_config(recipe),
            callbacks=[callback(recorder), order.callback(stream)],
        )
    # TRL takes none but its own kinds of data set; from here on the Trainer only reads it.
    trainer.train_dataset = stream
    if recipe.method.name == "qlora":
        import torch

        # TRL makes the adapter bfloat16; a resume would load it in float32 and compute otherwise.
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32)
    if recipe.method.adapter and not resumed:
        initial_adapter.load_weights(trainer.model, recipe.method)
    strategy.shard(trainer, recipe)
    if sliced:
        device = "cpu" if recipe.sharding.offload == "cpu" else None
        if resumed and recipe.method.name == "full":
            sharded_loading.allocate(trainer.model, device)
        else:
            sharded_loading.load_weights(trainer.model, loading.local_folder(recipe.model), device)
    strategy.ready(trainer, recipe)
    recorder.trainer = trainer
    saver.attach(trainer, recorder)
    return trainer, resumed


def arguments(recipe: Recipe, plan: Plan, shape: Shape, checkpoints: Path) -> Any:
    """The SFTConfig that recipe, plan and strategy make together."""
    from trl import SFTConfig

    training, save_steps, strategy = recipe.training, recipe.checkpoints.save_steps, strategy_of(recipe)
    common: dict[str, Any] = {
        "output_dir": str(checkpoints),
        "learning_rate": training.learning_rate,
        "num_train_epochs": training.num_train_epochs,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": plan.per_device_train_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "lr_scheduler_type": training.lr_scheduler_type,
        "warmup_steps": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "max_grad_norm": training.max_grad_norm,
        "optim": strategy.optimizer(recipe),
        "seed": training.seed,
        "activation_checkpointing": training.activation_checkpointing,
        "torch_compile": training.torch_compile,
        "bf16": recipe.model.dtype == "bfloat16",
        "fp16": recipe.model.dtype == "float16",
        "use_cpu": not shape.is_gpu,
        "logging_steps": training.logging_steps,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "save_strategy": "steps" if save_steps else "no",
        # Of `auto`, the stopper says when.
        "save_steps": save_steps if isinstance(save_steps, int) else sys.maxsize,
        # The data is prepared: labels are in it, and no sample is longer than data.max_length.
        "max_length": None,
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "dataloader_pin_memory": shape.is_gpu,
        "ddp_timeout": watchdog.process_group_seconds(training.hang_minutes),
    }
    return SFTConfig(**(common | trackers.arguments(recipe, checkpoints) | strategy.arguments(recipe, shape)))
