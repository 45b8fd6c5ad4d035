"""Reproduction of an artifact: its recipe run again with its data and base model, and the two results
compared."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from flytune import data
from flytune.artifacts import opening
from flytune.errors import DataError, ExportError
from flytune.export.folder import MANIFEST as EXPORT
from flytune.files import new_output
from flytune.models import base as models_base
from flytune.recipe import DataRequest, Hardware, Model, Notify, Recipe, sections
from flytune.records import Contents, Export, Manifest, Plan, Step, TrainingResult, environment
from flytune.records.contents import CONTENTS, record, verify
from flytune.records.training import STEPS
from flytune.schema import Record, RecordError, Strict
from flytune.sentences import counted


class ComparedProperty(Strict):
    """One property of both runs."""

    name: str
    result: Literal["equal", "near", "different", "unknown"]
    first: str
    """The artifact's value."""
    second: str
    """The second run's value, or the distance."""


class Reproduction(Record):
    """The comparison of an artifact with a second run of its recipe."""

    artifact: str
    second: str
    findings: list[ComparedProperty]

    @property
    def is_equal(self) -> bool:
        """True if data, losses and weights are equal, bit for bit."""
        return not [
            finding
            for finding in self.findings
            if finding.result != "equal" and finding.name in ("prepared data", "losses", "weights")
        ]


def recipe_of(artifact: Path, trust_remote_code: bool = False, base: str | None = None) -> Recipe:
    """Return the recipe of an artifact for a second run: its base model's commit and its teacher's, its
    shape; nothing published or reported.

    Args:
        artifact: its folder.
        trust_remote_code: True if code that it names may run.
        base: the base model of the person, instead of the one that it names.

    Raises:
        ExportError: the folder is no complete artifact, a file of it was changed, or its recipe runs code
            without consent.
    """
    # What the recipe names is looked at by the run itself: a base or data at an address, as in the first run.
    consent = opening.Consent(trust_remote_code, base, base_at_address=True)
    recipe = opening.open_artifact(artifact, consent).recipe
    if recipe.evaluation.tasks and recipe.evaluation.include_path and not trust_remote_code:
        raise ExportError(
            f"{artifact}: its recipe has evaluation.include_path: tasks in "
            f"{recipe.evaluation.include_path!r:.200} may have Python code, which would run here; read them "
            f"first, then give {opening.FLAG}"
        )
    named = recipe.objective.own_code
    if named and not trust_remote_code:
        raise ExportError(
            f"{artifact}: its recipe has objective.rewards with code of its own ({', '.join(named)}), which "
            f"would run here; read it first (recipe.yaml), then give {opening.FLAG}"
        )
    if recipe.objective.own_places and not trust_remote_code:
        raise ExportError(
            f"{artifact}: its recipe has objective.{recipe.objective.own_places[0]:.200}: a program that "
            "would be started here, or a place that would get prompts, weights and the key of "
            f"FLYTUNE_API_KEY; look at it first (recipe.yaml), then give {opening.FLAG}"
        )
    alone = _alone(artifact, recipe, record(Plan, artifact / "plan.json"))
    if base is not None:
        alone = alone.model_copy(update={"model": recipe.model})
    # The first run may have left checkpoints, where a budget stopped it.
    checkpoints = alone.checkpoints.model_copy(update={"name": f"reproduction-{alone.key()}"})
    return alone.model_copy(update={"checkpoints": checkpoints})


def _recipe_of(artifact: Path) -> Recipe:
    return _alone(artifact, Recipe.from_yaml(artifact / "recipe.yaml"), record(Plan, artifact / "plan.json"))


