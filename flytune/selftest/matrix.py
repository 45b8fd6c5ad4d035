"""The matrix of all pairs of method and sharding, each compared with plain training of the method."""

import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from flytune.errors import ExportError, FlytuneError, RecipeError
from flytune.hardware import Shape
from flytune.objectives import objective_of
from flytune.recipe import Method, Sharding
from flytune.schema import Record, Strict
from flytune.selftest import shapes
from flytune.selftest.processes import Nodes, RankFailed
from flytune.selftest.runs import (
    OBJECTIVE_ROWS,
    BatchLayout,
    FinishedRun,
    Model,
    Pair,
    Parallel,
    Rows,
    Trials,
    plain_pair,
)
from flytune.sentences import counted
from flytune.sharding import SHARDINGS, pair_problem, sharding_of


def loss_distance(run: FinishedRun, plain: FinishedRun, scale: float = 0.0) -> float:
    """Return the largest difference of a step's loss, relative to the loss, or to `scale` where that is
    more."""
    pairs = [
        (step.loss, other.loss) for step, other in zip(run.result.steps, plain.result.steps, strict=True)
    ]
    return _largest(pairs, scale)


def grad_norm_distance(run: FinishedRun, plain: FinishedRun) -> float:
    """Return the largest relative difference of a step's gradient norm; NaN if a norm was not recorded."""
    norms = [
        (step.grad_norm, other.grad_norm)
        for step, other in zip(run.result.steps, plain.result.steps, strict=True)
    ]
    missing = float("nan")
    return _largest(
        [(missing if mine is None else mine, missing if theirs is None else theirs) for mine, theirs in norms]
    )


def weight_distance(run: FinishedRun, plain: FinishedRun, base: Path) -> float:
    """Return ||run - plain|| / ||plain - start||, over all exported tensors as one vector.

    An element-wise bound would be meaningless: Adam divides each gradient by its own size, so a gradient that
    is only rounding noise moves its weight by a full learning rate, in either direction. An adapter's initial
    weights are not stored: its lora_B starts at zero, so the norm of lora_B alone is at most the update's,
    and the distance at least the true one.

    Raises:
        ExportError: the two runs exported different tensors.
    """
    import numpy

    mine, theirs, start = (_tensors(folder) for folder in (run.exported, plain.exported, base))
    if mine.keys() != theirs.keys():
        raise ExportError(
            f"{run.exported.parent.name}: exported different tensors: "
            f"{sorted(mine.keys() ^ theirs.keys())[:3]}"
        )
    is_adapter = any(".lora_B." in name for name in theirs)
    differences = [mine[name] - theirs[name] for name in mine]
    # A model without a head has shorter names than its base.
    start |= {name.removeprefix("model."): tensor for name, tensor in start.items()}
    # The head of a sequence is not in the base.
    updates = [
        theirs[name] if is_adapter else theirs[name] - start[name]
        for name in mine
        if (".lora_B." in name if is_adapter else name in start)
    ]
    norm = [float(numpy.sqrt(sum((part**2).sum() for part in parts))) for parts in (differences, updates)]
    return norm[0] / norm[1]


def _largest(pairs: list[tuple[float, float]], scale: float = 0.0) -> float:
    import numpy

    mine, theirs = numpy.array(pairs).T
    # numpy's max returns NaN if there is one, which exceeds any tolerance.
    return float(numpy.max(numpy.abs(mine - theirs) / numpy.maximum(numpy.abs(theirs), scale)))


def _tensors(folder: Path) -> dict[str, Any]:
    """Return all tensors of a folder's safetensors files, in float64."""
    from safetensors.numpy import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.astype("float64") for file in files for name, tensor in load_file(file).items()}


