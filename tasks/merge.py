"""The steps between two runs of one lineage: guards of the first, and its model as the base of the second.

MERGE maps shapes, and `none`, to tasks.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from flytekit import Resources, task
from flytekit.types.directory import FlyteDirectory

from flytune import caches
from flytune.adapters import merging
from flytune.artifacts import opening
from flytune.errors import ExportError, RecipeError
from flytune.evaluation import guards
from flytune.failures.table import RETRIES
from flytune.hardware import load_shapes
from flytune.models import clean_process
from flytune.planning import evaluation_shape
from flytune.recipe import Recipe
from flytune.records import Metrics, Plan
from flytune.storage import Storage
from images import LIGHT
from images import TRAIN as IMAGE
from tasks.runtime.directories import fetch, fetch_file, new_folder, shared_address, unpack_base_model
from tasks.runtime.pods import declare
from tasks.runtime.retries import classify_failures
from tasks.runtime.schema import without_schema
from tasks.runtime.secrets import secrets
from tasks.runtime.volumes import light_pod

_POD = Resources(cpu="1", mem="2Gi")
_DONE = "merge.json"
"""File that is stored last: it shows that a merged model is complete."""
UNMERGED = "none"
"""Key in MERGE of a complete model."""


class StagesOutput(NamedTuple):
    """The two recipes after their checks."""

    recipe: Recipe
    preference: Recipe


@without_schema
@task(container_image=LIGHT, pod_template=light_pod(), requests=_POD, retries=RETRIES)
def check_stages(recipe: Recipe, preference: Recipe, plan: Plan) -> StagesOutput:
    """Check that two recipes can follow each other, before the first one runs; `plan` is that of the second."""
    with classify_failures():
        if problems := _problems(recipe, preference):
            raise RecipeError.of(f"recipe {preference.name} after {recipe.name}", problems)
    return StagesOutput(recipe, preference)


def _problems(recipe: Recipe, preference: Recipe) -> list[str]:
    found = []
    if recipe.objective.name != "sft":
        found.append(f"--recipe: objective: {recipe.objective.name}; the first run is supervised: write objective: sft")
    if preference.objective.name == "sft":
        found.append("--preference: objective: sft; the second run compares answers: write objective: dpo")
    if preference.name == recipe.name:
        found.append(f"name: both recipes are named {recipe.name}; give the second one a name of its own")
    models = [(one.model.name_or_path, one.model.revision) for one in (recipe, preference)]
    if models[0] != models[1]:
        found.append(
            f"model.name_or_path: {models[1][0]}, but the first run trains {models[0][0]} (and its revision must be the same); "
            "name the same model: the second run gets the one that the first made of it"
        )
    return found


@without_schema
@task(container_image=LIGHT, pod_template=light_pod(), requests=_POD, retries=RETRIES, secret_requests=secrets("hub"))
def pass_guards(recipe: Recipe, artifact: FlyteDirectory) -> str:
    """Return the key in MERGE for an artifact; raise an error if its guards are broken, so that the next run does not start."""
    with classify_failures():
        metrics, plan = (kind.read(fetch_file(artifact, name)) for kind, name in _RECORDS)
        if broken := guards.broken(recipe, metrics):
            raise ExportError(
                f"{recipe.name}: {'; '.join(broken)}; the next run does not start. The artifact is stored; change the "
                "recipe or the guard, or name the artifact in model.name_or_path to go on all the same"
            )
        return UNMERGED if recipe.method.name == "full" else evaluation_shape.shape_for(recipe, plan).name


_RECORDS: tuple[tuple[Any, str], ...] = ((Metrics, "metrics.json"), (Plan, "plan.json"))


@without_schema
@task(container_image=LIGHT, pod_template=light_pod(), requests=_POD, retries=RETRIES)
def continue_complete(recipe: Recipe, preference: Recipe, artifact: FlyteDirectory, base: FlyteDirectory) -> Recipe:
    """Return the second recipe with the first run's artifact, a complete model, as its base."""
    return _continued(preference, str(artifact.remote_source or artifact.path))


def merge_adapter(recipe: Recipe, preference: Recipe, artifact: FlyteDirectory, base: FlyteDirectory) -> Recipe:
    """Merge the first run's adapter, store the model by its content, and return the second recipe with it as its base."""
    with classify_failures():
        unpack_base_model(base)
        # The recipe is the person's own, and so are its consent to code and its base.
        consent = opening.Consent(recipe.model.trust_remote_code, base_at_address=True)
        folder = new_folder() / "model"
        made = clean_process.run(merging.merge, fetch(artifact), folder, consent)
        listed = "".join(f"{file.sha256} {file.file}\n" for file in made.files if file.file.endswith(".safetensors"))
        return _continued(preference, _stored(folder, hashlib.sha256(listed.encode()).hexdigest()[:32]))


def _stored(folder: Path, digest: str) -> str:
    """Store a merged model at an address that its weights name, so that a rerun finds the second run's checkpoints there."""
    address = f"{shared_address('models') or caches.hub_folder('models')}/{digest}"
    storage = Storage(address, "the merged model")
    if not storage.exists(_DONE):
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        for name in sorted(names, key=lambda name: name == _DONE):
            storage.copy(folder / name, name)
    return address


def _continued(preference: Recipe, address: str) -> Recipe:
    model = preference.model.model_dump() | {"name_or_path": address, "revision": None}
    return preference.model_copy(update={"model": type(preference.model).model_validate(model)})


MERGE: dict[str, Any] = {UNMERGED: continue_complete} | {
    shape.name: declare(
        merge_adapter,
        f"merge_adapter_{shape.identifier}",
        shape.one_node,
        globals(),
        container_image=IMAGE,
        retries=RETRIES,
    )
    for shape in load_shapes()
}
