"""State of one training run on one of its processes."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from flytune import data
from flytune.console import run_lines, step_lines
from flytune.errors import DataError
from flytune.hardware import Shape
from flytune.objectives.bound import BoundRecipe
from flytune.planning import budget
from flytune.recipe import Recipe
from flytune.records import Plan
from flytune.sentences import counted
from flytune.training import reference
from flytune.training.attempt import AttemptWriter
from flytune.training.checkpoints import Saver
from flytune.training.checkpoints.saver import CheckpointPublisher
from flytune.training.eval_loss import Scorer
from flytune.training.measurements import GpuMonitor, Peaks
from flytune.training.reference import Reference
from flytune.training.step_log import Recorder
from flytune.training.stopping import Stopper
from flytune.training.watchdog import Watch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunState(BoundRecipe):
    """The inputs of a run, and the parts that follow it from loading to export. All exist before the model is
    loaded."""

    recipe: Recipe
    plan: Plan
    shape: Shape
    dataset: Path
    """Folder of the prepared data set."""
    reference: Reference | None
    """Log-probabilities of the reference model, where no step runs it."""
    saver: Saver
    stopper: Stopper
    watch: Watch
    peaks: Peaks
    gpu_monitor: GpuMonitor
    recorder: Recorder
    attempt: AttemptWriter

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        plan: Plan,
        shape: Shape,
        dataset: Path,
        publisher: Callable[[Recipe, str], CheckpointPublisher] | None = None,
        reference_folder: Path | None = None,
    ) -> Self:
        """Make the parts of a run.

        Raises:
            DataError: the data set is incomplete, is of another objective, or has nothing to score;
                log-probabilities of the reference are needed, and are missing, or of another one.
        """
        bound, manifest = BoundRecipe(recipe), data.read_manifest(dataset)
        wanted = data.row_kind(recipe.row_kind)
        if (found_kind := data.row_kind(manifest.row_kind)) != wanted:
            raise DataError(
                f"{dataset}: its rows are {found_kind.meaning}, and the recipe's objective, "
                f"{recipe.objective.name}, needs {wanted.meaning}; prepare again"
            )
        if manifest.classes != recipe.objective.classes:
            raise DataError(
                f"{dataset}: its labels are {', '.join(manifest.classes)[:200]}, in this order, and the "
                f"recipe's {', '.join(recipe.objective.classes)[:200]}; prepare again"
            )
        if manifest.negatives != recipe.objective.negatives_of_a_row:
            raise DataError(
                f"{dataset}: its rows have {counted(manifest.negatives, 'negative')}, and "
                f"objective.negatives is {recipe.objective.negatives_of_a_row}; prepare again"
            )
        for line in bound.objective.warnings(manifest):
            log.warning("%s", line)
        needed = reference.is_needed(recipe)
        known_answers = (
            reference.Reference(reference_folder, recipe, manifest.content_sha256) if needed else None
        )
        scorer = Scorer(bound, dataset, plan.degrees, known_answers)
        teacher = known_answers.identity if known_answers else ""
        saver = Saver(recipe, manifest.content_sha256, publisher, scorer.rows, teacher)
        stopper = Stopper(
            recipe.checkpoints,
            shape,
            saver,
            budget.of(recipe.hardware, shape.total_price_per_hour),
            recipe.evaluation,
        )
        watch = Watch(recipe.training.hang_minutes)
        peaks = Peaks([watch.enter])
        gpu_monitor = GpuMonitor()
        recorder = Recorder(bound, plan.degrees, scorer, peaks, gpu_monitor)
        attempt = AttemptWriter(
            saver.address,
            plan,
            peaks,
            is_signalled=lambda: stopper.is_signalled,
            has_checkpoints=recipe.checkpoints.save_steps is not None,
            goes_on=recipe.training.auto_find_batch_size or recipe.training.on_bad_loss == "skip",
        )
        # After the watchdog: a phase may wait for the storage of its record.
        peaks.on_enter.append(attempt.enter)
        followers = (saver, stopper, watch, peaks, gpu_monitor, recorder, attempt)
        if os.environ.get("RANK", "0") == "0":
            step_lines.show(run_lines.data_line(recipe.name, manifest))
            stored_contract = data.contract.stored(dataset)
            for check in stored_contract.faults if stored_contract else []:
                step_lines.show(f"{recipe.name}: data: {check.sentence}")
            checkpoints = recipe.checkpoints
            step_lines.show(
                run_lines.checkpoints_line(
                    recipe.name, checkpoints.save_steps, checkpoints.save_total_limit, saver.address
                )
            )
        return cls(recipe, plan, shape, dataset, known_answers, *followers)
