"""Memory and time of a run's own answers as lines of its plan, and the larger batch of them that is
faster."""

from bisect import bisect_left
from dataclasses import replace

from flytune.hardware.shapes import GIB
from flytune.objectives.bound import BoundRecipe
from flytune.planning import candidates, requirements, workloads
from flytune.planning.candidates import Fit
from flytune.recipe import Grpo, TransformersEngine, VllmEngine
from flytune.sentences import counted
from training_estimates import decoding, model_states
from training_estimates.workload import Decoding

_WORTH = 1.2
"""Times as fast that drawing must be with another batch for a plan to name it."""


def reasons(fit: Fit) -> list[str]:
    """Return the lines of a plan about its drawn answers; none where the objective draws none."""
    work = fit.workload
    if work.decoding is None:
        return []
    return _of_vllm(fit, work.decoding) if work.decoding.by_vllm else _of_model(fit, work.decoding)


def _of_model(fit: Fit, drawn: Decoding) -> list[str]:
    """Return the lines about answers that the trained model draws itself."""
    held, time = decoding.held_bytes(fit.workload, drawn.at_a_time), fit.time
    line = (
        f"drawing: each process draws {counted(drawn.answers, 'answer')} a step, {drawn.at_a_time} at a "
        f"time, which take {held['KV cache'] / GIB:.2g} GiB of keys and values and "
        f"{held['logits and loss'] / GIB:.2g} of logits"
    )
    if time is None:
        return [f"{line}; its time is not known on {fit.shape.name}"]
    scoring = ", with the scoring by the teacher" if drawn.teacher else ""
    return [
        f"{line}; {counted(drawn.tokens, 'token')} of each take {time.drawing:.3g} s of a step's "
        f"{time.seconds:.3g}{scoring}, less where answers end before. That time follows from the bytes and "
        "kernels of a token; no published run was compared",
        *_larger(fit),
        *_by_the_other(fit, drawn),
    ]


def _of_vllm(fit: Fit, drawn: Decoding) -> list[str]:
    """Return the lines about answers that vLLM draws."""
    time, line = fit.time, f"drawing: vLLM draws {counted(drawn.answers, 'answer')} a process and step"
    if drawn.served:
        own = fit.shape.processes - fit.workload.degrees.processes
        line += f", on {own} of a node's {counted(fit.shape.processes, 'GPU')}, {drawn.served} each"
    if time is None:
        return [f"{line}; its time is not known on {fit.shape.name}"]
    low, high = decoding.VLLM_BAND
    return [
        f"{line}; {counted(drawn.tokens, 'token')} of each take {time.drawing:.3g} s of a step's "
        f"{time.seconds:.3g}, with the scoring by the trained model, less where answers end before. That "
        f"time is fitted to published speeds of one answer at a time, which are {low:g} to {high:g} of it "
        "(training_estimates/decoding.py); no published run with several was compared",
        *_by_the_other(fit, drawn),
    ]


def _by_the_other(fit: Fit, drawn: Decoding) -> list[str]:
    """Return the line about the price of a step with the other engine on the same shape, or with vLLM on GPUs
    that train where it has its own; none where that cannot run there."""
    draws = fit.objective.draws()
    if draws is None or draws.teacher:
        return []  # a student that is distilled has one engine
    if drawn.served:
        return _by_all_gpus(fit)
    engine = TransformersEngine() if drawn.by_vllm else VllmEngine(name="vllm")
    section = fit.recipe.objective.model_copy(update={"engine": engine})
    recipe = fit.recipe.model_copy(update={"objective": section})
    bound = BoundRecipe(recipe)
    if recipe.refusals() or bound.objective.base_problems(fit.workload.geometry):
        return []
    other = replace(fit.workload, decoding=replace(drawn, by_vllm=not drawn.by_vllm))
    states = model_states.of(other)
    with_other = replace(
        fit,
        recipe=recipe,
        workload=other,
        needs=requirements.of(bound, fit.shape, other, states),
        time=workloads.time_of(other, fit.shape, states),
    )
    price = _price(fit, with_other)
    if price is None or not with_other.fits:
        return []
    # A server of one's own may be on any machine.
    is_elsewhere = drawn.by_vllm and draws.gpu_share is None
    beside = ", without the machine of the server" if is_elsewhere else ""
    return [f"objective.engine: {engine.name} {price}{beside}; {_where_vllm_is_faster(fit, drawn)}"]


def _price(fit: Fit, other: Fit) -> str | None:
    """Return how the price of a step changes with another way to draw, as a clause; None where it is not
    known."""
    if fit.time is None or other.time is None:
        return None
    price, other_price = (
        time.seconds / 3600 * fit.shape.total_price_per_hour for time in (fit.time, other.time)
    )
    return (
        f"would be {'cheaper' if other_price < price else 'dearer'}: {other.time.drawing:.3g} s of drawing, "
        f"and ${other_price:.2g} a step instead of ${price:.2g}"
    )


def _by_all_gpus(fit: Fit) -> list[str]:
    """Return the line about the price of a step with vLLM on GPUs that train; none where that cannot run."""
    section = fit.recipe.objective
    assert isinstance(section, Grpo)
    engine = section.engine.model_copy(update={"gpus": 0})
    recipe = fit.recipe.model_copy(update={"objective": section.model_copy(update={"engine": engine})})
    other = candidates.best_fit(recipe, fit.shape, fit.workload.geometry)
    price = None if isinstance(other, str) else _price(fit, other)
    return [] if price is None else [f"objective.engine.gpus: 0, where all GPUs train, {price}"]


def _where_vllm_is_faster(fit: Fit, drawn: Decoding) -> str:
    """Return from which length of answers on vLLM draws faster, as a clause."""

    def seconds(answers: Decoding) -> float:
        work = replace(fit.workload, decoding=answers)
        time = workloads.time_of(work, fit.shape, model_states.of(work))
        assert time is not None, "the caller has one"
        return time.drawing

    def is_vllm_faster(tokens: int) -> bool:
        answers = replace(drawn, tokens=tokens, by_vllm=False)
        return seconds(replace(answers, by_vllm=True)) < seconds(answers)

    # A prompt has a token at least.
    lengths = range(1, fit.recipe.data.max_length)
    shortest = bisect_left(lengths, True, key=is_vllm_faster)
    if shortest == len(lengths):
        return "vLLM is faster at no length of answers"
    if shortest == 0:
        return "vLLM is faster at every length of answers"
    return f"vLLM is faster where answers have {counted(lengths[shortest], 'token')} or more"


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
        need = requirements.of(fit, fit.shape, other, states)[0]
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
