"""Results of a frozen model on the prepared rows, computed once before training and read beside them: the
log-probabilities of a reference model (log_probs.py), or the tokens of a teacher (teacher.py).

They take the place of the reference model in each step: full training then needs no second model, whatever
its sharding, and a run that continues from an adapter (method.adapter) has the model with that adapter as its
reference.
"""

import hashlib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flytune import data
from flytune.console import output
from flytune.errors import DataError
from flytune.files import sha256_of
from flytune.models import BaseRequest, Row, base_identity, initial_adapter, loading
from flytune.models import base as models_base
from flytune.objectives import objective_of
from flytune.recipe import DataRequest, Recipe
from flytune.schema import Record, Strict, omitted
from flytune.training.frozen import FrozenModel
from flytune.training.log_probs import ReferenceModel
from flytune.training.teacher import Teacher

MANIFEST = "reference.json"


class ReferenceManifest(Record):
    """Content of reference.json, written last."""

    key: str
    """Hash of the rows and of everything in the recipe that the results follow from."""
    files: dict[str, str]
    """SHA-256 of each file, by name."""
    commit: str | None = omitted(None)
    """Commit of a teacher on the hub."""
    identity: str = omitted("")
    """Identity of a teacher; empty in those of earlier versions."""


class ReferenceRequest(Strict):
    """Everything that the results depend on; the cache key of their task."""

    recipe: Recipe
    """The parts of the recipe that they follow from; all others have their defaults."""
    request: DataRequest
    base: BaseRequest
    adapter_sha256: str = ""
    """Hash of the weights of method.adapter."""
    base_identity: str = omitted("")
    """Identity of a base model that is not on the hub, whose commit `base` does not have."""


def frozen_model(recipe: Recipe) -> FrozenModel:
    """Return the model of a recipe that runs before training."""
    return (Teacher if objective_of(recipe).teacher() else ReferenceModel)(recipe)


def requests(recipe: Recipe, request: DataRequest, base: BaseRequest) -> list[ReferenceRequest]:
    """Return the request of a run that reads results of a frozen model; none of another."""
    if not is_needed(recipe):
        return []
    frozen, base = frozen_model(recipe).requested(base)
    reduced = {
        "name": "reference",
        **frozen.model_dump(mode="json", include={"model", "data", "method", "sharding"}),
        "objective": frozen.objective.model_dump(include={*frozen.objective.cached_by}),
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
    """Return whether a run reads results of a frozen model."""
    return objective_of(recipe).reference() == "precomputed"


def compute(recipe: Recipe, dataset: Path, out: Path, *, in_pod: bool = False) -> None:
    """Write the results of the frozen model on all rows of a prepared data set to a new folder `out`; one
    process, on all its GPUs.

    In a pod a teacher is fetched here, from the hub too: no other task hands it on.

    Raises:
        DataError: the data set is incomplete, or a teacher has another tokenizer.
        ExportError: a result is not finite.
        TrainingError: the adapter cannot be loaded.
    """
    output.install()
    loading.import_libraries()
    out.mkdir(parents=True)
    model, content = frozen_model(recipe), data.read_manifest(dataset).content_sha256
    fetches = in_pod and objective_of(recipe).teacher() is not None
    with models_base.asking_the_hub() if fetches else nullcontext():
        written = model.compute(dataset, out)
    files = {file.relative_to(out).as_posix(): sha256_of(file) for file in written}
    manifest = ReferenceManifest(
        key=_key(model, content), files=files, commit=model.commit(), identity=model.identity()
    )
    manifest.write(out / MANIFEST)


class Reference:
    """The results in a folder that `compute` wrote."""

    def __init__(self, folder: Path | None, recipe: Recipe, content_sha256: str) -> None:
        """Check the folder.

        Raises:
            DataError: there is none, it is of other rows or of another model, or a file was changed.
        """
        self._model = frozen_model(recipe)
        results, again = self._model.results, self._model.again
        if folder is None:
            raise DataError(f"recipe {recipe.name}: the run needs {results}, and was given none; {again}")
        try:
            self.folder, manifest = folder, ReferenceManifest.read(folder / MANIFEST)
        except FileNotFoundError:
            raise DataError(f"{folder}: {MANIFEST} is missing: {results} are incomplete; {again}") from None
        if manifest.key != _key(self._model, content_sha256):
            raise DataError(f"{folder}: {results} are of another model, or of other rows; {again}")
        for name, sha256 in manifest.files.items():
            if not (folder / name).is_file() or sha256_of(folder / name) != sha256:
                raise DataError(f"{folder}: {name} is not the file that {MANIFEST} lists; {again}")
        self.commit, self.identity = manifest.commit, manifest.identity

    def beside(self, rows: Any) -> Any:
        """Return the training rows, a `datasets.Dataset`, with the results."""
        return self._model.beside(rows, self.folder)

    def beside_heldout(self, rows: Sequence[Row]) -> list[Row]:
        """Return the first held-out rows with the results."""
        return self._model.beside_heldout(rows, self.folder) if rows else []


def _key(model: FrozenModel, content_sha256: str) -> str:
    """Return the hash of the rows and of the part of a recipe that decides about a frozen model's results."""
    return hashlib.sha256("\n".join((content_sha256, *model.key_parts())).encode()).hexdigest()
