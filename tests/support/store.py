"""Sample store with artifacts of the tiny model, as finetune stores them; one takes a second or two."""

import tempfile
from pathlib import Path
from typing import Any

from flytune.artifacts import build
from tests.support.reports import metrics
from tests.support.stages import plan_for, recipe_for, write_trained


def stored(
    store: Path, base: Path, dataset: Path, name: str, method: str = "lora", steps: int = 30, **changes: Any
) -> Path:
    """Store an artifact under `name`; other `steps` make other weights."""
    recipe = recipe_for(base, method, **{"name": name, "model.dtype": "float32", **changes})
    with tempfile.TemporaryDirectory() as folder:
        trained = write_trained(Path(folder), recipe, dataset, steps)
        return build.store(recipe, plan_for(recipe), dataset, trained, metrics(), store / name)
