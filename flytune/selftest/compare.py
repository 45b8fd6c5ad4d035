"""Differences between two training runs."""

from pathlib import Path
from typing import Any

from flytune.errors import ExportError
from flytune.selftest.runs import FinishedRun


def losses(run: FinishedRun, plain: FinishedRun, scale: float = 0.0) -> float:
    """Return the largest difference of a step's loss, relative to the loss, or to `scale` where that is
    more."""
    pairs = [
        (step.loss, other.loss) for step, other in zip(run.result.steps, plain.result.steps, strict=True)
    ]
    return _largest(pairs, scale)


def grad_norms(run: FinishedRun, plain: FinishedRun) -> float:
    """Return the largest relative difference of a step's gradient norm; NaN if a norm was not recorded."""
    norms = [
        (step.grad_norm, other.grad_norm)
        for step, other in zip(run.result.steps, plain.result.steps, strict=True)
    ]
    missing = float("nan")
    return _largest(
        [(missing if mine is None else mine, missing if theirs is None else theirs) for mine, theirs in norms]
    )


def weights(run: FinishedRun, plain: FinishedRun, base: Path) -> float:
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
    # The head of a reward model is not in the base.
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
