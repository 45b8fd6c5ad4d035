"""Comparison of the loss that is trained with the model's own, on one short row, before the first step."""

import inspect
from typing import Any

from flytune.errors import TrainingError
from flytune.models.scoring import innermost
from flytune.sentences import counted

TOKENS = 32
"""Tokens of the row."""
BOUNDS = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Largest differences by model.dtype, in shares of the loss, and at least of 1 nat: four times the dtype's
rounding; in float32 that of products whose sums are in another order."""


def check(trainer: Any) -> None:
    """Compare the loss of a language model's head, as the trainer calls it, with `model(...).loss`. Every
    process calls it.

    Raises:
        TrainingError: they differ by more than the dtype rounds.
    """
    import torch

    run, model = trainer.run, trainer.model_wrapped
    recipe = run.recipe
    if not run.objective.head_outputs:
        return
    ids = torch.tensor([trainer.train_dataset.first_tokens(TOKENS)], device=trainer.args.device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    has_balance_loss = trainer.aux_loss_enabled
    if has_balance_loss:
        batch["output_router_logits"] = True
    was_training = model.training
    model.eval()
    try:
        # Without dropout nothing is drawn; code of the model's own may draw all the same. Nothing is compiled
        # for this length.
        with torch.no_grad(), trainer.compute_loss_context_manager(), torch.random.fork_rng(), _uncompiled():
            trained = model(**batch, labels=ids, fused_lm_head=True)
            loss = float(-trained.log_probs.sum() / trained.label_mask.sum())
            if has_balance_loss:
                loss += trainer.router_aux_loss_coef * float(trained.aux_loss)
            own_loss = _own_loss(model, batch, ids, run.objective.temperature())
    finally:
        model.train(was_training)
    bound = BOUNDS[recipe.model.dtype] * max(1.0, abs(own_loss))
    if not abs(loss - own_loss) <= bound:
        raise TrainingError(
            f"the loss that would be trained is not the model's own: {loss:.6g}, and {own_loss:.6g} of "
            f"model(...).loss on the first {counted(ids.shape[1], 'token')} of the data, more than "
            f"{bound:.2g} apart; {innermost(model).config.model_type} changes its logits or its loss in a "
            "way that Flytune does not know; nothing was trained"
        )


def _own_loss(model: Any, batch: dict[str, Any], ids: Any, temperature: float) -> float:
    """Return the loss that a model computes itself; of its logits where it takes labels for the tokens at
    their own places, or where the logits are divided by a temperature."""
    from torch.nn.functional import cross_entropy

    if temperature != 1.0 or not _takes_labels(innermost(model)):
        logits = model(**batch).logits[0].float() / temperature
        return float(cross_entropy(logits[:-1], ids[0, 1:].to(logits.device)))
    outputs = model(**batch, labels=ids)
    logits, wanted, loss = outputs.logits[0].float(), ids[0].to(outputs.logits.device), float(outputs.loss)
    # The decoders of translation models (Bart and its kin) expect labels that are shifted already.
    if abs(float(cross_entropy(logits, wanted)) - loss) <= BOUNDS["float32"] * max(1.0, abs(loss)):
        return float(cross_entropy(logits[:-1], wanted[1:]))
    return loss


def _takes_labels(model: Any) -> bool:
    parameters = inspect.signature(type(model).forward).parameters.values()
    return any(
        parameter.name == "labels" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters
    )


def _uncompiled() -> Any:
    import torch

    return torch.compiler.set_stance("force_eager")
