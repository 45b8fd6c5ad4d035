"""Publishing of the weights at a run's saves, each as a branch, in a thread of its own."""

import logging
import shutil
import tempfile
import threading
from pathlib import Path

from flytune.artifacts.publish import hub, hub_errors
from flytune.errors import ExportError
from flytune.models import heads
from flytune.recipe import Recipe

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that a finished run waits for the current upload; its processes occupy GPUs."""
_NOTE = """---
library_name: {library}
tags:
- flytune
---

# {name}, step {step}

Weights of {name} at step {step}, published during training. They have not been evaluated.
"""


class StepPublisher:
    """Publisher in the process that stores a run's checkpoints. It never raises: it logs failures, and
    training continues."""

    def __init__(self, recipe: Recipe, run: str) -> None:
        self.recipe, self.run = recipe, run
        self._thread: threading.Thread | None = None
        self._taken: Path | None = None
        self._step = 0

    @property
    def is_uploading(self) -> bool:
        """True while a checkpoint is uploaded."""
        return self._thread is not None and self._thread.is_alive()

    def take(self, weights: Path, step: int) -> None:
        """Take a folder of weights that is published; it is moved, and deleted afterwards."""
        self._drop()
        try:
            # In the attempt's folder, so that it is deleted with it.
            self._taken = Path(shutil.move(weights, weights.with_name(f"publishing-{step}")))
            library = "transformers" if self.recipe.method.name == "full" else "peft"
            note = {"library": heads.head_of(self.recipe).library or library, "name": self.recipe.name}
            (self._taken / hub.CARD).write_text(_NOTE.format(**note, step=step), encoding="utf-8")
            self._step = step
        except OSError as error:
            log.warning("step %d is not published: %s", step, error)
            self._drop()

    def begin(self) -> None:
        """Start to publish what was taken, once its checkpoint is complete."""
        if folder := self._taken:
            self._taken = None
            # A daemon thread: a finished run waits no longer than finish() does.
            self._thread = threading.Thread(target=self._publish, args=(folder, self._step), daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait up to PATIENCE seconds for the current upload."""
        if self._thread:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                log.warning("step %d is not published: the run has finished before its upload", self._step)

    def _drop(self) -> None:
        """Delete the weights of a checkpoint that could not be stored."""
        if self._taken:
            shutil.rmtree(self._taken, ignore_errors=True)
        self._taken = None

    def _publish(self, folder: Path, step: int) -> None:
        address, branch = str(self.recipe.publish.address), revision(self.run, step)
        try:
            with (
                tempfile.TemporaryDirectory(prefix="flytune-publish-") as temporary,
                hub_errors.open_api(address) as api,
            ):
                repository = hub.Repository(api, address, self.recipe.publish.private)
                repository.branch(branch)
                files = {
                    path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
                }
                repository.commit(
                    hub.with_contents(files, Path(temporary)), branch, f"{self.recipe.name}, step {step}"
                )
            log.info("step %d: published as %s@%s", step, address, branch)
        except (ExportError, OSError) as error:
            log.warning("step %d is not published: %s", step, error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def revision(run: str, step: int) -> str:
    """Return the branch of a step: RECIPE-KEY-step-N. `run` is the run's key
    (flytune.training.checkpoints.paths.run_key)."""
    return f"{run}-step-{step}"