def _alone(artifact: Path, recipe: Recipe, plan: Plan) -> Recipe:
    commit = record(Export, artifact / EXPORT).revision if (artifact / EXPORT).is_file() else None
    teacher_commit = None
    if recipe.objective.teacher(recipe.model) is not None:
        teacher_commit = record(TrainingResult, artifact / "training.json").teacher_commit
    # Which steps are saved decides which are logged, and what `export: best` chooses from.
    saves = recipe.checkpoints.model_copy(update={"folder": None, "name": None})
    alone = {
        "model": models_base.pinned(recipe.model, commit),
        "objective": recipe.objective.with_teacher_at(teacher_commit),
        "hardware": Hardware(shape=plan.shape),
        "checkpoints": saves,
        "tracking": sections.Tracking(),
        "publish": sections.Publish(),
        "notify": Notify(on=[]),
    }
    return recipe.model_copy(update=alone)


def check_data(artifact: Path, recipe: Recipe) -> None:
    """Prepare the data as it is now, and compare it with what the artifact was trained on.

    Raises:
        DataError: it cannot be reached, or is other data.
    """
    before = record(Manifest, artifact / "manifest.json")
    with tempfile.TemporaryDirectory(prefix="flytune-") as folder:
        request = DataRequest.of(recipe, data.fingerprint(recipe.data))
        data.prepare(request, Path(folder) / "dataset")
        now = record(Manifest, Path(folder) / "dataset" / "manifest.json")
    if now.content_sha256 == before.content_sha256:
        return
    because = (
        "the tokenizer is another one"
        if now.tokenizer_sha256 != before.tokenizer_sha256
        else f"it had {counted(before.rows, 'row')}, and has {now.rows:,}"
    )
    names = ", ".join(source.name for source in recipe.data.all_sources.values())
    raise DataError(
        f"{names}: not the data that the artifact was trained on: its hash was {before.content_sha256[:12]}, "
        f"and is {now.content_sha256[:12]} ({because}); restore it, or name the first data in "
        f"{artifact.name}/recipe.yaml"
    )


def run_again(recipe: Recipe, out: Path) -> Path:
    """Run the recipe on this machine, and return the folder of its artifact below `out`.

    Raises:
        ExportError: `out` is not empty, or the run failed; its own error is printed before.
    """
    if out.exists() and any(out.iterdir()):
        raise ExportError(f"{out}: not empty; give a new folder (--out)")
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    # Checkpoints of an earlier run would be resumed from.
    local = {
        "publish": sections.Publish(address=str(out / "store")),
        "checkpoints": recipe.checkpoints.model_copy(update={"folder": str(out / "checkpoints")}),
    }
    file = write_recipe(recipe.model_copy(update=local), out)
    with subprocess.Popen([sys.executable, "-m", "flytune.cli", "run", str(file)], stdout=sys.stderr) as run:
        code = _ended(run)
    stored = sorted((out / "store").glob(f"*/{CONTENTS}"))
    if code or not stored:
        raise ExportError(
            f"{recipe.name}: the second run failed (exit code {code}); the error is shown above"
        )
    return stored[0].parent


