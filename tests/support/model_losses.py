"""Losses of a tiny model of any type, and any configuration: its own, TRL's chunked one, and Flytune's of its
logits."""

import copy
from collections.abc import Iterator
from typing import Any

from flytune.models import own_logits
from flytune.models.scoring import IGNORED
from tests.support.model_types import tiny_config
from tests.support.packed_samples import Undecided, double

EQUAL, DIFFERENT = 1e-10, 1e-6
"""Largest distance of equal losses, and smallest of different ones, as a share of them; computed in
float64."""
UNUSUAL = {
    "final_logit_softcapping": 0.5,
    "logit_scale": 0.3,
    "output_multiplier": 0.3,
    "lm_head_multiplier": 0.3,
    "logits_scaling": 3.0,
}
"""Values of model_types.CHUNKED_FIELDS."""
_LEFT = (
    "token_id",
    "use_cache",
    "return_dict",
    "dtype",
    "is_encoder",
    "add_cross",
    "output_hidden",
    "output_att",
    "chunk_size_feed",
)
"""Parts of the names of fields that do not belong to the model's arithmetic."""


def losses(config: Any, *, training: bool = False, masked: bool = False) -> dict[str, float | None]:
    """Return the losses, by name: own, chunked and logits, of a model of a configuration; None for one that
    fails.

    The balance loss of routers is in all of them where the trainer has it.

    Args:
        training: as the model computes while it trains, where some draw, or add terms.
        masked: with tokens that are not trained at the beginning, and padding at the end.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    torch.manual_seed(0)
    with double():
        model = (
            AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float64)
            .double()
            .train(training)
        )

    def forward(**arguments: Any) -> Any:
        torch.manual_seed(1)  # the same is drawn for each of the losses
        return model(**arguments)

    with torch.no_grad(), double():
        # Large weights: what is done to the logits must show in the loss.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
        head = model.get_output_embeddings()
        for tensor in (getattr(head, "weight", None), getattr(head, "bias", None)):
            if tensor is not None:
                tensor.normal_(std=0.5)
        ids = torch.randint(4, 120, (2, 12))
        text = model.config.get_text_config()
        # As TRL's trainers switch the balance loss on and off.
        factor = getattr(text, "router_aux_loss_coef", 0.0)
        balanced = hasattr(text, "output_router_logits") and bool(factor)
        if hasattr(text, "router_aux_loss_coef"):
            text.output_router_logits = balanced
        labels, mask = ids.clone(), torch.ones_like(ids)
        if masked:
            labels[0, :5] = labels[1, :7] = labels[1, 9:] = IGNORED
            mask[1, 9:] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        batch |= {"output_router_logits": True} if balanced else {}
        found = forward(**batch, labels=labels, use_cache=False)
        own, places = float(found.loss), found.logits.shape[:2] == ids.shape
        if places and _same(own, float(cross_entropy(found.logits.flatten(0, 1).float(), labels.flatten()))):
            # Labels at the tokens' own places: decoders of translation models expect them shifted.
            own = float(cross_entropy(found.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()))
        results: dict[str, float | None] = {"own": own, "chunked": None, "logits": None}
        plain = model.forward
        for name, add in (("chunked", add_fused_lm_head), ("logits", own_logits._add_own)):
            try:
                add(model)
                trained = forward(**batch, labels=labels, fused_lm_head=True)
                loss = -trained.log_probs.sum() / trained.label_mask.sum()
                results[name] = float(loss + factor * trained.aux_loss if balanced else loss)
            except Exception:  # noqa: BLE001 (TRL's head reads what not every model has)
                results[name] = None
            model.forward = plain
    return results


def _same(first: float | None, second: float | None) -> bool:
    if first is None or second is None:
        return False
    distance = abs(first - second) / max(1.0, abs(first))
    if EQUAL < distance < DIFFERENT:
        raise Undecided(f"losses {first} and {second}: {distance:.1e} apart, neither {EQUAL} nor {DIFFERENT}")
    return distance <= EQUAL


def kind_of(found: dict[str, float | None]) -> str:
    """Return which of them is the model's own: chunked, logits, or none."""
    return next((name for name in ("chunked", "logits") if _same(found["own"], found[name])), "none")


def unusual(config: Any) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield part (the whole, or text), name, value and another value of each field of a configuration."""
    parts = (
        {"": config} if config.get_text_config() is config else {"": config, "text": config.get_text_config()}
    )
    for part, whole in parts.items():
        values = {
            name: value for name, value in whole.to_dict().items() if not isinstance(value, dict | list | str)
        }
        for name, value in (dict.fromkeys(UNUSUAL) | values).items():
            if name.startswith("_") or any(left in name for left in _LEFT):
                continue
            if name in UNUSUAL:
                other = UNUSUAL[name]
            elif isinstance(value, bool):
                other = not value
            elif isinstance(value, float):
                other = value * 1.7 if value else 0.7
            else:
                other = 3.0 if value is None else value * 2 if value else 1
            yield part, name, value, other


def row(model_type: str) -> dict[str, Any]:
    """Return the entries of a model type's row that say how its loss is computed
    (flytune/models/model_types.py)."""
    config = tiny_config(model_type)
    usual = kind_of(losses(config))
    if usual == "none":
        return {"problems": {"loss": "its loss is not that of its logits"}}
    for how, name in ({"training": True}, "while it trains"), ({"masked": True}, "of a part of the tokens"):
        found = losses(config, **how)
        if not _same(found["own"], found[usual]):
            return {"problems": {"loss": f"its loss {name} is not that of its logits"}}
    alike: set[str] = set()
    own: dict[str, Any] = {}
    neither: dict[str, Any] = {}
    known = config.to_dict() | config.get_text_config().to_dict()
    is_chunked = usual == "chunked"
    for part, name, value, other in unusual(config):
        changed = copy.deepcopy(config)
        try:
            setattr(changed.get_text_config() if part else changed, name, other)
            kind = kind_of(losses(changed))
        except Undecided:
            raise
        except Exception:  # noqa: BLE001 (no model of the type has such a value)
            continue
        if kind == "none":
            neither[name] = value
        elif kind == "chunked" and name in UNUSUAL and name in known:
            alike.add(name)
        elif kind == "logits" and is_chunked and (name not in UNUSUAL or name in known):
            own[name] = value
    alike -= {*own, *neither}
    # A size has another value in each model, so that its default means nothing.
    is_chunked = is_chunked and not any(
        isinstance(value, int) and not isinstance(value, bool) for value in own.values()
    )
    made: dict[str, Any] = {} if is_chunked else {"chunked_loss": False}
    made |= {"chunked_fields": sorted(alike)} if is_chunked and alike else {}
    made |= {"own_fields": own} if is_chunked and own else {}
    return made | ({"loss_fields": neither} if neither else {})
