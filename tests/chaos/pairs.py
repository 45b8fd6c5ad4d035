"""Pairs of method and sharding that run on a CPU: their recipes, their runs with faults, and reports."""

import random
import re
import shutil
import signal
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytekit.types.directory import FlyteDirectory

from flytune.hardware import load_shapes, shape_named
from flytune.objectives import objective_of
from flytune.planning import planner
from flytune.recipe import SECTIONS, Grpo, Recipe
from flytune.recipe.rewards import RewardFunction
from flytune.schema import Record
from flytune.selftest import dataset as selftest_dataset
from flytune.selftest import processes as selftest_processes
from flytune.selftest import tiny_model
from flytune.selftest.matrix import all_pairs
from flytune.selftest.runs import DRAWN_ROWS, OBJECTIVE_ROWS, OBJECTIVE_SECTIONS, Pair, Rows
from flytune.sharding import pair_problem, sharding_of
from flytune.training import reference
from tasks.train import TRAIN
from tests.chaos import checking
from tests.chaos.bucket import NAME, Bucket
from tests.chaos.disturbed_run import DisturbedRun, by_step
from tests.chaos.faults import CHANGES, OF_REWARDS, Bag
from tests.chaos.pods import write_inputs
from tests.support.changed_base import change_weights

STEPS, ROWS = 14, 40
# Kinds of rows that are trained, and the functions that write them.
_WRITERS: dict[Rows, Callable[..., None]] = {
    "chats": selftest_dataset.write,
    "dpo": selftest_dataset.write_pairs,
    "kto": selftest_dataset.write_labelled,
    "reward": selftest_dataset.write_pairs,
    "grpo": selftest_dataset.write_prompts,
    "classify": selftest_dataset.write_texts,
    "embed": selftest_dataset.write_queries,
    "distill": selftest_dataset.write,
    "on-policy": selftest_dataset.write,
}

_CHECKPOINT = re.compile(r"\d+-(\d{4,})-")
"""Name of a checkpoint's folder; the group is the attempt's number."""


class Report(Record):
    """Result of a pair's runs."""

    pair: str
    faults: dict[str, int]
    """Number of faults by kind."""
    runs: int
    on_s3: int
    """Number of runs with checkpoints on S3."""
    pods: int
    by_hand: int
    """Number of attempts whose error is final for Flyte, so that a user would have to start the next."""
    steps: int
    """Number of steps of all runs together."""
    repeated: dict[str, int]
    """Number of steps that were trained again, by the kind of the preceding fault."""
    seconds: list[float]
    """Seconds from each kill to the end of the next step."""
    problems: list[str]
    """Differences from the undisturbed run, and other failures."""

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


def objective_for(pair: Pair, folder: Path) -> dict[str, Any]:
    """Return the section of a pair's objective, with dropout; the teacher is the other base."""
    if pair.rows not in OBJECTIVE_ROWS:
        return {"name": "sft"}
    section = {"name": pair.rows} | OBJECTIVE_SECTIONS.get(pair.rows, {})
    if "disable_dropout" in SECTIONS[section["name"]].model_fields:
        section["disable_dropout"] = False
    if section["name"] == "distill":
        section["teacher_model_name_or_path"] = str(folder / "other-base")
    return section


def recipe_for(pair: Pair, folder: Path, checkpoints: str, save_steps: int) -> Recipe:
    """Return a recipe with dropout and evaluations, whose states a resumed run must restore."""
    processes = {"none": 1, "device_map": 1}.get(pair.sharding, 2 * pair.replicas)
    return Recipe.model_validate(
        {
            "name": "chaos",
            "model": {"name_or_path": str(folder / "base"), "dtype": "float32"},
            "data": {
                "path": str(folder / f"{pair.rows}.jsonl"),
                "heldout_path": str(folder / f"{pair.rows}-heldout.jsonl"),
            },
            "method": {"name": pair.method}
            | ({} if pair.method == "full" else {"lora_dropout": 0.1, "r": 8}),
            "sharding": {
                "name": pair.sharding,
                "sequence_parallel": pair.sequence_parallel,
                "replicas": pair.replicas,
            },
            "objective": objective_for(pair, folder),
            "training": {
                "learning_rate": 1e-3,
                "global_batch_size": 4,
                "num_train_epochs": 2,
                "max_steps": STEPS,
                "activation_checkpointing": False,
                "logging_steps": 1,
                "hang_minutes": 2,
            },
            "evaluation": {"eval_steps": 5, "max_samples": 4, "batch_size": 4},
            "checkpoints": {"folder": checkpoints, "save_steps": save_steps, "name": "chaos"},
            "hardware": {"shape": f"cpu-{processes}"},
        }
    )


