"""What checkpoints have trained, published while training goes on: each a branch of its own, beside training."""

import json
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path

from flytune.artifacts.publish import hub, hub_errors
from flytune.errors import ExportError
from flytune.recipe.recipe import Recipe

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that a run which is over waits for the upload that is under way; its processes hold GPUs."""
# Of a checkpoint's files, those that a model or adapter is made of; the rest is state of the training.
_KINDS = {".safetensors", ".json", ".jinja", ".txt", ".model"}
_STATE = {"trainer_state.json"}
_NOTE = """---
library_name: {library}
tags:
- flytune
---

# {name}, step {step}

What {name} had trained at step {step}, published while it was training. Nothing of it has been evaluated. The weights
are as the checkpoint has them: those of a full fine-tune may be float32.
"""


class StepPublisher:
    """On the process that stores a run's checkpoints. Never raises: what fails is warned of, and training goes on."""

    def __init__(self, recipe: Recipe, run: str) -> None:
        self.recipe, self.run = recipe, run
        self._thread: threading.Thread | None = None
        self._taken: Path | None = None
        self._step = 0

    def take(self, checkpoint: Path, step: int) -> None:
        """Links what is to be published of a checkpoint's folder, which may then be moved away.

        Of saves that come faster than they are uploaded, those in between are left out.
        """
        if not self.recipe.publish.every_save:
            return
        self._drop()
        if self._thread and self._thread.is_alive():
            log.warning("step %d is not published: step %d still is being uploaded", step, self._step)
            return
        try:
            # Beside the checkpoint, so that the links work; a folder of the attempt, which is swept with it.
            self._taken = Path(tempfile.mkdtemp(prefix=f"publishing-{step}-", dir=checkpoint.parent))
            _collect(checkpoint, self._taken, self.recipe, step)
            self._step = step
        except (OSError, ValueError) as error:
            log.warning("step %d is not published: %s", step, error)
            self._drop()

    def begin(self) -> None:
        """The checkpoint that was taken is whole: starts to publish it."""
        if folder := self._taken:
            self._taken = None
            # A daemon: a run that is over does not wait longer than finish() does.
            self._thread = threading.Thread(target=self._publish, args=(folder, self._step), daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Gives the upload that is under way a moment to end."""
        if self._thread:
            self._thread.join(PATIENCE)
            if self._thread.is_alive():
                log.warning("step %d is not published: the run is over, and its upload is not", self._step)

    def _drop(self) -> None:
        """What was taken of a checkpoint that could not be stored."""
        if self._taken:
            shutil.rmtree(self._taken, ignore_errors=True)
        self._taken = None

    def _publish(self, folder: Path, step: int) -> None:
        address, branch = str(self.recipe.publish.address), revision(self.run, step)
        try:
            with tempfile.TemporaryDirectory(prefix="flytune-publish-") as made, hub_errors.told(address) as api:
                repository = hub.Repository(api, address, self.recipe.publish.private)
                repository.branch(branch)
                files = {path.name: path for path in folder.iterdir()}
                repository.commit(hub.listed(files, Path(made)), branch, f"{self.recipe.name}, step {step}")
            log.info("step %d: published as %s@%s", step, address, branch)
        except (ExportError, OSError) as error:
            log.warning("step %d is not published: %s", step, error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def revision(run: str, step: int) -> str:
    """The branch of a step: RECIPE-KEY-step-N. `run` is the run's key (flytune.training.checkpoints.paths.run_key)."""
    return f"{run}-step-{step}"


def _collect(checkpoint: Path, folder: Path, recipe: Recipe, step: int) -> None:
    """Links weights, and copies what stands beside them, as whoever loads them needs it."""
    for path in checkpoint.iterdir():
        if not path.is_file() or path.suffix not in _KINDS or path.name in _STATE:
            continue
        if path.suffix == ".safetensors":
            os.link(path, folder / path.name)
        else:
            shutil.copy(path, folder)
    if not list(folder.glob("*.safetensors")):
        raise OSError(f"{checkpoint.name} holds no whole weights")
    # While it trains, a model has no cache, and an adapter names its base by where it was loaded from.
    _change(folder / "config.json", use_cache=True)
    _change(folder / "adapter_config.json", base_model_name_or_path=recipe.model.name_or_path)
    library = "transformers" if recipe.method.name == "full" else "peft"
    (folder / hub.CARD).write_text(_NOTE.format(library=library, name=recipe.name, step=step), encoding="utf-8")


def _change(file: Path, **values: object) -> None:
    if file.exists():
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values, indent=2) + "\n", encoding="utf-8")
