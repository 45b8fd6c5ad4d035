"""Results of a frozen model on the prepared rows, computed once before training and read beside them: the
log-probabilities of a reference model, or the tokens of a teacher (teacher.py).

They take the place of the reference model in each step: full training then needs no second model, whatever
its sharding, and a run that continues from an adapter (method.adapter) has the model with that adapter as its
reference.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from flytune import data
from flytune.console import output
from flytune.errors import DataError
from flytune.files import sha256_of
from flytune.models import BaseRequest, Row, base_identity, finite_loss, initial_adapter, loading
from flytune.models import base as models_base
from flytune.models.scoring import sequences_of
from flytune.objectives import objective_of
from flytune.recipe import DataRequest, Recipe
from flytune.schema import Record, Strict
from flytune.sharding import sharding_of
from flytune.training import teacher

MANIFEST = "reference.json"
COLUMN = "ref_logps"
"""Column of the rows: log-probabilities of the chosen and of the rejected answer, each summed over its
trained tokens."""
ROWS_AT_A_TIME = 4096
"""Pairs that are held in memory, and sorted by length, at a time."""
_SPLITS = ("train", "heldout")


class ReferenceManifest(Record):
    """Content of reference.json, written last."""

    key: str
    """Hash of the rows and of everything in the recipe that the log-probabilities follow from."""
    files: dict[str, str]
    """SHA-256 of each file, by name."""
    commit: Annotated[str | None, Field(exclude_if=lambda commit: commit is None)] = None
    """Commit of a teacher on the hub."""

    @property
    def is_of_teacher(self) -> bool:
        """Return whether the files are those of a teacher."""
        return "train.parquet" in self.files


class ReferenceRequest(Strict):
    """Everything that the log-probabilities depend on; the cache key of their task."""

    recipe: Recipe
    """The parts of the recipe that they follow from; all others have their defaults."""
    request: DataRequest
    base: BaseRequest
    adapter_sha256: str = ""
    """Hash of the weights of method.adapter."""
    base_identity: Annotated[str, Field(exclude_if=lambda identity: not identity)] = ""
    """Identity of a base model that is not on the hub, whose commit `base` does not have."""


def requests(recipe: Recipe, request: DataRequest, base: BaseRequest) -> list[ReferenceRequest]:
    """Return the request of a run that reads the reference's log-probabilities; none of another."""
    if not is_needed(recipe):
        return []
    frozen = teacher.recipe_of(recipe) if objective_of(recipe).teacher() else recipe
    objective = recipe.objective.model_dump(include={*recipe.objective.cached_by})
    if frozen is not recipe:
        base = models_base.request(frozen.model)
        # Its task loads the commit that is part of the key, also where a branch has moved on.
        objective["teacher_model_revision"] = base.commit
    reduced = {
        "name": "reference",
        **frozen.model_dump(mode="json", include={"model", "data", "method", "sharding"}),
        "objective": objective,
        "training": {"learning_rate": 1, "global_batch_size": 1},
        "evaluation": {"batch_size": recipe.evaluation.batch_size},
    }
    adapter = initial_adapter.weights_sha256(frozen.method)
    identity = "" if base.commit else base_identity.identity_of(frozen.model)
    reduced_recipe = Recipe.model_validate(reduced)
    return [
        ReferenceRequest(
            recipe=reduced_recipe, request=request, base=base, adapter_sha256=adapter, base_identity=identity
        )
    ]


def is_needed(recipe: Recipe) -> bool:
    """Return whether a run reads the reference's log-probabilities."""
    return objective_of(recipe).reference() == "precomputed"


