"""Identity of an artifact: a hash of the model and of what made it, the same for equal runs.

Two equal runs differ in their records: times, memory, throughput, machines, and where checkpoints and copies
go.
"""

import hashlib
import json
from collections.abc import Iterable

from flytune.data.bad_rows import BAD_ROWS
from flytune.export.folder import MANIFEST as EXPORT
from flytune.models import base as models_base
from flytune.models.probe import PROBE
from flytune.recipe import Checkpoints, Recipe, sections
from flytune.records import Manifest
from flytune.records.comparison import COMPARISON
from flytune.records.contents import CONTENTS, StoredFile
from flytune.records.lineage import LINEAGE
from flytune.records.training import ROLLOUTS, STEPS

_RECORDS = {
    "README.md",
    "manifest.json",
    "metrics.json",
    "plan.json",
    "recipe.yaml",
    "report.html",
    "training.json",
    BAD_ROWS,
    COMPARISON,
    CONTENTS,
    EXPORT,
    LINEAGE,
    PROBE,
    ROLLOUTS,
    STEPS,
}
"""Files of an artifact that describe its run; so do those of HARNESS."""
HARNESS = "harness"


def is_record(name: str) -> bool:
    """Return whether a file describes the run; all others are the model."""
    return name in _RECORDS or name.startswith(f"{HARNESS}/")


def of(recipe: Recipe, manifest: Manifest, revision: str | None, files: Iterable[StoredFile]) -> str:
    """Return the identity: 64 hex digits of weights, configuration, tokenizer, decisions, prepared data and
    base commit.

    Args:
        revision: commit of the base model; None for a folder.
        files: those of the artifact.
    """
    made_of = {
        "model": sorted((file.file, file.sha256) for file in files if not is_record(file.file)),
        "recipe": _decisions(recipe, revision).key(),
        "data": manifest.content_sha256,
    }
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def _decisions(recipe: Recipe, revision: str | None) -> Recipe:
    """Return the recipe without machines, addresses and notifications, and with the base's commit in place of
    its branch."""
    elsewhere = {
        "model": models_base.pinned(recipe.model, revision),
        "checkpoints": Checkpoints(export=recipe.checkpoints.export),
        "tracking": sections.Tracking(),
        "publish": sections.Publish(),
    }
    return recipe.without_infrastructure().model_copy(update=elsewhere)
