"""Forward passes of a step: batch, reference model and loss of each objective, as TRL's trainers have them."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from flytune.data import Collator
from flytune.models import host_memory
from flytune.objectives import objective_of
from flytune.planning.dryrun.allocations import FORWARD, Ledger
from flytune.planning.dryrun.case import Case
from flytune.sharding import sharding_of

REFERENCE = "reference"
"""Stage of the passes without gradients, of which one is traced."""


def is_flash(case: Case) -> bool:
    return case.recipe.model.attn_implementation.startswith("flash")


def prepare(case: Case, model: Any) -> None:
    """Give a language model TRL's chunked loss, and switch dropout off where the objective does."""
    from trl.trainer.utils import add_fused_lm_head, disable_dropout_in_model

    objective = objective_of(case.recipe)
    if objective.switches_dropout_off(case.recipe):
        disable_dropout_in_model(model)
    if case.profile.loss == "chunked" and objective.head_outputs:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        add_fused_lm_head(base, outputs=objective.head_outputs)
        if case.profile.kernels == "cpu":
            host_memory.use_small_loss_tiles()


def forward(case: Case, model: Any, reference: Any, ledger: Ledger) -> Any:
    """Run the forward passes of a micro batch, and return the loss.

    Args:
        reference: the frozen model beside `model`; None where there is none.
    """
    recipe = case.recipe
    objective, batch = objective_of(recipe), _batch(case)
    frozen = objective.frozen_passes(recipe)
    first = frozen and objective.frozen_passes_first(recipe)
    if first:
        ledger.stage(REFERENCE)
        known = _reference(case, model, reference, batch)
    ledger.stage(FORWARD)
    outputs = _outputs(case, model, batch)
    loss = _loss(case, outputs)
    del outputs
    if frozen and not first:
        ledger.stage(REFERENCE)
        known = _reference(case, model, reference, batch)
    # What the losses of preferences do with a number of each row has no size.
    return (loss - known if frozen else loss).mean()


def _reference(case: Case, model: Any, reference: Any, batch: dict[str, Any]) -> Any:
    """Return a number of each row from a pass without gradients: of the reference, or of the model without its adapter.

    Such a pass leaves nothing behind, so that one stands for several.
    """
    import torch
    from trl.models.utils import disable_gradient_checkpointing

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    without: AbstractContextManager[Any] = nullcontext() if reference is not None else model.disable_adapter()
    with torch.no_grad(), disable_gradient_checkpointing(base), without:
        return _loss(case, _outputs(case, model if reference is None else reference, batch))


def _batch(case: Case) -> dict[str, Any]:
    """Return a micro batch of rows of data.max_length tokens, of pairs of such answers; all tokens are trained."""
    data, flash, length = case.recipe.data, is_flash(case), case.recipe.data.max_length
    objective, answers = case.recipe.objective, objective_of(case.recipe).sequences_per_row
    row: dict[str, Any] = {"input_ids": [1] * length * answers, "labels": [1] * length * answers}
    if objective.has_pairs or data.packing:
        row["seq_lengths"] = [length] * answers
    if objective.has_labels:
        row["label"] = True
    collate = objective_of(case.recipe).collator(0) or Collator(0, length, flatten=flash)
    batch = collate([row] * case.micro_batch)
    if objective.compares_answers:
        batch.pop("label", None)
        if not objective.is_reward_model:
            batch["labels"] = batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, -100)
    if flash or (case.profile.fixed_length and not data.packing):
        kept = {"input_ids", "labels"}
        return {key: value for key, value in batch.items() if key in kept}
    return batch


def _outputs(case: Case, model: Any, batch: dict[str, Any]) -> Any:
    import torch
    from accelerate.utils.operations import convert_to_fp32

    dtype, fused = case.recipe.model.dtype, case.profile.loss == "chunked" and objective_of(case.recipe).head_outputs
    autocast = case.profile.autocast and dtype != "float32" and sharding_of(case.recipe).precision(case.recipe) != "pure"
    with torch.autocast("cpu", dtype=getattr(torch, dtype)) if autocast else nullcontext():
        outputs = model(**batch, use_cache=False, **({"fused_lm_head": True} if fused else {}))
    return convert_to_fp32(outputs) if autocast else outputs


def _loss(case: Case, outputs: Any) -> Any:
    """Return the loss as TRL's compute_loss or the model has it; of preferences and rewards a number of each row."""
    recipe = case.recipe
    if recipe.objective.is_reward_model:
        return outputs.logits.squeeze(-1)
    if recipe.objective.compares_answers:
        return outputs.log_probs.sum(dim=1)
    if case.profile.loss != "chunked":
        return outputs.loss
    loss = (-outputs.log_probs).sum() / outputs.label_mask.sum().clamp(min=1)
    outputs.entropy.detach().sum(), outputs.is_top1.sum()
    return loss