def changed(recipe: Recipe, kind: str) -> Recipe:
    """Return the recipe of an attempt that a fault of `CHANGES` or `OF_REWARDS` begins, which saves
    nothing."""
    model, training, objective = recipe.model, recipe.training, recipe.objective
    if kind == "other base":
        model = model.model_copy(update={"name_or_path": f"{Path(model.name_or_path).parent}/other-base"})
    if kind == "other batch":
        training = training.model_copy(update={"global_batch_size": 2 * training.global_batch_size})
    if kind == "other setting":
        training = training.model_copy(update={"learning_rate": 3e-3})
    if kind == "other reward" and isinstance(objective, Grpo):
        rewards = [
            RewardFunction(name="letters", code=selftest_dataset.REWARD.replace("return ", "return 100 - "))
        ]
        objective = objective.model_copy(update={"rewards": rewards})
    checkpoints = recipe.checkpoints.model_copy(update={"save_steps": 1000})
    training = training.model_copy(update={"max_steps": 2 * STEPS})
    update = {"model": model, "training": training, "objective": objective, "checkpoints": checkpoints}
    return recipe.model_copy(update=update)


def pairs_on_cpu(folder: Path) -> list[Pair]:
    """Return all pairs that run on this machine's CPU, without offload; two groups of processes where
    shapes.yaml has a row cpu-4."""
    found, rows = [], {shape.name for shape in load_shapes()}
    for pair in all_pairs():
        if pair.offload == "none" and pair.rows in _WRITERS and pair.model == "dense":
            recipe = recipe_for(pair, folder, str(folder), 1)
            if recipe.hardware.shape not in rows:
                continue
            refused = pair_problem(recipe) or objective_of(recipe).problems()
            if not refused and not sharding_of(recipe).misfit(shape_named(recipe.hardware.shape)):
                found.append(pair)
    return found


def make_inputs(folder: Path) -> None:
    """Write the tiny model and its data."""
    selftest_processes.run(
        1, tiny_model.write, folder / "base", tiny_model.SENTENCES, log=folder / "model.log"
    )
    shutil.copytree(folder / "base", folder / "other-base")
    selftest_processes.run(1, change_weights, folder / "other-base", log=folder / "model.log")
    for rows, write in _WRITERS.items():
        write(folder / f"{rows}.jsonl", ROWS)
        write(folder / f"{rows}-heldout.jsonl", 4, seed=1)
        recipe = recipe_for(Pair("full", "none", rows=rows), folder, str(folder), 1)
        selftest_processes.run(
            1, selftest_dataset.prepare, recipe, folder / f"{rows}-dataset", log=folder / f"{rows}.log"
        )


