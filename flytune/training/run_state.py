"""State of one training run on one of its processes."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from flytune import data
from flytune.data.contract.checks import weight_advice
from flytune.errors import DataError
from flytune.hardware import Shape
from flytune.planning import budget
from flytune.recipe import Recipe
from flytune.records import Plan, SplitCounts
from flytune.sharding import ShardingBase, sharding_of
from flytune.training import reference
from flytune.training.checkpoints import Saver
from flytune.training.checkpoints.saver import CheckpointPublisher
from flytune.training.eval_loss import Scorer
from flytune.training.gpu_monitor import GpuMonitor
from flytune.training.memory_peaks import Peaks
from flytune.training.phase_notes import PhaseNotes
from flytune.training.preemption import Stopper
from flytune.training.reference import Reference
from flytune.training.step_log import Recorder
from flytune.training.watchdog import Watch

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunState:
    """The inputs of a run, and the parts that follow it from loading to export. All exist before the model is loaded."""

    recipe: Recipe
    plan: Plan
    shape: Shape
    dataset: Path
    """Folder of the prepared data set."""
    reference: Reference | None
    """Log-probabilities of the reference model, where no step runs it."""
    sharding: ShardingBase
    saver: Saver
    stopper: Stopper
    watch: Watch
    phases: PhaseNotes
    peaks: Peaks
    gpu_monitor: GpuMonitor
    recorder: Recorder

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
            DataError: the data set is incomplete, is of another objective, or has nothing to score; log-probabilities of the
                reference are needed, and are missing, or of another one.
        """
        sharding, manifest = sharding_of(recipe), data.read_manifest(dataset)
        wanted = (recipe.objective.has_pairs, recipe.objective.has_labels)
        if (manifest.pairs, manifest.labels) != wanted:
            kind = "pairs of a chosen and a rejected answer" if manifest.pairs else "no pairs"
            kind = "answers with labels" if manifest.labels else kind
            raise DataError(
                f"{dataset}: its rows are {kind}, and the recipe's objective is {recipe.objective.name}; prepare again"
            )
        if manifest.labels:
            _warn_of_weights(recipe, manifest.train)
        needed = reference.is_needed(recipe)
        found = reference.Reference(reference_folder, recipe, manifest.content_sha256) if needed else None
        scorer = Scorer(recipe, dataset, found)
        saver = Saver(recipe, manifest.content_sha256, publisher)
        stopper = Stopper(
            recipe.checkpoints, shape, saver, budget.of(recipe.hardware, shape.total_price_per_hour), recipe.evaluation
        )
        watch = Watch(recipe.training.hang_minutes)
        phases = PhaseNotes(saver.address, plan, lambda: stopper.is_signalled)
        # The watchdog first: a phase's note may wait for the storage.
        peaks = Peaks([watch.enter, phases.enter])
        gpu_monitor = GpuMonitor()
        recorder = Recorder(sharding, scorer, peaks, gpu_monitor)
        return cls(recipe, plan, shape, dataset, found, sharding, saver, stopper, watch, phases, peaks, gpu_monitor, recorder)


def _warn_of_weights(recipe: Recipe, train: SplitCounts) -> None:
    """Warn where one label outweighs the other more than KTO's paper advises."""
    objective, desirable = recipe.objective, train.desirable or 0
    undesirable = train.samples - desirable
    if desirable and undesirable:
        share = objective.desirable_weight * desirable / (objective.undesirable_weight * undesirable)
        if not 0.99 <= share <= 1.35:
            log.warning(
                "objective: desirable answers weigh %.3g times as much as undesirable ones; %s",
                share,
                weight_advice(desirable, undesirable),
            )
