"""Lineage of artifacts: the runs that made the base model of a run, read from the files next to that
model."""

import hashlib
from pathlib import Path

from flytune import yaml_core
from flytune.errors import ExportError, RecipeError
from flytune.export.folder import MANIFEST as EXPORT
from flytune.models import base as models_base
from flytune.recipe import Model, Recipe
from flytune.records import Export, Manifest, TrainingResult
from flytune.records.contents import CONTENTS
from flytune.records.lineage import LINEAGE, Ancestor, Lineage
from flytune.schema import RecordError
from flytune.storage import Storage


def of_base(model: Model) -> Lineage | None:
    """Return the runs that made a base model: the artifact of a run, or one that was merged; None for any
    other model.

    Raises:
        ExportError: its records are damaged.
        StorageError: its storage is away.
    """
    if models_base.is_on_hub(model):
        return None
    name = model.name_or_path
    storage = Storage(name if models_base.is_address(name) else Path(name).expanduser(), "model.name_or_path")
    if storage.exists(CONTENTS):
        return of_artifact(storage)
    return _read(storage)


def of_artifact(storage: Storage) -> Lineage:
    """Return the runs that made an artifact: those of its base, and its own.

    Raises: as `of_base`.
    """
    before = _read(storage)
    try:
        recipe = Recipe.model_validate(yaml_core.load(storage.read("recipe.yaml")))
        manifest = Manifest.parse(storage.read("manifest.json"))
        commit = (
            Export.parse(storage.read(EXPORT)).revision if storage.exists(EXPORT) else recipe.model.revision
        )
        teacher, teacher_commit = recipe.objective.teacher(recipe.model), None
        if teacher is not None:
            teacher_commit = TrainingResult.parse(storage.read("training.json")).teacher_commit
        contents = storage.read(CONTENTS)
    except (RecordError, RecipeError, yaml_core.YAMLError, FileNotFoundError) as error:
        raise ExportError(
            f"{storage.where}: its records cannot be read: {error}; restore the artifact"
        ) from None
    run = Ancestor(
        name=recipe.name,
        objective=recipe.objective.name,
        method=recipe.method.name,
        base=recipe.model.name_or_path,
        revision=commit,
        teacher=None if teacher is None else teacher.name_or_path,
        teacher_revision=teacher_commit,
        data_sha256=manifest.content_sha256,
        artifact_sha256=hashlib.sha256(contents).hexdigest(),
        recipe=recipe.to_yaml(),
    )
    return Lineage(runs=[*(before.runs if before else []), run])


def _read(storage: Storage) -> Lineage | None:
    try:
        return Lineage.parse(storage.read(LINEAGE)) if storage.exists(LINEAGE) else None
    except RecordError as error:
        raise ExportError(f"{storage.where}: {LINEAGE}: {error}; restore it") from None