class DisturbedPair:
    """Runs of one pair, below one folder."""

    def __init__(self, pair: Pair, inputs: Path, folder: Path, seed: str, storage: str, cold: bool) -> None:
        self.pair, self.inputs, self.folder, self.storage, self.cold = pair, inputs, folder, storage, cold
        self.dataset = inputs / f"{pair.rows}-dataset"
        self.draw = random.Random(seed)
        # Few faults for each pair are in one run: on S3 of about every second pair.
        self.begins_on_s3 = self.draw.random() < 0.5
        self.runs: list[DisturbedRun] = []
        self.problems: list[str] = []

    def run(self, faults: int, report: Callable[[str | None], None]) -> Report:
        """Inject `faults` faults, in as many runs as that takes."""
        signal.signal(signal.SIGTERM, lambda *_: _raise_exit())
        bag = Bag(self.draw, self.pair.rows == "grpo", self.pair.rows in DRAWN_ROWS)
        bucket = Bucket() if self.storage != "folder" else None
        try:
            undisturbed = self._result(self._new_run(None, 1), Bag(self.draw), 0, report)
            while undisturbed and (done := sum(run.injected.total() for run in self.runs)) < faults:
                is_turn_of_s3 = (len(self.runs) % 2 == 1) == self.begins_on_s3
                on_s3 = bucket if self.storage == "s3" or is_turn_of_s3 else None
                one = self._new_run(on_s3, self.draw.choice([1, 2]))
                before = len(self.problems)
                self._result(one, bag, faults - done, report, undisturbed)
                if len(self.problems) > before + 1 or not one.injected:
                    break
        finally:
            if bucket:
                bucket.close()
        return self._report(self.runs[1:])

    def _new_run(self, bucket: Bucket | None, save_steps: int) -> DisturbedRun:
        folder = self.folder / f"run-{len(self.runs)}"
        folder.mkdir(parents=True)
        checkpoints = f"s3://{NAME}/{folder.name}" if bucket else str(folder / "checkpoints")
        recipe = recipe_for(self.pair, self.inputs, checkpoints, save_steps)
        self.recipe, plan = recipe, planner.make(recipe)
        self.task = TRAIN[plan.shape]
        known = [self.folder / "reference"] * reference.is_needed(recipe)
        if known and not known[0].exists():
            selftest_processes.run(1, reference.compute, recipe, self.dataset, known[0])
        kinds = CHANGES | (OF_REWARDS if self.pair.rows == "grpo" else {})
        others = {kind: changed(recipe, kind) for kind in kinds}
        files = {kind: folder / f"inputs-{kind.replace(' ', '-')}.pb" for kind in kinds}
        written = [(folder / "inputs.pb", recipe), *((files[kind], other) for kind, other in others.items())]
        selftest_processes.run(1, _write_all, self.task, written, self.dataset, known)
        inputs, address = folder / "inputs.pb", f"{checkpoints}/chaos"
        self.runs.append(
            DisturbedRun(self.task, inputs, files, folder, address, bucket, self.draw, self.cold)
        )
        return self.runs[-1]

    def _result(
        self,
        one: DisturbedRun,
        bag: Bag,
        faults: int,
        report: Callable[[str | None], None],
        undisturbed: Any = None,
    ) -> Any:
        """Finish a run and compare it with the undisturbed run; add differences to `problems`."""
        one.run(bag, faults, report)
        found: Any = None
        problems, last = list(one.problems), 0
        for pod in one.done:
            found = selftest_processes.run(
                1, checking.result, self.task, pod.folder, self.recipe, self.dataset
            )
            one.record([f"{line}\n" for line in found["lines"]])
            problems += checking.differences(found, undisturbed or found)
            last = max(last, int(found["attempt"].partition("-")[0] or 0))
        left = selftest_processes.run(1, checking.remaining_files, one.address) if one.done else []
        # The end of a run deletes the checkpoints of earlier attempts alone; one that was killed after it
        # leaves its own, too.
        later = {name for name in left if (found_in := _CHECKPOINT.match(name)) and int(found_in[1]) > last}
        left = [
            name for name in left if name.startswith("attempt-") or not (one.leaves_files or name in later)
        ]
        if left:
            problems.append(f"the run has finished, and {', '.join(left)} is left at its address")
        expected = {row[0]: row[1:] for row in (undisturbed or found or {"steps": []})["steps"]}
        for step, seen in by_step(one.lines).items():
            problems += [
                f"an attempt had step {step} as {row}, not {expected.get(step)}"
                for row in seen
                if row != expected.get(step)
            ]
        for problem in problems:
            report(f"{self.pair}: {one.folder.name}: {problem}")
        self.problems += [f"{one.folder.name}: {problem}" for problem in problems]
        if not problems:
            shutil.rmtree(one.folder)
        return found

    def _report(self, runs: list[DisturbedRun]) -> Report:
        faults, repeated = Counter[str](), Counter[str]()
        for one in runs:
            faults += one.injected
            repeated += one.repeated
        return Report(
            pair=str(self.pair),
            faults=dict(sorted(faults.items())),
            runs=len(runs),
            on_s3=sum(run.bucket is not None for run in runs),
            pods=sum(run.pods for run in runs),
            by_hand=sum(run.by_hand for run in runs),
            steps=STEPS * len(runs),
            repeated=dict(sorted(repeated.items())),
            seconds=[second for run in runs for second in run.seconds],
            problems=self.problems,
        )


def _raise_exit() -> None:
    raise SystemExit(1)


def _write_all(task: Any, written: list[tuple[Path, Recipe]], dataset: Path, known: list[Path]) -> None:
    for file, recipe in written:
        folders = {
            "dataset": FlyteDirectory(str(dataset)),
            "references": [FlyteDirectory(str(folder)) for folder in known],
        }
        write_inputs(task, file, {"recipe": recipe, "plan": planner.make(recipe)} | folders)