# Largest allowed differences from plain training; docs/equality.md has the reasons, and observed values.
TOLERANCES = {"loss": 1e-5, "grad_norm": 1e-4, "weights": 1e-4}
# Pairs that are also trained on packed rows, and compared with the same chats unpacked.
PACKED = [
    Pair(method, sharding, rows="packed")
    for method in get_args(Method.model_fields["name"].annotation)
    for sharding, kind in SHARDINGS.items()
    if method in kind.packed_selftests
]
# Pairs that are also trained by two processes that divide each sample.
DIVIDED = [
    Pair(method, sharding, rows=rows, parallel="sp2")
    for sharding, kind in SHARDINGS.items()
    for method in kind.divided_selftests
    for rows in get_args(Rows)
    if rows == "chats" or (rows == "packed" and method in kind.packed_selftests)
]
# Pairs that are also trained by two groups of processes.
GROUPED = [
    Pair(method, sharding, parallel="2x2")
    for sharding, kind in SHARDINGS.items()
    for method in kind.grouped_selftests
]
# Pairs that are also trained with these objectives, without offload; one is refused with the reason where it
# cannot run.
COMPARED = [
    Pair(method, sharding, rows=rows)
    for rows in OBJECTIVE_ROWS
    for sharding in SHARDINGS
    for method in get_args(Method.model_fields["name"].annotation)
]
# Pairs of a model that reads images, of which some samples have none.
IMAGES = [
    Pair(method, sharding, rows="images", model="vision")
    for method in ("full", "lora")
    for sharding, kind in SHARDINGS.items()
    if method not in kind.refuses
]
_WITH_LORA = [name for name, kind in SHARDINGS.items() if "lora" not in kind.refuses]
# Pairs of a mixture of experts, whose experts have adapters: as chats, packed, with a balance loss, and with
# other objectives.
_OF_MIXTURES = [
    *(Pair("lora", sharding, model="experts") for sharding in _WITH_LORA),
    *(Pair("lora", sharding, rows="packed", model="experts") for sharding in _WITH_LORA),
    *(Pair("lora", sharding, model="balance") for sharding in _WITH_LORA),
    *(
        Pair("lora", sharding, rows=rows, model="experts")
        for rows in OBJECTIVE_ROWS
        for sharding in _WITH_LORA
    ),
    *(
        Pair("lora", sharding, rows=rows, model="balance")
        for rows in ("dpo", "kto", "grpo")
        for sharding in _WITH_LORA
        # The plan refuses a balance loss beside a reference there (planning/candidates.py).
        if not SHARDINGS[sharding].estimated_as.zero3
    ),
    *(Pair("full", sharding, model="experts") for sharding in SHARDINGS),
]
EXPERTS = [
    pair
    for pair in _OF_MIXTURES
    if pair.method == "lora" and (pair.rows, pair.model) in SHARDINGS[pair.sharding].mixture_selftests
]
# Pairs that run only where they are named; a balance loss has nothing to be compared with in plain training.
FURTHER = [
    pair
    for pair in _OF_MIXTURES
    if pair not in EXPERTS and (pair.model != "balance" or pair != plain_pair(pair))
]
# Number of last lines that are shown of a failed rank's traceback.
LINES_SHOWN = 8


class Distance(Strict):
    """Differences of one run from plain training of its method."""

    layout: str
    """Micro batch x accumulation x processes."""
    loss: float
    """Largest relative difference of a step's loss."""
    grad_norm: float
    """Largest relative difference of a step's gradient norm before clipping."""
    weights: float
    """Norm of the difference of all exported tensors over the norm of the update."""
    seconds: float
    """Seconds of the training loop."""

    @property
    def exceeded(self) -> list[str]:
        """Differences that exceed their tolerance."""
        return [
            f"{name} {getattr(self, name):.1e}"
            for name, most in TOLERANCES.items()
            if not getattr(self, name) <= most
        ]


class Cell(Strict):
    """The result of one pair."""

    method: str
    sharding: str
    offload: str
    rows: Rows
    model: Model = "dense"
    parallel: Parallel = "data"
    state: Literal["equal", "differs", "failed", "refused", "lacking"]
    words: str
    """Text in the table."""
    reason: str = ""
    distances: list[Distance] = Field(default=[])
    """Differences of each layout of the global batch."""

    @classmethod
    def of(cls, pair: Pair, **fields: object) -> "Cell":
        return cls.model_validate(pair._asdict() | fields)


class Matrix(Record):
    """The results of all pairs on one machine."""

    machine: str
    global_batch_size: int
    tolerances: dict[str, float] = TOLERANCES
    cells: list[Cell]
    seconds: float

    @property
    def is_good(self) -> bool:
        return not any(cell.state in ("differs", "failed") for cell in self.cells)


def all_pairs() -> list[Pair]:
    """Return every method with every sharding and offload, also unsupported ones; a few packed, with divided
    samples, in groups of processes, about images, or with experts; all with other objectives."""
    methods, offloads = (
        get_args(section.model_fields[name].annotation)
        for section, name in ((Method, "name"), (Sharding, "offload"))
    )
    pairs = [
        Pair(method, sharding, offload) for sharding, offload, method in product(SHARDINGS, offloads, methods)
    ]
    return [*pairs, *PACKED, *DIVIDED, *GROUPED, *COMPARED, *IMAGES, *EXPERTS]


