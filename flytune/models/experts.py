"""Routed experts: their weights, and the numbers by which their adapters are compared.

Weights are parameters of three dimensions, one matrix for each expert, or modules of a list. The probe has
numbers of each expert's adapter: of the live model, of every copy, and of merged weights.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from flytune.models.scoring import innermost
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
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if is_fused(name, len(shape_of(parameter)))
    }


def shape_of(parameter: Any) -> tuple[int, ...]:
    """Return the shape of a parameter, also where ZeRO-3 has partitioned it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def suffixes(names: Any) -> list[str]:
    """Return what PEFT's target_parameters needs to name them: `experts.down_proj` is the end of each
    layer's."""
    return sorted({".".join(name.split(".")[-2:]) for name in names})


PROBES = 4
"""Pairs of vectors. One wrong number in a factor changes all four."""
_WRAPPERS = ("_orig_mod", "base_layer")


def adapted_experts(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield PEFT's layers around parameters of experts, each with the name of its parameter in the base, in a
    fixed order."""
    base = innermost(model)
    for name, module in base.named_modules():
        if type(module).__name__ == "ParamWrapper":
            yield f"{base_name(name)}.{module.parameter_name}", module


def listed_experts(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the adapted linear layers of experts that a model has in lists, each with its name in the
    base."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_B") and is_listed(base_name(name)):
            yield base_name(name).removeprefix("base_model.model."), module


def _probed(model: Any) -> list[tuple[str, Any, int]]:
    """Return the adapted layers of experts in a fixed order: name, layer, and how many experts it has."""
    fused = [(name, layer, layer.num_experts) for name, layer in adapted_experts(model)]
    return [*fused, *((name, layer, 1) for name, layer in listed_experts(model))]


def base_name(module: str) -> str:
    """Return a module's name in the base model, without the layers that PEFT and torch.compile put around
    it."""
    return ".".join(part for part in module.split(".") if part not in _WRAPPERS)


def expert_names(model: Any) -> list[str]:
    """Return a name for each number of `fingerprints`: parameter and expert."""
    return [
        name if count == 1 else f"{name}, expert {expert}"
        for name, _, count in _probed(model)
        for expert in range(count)
    ]


def fingerprints(
    model: Any, gather: Callable[[Any], Any] = lambda parameter: parameter, adapter: str = "default"
) -> Any:
    """Return the numbers of each expert's adapter, float64 (experts of all parameters, PROBES); None without
    such adapters.

    Every process of a sharded model calls it, and `gather` returns a complete parameter.
    """
    import torch

    products = []
    for _, layer, count in _probed(model):
        first, second = (
            gather(factor[adapter].weight).detach().to("cpu", torch.float64)
            for factor in (layer.lora_A, layer.lora_B)
        )
        # (experts x rank, in) and (out, rank x experts): PEFT, ParamWrapper.get_delta_factors
        inner = (first @ _vectors(first.shape[1], 1)).reshape(count, -1, PROBES)
        outer = (second.T @ _vectors(second.shape[0], 2)).reshape(-1, count, PROBES).transpose(0, 1)
        products.append(layer.scaling[adapter] * (inner * outer).sum(dim=1))
    return torch.cat(products) if products else None


def _vectors(length: int, seed: int) -> Any:
    """Return fixed vectors, (length, PROBES), that no release of torch draws otherwise."""
    import torch

    places = torch.arange(1, length + 1, dtype=torch.float64)[:, None]
    return torch.cos(places * (0.7 + 0.61803398875 * torch.arange(1, PROBES + 1, dtype=torch.float64) / seed))


def farthest(live: Any, exported: Any) -> tuple[float, int]:
    """Return the largest relative distance of an expert's numbers, and its place in `names`."""
    distances = (live - exported).norm(dim=1) / live.norm(dim=1).clamp_min(1e-30)
    worst = int(distances.nan_to_num(float("inf")).argmax())
    return float(distances[worst]), worst
