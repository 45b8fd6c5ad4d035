"""The load of experts: how many tokens of the held-out samples the router of each layer sends to each of its
experts."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flytune.models.experts import adapted_experts, base_name, is_fused, listed_experts
from flytune.records.metrics import ExpertLoad, UntrainedExperts

_LAYER, _NUMBER = re.compile(r"\.(\d+)\."), re.compile(r"\.experts\.(\d+)\.")


@contextmanager
def counting(model: Any) -> Iterator[dict[str, Any]]:
    """Count the tokens of each expert in all forward passes within the block; padding does not count.

    Yields: the counts, int64 (experts,), by the name of the module that has the experts. A layer that hands
    its experts no
        choice of the router (Llama 4's compute all tokens) is not among them.
    """
    import torch

    counts: dict[str, Any] = {}
    mask: list[Any] = [None]

    def masked(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        mask[0] = named.get("attention_mask")

    def count(name: str, experts: int) -> Any:
        def hook(module: Any, arguments: Any, named: dict[str, Any]) -> None:
            chosen = next(
                (argument for argument in (*arguments[1:], *named.values()) if _is_choice(argument)), None
            )
            if chosen is None:
                return
            if mask[0] is not None and mask[0].numel() == len(chosen):
                chosen = chosen[mask[0].flatten().to(chosen.device).bool()]
            counted_now = torch.bincount(chosen.flatten().clamp(0, experts), minlength=experts + 1)[
                :experts
            ].cpu()
            counts[name] = counts.get(name, 0) + counted_now

        return hook

    hooks = [model.register_forward_pre_hook(masked, with_kwargs=True)]
    modules = dict(model.named_modules())
    for full, parameter in model.named_parameters():
        name, owner = base_name(full), full.rpartition(".")[0]
        if not name.endswith("down_proj") or not is_fused(name, parameter.dim()):
            continue  # of a layer's parameters it is one that all have
        name, experts = name.rpartition(".")[0], len(parameter)
        hooks.append(modules[owner].register_forward_pre_hook(count(name, experts), with_kwargs=True))
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _is_choice(value: Any) -> bool:
    """Return whether an argument has the numbers of the experts that each token goes to."""
    import torch

    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype in (torch.int32, torch.int64)


def loads(base: dict[str, Any], tuned: dict[str, Any]) -> list[ExpertLoad]:
    """Return the load of each layer with experts, in their order."""
    return [
        ExpertLoad(layer=int(match[1]), base=base[name].tolist(), tuned=counts.tolist())
        for name, counts in tuned.items()
        if name in base and (match := _LAYER.search(name))
    ]


def untrained(model: Any) -> list[UntrainedExperts]:
    """Return the experts whose adapter changes nothing: lora_B starts at 0, and only the gradient of a token
    moves it."""
    untrained_lists = []
    for name, layer in adapted_experts(model):
        second = layer.lora_B["default"].weight
        # (out, rank x experts): PEFT, ParamWrapper.get_delta_factors
        moved = second.reshape(len(second), -1, layer.num_experts).abs().amax(dim=(0, 1)) > 0
        if none := [expert for expert, is_moved in enumerate(moved.tolist()) if not is_moved]:
            untrained_lists.append(UntrainedExperts(parameter=name, experts=none, of=layer.num_experts))
    lists: dict[str, dict[int, bool]] = {}
    for name, layer in listed_experts(model):
        before, number, after = _NUMBER.split(name, maxsplit=1)
        moved_ones = lists.setdefault(f"{before}.experts.*.{after}", {})
        moved_ones[int(number)] = bool((layer.lora_B["default"].weight != 0).any())
    for name, moved_ones in lists.items():
        if none := [expert for expert, is_moved in sorted(moved_ones.items()) if not is_moved]:
            untrained_lists.append(UntrainedExperts(parameter=name, experts=none, of=len(moved_ones)))
    return untrained_lists
