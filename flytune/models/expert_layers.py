"""Weights of routed experts: parameters of three dimensions, one matrix for each expert, or modules of a
list.

transformers 5 keeps a layer's experts in parameters of a module `experts`, JetMoE's in the weights of two
layers of its own (input_linear and output_linear, of attention too); code of a model's own may list them as
modules.
"""

import re
from typing import Any

from training_estimates.sizes import is_fused_name

_LISTED = re.compile(r".*\.experts\.\d+\..*")
REFUSED = {
    "dbrx": "PEFT's layer around its experts hides the matrices that the model reads (ParamWrapper has no "
    "attribute v1)",
}
"""Model types whose experts get no adapter, with the reason."""


def is_fused(name: str, dimensions: int) -> bool:
    """Return whether a parameter has the matrices of a layer's routed experts, the first dimension by
    expert."""
    return dimensions == 3 and is_fused_name(name)


def is_listed(module: str) -> bool:
    """Return whether a linear layer is one of a list of routed experts, by its name."""
    return _LISTED.fullmatch(module) is not None


def fused(model: Any) -> dict[str, Any]:
    """Return the fused parameters of a model, sharded or not, by name."""
    return {name: one for name, one in model.named_parameters() if is_fused(name, len(shape_of(one)))}


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Return the shape of a parameter, also where ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def suffixes(names: Any) -> list[str]:
    """Return what PEFT's target_parameters needs to name them: `experts.down_proj` is the end of each
    layer's."""
    return sorted({".".join(name.split(".")[-2:]) for name in names})
