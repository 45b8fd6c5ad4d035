"""Forward passes: batch, reference model and loss of each objective as TRL's trainers have them, and drawing
answers."""

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from flytune.data import Collator
from flytune.dryrun.allocations import FORWARD, AllocationLedger
from flytune.dryrun.case import Case
from flytune.models import host_memory, own_logits
from flytune.models.scoring import innermost
from flytune.models.sequence_parallel import WHOLE, SequenceGroup, SequencePart
from flytune.records.plan import DRAW
from flytune.rollouts import Drawing, chosen

REFERENCE = "reference"
"""Stage of the passes without gradients, of which one is traced."""


def is_flash(case: Case) -> bool:
    return case.recipe.model.attn_implementation.startswith("flash")


def prepare(case: Case, model: Any) -> None:
    """Give a language model the head of its loss, and switch dropout off where the objective does."""
    objective = case.objective
    objective.set_dropout(model)
    if case.profile.loss == "chunked" and objective.head_outputs:
        base = innermost(model)
        own_logits.add_head(base, case.recipe.model.trust_remote_code, outputs=objective.head_outputs)
        if case.profile.kernels == "cpu":
            host_memory.use_small_loss_tiles()


def divided(case: Case) -> AbstractContextManager[None]:
    """Return the context of a step's passes in which processes that divide samples exchange heads."""
    if case.degrees.copies == 1:
        return nullcontext()
    return SequenceGroup(case.degrees.copies, timedelta(minutes=1)).computing(_batch(case), "cpu")


def forward(case: Case, model: Any, reference: Any, ledger: AllocationLedger) -> Any:
    """Run the forward passes of a micro batch, and return the loss.

    Args:
        reference: the frozen model beside `model`; None where there is none.
    """
    batch = _batch(case)
    batch.pop(WHOLE, None)

    def trained() -> Any:
        ledger.stage(FORWARD)
        return _loss(case, _outputs(case, model, batch))

    def frozen() -> Any:
        ledger.stage(REFERENCE)
        return _reference(case, model, reference, batch)

    loss, known = case.objective.run_passes(trained, frozen)
    # What the losses of preferences do with a number of each row has no size.
    return (loss if known is None else loss - known).mean()


def draw(case: Case, model: Any, ledger: AllocationLedger) -> None:
    """Draw the first and the last token of answers that are drawn together, as flytune.rollouts.draw does.

    Prompts are as long as the longest answers leave them. Between both tokens the cache grows at once, layer
    by layer.
    """
    import torch

    recipe, section = case.recipe, case.objective.draws()
    assert section is not None
    rows, longest = section.at_a_time or case.micro_batch, recipe.data.max_length
    prompt = max(1, longest - section.tokens)
    drawing = Drawing(ends=(0,), pad=0, temperature=case.objective.temperature())
    ledger.stage(DRAW)
    with torch.no_grad(), ledger.paths(model.eval()), _autocast(case):
        output = _token(model, rows, prompt, prompt, None, drawing)
        for layer in output.past_key_values.layers:
            more = torch.empty(
                rows, layer.keys.shape[1], longest - prompt - 1, layer.keys.shape[3], dtype=layer.keys.dtype
            )
            layer.keys, layer.values = (
                torch.cat([held, more], dim=-2) for held in (layer.keys, layer.values)
            )
            del more
        _token(model, rows, 1, longest, output.past_key_values, drawing)


def _token(model: Any, rows: int, length: int, seen: int, cache: Any, drawing: Drawing) -> Any:
    """Run the model on `length` tokens of each row, of `seen` so far, choose the next one, and return the
    model's output."""
    import torch

    output = model(
        input_ids=torch.ones(rows, length, dtype=torch.long),
        attention_mask=torch.ones(rows, seen, dtype=torch.long),
        position_ids=torch.ones(rows, length, dtype=torch.long),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    chosen(output.logits[:, -1].float(), torch.zeros(rows, dtype=torch.float64), drawing)
    return output


def _reference(case: Case, model: Any, reference: Any, batch: dict[str, Any]) -> Any:
    """Return a number of each row from a pass without gradients: of the reference, or of the model without
    its adapter.

    Such a pass leaves nothing behind, so that one stands for several.
    """
    import torch
    from trl.models.utils import disable_gradient_checkpointing

    base = innermost(model)
    without: AbstractContextManager[Any] = nullcontext() if reference is not None else model.disable_adapter()
    with torch.no_grad(), disable_gradient_checkpointing(base), without:
        return _loss(case, _outputs(case, model if reference is None else reference, batch))


def _batch(case: Case) -> dict[str, Any]:
    """Return a micro batch of rows of data.max_length tokens, of pairs of such answers; all tokens are
    trained."""
    data, flash, length = case.recipe.data, is_flash(case), case.recipe.data.max_length
    objective = case.objective
    row = case.row_kind.traced(length, data.packing)
    part = SequencePart(0, case.degrees.copies)
    collate = objective.collator(0) or Collator(0, length, flatten=flash, part=part)
    batch = objective.model_inputs(collate([row] * case.micro_batch))
    if part.parts > 1:
        return {key: value for key, value in batch.items() if key != "attention_mask"}
    if flash or (case.profile.fixed_length and not data.packing):
        kept = {"input_ids", "labels"}
        return {key: value for key, value in batch.items() if key in kept}
    return batch


def _outputs(case: Case, model: Any, batch: dict[str, Any]) -> Any:
    from accelerate.utils.operations import convert_to_fp32

    fused = case.profile.loss == "chunked" and case.objective.head_outputs
    with _autocast(case) as is_cast:
        outputs = model(**batch, use_cache=False, **({"fused_lm_head": True} if fused else {}))
    return outputs if is_cast is None else convert_to_fp32(outputs)


def _autocast(case: Case) -> AbstractContextManager[Any]:
    """Return the context in which the trainer runs the model; None is bound where it casts nothing."""
    import torch

    dtype = case.recipe.model.dtype
    if case.profile.autocast and dtype != "float32" and case.sharding.precision != "pure":
        return torch.autocast("cpu", dtype=getattr(torch, dtype))
    return nullcontext()


def _loss(case: Case, outputs: Any) -> Any:
    """Return the loss as TRL's compute_loss or the model has it; of preferences and rewards a number of each
    row."""
    if (numbers := case.objective.row_numbers(outputs)) is not None:
        return numbers
    if case.profile.loss != "chunked":
        return outputs.loss
    loss = (-outputs.log_probs).sum() / outputs.label_mask.sum().clamp(min=1)
    for name in ("entropy", "is_top1"):
        if (output := getattr(outputs, name, None)) is not None:
            output.detach().sum()
    return loss