def pairs_named(names: str) -> list[Pair]:
    """Parse names such as `full/zero2,lora/zero3/cpu`; without names, return all pairs but those of FURTHER.

    Raises:
        RecipeError: there is no such pair.
    """
    if not names:
        return all_pairs()
    known = {str(pair): pair for pair in [*all_pairs(), *FURTHER]}
    wanted = names.split(",")
    if unknown := [name for name in wanted if name not in known]:
        raise RecipeError(
            f"pairs: {', '.join(unknown)}: no such pair; write method/sharding or method/sharding/offload, "
            f"as in full/zero2 or full/zero3/cpu (or {PACKED[0]}, {DIVIDED[0]}, {GROUPED[0]}, {EXPERTS[0]}), "
            f"with a sharding of {', '.join(SHARDINGS)}"
        )
    return [known[name] for name in wanted]


def fill(
    folder: Path,
    pairs: Sequence[Pair],
    on_cell: Callable[[Cell], None] = lambda cell: None,
    nodes: Nodes | None = None,
) -> Matrix:
    """Test all `pairs` on this machine, or on all `nodes`, of which this is the first.

    Args:
        folder: a new or empty folder for the exports and logs of all runs.
        on_cell: is called with each cell as soon as it is known.

    Raises:
        RankFailed: the tiny model or its data could not be made.
    """
    started = time.monotonic()
    trials, cells = Trials(folder, nodes=nodes), []
    for pair in pairs:
        cells.append(try_pair(trials, pair))
        on_cell(cells[-1])
    here = trials.shapes[0]
    processes = (
        f"{here.processes} x {here.accelerator}"
        if here.is_gpu
        else f"{counted(here.processes, 'rank')} on a CPU of {counted(here.cpu, 'core')}"
    )
    if here.nodes > 1:
        processes = f"{counted(here.nodes, 'node')} of {processes}"
    size, seconds = trials.global_batch_size, time.monotonic() - started
    return Matrix(machine=processes, global_batch_size=size, cells=cells, seconds=seconds)


def try_pair(trials: Trials, pair: Pair) -> Cell:
    """Train one pair in all its layouts, and compare each with plain training; or return the reason why it
    cannot run."""
    recipe = trials.recipe(pair)
    if problem := pair_problem(recipe) or next(iter(objective_of(recipe).problems()), None):
        return Cell.of(pair, state="refused", words="refused", reason=problem)
    shape = shapes.shape_for(recipe, trials.shapes)
    if shape is None:
        misfit = f"{pair}: {pair.sharding} {sharding_of(recipe).misfit(trials.shapes[0])}"
        lacking = shapes.lacks(recipe, trials.shapes)
        return Cell.of(
            pair, state="lacking" if lacking else "refused", words=lacking or "refused", reason=misfit
        )
    layouts = trials.layouts(pair, sharding_of(recipe).degrees(shape))
    distances = []
    for layout in layouts[1:] if pair == plain_pair(pair) else layouts:
        try:
            distances.append(distance(trials, pair, layout, shape))
        except (RankFailed, FlytuneError) as error:
            end = "\n".join(str(error).strip().splitlines()[-LINES_SHOWN:])
            return Cell.of(
                pair, state="failed", words="FAILED", reason=f"{pair} at {layout}: {end}", distances=distances
            )
    if exceeded := [
        f"{distance.layout}: {', '.join(distance.exceeded)}" for distance in distances if distance.exceeded
    ]:
        reason = f"{pair} differs from plain training of {pair.method}; {'; '.join(exceeded)}"
        return Cell.of(pair, state="differs", words="DIFFERS", reason=reason, distances=distances)
    return Cell.of(
        pair,
        state="equal",
        words=f"equal {max(distance.loss for distance in distances):.0e}",
        distances=distances,
    )


def distance(trials: Trials, pair: Pair, layout: BatchLayout, shape: Shape) -> Distance:
    """Train a pair in one layout, and measure its differences from plain training."""
    plain = trials.reference(pair, layout.micro_batch)
    run = trials.train(pair, layout, shape)
    return Distance(
        layout=str(layout),
        # Of drawn answers the loss is a sum of advantages of both signs, which are about 1, and may be 0
        # itself.
        loss=loss_distance(run, plain, scale=1.0 if pair.rows == "grpo" else 0.0),
        grad_norm=grad_norm_distance(run, plain),
        weights=weight_distance(run, plain, trials.base(pair.model)),
        seconds=run.result.seconds,
    )