def compute(recipe: Recipe, dataset: Path, out: Path) -> None:
    """Write the log-probabilities of all pairs of a prepared data set to a new folder `out`; one process, on
    all its GPUs.

    The model is loaded, and computes, in the precision that it has in training.

    Raises:
        DataError: the data set is incomplete.
        ExportError: a log-probability is not finite.
        TrainingError: the adapter cannot be loaded.
    """
    output.install()
    loading.import_libraries()
    import numpy
    import torch
    from safetensors.numpy import save_file

    out.mkdir(parents=True)
    manifest = data.read_manifest(dataset)
    if objective_of(recipe).teacher():
        files = teacher.compute(recipe, dataset, out)
        commit = loading.commit(teacher.recipe_of(recipe).model, local=True)
        key = _key(recipe, manifest.content_sha256)
        ReferenceManifest(key=key, files=files, commit=commit).write(out / MANIFEST)
        return
    model, uses_autocast = _model(recipe)
    pad = data.stored_tokenizer(dataset, recipe.model.trust_remote_code).pad_token_id
    device = next(model.parameters()).device.type
    splits = _SPLITS if manifest.heldout.samples else _SPLITS[:1]
    for split in splits:
        rows = data.load(dataset, split)
        column = numpy.empty((len(rows), 2))
        for start in range(0, len(rows), ROWS_AT_A_TIME):
            places = range(start, min(start + ROWS_AT_A_TIME, len(rows)))
            label = f"reference, {split}: pairs {start + 1:,} to {places.stop:,} of {len(rows):,}"
            with torch.autocast(device, getattr(torch, recipe.model.dtype), enabled=uses_autocast):
                sequences = sequences_of([rows[place] for place in places])
                nll, _ = finite_loss(model, sequences, pad, recipe.evaluation.batch_size, label)
            column[start : places.stop] = -nll.reshape(2, -1).T
        save_file({COLUMN: column}, out / _file(split))
    files = {_file(split): sha256_of(out / _file(split)) for split in splits}
    ReferenceManifest(key=_key(recipe, manifest.content_sha256), files=files).write(out / MANIFEST)


def _model(recipe: Recipe) -> tuple[Any, bool]:
    """Return the reference model, and whether it computes under autocast."""
    uses_autocast = sharding_of(recipe).uses_autocast
    dtype = sharding_of(recipe).load_dtype if uses_autocast else recipe.model.dtype
    model = loading.base_model(recipe, dtype, device_map=loading.device_map())
    if recipe.method.adapter:
        from peft import get_peft_model

        config = loading.peft_config(recipe, model)
        model = get_peft_model(model, config)
        initial_adapter.load_weights(model, recipe.method)
    return model, uses_autocast


class Reference:
    """The log-probabilities in a folder that `compute` wrote."""

    def __init__(self, folder: Path | None, recipe: Recipe, content_sha256: str) -> None:
        """Check the folder.

        Raises:
            DataError: there is none, it is of other rows or of another model, or a file was changed.
        """
        results, again = "the teacher's tokens", "compute them again (reference_log_probs)"
        if not objective_of(recipe).teacher():
            results = "the reference's log-probabilities"
            again += ", or set objective.precompute_ref_log_probs: false"
        if folder is None:
            raise DataError(f"recipe {recipe.name}: the run needs {results}, and was given none; {again}")
        try:
            self.folder, manifest = folder, ReferenceManifest.read(folder / MANIFEST)
        except FileNotFoundError:
            raise DataError(f"{folder}: {MANIFEST} is missing: {results} are incomplete; {again}") from None
        if manifest.key != _key(recipe, content_sha256):
            raise DataError(f"{folder}: {results} are of another model, or of other rows; {again}")
        for name, sha256 in manifest.files.items():
            if not (folder / name).is_file() or sha256_of(folder / name) != sha256:
                raise DataError(f"{folder}: {name} is not the file that {MANIFEST} lists; {again}")
        self.is_of_teacher, self.commit = manifest.is_of_teacher, manifest.commit

    def column(self, split: str) -> Any:
        """Return the log-probabilities of the rows of a split: float64 of shape (rows, 2)."""
        from safetensors.numpy import load_file

        return load_file(self.folder / _file(split))[COLUMN]

    def beside(self, dataset: Any) -> Any:
        """Return the training rows, a `datasets.Dataset`, with the column."""
        if self.is_of_teacher:
            return teacher.beside(dataset, self.folder / "train.parquet")
        return dataset.add_column(COLUMN, self.column("train").tolist())

    def beside_heldout(self, rows: Sequence[Row]) -> list[Row]:
        """Return the first held-out rows with the column."""
        if not rows:
            return []
        if self.is_of_teacher:
            return teacher.beside_rows(rows, self.folder / "heldout.parquet")
        return [
            row | {COLUMN: value} for row, value in zip(rows, self.column("heldout").tolist(), strict=False)
        ]


def _file(split: str) -> str:
    return f"{split}.safetensors"


def _key(recipe: Recipe, content_sha256: str) -> str:
    """Return the hash of the rows and of the part of a recipe that decides about the reference model's
    results."""
    method, model = recipe.method, recipe.model
    if of_teacher := objective_of(recipe).teacher():
        section = recipe.objective.model_dump_json(include={"loss_top_k", "temperature"})
        return _hash(content_sha256, of_teacher.model_dump_json(exclude={"revision"}), section)
    parts = (
        content_sha256,
        model.model_dump_json(exclude={"revision"}),
        method.model_dump_json() if method.adapter or method.name == "qlora" else "",
        sharding_of(recipe).precision,
    )
    return _hash(*parts)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
