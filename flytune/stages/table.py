"""The table of stages: where each one runs, what it is given there, and how it is wired into a run.

A stage is a function of this package and a row of this table. `tasks/` and `flyte2/` declare the rows for
Flyte; finetune, its parts, refresh and sweep are wired from RUN.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, NamedTuple

from flytune.failures.table import RETRIES
from flytune.hardware import load_cluster
from flytune.pods import disk

PREPARED = "8"
"""Version of the prepared bytes. Raise it when the same request would prepare other bytes."""


class Resources(NamedTuple):
    """Requests of a light pod."""

    cpu: int
    memory_gib: int
    disk_gib: int | None = None
    is_limit: bool = False
    """True if the pod gets no more either: its processes are as many as its cores."""


class Cache(NamedTuple):
    """Results that are stored by the inputs they follow from."""

    version: str
    """Raise it when the same inputs would store other bytes."""
    ignored: tuple[str, ...] = ()
    """Inputs without an influence on the result."""


@dataclass(frozen=True)
class Stage:
    """Row of the table."""

    name: str
    """Name in a run and in the reasons of failures."""
    function: str
    """Module and name of the function in this package: `plan.make_plan`; empty where each kind of input has a
    function."""
    place: Literal["light", "plan", "node", "shape"] = "light"
    """A light pod, one in the image that plans, one node of each row of shapes.yaml, or all of its nodes."""
    requests: Resources | None = None
    """Requests of a light pod; shapes have their own."""
    retries: int = RETRIES
    """Attempts of a light pod after the first; shapes have their own."""
    cache: Cache | None = None
    secrets: tuple[Literal["hub", "tracking", "notify"], ...] = ()
    """Kinds of secrets that its pods get."""
    report: str = ""
    """Title of the page that it shows; empty if it shows none."""
    phase: str = ""
    """Phase of its notes: where two attempts were killed in it, a third is refused. Empty for one that loads
    no model."""
    has_separate_fields: bool = False
    """True if the fields of its record are outputs of their own: Flyte's conditions compare primitives
    only."""
    makes: str = ""
    """Name of its result in a run."""
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Inputs in a run, each with the name of a field of the plan or of an earlier stage's result."""
    over: str = ""
    """Input that is a list in the run; the stage runs once for each item, and its result is a list."""
    on: str = ""
    """Name of the value that names the row of shapes.yaml."""
    fetch: str = ""
    """Module and name of the function that brings its inputs to a node, once for all ranks: of a stage that
    trains."""
    asks: bool = False
    """True if it may leave a question to a person beside an artifact: its result, or its input `artifact`."""
    is_costly: bool = False
    """True if a sweep runs it for no point once too few points can succeed."""

    def taken(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return its inputs out of the values of a run."""
        return {name: values[source] for name, source in self.inputs.items()}

    def load(self) -> Callable[..., Any]:
        """Return its function."""
        return _imported(self.function)

    def load_fetch(self) -> Callable[..., Any] | None:
        """Return the function that brings its inputs to a node; None if it has none."""
        return _imported(self.fetch) if self.fetch else None


class Phase(NamedTuple):
    """Stages that a sweep runs for all points before any later one."""

    name: str
    stages: tuple[Stage, ...]

    @property
    def waves(self) -> list[list[Stage]]:
        """Return its stages in groups, each of which takes what an earlier group makes."""
        waves: list[list[Stage]] = []
        for stage in self.stages:
            after = [
                number
                for number, wave in enumerate(waves, 1)
                for earlier in wave
                if earlier.makes in stage.inputs.values()
            ]
            place = max(after, default=0)
            if place == len(waves):
                waves.append([])
            waves[place].append(stage)
        return waves


def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(".")
    imported: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), function)
    return imported


def _inputs(*same: str, **others: str) -> dict[str, str]:
    return {name: name for name in same} | others


def _base_model_version() -> str:
    """Return a version that changes with cluster.yaml's model_cache, where outputs of the stage then are."""
    version, folder = "1", load_cluster().model_cache
    return version if folder is None else f"{version}-{hashlib.sha256(folder.encode()).hexdigest()[:8]}"


_SMALL = Resources(1, 2)
# Memory for the harness, which loads its tasks' data.
_PLANNING = Resources(2, 8)

PLAN = Stage(
    "plan", "plan.make_plan", "plan", _PLANNING, secrets=("hub",), report="plan", has_separate_fields=True
)
BASE_MODEL = Stage(
    "base_model",
    "base_model.fetch_base_model",
    requests=Resources(2, 4, disk.FETCH_BASE_GIB, is_limit=True),
    cache=Cache(_base_model_version()),
    secrets=("hub",),
    makes="base_files",
    inputs=_inputs("base"),
)
PREPARE = Stage(
    "prepare",
    "prepare.prepare_data",
    requests=Resources(4, 16, disk.PREPARE_GIB, is_limit=True),
    cache=Cache(PREPARED, ignored=("scratch_folder",)),
    secrets=("hub",),
    makes="dataset",
    inputs=_inputs("request", "scratch_folder"),
)
REFERENCE = Stage(
    "reference",
    "reference.reference_log_probs",
    "node",
    cache=Cache("1", ignored=("dataset", "base")),
    # It fetches a teacher itself.
    secrets=("hub",),
    phase="reference",
    makes="reference_folders",
    inputs=_inputs("dataset", request="references", base="base_files"),
    over="request",
    on="reference_shape",
)
TRAIN = Stage(
    "train",
    "train.train",
    "shape",
    secrets=("tracking",),
    makes="trained",
    inputs=_inputs(
        "recipe", "plan", "dataset", "export_only", base="base_files", references="reference_folders"
    ),
    on="route",
    fetch="train.fetch_inputs",
    is_costly=True,
)
EVALUATE = Stage(
    "evaluate",
    "evaluate.evaluate_model",
    "node",
    phase="evaluate",
    makes="metrics",
    inputs=_inputs("recipe", "trained", "dataset", base="base_files"),
    on="shape",
)
HARNESS = Stage(
    "harness",
    "harness.evaluate_tasks",
    "node",
    phase="evaluate",
    makes="answers",
    inputs=_inputs("recipe", "trained", "harness_data", job="jobs", base="base_files"),
    over="job",
    on="shape",
)
STORE = Stage(
    "store",
    "store.store_artifact",
    requests=Resources(2, 8, disk.STORE_GIB),
    secrets=("hub", "notify"),
    report="Report",
    makes="artifact",
    inputs=_inputs("recipe", "plan", "dataset", "trained", "metrics", "answers", "harness_data"),
    asks=True,
)
RUN = (
    Phase("prepare", (BASE_MODEL, PREPARE)),
    Phase("train", (REFERENCE, TRAIN)),
    Phase("evaluate", (EVALUATE, HARNESS)),
    Phase("store", (STORE,)),
)
"""The stages of a run between its plan and its end, in their order."""

CHECKPOINT = Stage("checkpoint", "checkpoint.find_checkpoint", requests=Resources(1, 1), retries=0)
COMBINE = Stage("combine", "harness.combine_tasks", requests=_PLANNING, secrets=("hub",))
REPORT = Stage(
    "report",
    "report.report_failure",
    requests=Resources(1, 1),
    retries=0,
    secrets=("notify",),
    report="Failure",
)
INPUT_DATA = Stage("input_data", "", requests=Resources(1, 2, 20))
DRAW = Stage("draw", "sweep.draw_points", "plan", _PLANNING, secrets=("hub",))
COMPARE_POINTS = Stage(
    "compare_points", "sweep.compare_points", requests=_SMALL, secrets=("notify",), report="Sweep"
)
SPLIT = Stage("split", "infer.split_prompts", requests=Resources(2, 4), secrets=("hub",))
INFER = Stage("infer", "infer.answer_prompts", "node", phase="answer")
JOIN = Stage("join", "infer.join_answers", requests=Resources(2, 8))
CHECK_STAGES = Stage("check_stages", "merge.check_stages", requests=_SMALL)
PASS_GUARDS = Stage("pass_guards", "merge.pass_guards", requests=_SMALL, secrets=("hub",))
MERGE = Stage("merge", "merge.merge_adapter", "node")
CONTINUE = Stage("continue", "merge.continue_complete", requests=_SMALL)
COMPARE_MODELS = Stage("compare", "promote.compare_models", "node")
PROMOTE = Stage("promote", "promote.promote_challenger", requests=_SMALL, asks=True)
ASK = Stage("ask", "approval.ask_person", requests=_SMALL, secrets=("notify",), report="Approval")
ANSWER = Stage(
    "answer",
    "approval.take_answer",
    requests=Resources(2, 8, disk.STORE_GIB),
    secrets=("hub", "notify"),
    report="Approval",
)
ROLLBACK = Stage("rollback", "promote.rollback_accepted", requests=_SMALL, retries=0)
DECIDE = Stage("decide", "refresh.decide_refresh", requests=_SMALL, secrets=("hub",))
SKIP = Stage("skip", "refresh.skip_refresh", requests=_SMALL, retries=0)
SELFTEST = Stage("selftest", "selftest.selftest_machine", "shape", report="Self-test")

ROWS = tuple(row for row in list(globals().values()) if isinstance(row, Stage))
"""All rows."""
