"""A teacher, and its most probable tokens for the trained tokens of rows: of the data's answers before
training, of those that the student draws in the step that trains them."""

from collections.abc import Iterator, Sequence
from typing import Any

from flytune.errors import ExportError
from flytune.models import Row
from flytune.models.scoring import IGNORED, padded, tiles_of_logits
from flytune.recipe import Distill, Method, Recipe, Sharding

IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"
"""Keys of a row, and of a batch: the teacher's most probable tokens for each trained token, the most probable
first, and their log-probabilities at the recipe's temperature."""
NLL = "teacher_nll"
"""Key of a row: minus the teacher's log-probability of each trained token, at temperature 1."""
COLUMNS = (IDS, LOG_PROBS, NLL)
FOLDER = "teacher"
"""Folder with the teacher's own files beside its tokens, where it also runs beside the student."""


def recipe_of(recipe: Recipe) -> Recipe:
    """Return the recipe of which the teacher is the base model, complete and in one process."""
    teacher = recipe.objective.teacher(recipe.model)
    assert teacher is not None, "the plan refuses a recipe without one"
    changes = {"model": teacher, "method": Method(name="full"), "sharding": Sharding(name="none")}
    return recipe.model_copy(update=changes)


def columns(
    model: Any, rows: Sequence[Row], recipe: Recipe, pad: int, vocabulary: int
) -> Iterator[dict[str, Any]]:
    """Yield the COLUMNS of each row of one batch, as numpy arrays.

    Rows of the table beyond the tokenizer's tokens are padding, and never a token: both models are compared
    without the teacher's.
    """
    import torch

    section = recipe.objective
    assert isinstance(section, Distill)
    device = next(model.parameters()).device
    inputs = {
        "input_ids": padded([row["input_ids"] for row in rows], pad).to(device),
        "attention_mask": padded([[1] * len(row["input_ids"]) for row in rows], 0).to(device),
        "use_cache": False,
    }
    wanted = padded([row["labels"] for row in rows], IGNORED)[:, 1:].to(device)
    positions = (wanted != IGNORED).any(dim=0).nonzero().flatten()
    top_k = min(section.loss_top_k, vocabulary)
    parts: list[list[dict[str, Any]]] = [[] for _ in rows]
    with torch.no_grad():
        for tile, logits in tiles_of_logits(model, inputs, positions):
            for number, of_row in enumerate(logits):
                labels = wanted[number, tile]
                is_trained = labels != IGNORED
                kept = of_row[is_trained.to(of_row.device)][:, :vocabulary].float()
                if not torch.isfinite(kept).all():
                    raise ExportError(
                        f"teacher {section.teacher_model_name_or_path}: a logit is not finite; it overflows "
                        f"in {recipe.model.dtype}: use bfloat16 or float32 (model.dtype)"
                    )
                best = (kept / section.temperature).log_softmax(dim=1).topk(top_k, dim=1)
                chosen = kept.gather(1, labels[is_trained].to(kept.device)[:, None])[:, 0]
                parts[number].append(
                    {
                        IDS: best.indices.flatten().cpu(),
                        LOG_PROBS: best.values.flatten().cpu(),
                        NLL: (kept.logsumexp(dim=1) - chosen).cpu(),
                    }
                )
    for tiles in parts:
        yield {name: torch.cat([part[name] for part in tiles]).numpy() if tiles else [] for name in COLUMNS}
