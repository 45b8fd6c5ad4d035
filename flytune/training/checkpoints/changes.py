"""Changes of a recipe between two attempts of a run: which hold from the next step on, and which are refused.

docs/checkpoints.md has the table for readers; its test compares it with the sets here, and these with the
recipe's fields.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from flytune.models import Row
from flytune.recipe import OPTIMIZERS, Recipe
from flytune.sharding import sharding_of

_LONGEST = 200
"""Characters of a value that a checkpoint has as it is; of a longer one it has the hash."""
_UNSET = "its default"

_ORDER = "training.global_batch_size training.seed training.probe_longest objective.group_size"
FIXED = {
    "the position in the data and the order of samples follow from it": _ORDER,
    "the checkpoint has the states of another optimizer": "training.optim",
    "the checkpoint has weights and states of another precision": "model.dtype training.master_dtype "
    "sharding.config.fp16 sharding.config.bf16",
    "the checkpoint has other trained weights": "model.extra_special_tokens model.vision method",
    "the steps before were trained for another objective": "objective.name",
    "a checkpoint of one sharding is not read by another": "sharding.name",
    "offloaded states are updated by an optimizer of their own, which reading others' was not tested with": (
        "sharding.offload"
    ),
}
"""Fields that a resumed run cannot change, by the reason."""
TAKEN = {
    "next step": "model.attn_implementation model.trust_remote_code model.rope_scaling method.lora_dropout "
    "sharding training objective",
    "no step": "name description evaluation hardware checkpoints tracking publish notify "
    "training.logging_steps training.hang_minutes training.ddp_timeout training.max_loss_jump "
    "training.on_bad_loss training.per_device_train_batch_size training.auto_find_batch_size "
    "training.activation_checkpointing sharding.sequence_parallel objective.eval_answers "
    "objective.per_device_generation_batch_size objective.reward_seconds",
    "content": "model.name_or_path model.revision method.adapter data",
}
"""All other fields, by what they change: the training from the next step on; nothing that is trained; or they
name files, whose content is compared. A section stands for the fields in it that are not named themselves."""
_ROUNDING = ("sharding.name", "sharding.offload")
_REASONS = {field: reason for reason, fields in FIXED.items() for field in fields.split()}
_EFFECTS = dict.fromkeys(_REASONS, "fixed") | {
    field: effect for effect, fields in TAKEN.items() for field in fields.split()
}


def settings_of(recipe: Recipe) -> dict[str, str]:
    """Return the decisions of a recipe that are not the defaults, by dotted field, each as JSON or, if it is
    long, its hash."""
    settings = dict(_leaves(recipe.without_infrastructure(), ""))
    # `auto` and the name of what it stands for are the same.
    return settings | {"training.optim": _text(_states_of(sharding_of(recipe).optimizer))}


def _leaves(section: BaseModel, place: str) -> Iterator[tuple[str, str]]:
    for name, field in type(section).model_fields.items():
        value, here = getattr(section, name), f"{place}.{name}".lstrip(".")
        if isinstance(value, BaseModel):
            yield from _leaves(value, here)
        elif value != field.get_default(call_default_factory=True):
            plain = section.model_dump(mode="json", include={name})[name]
            named = (
                {f"{here}.{key}": part for key, part in plain.items()}
                if isinstance(plain, dict)
                else {here: plain}
            )
            yield from ((key, _text(part)) for key, part in named.items())


def _text(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _states_of(optimizer: str) -> str:
    """Return the name of the first optimizer that has the states of another one: paged or fused, they are the
    same."""
    kind = OPTIMIZERS[optimizer]
    return next(
        name
        for name, other in OPTIMIZERS.items()
        if (other.library, other.algorithm, other.bits) == (kind.library, kind.algorithm, kind.bits)
    )


def effect_of(field: str) -> str | None:
    """Return `fixed` or a key of TAKEN, what a change of a field does on a resume; None for a field that is
    unknown."""
    named = _nearest(field)
    return None if named is None else _EFFECTS[named]


def _nearest(field: str) -> str | None:
    """Return the field, or the innermost section around it, that has an effect of its own."""
    while field and field not in _EFFECTS:
        field = field.rpartition(".")[0]
    return field or None


def between(earlier: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return the fields that differ, each with the sentence `FIELD: EARLIER, now NOW`."""
    names = sorted(name for name in earlier.keys() | now.keys() if earlier.get(name) != now.get(name))
    return {name: f"{name}: {earlier.get(name, _UNSET)}, now {now.get(name, _UNSET)}" for name in names}


def refused(differences: Mapping[str, str]) -> list[str]:
    """Return the sentences of those that a resumed run cannot take over, with the reason."""
    fixed = {name: text for name, text in differences.items() if effect_of(name) == "fixed"}
    return [f"{text} ({_REASONS[str(_nearest(name))]})" for name, text in fixed.items()]


def trained_with(settings: Mapping[str, str], base: str, content_sha256: str) -> str:
    """Return 16 hex digits of all that the weights after a step follow from, apart from rounding, if the
    weights before are the same."""
    return _hash([_without_rounding(_with_effects(settings, "fixed", "next step")), base, content_sha256])


def started_from(settings: Mapping[str, str], base: str) -> str:
    """Return 16 hex digits of all that the weights before the first step follow from."""
    return _hash([_without_rounding(_with_effects(settings, "fixed")), base])


def _without_rounding(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings without those that change the order of sums alone: answers that were drawn under one
    sharding are trained under another one (the self-test compares them)."""
    return {name: value for name, value in settings.items() if name not in _ROUNDING}


def order_of(settings: Mapping[str, str], content_sha256: str) -> str:
    """Return 16 hex digits of the data and of its order in training."""
    return _hash([content_sha256, *(settings.get(field) for field in _ORDER.split())])


def scored_on(settings: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Return 16 hex digits of what eval_loss is computed of, the held-out `rows`, and of how; empty without
    rows."""
    if not rows:
        return ""
    trained = _with_effects(settings, "fixed", "next step")
    measure = {name: text for name, text in trained.items() if name.startswith("objective.")}
    return _hash([measure, settings.get("data.max_length"), list(rows)])


def _with_effects(settings: Mapping[str, str], *effects: str) -> dict[str, str]:
    return {name: text for name, text in settings.items() if effect_of(name) in effects}


def _hash(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
