"""The optimizers that recipes name: their algorithm, library and states."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """One of the optimizers of transformers (TrainingArguments.optim)."""

    library: Literal["torch", "transformers", "bitsandbytes"]
    algorithm: Literal["adamw", "lion", "adafactor", "sgd"]
    bits: Literal[8, 32] = 32
    """Bits of a number of its states; torch's AdamW keeps them in the dtype of the parameter instead."""
    paged: bool = False
    """True if its states are in CUDA's unified memory, and leave the GPU where it has no room."""


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw_torch_fused": OptimizerKind("torch", "adamw"),
    "adamw_torch": OptimizerKind("torch", "adamw"),
    "adamw_8bit": OptimizerKind("bitsandbytes", "adamw", bits=8),
    "adamw_bnb_8bit": OptimizerKind("bitsandbytes", "adamw", bits=8),
    "paged_adamw_8bit": OptimizerKind("bitsandbytes", "adamw", bits=8, paged=True),
    "paged_adamw_32bit": OptimizerKind("bitsandbytes", "adamw", paged=True),
    "lion_32bit": OptimizerKind("bitsandbytes", "lion"),
    "lion_8bit": OptimizerKind("bitsandbytes", "lion", bits=8),
    "paged_lion_32bit": OptimizerKind("bitsandbytes", "lion", paged=True),
    "paged_lion_8bit": OptimizerKind("bitsandbytes", "lion", bits=8, paged=True),
    "adafactor": OptimizerKind("transformers", "adafactor"),
    "sgd": OptimizerKind("torch", "sgd"),
}
"""The optimizers by their names in transformers; adamw_8bit and adamw_bnb_8bit are two names of one."""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "adamw": ("adam_beta1", "adam_beta2", "adam_epsilon"),
    "lion": ("adam_beta1", "adam_beta2"),
    "adafactor": (),
    "sgd": (),
}
"""Fields of `training` that transformers gives to an algorithm (trainer_optimizer.py)."""


def problem(optim: str, given: Collection[str]) -> str | None:
    """Return which of the fields `given`, whose values are not the defaults, an optimizer does not take; None
    if none."""
    takes = ARGUMENTS[OPTIMIZERS[optim].algorithm] if optim != "auto" else ARGUMENTS["adamw"]
    if unused := [name for name in ARGUMENTS["adamw"] if name in given and name not in takes]:
        return f"{', '.join(unused)}: no argument of {optim}; leave it out, or use another optim"
    return None
