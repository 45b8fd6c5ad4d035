"""Training and export of one run."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from flytune import process_setup
from flytune.console import output
from flytune.data import shards
from flytune.errors import TrainingError
from flytune.export import write
from flytune.hardware import Shape, devices
from flytune.models import chat_templates, clean_process, loading, probe, rope, scoring
from flytune.objectives import of_gate
from flytune.recipe import Recipe
from flytune.records import Attempt, Plan, TrainingResult, environment
from flytune.records.plan import EVALUATE, EXPORT
from flytune.records.training import STEPS, highest
from flytune.training import attempt_notes, running_lock, step_log, teacher
from flytune.training.attempt_notes import Notes
from flytune.training.checkpoints.resume import gathered
from flytune.training.checkpoints.saver import CheckpointPublisher
from flytune.training.eval_loss import live_loss, scored_rows
from flytune.training.run_state import RunState
from flytune.training.trainer import build


def fit(
    recipe: Recipe,
    plan: Plan,
    shape: Shape,
    dataset: Path,
    out: Path,
    export_only: bool = False,
    publisher: Callable[[Recipe, str], CheckpointPublisher] | None = None,
    reference: Path | None = None,
) -> TrainingResult:
    """Train and export one run. Every process of the run calls it; the first one writes `out`.

    Args:
        dataset: a prepared data set, on this machine's disk.
        out: a new folder; receives model/ or adapter/, and training.json last.
        export_only: train no step; export the newest complete checkpoint as it is, and keep it.
        publisher: makes the publisher of the run's checkpoints from the recipe and the run's key; None
            publishes none.
        reference: a folder of flytune.training.reference, where the recipe needs one.

    Raises:
        TrainingError: training failed; says what happened, on which rank, and whether the run continues by
            itself.
    """
    output.install()
    clean_process.note_training()
    run = RunState.of(recipe, plan, shape, dataset, publisher, reference)
    shares = recipe.checkpoints.save_steps is not None and not export_only
    lock = running_lock.held(run.saver.address) if shares else nullcontext()
    attempt = run.attempt.keeping(run.saver.newest_step, exports_only=export_only)
    with lock, run.stopper.listening(), run.watch, run.gpu_monitor, attempt, chat_templates.in_process():
        return _fit(run, out, export_only)


def _fit(run: RunState, out: Path, export_only: bool) -> TrainingResult:
    recipe, shape, saver = run.recipe, run.shape, run.saver
    devices.configure_allocator()
    process_setup.use_accelerator("cpu" if shape.accelerator == "cpu" else "cuda")
    loading.import_libraries()
    import torch

    if shape.is_gpu and recipe.sharding.offload != "none":
        # The optimizer runs on the host, where torchrun leaves each process one thread.
        torch.set_num_threads(max(1, shape.cpu // shape.processes))
    notes = attempt_notes.read(
        saver.address,
        saver.order,
        halves_on=shape.name if recipe.training.auto_find_batch_size else None,
        is_required=recipe.checkpoints.save_steps is not None,
    )
    trainer, resumed = build(run, notes)
    attempt_notes.check_agreed(notes, trainer.args)
    if export_only and not saver.resumed_step:
        raise TrainingError(
            "there is no complete checkpoint of this recipe and data, so there is nothing to export yet"
        )
    _train(run, trainer, resumed, notes, export_only)
    exported = _load_exported(run, trainer)
    heldout_loss = _record_probe(run, trainer, out)
    run.peaks.enter(EXPORT)
    # The digest of the exported step's checkpoint lets a later attempt complete an interrupted export.
    write.write(trainer, recipe, run.dataset / "tokenizer", out, exported.digest)
    result = _result(run, trainer, exported, heldout_loss, export_only)
    if trainer.is_world_process_zero():
        run.objective.finish(trainer, out)
        run.recorder.finish(out, result)
        result.write(out / "training.json")
    saver.finish()
    return result


def _train(run: RunState, trainer: Any, resumed: Path | None, notes: Notes, export_only: bool) -> None:
    """Train the steps that are left: those after the checkpoint `resumed`, none where it is only exported or
    the run had ended."""
    import torch

    saver, stopper, recorder = run.saver, run.stopper, run.recorder
    if export_only:
        trainer.end_at(saver.resumed_step)
    if resumed:
        recorder.resume(step_log.read(resumed / STEPS))
        stopper.early.resume(step for step in recorder.steps if step.step > saver.scored_since)
    if resumed and stopper.has_ended(saver.resumed_step, trainer.args):
        # The run ends here: the checkpoint is loaded, and no step is trained.
        trainer.end_at(saver.resumed_step)
    run.attempt.begin_steps()
    try:
        trainer.train(resume_from_checkpoint=str(resumed) if resumed else None)
    except torch.OutOfMemoryError as error:
        rank, step = trainer.args.process_index, trainer.state.global_step + 1
        halves = run.recipe.training.auto_find_batch_size
        raise attempt_notes.out_of_memory(
            notes.applied(run.plan), rank, step, goes_on=halves, error=error
        ) from error
    stopper.end()
    run.attempt.end_steps()
    trainer.learning.end(trainer, recorder.steps)


def _record_probe(run: RunState, trainer: Any, out: Path) -> float | None:
    """Record what the gate compares the export with: the live model's answers to fixed prompts, and its loss
    on the first held-out rows, which is returned; None where there are none. Every process calls it."""
    recipe = run.recipe
    run.peaks.enter(EVALUATE)
    rows = scored_rows(run.dataset, min(scoring.GATE_SAMPLES, recipe.evaluation.max_samples))
    heldout_loss = live_loss(trainer, run.plan.degrees, *of_gate(recipe, rows)) if rows else None
    if heldout_loss is not None:
        run.recorder.score(heldout_loss, len(rows), run.head.loss_unit)
    # PiSSA trains on what its singular values leave of the base.
    on_base = recipe.method.name != "full" and not recipe.method.is_pissa
    beyond = rope.tokens_beyond(recipe)
    processor = shards.stored_images(run.dataset).processor if recipe.data.images else None
    file = out / probe.PROBE
    probe.record(trainer, trainer.processing_class, file, run.sharding, on_base, beyond, processor)
    return heldout_loss


def _result(
    run: RunState, trainer: Any, exported: "_Exported", heldout_loss: float | None, export_only: bool
) -> TrainingResult:
    """Return the record of the run. Every process calls it."""
    saver, stopper, recorder = run.saver, run.stopper, run.recorder
    parameters = [
        (parameter.requires_grad, write.elements(parameter)) for parameter in trainer.model.parameters()
    ]
    attempts = _attempts(run, trainer.args)
    on_cpu = run.shape.accelerator == "cpu"
    return TrainingResult(
        steps=recorder.steps,
        figures=recorder.figures,
        seconds=sum(attempt.seconds for attempt in attempts),
        tokens=sum(step.tokens for step in recorder.steps),
        world_size=trainer.args.world_size,
        memory_kind="host memory (RSS)" if on_cpu else "GPU memory allocated",
        trained_parameters=sum(size for trained, size in parameters if trained),
        total_parameters=sum(size for _, size in parameters),
        heldout_loss=heldout_loss,
        peaks=highest([attempt.peaks for attempt in attempts]),
        reserved_peaks=highest([attempt.reserved_peaks for attempt in attempts]),
        attempts=attempts,
        resumed_from_step=saver.resumed_step,
        stopped_early=stopper.stopped_early,
        early_stopping=stopper.early_stopping,
        exported_step=exported.step,
        exported_eval_loss=exported.eval_loss,
        teacher_loss=_teacher_loss(run),
        teacher_commit=run.reference.commit if run.reference else None,
        versions=environment.versions(),
        attempt="" if export_only else saver.ledger.attempt,
        rope=rope.arguments(run.recipe.model),
    )


def _teacher_loss(run: RunState) -> float | None:
    """Return the loss of a teacher on the held-out rows that are evaluated; None without one."""
    if run.reference is None:
        return None
    rows = scored_rows(run.dataset, run.recipe.evaluation.max_samples, run.reference)
    return teacher.heldout_loss(rows)


def _attempts(run: RunState, args: Any) -> list[Attempt]:
    """Return the records of all attempts, this one last. Every process calls it, and gets the same."""
    mine = run.attempt.now().figures().model_copy(update=run.peaks.of_all_processes())
    earlier = (
        run.attempt.earlier(run.recorder.steps, run.saver.resumed_seconds) if args.process_index == 0 else []
    )
    return gathered([*earlier, mine], args)[0]


class _Exported(NamedTuple):
    """The weights of the live model that is exported."""

    step: int
    eval_loss: float | None
    digest: str | None
    """Digest of their checkpoint; None if there is none."""


def _load_exported(run: RunState, trainer: Any) -> _Exported:
    """Load the checkpoint that the recipe exports, if it is not the live model already. Every process calls
    it."""
    saver, step = run.saver, trainer.state.global_step
    loss = saver.resumed_loss if step == saver.resumed_step else run.recorder.eval_loss_of(step)
    best = saver.best(step, loss)
    if best is None:
        exported = _Exported(step, loss, saver.weights_at(step))
    else:
        checkpoint, folder = best
        trainer.load_weights(folder)
        exported = _Exported(checkpoint.step, checkpoint.eval_loss, checkpoint.digest)
    run.recorder.export(
        exported.step,
        exported.eval_loss,
        saver.scored_since if run.recipe.checkpoints.export == "best" else None,
    )
    return exported