def _ended(run: "subprocess.Popen[bytes]") -> int:
    """Return the exit code of a run that shares the terminal. It gets a Ctrl-C too, and ends by itself;
    SIGTERM, which this process alone may get, is handed on."""
    before = signal.signal(signal.SIGTERM, lambda number, _: run.send_signal(number))
    try:
        while True:
            try:
                return run.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def write_recipe(recipe: Recipe, folder: Path) -> Path:
    """Write the recipe of the second run into a folder, and return its path.

    Raises:
        ExportError: another recipe is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, text = folder / "recipe.yaml", recipe.to_yaml()
    if file.exists() and file.read_bytes() != text.encode():
        raise ExportError(f"{file}: exists already, with another recipe; give a new folder (--out)")
    with new_output(file) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return file


def compare(first: Path, second: Path) -> Reproduction:
    """Compare two artifacts: recipe, data, base model, teacher, software, losses and weights. Nothing of them
    is run.

    Raises:
        ExportError: one of them is incomplete, or a file was changed.
    """
    verify(first)
    verify(second)
    return Reproduction(artifact=str(first), second=str(second), findings=list(_findings(first, second)))


def _findings(first: Path, second: Path) -> Iterator[ComparedProperty]:
    folders = (first, second)
    recipes = [_recipe_of(folder) for folder in folders]
    differing = [
        name for name in Recipe.model_fields if getattr(recipes[0], name) != getattr(recipes[1], name)
    ]
    yield _finding("recipe", recipes[0].key(), recipes[1].key(), f"differs in {', '.join(differing)}")
    before, now = [record(Manifest, folder / "manifest.json") for folder in folders]
    yield _finding("prepared data", before.content_sha256[:12], now.content_sha256[:12])
    yield _finding("tokenizer", before.tokenizer_sha256[:12], now.tokenizer_sha256[:12])
    bases = [_commit_or_name(recipe.model) for recipe in recipes]
    yield _finding("base model", *bases)
    teachers = [recipe.objective.teacher(recipe.model) for recipe in recipes]
    if any(teachers):
        yield _finding("teacher", *map(_commit_or_name, teachers))
    trainings = [record(TrainingResult, folder / "training.json") for folder in folders]
    yield _finding("processes", *(_processes(training) for training in trainings))
    yield from _software(*(training.versions for training in trainings))
    yield _losses(*(_logged(*steps) for steps in zip(folders, trainings, strict=True)))
    yield _weights(first, second)


def _finding(name: str, first: str, second: str, note: str = "") -> ComparedProperty:
    if first == second:
        return ComparedProperty(name=name, result="equal", first=first, second=second)
    return ComparedProperty(name=name, result="different", first=first, second=f"{second} {note}".strip())


def _commit_or_name(model: Model | None) -> str:
    return (model.revision or model.name_or_path) if model else "none"


def _software(first: dict[str, str], second: dict[str, str]) -> Iterator[ComparedProperty]:
    if not first:
        now = environment.versions()
        yield ComparedProperty(
            name="software",
            result="unknown",
            first="not recorded before 0.2.0",
            second=f"flytune {now['flytune']}",
        )
        return
    changed = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    if not changed:
        yield ComparedProperty(
            name="software",
            result="equal",
            first=counted(len(first), "version"),
            second=counted(len(second), "version"),
        )
    for name in changed:
        yield _finding(f"version of {name}", first.get(name, "none"), second.get(name, "none"))


def _processes(training: TrainingResult) -> str:
    """Return the number of processes, of each attempt where they differ."""
    return ", then ".join(dict.fromkeys(str(attempt.world_size) for attempt in training.attempts)) or str(
        training.world_size
    )


def _logged(artifact: Path, training: TrainingResult) -> list[Step]:
    """Return the logged steps of all attempts; training.json of 0.1.0 has those of the last one, steps.jsonl
    has all."""
    file = artifact / STEPS
    if training.attempts or not file.is_file():
        return training.steps
    try:
        return [Step.parse(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (RecordError, UnicodeDecodeError) as error:
        raise ExportError(f"{file}: not a log of steps ({error}); do not use it") from None


def _losses(first: list[Step], second: list[Step]) -> ComparedProperty:
    """Compare the losses of two logs, over the steps between those that both have logged."""
    first_run = f"{counted(first[-1].step, 'step')}, the last {first[-1].loss:.6g}" if first else "no step"
    ends = [steps[-1].step if steps else 0 for steps in (first, second)]
    if ends[0] != ends[1]:
        return ComparedProperty(
            name="losses", result="different", first=first_run, second=counted(ends[1], "step")
        )
    shared = sorted({step.step for step in first} & {step.step for step in second})
    apart, rounded = [], False
    for start, end in zip([0, *shared], shared, strict=False):
        means = [_mean(steps, start, end) for steps in (first, second)]
        distance = abs(means[0][0] - means[1][0])
        # A run that stopped to save has logged a part of these steps on its own: the mean of its means is
        # rounded.
        is_rounded = means[0][1] != means[1][1]
        rounded |= is_rounded
        apart.append((0.0 if is_rounded and distance <= ROUNDING * abs(means[0][0]) else distance, end))
    largest, at = max(apart, default=(0.0, 0))
    if not largest:
        second_run = (
            f"{counted(ends[1], 'step')}, all equal{', but for the rounding of means' if rounded else ''}"
        )
        return ComparedProperty(name="losses", result="equal", first=first_run, second=second_run)
    from_step = next(step for distance, step in apart if distance)
    second_run = f"differ from step {from_step}, by {largest:.2g} at most (step {at})"
    return ComparedProperty(
        name="losses", result=_nearness(largest, NEAR_LOSS), first=first_run, second=second_run
    )


def _mean(steps: list[Step], start: int, end: int) -> tuple[float, int]:
    """Return the mean loss of the steps after `start` up to `end`, and the number of logged steps that have
    it."""
    logged = [step for step in steps if start < step.step <= end]
    if len(logged) == 1:
        return logged[0].loss, 1
    before = [start, *(step.step for step in logged)]
    total = sum(step.loss * (step.step - last) for step, last in zip(logged, before, strict=False))
    return total / (end - start), len(logged)


ROUNDING = 1e-6
"""Largest relative difference of a mean of rounded means."""
NEAR_LOSS = 1e-3
"""Difference of losses in nats below which two runs are called near: order of summation, not other data."""
NEAR_WEIGHTS = 1e-3
"""Distance of weights below which they are called near, relative to the norm of all of them."""


def _nearness(distance: float, limit: float) -> Literal["near", "different"]:
    return "near" if distance <= limit else "different"


def _weights(first: Path, second: Path) -> ComparedProperty:
    listed = []
    for folder in (first, second):
        files = record(Contents, folder / CONTENTS).files
        listed.append(
            {
                file.file: file.sha256
                for file in files
                if file.file.endswith(".safetensors") and "/" not in file.file
            }
        )
    count_of_files = counted(len(listed[0]), "file")
    if listed[0] == listed[1]:
        return ComparedProperty(name="weights", result="equal", first=count_of_files, second="bit for bit")
    names = [_tensors(folder, list(files)) for folder, files in zip((first, second), listed, strict=True)]
    if names[0].keys() != names[1].keys():
        return ComparedProperty(
            name="weights",
            result="different",
            first=counted(len(names[0]), "tensor"),
            second=counted(len(names[1]), "tensor"),
        )
    distance, total, largest = 0.0, 0.0, (0.0, "")
    for name in names[0]:
        mine, theirs = (_tensor(files_of[name], name) for files_of in names)
        if mine.shape != theirs.shape:
            return ComparedProperty(
                name="weights",
                result="different",
                first=f"{name} {list(mine.shape)}",
                second=str(list(theirs.shape)),
            )
        difference = (mine.float() - theirs.float()).abs()
        distance += float(difference.double().square().sum())
        total += float(mine.double().square().sum())
        largest = max(largest, (float(difference.max()) if difference.numel() else 0.0, name))
    relative = (distance / total) ** 0.5 if total else 0.0
    described = f"distance {relative:.2e} of their norm; by {largest[0]:.2e} at most ({largest[1]})"
    return ComparedProperty(
        name="weights", result=_nearness(relative, NEAR_WEIGHTS), first=count_of_files, second=described
    )


def _tensors(folder: Path, files: list[str]) -> dict[str, Path]:
    """Return the file of each tensor."""
    tensors: dict[str, Path] = {}
    for file in files:
        with _opened(folder / file) as opened:
            tensors |= dict.fromkeys(opened.keys(), folder / file)
    return tensors


def _tensor(file: Path, name: str) -> Any:
    with _opened(file) as opened:
        return opened.get_tensor(name)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ExportError(
            f"{file}: truncated, or not a safetensors file ({error}); fetch the artifact again"
        ) from None
