"""Model types that Flytune trains and packs, by runs on a tiny instance of each (model_types.json)."""

from functools import cache
from pathlib import Path
from typing import Any

from flytune import json_core

FILE = Path(__file__).resolve().parent / "model_types.json"
"""Written by `python -m benchmarks.model_types --write`: the version of transformers, and a row for each of its causal
language models: packing (kinds of attention under which packed samples were as samples alone) and problems (reasons by
packing, full, lora, slices: the parts of the weights that processes read under fsdp). untried: true if only packing was
tried."""


@cache
def table() -> dict[str, dict[str, Any]]:
    """Return the rows by model type."""
    return dict(json_core.load(FILE.read_bytes())["types"])


def packing_problem(model_type: str, attention: str, trust_remote_code: bool) -> str | None:
    """Return why data.packing would not keep the samples of such a model apart; None if a run showed that it does.

    Args:
        attention: attn_implementation; FlashAttention 3 is handed the same arguments as 2.
    """
    if trust_remote_code:
        return "model.trust_remote_code: whether code of the model's own keeps packed samples apart is not known"
    if (row := table().get(model_type)) is None:
        return f"no test shows that packed samples of {model_type} do not see each other; leave packing out"
    kind = "flash_attention_2" if attention.startswith("flash_attention") else attention
    if kind in row["packing"]:
        return None
    why = row["problems"].get("packing", f"{model_type} has no {attention} that a test could run")
    other = f"set model.attn_implementation to {row['packing'][0]}, or leave" if row["packing"] else "leave"
    return f"{model_type} with {attention}: {why}; {other} packing out"


def training_problem(model_type: str, method: str, in_slices: bool, trust_remote_code: bool) -> str | None:
    """Return why a model type cannot be trained; None if a run showed that it can, or if the table does not know it.

    Args:
        method: full, lora or qlora; qlora adapts the layers that lora does.
        in_slices: True if each process reads its own part of the weights only (fsdp).
    """
    row = None if trust_remote_code else table().get(model_type)
    if row is None:
        return None
    checks = ["full" if method == "full" else "lora", *(["slices"] if in_slices else [])]
    return next((row["problems"][check] for check in checks if check in row["problems"]), None)


def was_trained(model_type: str) -> bool:
    """Return whether training a tiny instance of a model type was tried."""
    return model_type in table() and not table()[model_type].get("untried")
