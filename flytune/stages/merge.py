"""The steps between two runs of one lineage: guards of the first, and its model as the base of the second."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from flytune import caches
from flytune.adapters import merging
from flytune.artifacts import opening
from flytune.errors import ExportError, RecipeError
from flytune.evaluation import guards
from flytune.models import clean_process
from flytune.planning import stage_shapes
from flytune.recipe import Recipe
from flytune.records import Metrics, Plan
from flytune.row_names import ANSWERS
from flytune.stages import base_model
from flytune.stages.orchestrator import Folder, Orchestrator
from flytune.stages.stored import local, local_file
from flytune.storage import Storage

_DONE = "merge.json"
"""File that is stored last: it shows that a merged model is complete."""
UNMERGED = "none"
"""Key of the merge of a complete model, which has nothing to merge."""


class StagesOutput(NamedTuple):
    """The two recipes after their checks."""

    recipe: Recipe
    preference: Recipe


def check_stages(recipe: Recipe, preference: Recipe, plan: Plan) -> StagesOutput:
    """Check that two recipes can follow each other, before the first one runs; `plan` is that of the
    second."""
    if problems := _problems(recipe, preference):
        raise RecipeError.of(f"recipe {preference.name} after {recipe.name}", problems)
    return StagesOutput(recipe, preference)


def _problems(recipe: Recipe, preference: Recipe) -> list[str]:
    problems = []
    if recipe.row_kind != ANSWERS:
        problems.append(
            f"--recipe: objective: {recipe.objective.name}; the first run is supervised: write objective: sft"
        )
    if preference.objective.row_kind == ANSWERS:
        problems.append(
            "--preference: objective: sft; the second run compares answers: write objective: dpo, kto or "
            "reward"
        )
    if preference.name == recipe.name:
        problems.append(f"name: both recipes are named {recipe.name}; give the second one a name of its own")
    models = [
        (each_recipe.model.name_or_path, each_recipe.model.revision) for each_recipe in (recipe, preference)
    ]
    if models[0] != models[1]:
        problems.append(
            f"model.name_or_path: {models[1][0]}, but the first run trains {models[0][0]} (and its revision "
            "must be the same); name the same model: the second run gets the one that the first made of it"
        )
    return problems


def pass_guards(orchestrator: Orchestrator, recipe: Recipe, artifact: Folder) -> str:
    """Return the key of an artifact's merge; raise an error if it broke its guards, so that the next run does
    not start."""
    metrics = Metrics.read(local_file(orchestrator, artifact, "metrics.json"))
    plan = Plan.read(local_file(orchestrator, artifact, "plan.json"))
    if broken := guards.broken(recipe, metrics):
        raise ExportError(
            f"{recipe.name}: {'; '.join(broken)}; the next run does not start. The artifact is stored; "
            "change the recipe or the guard, or name the artifact in model.name_or_path to go on all the same"
        )
    return UNMERGED if recipe.method.name == "full" else stage_shapes.evaluation_shape(recipe, plan).name


def continue_complete(recipe: Recipe, preference: Recipe, artifact: Folder, base: Folder) -> Recipe:
    """Return the second recipe with the first run's artifact, a complete model, as its base."""
    return _continued(preference, artifact.address)


def merge_adapter(
    orchestrator: Orchestrator, recipe: Recipe, preference: Recipe, artifact: Folder, base: Folder
) -> Recipe:
    """Merge the first run's adapter, store the model by its content, and return the second recipe with it as
    its base."""
    base_model.unpack(orchestrator, base)
    # The recipe is the person's own, and so are its consent to code and its base.
    consent = opening.Consent(recipe.model.trust_remote_code, base_at_address=True)
    folder = orchestrator.new_folder() / "model"
    merged = clean_process.run(merging.merge, local(orchestrator, artifact), folder, consent)
    listed = "".join(
        f"{file.sha256} {file.file}\n" for file in merged.files if file.file.endswith(".safetensors")
    )
    digest = hashlib.sha256(listed.encode()).hexdigest()[:32]
    return _continued(preference, _stored(orchestrator, folder, digest))


def _stored(orchestrator: Orchestrator, folder: Path, digest: str) -> str:
    """Store a merged model at an address that its weights name, so that a rerun finds the second run's
    checkpoints there."""
    address = f"{orchestrator.shared_address('models') or caches.hub_folder('models')}/{digest}"
    storage = Storage(address, "the merged model")
    if not storage.exists(_DONE):
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        for name in sorted(names, key=lambda name: name == _DONE):
            storage.copy(folder / name, name)
    return address


def _continued(preference: Recipe, address: str) -> Recipe:
    model = preference.model.model_dump() | {"name_or_path": address, "revision": None}
    return preference.model_copy(update={"model": type(preference.model).model_validate(model)})
