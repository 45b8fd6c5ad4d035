"""Memory and time of a run's own answers as lines of its plan, and the larger batch of them that is
faster."""

from dataclasses import replace

from flytune.hardware.shapes import GIB
from flytune.planning import candidates, requirements, workloads
from flytune.planning.candidates import Fit
from flytune.sentences import counted
from training_estimates import decoding, model_states

_WORTH = 1.2
"""Times as fast that drawing must be with another batch for a plan to name it."""


def reasons(fit: Fit) -> list[str]:
    """Return the lines of a plan about its drawn answers; none where the objective draws none."""
    work, time = fit.workload, fit.time
    if work.decoding is None:
        return []
    drawn, held = work.decoding, decoding.held_bytes(work, work.decoding.at_a_time)
    each = (
        f"drawing: each process draws {counted(drawn.answers, 'answer')} a step, {drawn.at_a_time} at a "
        f"time, which take {held['KV cache'] / GIB:.2g} GiB of keys and values and "
        f"{held['logits and loss'] / GIB:.2g} of logits"
    )
    if time is None:
        return [f"{each}; its time is not known on {fit.shape.name}"]
    return [
        f"{each}; {counted(drawn.tokens, 'token')} of each take {time.drawing:.3g} s of a step's "
        f"{time.seconds:.3g}, less where answers end before. That time follows from the bytes and kernels of "
        "a token; no published run was compared",
        *_larger(fit),
    ]


def _larger(fit: Fit) -> list[str]:
    """Return the largest batch of drawn answers that leaves a tenth of the memory free, if it is worth
    writing."""
    recipe, work, time = fit.recipe, fit.workload, fit.time
    assert work.decoding is not None
    assert time is not None
    for size in range(work.decoding.answers, work.decoding.at_a_time, -1):
        if work.decoding.answers % size:
            continue
        other = replace(work, decoding=replace(work.decoding, at_a_time=size))
        states = model_states.of(other)
        need = requirements.of(recipe, fit.shape, other, states)[0]
        if need.share > min(candidates.preferred_share(recipe), candidates.allowed_share(recipe)):
            continue
        faster = workloads.time_of(other, fit.shape, states)
        if faster is None or time.drawing < _WORTH * faster.drawing:
            return []
        return [
            f"objective.per_device_generation_batch_size: {size} would draw them in {faster.drawing:.3g} s, "
            f"with {need.peak_bytes / GIB:.1f} of {need.available_bytes / GIB:.1f} GiB of {need.resource}"
        ]
    return []
