"""The recipe's settings of optimizer and schedule in a run that resumes.

An optimizer's states are stored with the settings of its groups (learning rate, decay, betas ...), a
schedule's position with its base rates, and ZeRO's states with its limit of the gradients' norm. Loading them
brings the settings of the checkpoint's recipe back, under every sharding. States and position are the
checkpoint's; the settings are this recipe's.
"""

from typing import Any


class OptimizerSettings:
    """Settings of an optimizer and its schedule, read before a checkpoint is loaded."""

    def __init__(self, optimizer: Any, schedule: Any) -> None:
        self._groups = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._base_rates = list(schedule.base_lrs)
        self._clipping = [(one, one.clip_grad) for one in _clipping(optimizer)]

    def restore(self, optimizer: Any, schedule: Any) -> None:
        """Put the settings back into what a checkpoint was loaded into, with the learning rates of the
        schedule's position."""
        schedule.base_lrs = list(self._base_rates)
        factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
        rates = [rate * factor for rate, factor in zip(self._base_rates, factors, strict=True)]
        schedule._last_lr = rates
        for group, own, rate in zip(optimizer.param_groups, self._groups, rates, strict=True):
            group.update(own | {"lr": rate})
        for one, most in self._clipping:
            one.clip_grad = most


def _clipping(optimizer: Any) -> list[Any]:
    """Return DeepSpeed's optimizer below accelerate's, which clips gradients itself; no other does."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return [inner] if hasattr(inner, "clip_grad") else []
