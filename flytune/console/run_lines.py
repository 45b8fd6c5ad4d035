"""Lines of a run in a terminal or log, beside those of its steps: its plan, data, checkpoints and results."""

from flytune.records import Manifest, Plan
from flytune.sentences import sharers


def plan_line(plan: Plan, method: str, sharding: str) -> str:
    """Return `tiny: plan: full, sharding ddp, on cpu-2: 4 samples a step (2 x 1 accumulated x 2 processes),
    ...`."""
    processes = sharers(plan.degrees.data_parallel, plan.degrees.copies)
    batch = (
        f"{plan.per_device_train_batch_size} x {plan.gradient_accumulation_steps} accumulated x {processes}"
    )
    steps = "" if plan.steps is None else f", {_count(plan.steps, 'step')}"
    hours = f", about {plan.hours[1]:.2g} hours and ${plan.price[1]:,.2f}" if plan.hours else ""
    return (
        f"{plan.recipe}: plan: {method}, sharding {sharding}, on {plan.shape}: "
        f"{_count(plan.global_batch_size, 'sample')} a step ({batch}){steps}; {plan.headline}{hours}"
    )


def data_line(name: str, manifest: Manifest) -> str:
    """Return `tiny: data: 52 samples to train on, 8 held out, of 62 rows; 2 too long`, with all that was left
    out or cut."""
    train = manifest.train
    packed = "" if train.blocks is None else f" in {_count(train.blocks, 'packed block')}"
    others = {
        "bad": manifest.bad,
        "duplicate": manifest.duplicates,
        "too long and left out": manifest.dropped_too_long,
        "without a trained token and left out": manifest.dropped_untrained,
        "cut off at data.max_length": manifest.truncated,
    }
    listed = ", ".join(f"{count:,} {what}" for what, count in others.items() if count)
    samples = f"{_count(train.samples, 'sample')} to train on{packed}, {manifest.heldout.samples:,} held out"
    return f"{name}: data: {samples}, of {_count(manifest.rows, 'row')}" + (f"; {listed}" if listed else "")


def checkpoints_line(name: str, save_steps: int | float | str | None, kept: int, address: str) -> str:
    """Return the line that says when checkpoints are written, and where to."""
    if save_steps is None:
        why = "checkpoints.save_steps: auto writes some"
        return f"{name}: checkpoints: none, so a run that is ended starts again at step 0 ({why})"
    if isinstance(save_steps, str):
        often = "after each epoch" if save_steps == "epoch" else "as often as loses least time"
    else:
        often = (
            f"every {_count(save_steps, 'step')}"
            if save_steps >= 1
            else f"every {save_steps:.3g} of all steps"
        )
    last = "the last one is" if kept == 1 else f"the last {kept} are"
    return f"{name}: checkpoints: {often}, {last} kept, in {address}"


def result_lines(what: str, address: str, report: str = "report.html") -> list[str]:
    """Return the last lines of a run: the addresses of its result and of its report, a file of the name
    `report`."""
    return [f"{what}: {address}", f"report: {address.rstrip('/')}/{report}"]


def _count(number: float, singular: str, more: str = "") -> str:
    noun = singular if number == 1 else more or singular + "s"
    return f"{number:,} {noun}"
