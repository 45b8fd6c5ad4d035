"""The pairs of method and sharding that run on a CPU: what each trains, and what became of it."""

import random
import shutil
import signal
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytekit.types.directory import FlyteDirectory

from flytune.hardware.shapes import shape_named
from flytune.planning import planner
from flytune.recipe.recipe import Recipe
from flytune.schema import Record
from flytune.selftest import dataset as selftest_dataset
from flytune.selftest import processes as selftest_processes
from flytune.selftest import tiny_model
from flytune.selftest.matrix import all_pairs
from flytune.selftest.runs import Pair
from flytune.sharding import pair_problem, sharding_of
from tasks.train import TRAIN
from tests.chaos import checking
from tests.chaos.bucket import NAME, Bucket
from tests.chaos.faults import Bag
from tests.chaos.pods import write_inputs
from tests.chaos.rounds import Round, grouped

STEPS, ROWS = 14, 40


class Report(Record):
    """What became of a pair."""

    pair: str
    faults: dict[str, int]
    """By kind."""
    runs: int
    on_s3: int
    """Of the runs."""
    pods: int
    by_hand: int
    """Attempts after which Flyte would not have started another: a person had to."""
    steps: int
    """Of all runs together."""
    repeated: dict[str, int]
    """Steps that were trained again, by the kind of fault before."""
    seconds: list[float]
    """From each kill to the end of the next step."""
    problems: list[str]
    """What was lost."""

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


def recipe_for(pair: Pair, folder: Path, checkpoints: str, save_steps: int) -> Recipe:
    """Dropout is on, and the held-out samples are scored now and then: both have states that must come back."""
    processes = {"none": 1, "device_map": 1}.get(pair.sharding, 2)
    return Recipe.model_validate(
        {
            "name": "chaos",
            "model": {"name_or_path": str(folder / "base"), "dtype": "float32"},
            "data": {"path": str(folder / "chats.jsonl"), "heldout_path": str(folder / "heldout.jsonl")},
            "method": {"name": pair.method} | ({} if pair.method == "full" else {"lora_dropout": 0.1, "r": 8}),
            "sharding": {"name": pair.sharding},
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


def that_run(folder: Path) -> list[Pair]:
    """All that run on this machine's CPU, without offload."""
    found = []
    for pair in all_pairs():
        if pair.offload == "none" and pair.rows == "chats":
            recipe = recipe_for(pair, folder, str(folder), 1)
            if not pair_problem(recipe) and not sharding_of(recipe).misfit(recipe, shape_named(recipe.hardware.shape)):
                found.append(pair)
    return found


def make_inputs(folder: Path) -> None:
    """The tiny model and its data."""
    selftest_dataset.write(folder / "chats.jsonl", ROWS)
    selftest_dataset.write(folder / "heldout.jsonl", 4, seed=1)
    selftest_processes.run(1, tiny_model.write, folder / "base", tiny_model.SENTENCES, log=folder / "model.log")
    recipe = recipe_for(Pair("full", "none"), folder, str(folder), 1)
    selftest_processes.run(1, selftest_dataset.prepare, recipe, folder / "dataset", log=folder / "dataset.log")


class Struck:
    """One pair's runs, below one folder."""

    def __init__(self, pair: Pair, inputs: Path, folder: Path, seed: str, storage: str, cold: bool) -> None:
        self.pair, self.inputs, self.folder, self.storage, self.cold = pair, inputs, folder, storage, cold
        self.draw = random.Random(seed)
        self.rounds: list[Round] = []
        self.problems: list[str] = []

    def run(self, faults: int, tell: Callable[[str | None], None]) -> Report:
        """Strikes `faults` times, in as many runs as it takes."""
        signal.signal(signal.SIGTERM, lambda *_: _raise_exit())
        bag, bucket = Bag(self.draw), Bucket() if self.storage != "folder" else None
        try:
            calm = self._result(self._round(None, 1), Bag(self.draw), 0, tell)
            while calm and (done := sum(one.struck.total() for one in self.rounds)) < faults:
                on_s3 = bucket if self.storage == "s3" or len(self.rounds) % 2 == 0 else None
                one = self._round(on_s3, self.draw.choice([1, 2]))
                before = len(self.problems)
                self._result(one, bag, faults - done, tell, calm)
                if len(self.problems) > before + 1 or not one.struck:
                    break
        finally:
            if bucket:
                bucket.close()
        return self._report(self.rounds[1:])

    def _round(self, bucket: Bucket | None, save_steps: int) -> Round:
        folder = self.folder / f"run-{len(self.rounds)}"
        folder.mkdir(parents=True)
        checkpoints = f"s3://{NAME}/{folder.name}" if bucket else str(folder / "checkpoints")
        recipe = recipe_for(self.pair, self.inputs, checkpoints, save_steps)
        self.recipe, plan = recipe, planner.make(recipe)
        self.task = TRAIN[plan.shape]
        selftest_processes.run(1, _write, self.task, folder / "inputs.pb", recipe, plan, self.inputs / "dataset")
        self.rounds.append(Round(self.task, folder / "inputs.pb", folder, f"{checkpoints}/chaos", bucket, self.draw, self.cold))
        return self.rounds[-1]

    def _result(self, one: Round, bag: Bag, faults: int, tell: Callable[[str | None], None], calm: Any = None) -> Any:
        """Runs it and compares it with the undisturbed run; what is wrong goes to `problems`."""
        one.run(bag, faults, tell)
        found: Any = None
        problems = list(one.problems)
        for pod in one.done:
            found = selftest_processes.run(1, checking.result, self.task, pod.folder, self.recipe, self.inputs / "dataset")
            one.take([f"{line}\n" for line in found["lines"]])
            problems += checking.lost(found, calm or found)
        left = selftest_processes.run(1, checking.left, one.address) if one.done else []
        if one.is_left:
            # A later attempt, which was killed when an earlier one had its result, leaves its checkpoints.
            left = [name for name in left if name.startswith("attempt-")]
        if left:
            problems.append(f"the run is over, and {', '.join(left)} is left at its address")
        expected = {row[0]: row[1:] for row in (calm or found or {"steps": []})["steps"]}
        for step, seen in grouped(one.lines).items():
            problems += [
                f"an attempt had step {step} as {row}, not {expected.get(step)}" for row in seen if row != expected.get(step)
            ]
        for problem in problems:
            tell(f"{self.pair}: {one.folder.name}: {problem}")
        self.problems += [f"{one.folder.name}: {problem}" for problem in problems]
        if not problems:
            shutil.rmtree(one.folder)
        return found

    def _report(self, rounds: list[Round]) -> Report:
        faults, repeated = Counter[str](), Counter[str]()
        for one in rounds:
            faults += one.struck
            repeated += one.repeated
        return Report(
            pair=str(self.pair),
            faults=dict(sorted(faults.items())),
            runs=len(rounds),
            on_s3=sum(one.bucket is not None for one in rounds),
            pods=sum(one.pods for one in rounds),
            by_hand=sum(one.by_hand for one in rounds),
            steps=STEPS * len(rounds),
            repeated=dict(sorted(repeated.items())),
            seconds=[second for one in rounds for second in one.seconds],
            problems=self.problems,
        )


def _raise_exit() -> None:
    raise SystemExit(1)


def _write(task: Any, file: Path, recipe: Recipe, plan: Any, dataset: Path) -> None:
    write_inputs(task, file, {"recipe": recipe, "plan": plan, "dataset": FlyteDirectory(str(dataset))})
