"""Publishing of checkpoints' weights during training, each as a branch, in a thread of its own."""

import json
import logging
import os
import shutil
import tempfile
import threading
from pathlib import Path

from flytune import json_core
from flytune.artifacts.publish import hub, hub_errors
from flytune.errors import ExportError
from flytune.recipe import Recipe

log = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that a finished run waits for the current upload; its processes occupy GPUs."""
# Suffixes of the files of a model or adapter; a checkpoint's other files are training state.
_KINDS = {".safetensors", ".json", ".jinja", ".txt", ".model"}
_STATE = {"trainer_state.json"}
_NOTE = """---
library_name: {library}
tags:
- flytune
---

# {name}, step {step}

Weights of {name} at step {step}, published during training. They have not been evaluated. Where they are a
checkpoint's own, those of a full fine-tune may be float32.
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

    def take(self, checkpoint: Path, step: int) -> None:
        """Link the files of a folder with a checkpoint's full weights that are published; the folder may then
        be moved.

        Saves that come while an upload is running are skipped.
        """
        if not self.recipe.publish.every_save:
            return
        self._drop()
        if self.is_uploading:
            log.warning("step %d is not published: step %d is still being uploaded", step, self._step)
            return
        try:
            # Next to the checkpoint, so that hard links work, and in the attempt's folder, so that it is
            # deleted with it.
            self._taken = Path(tempfile.mkdtemp(prefix=f"publishing-{step}-", dir=checkpoint.parent))
            _collect(checkpoint, self._taken, self.recipe, step)
            self._step = step
        except (OSError, ValueError) as error:
            log.warning("step %d is not published: %s", step, error)
            self._drop()

    def begin(self) -> None:
        """Start to publish the linked checkpoint, once it is complete."""
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
        """Delete the links of a checkpoint that could not be stored."""
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
                files = {path.name: path for path in folder.iterdir()}
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


def _collect(checkpoint: Path, folder: Path, recipe: Recipe, step: int) -> None:
    """Link the weights, and copy the other files with the changes that loading needs."""
    for path in checkpoint.iterdir():
        if not path.is_file() or path.suffix not in _KINDS or path.name in _STATE:
            continue
        if path.suffix == ".safetensors":
            os.link(path, folder / path.name)
        else:
            shutil.copy(path, folder)
    if not list(folder.glob("*.safetensors")):
        raise OSError(f"{checkpoint.name} has no complete weights")
    # During training a model's cache is off, and an adapter's config names its base by the folder that it was
    # loaded from.
    _change(folder / "config.json", use_cache=True)
    _change(folder / "adapter_config.json", base_model_name_or_path=recipe.model.name_or_path)
    library = "transformers" if recipe.method.name == "full" else "peft"
    (folder / hub.CARD).write_text(
        _NOTE.format(library=library, name=recipe.name, step=step), encoding="utf-8"
    )


def _change(file: Path, **values: object) -> None:
    if file.exists():
        file.write_text(
            json.dumps(json_core.load_object(file.read_bytes()) | values, indent=2) + "\n", encoding="utf-8"
        )
