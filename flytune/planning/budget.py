"""Budgets of time and money, after which a run stops and keeps what it has trained."""

from collections.abc import Sequence
from typing import NamedTuple

from flytune.recipe import Hardware


class Budget(NamedTuple):
    """Training time of all attempts together: from the start of each one's training task, loading and saving
    included.

    An attempt that was killed counts as far as its last checkpoint. Preparing, export and evaluation do not
    count.
    """

    seconds: float
    name: str
    """Field and value in the recipe."""

    def describe(self, step: int, spent: float) -> str:
        """Return the message that it is used up after `step` optimizer steps and `spent` seconds."""
        return (
            f"{self.name} is used up after step {step}: {spent / 3600:.3g} of {self.seconds / 3600:.3g} hours"
        )


def of(wish: Hardware, price_per_hour: float) -> Budget | None:
    """Return the smaller of hardware.max_hours and hardware.max_price, at that price; None where neither is
    set."""
    budgets = []
    if wish.max_hours is not None:
        budgets.append(Budget(3600 * wish.max_hours, f"hardware.max_hours: {wish.max_hours:g}"))
    if wish.max_price is not None and price_per_hour:
        budgets.append(
            Budget(3600 * wish.max_price / price_per_hour, f"hardware.max_price: {wish.max_price:g}")
        )
    return min(budgets, default=None)


def shortfall(wish: Hardware, price_per_hour: float, hours: Sequence[float]) -> str | None:
    """Return a warning if `hours` (likely at least, the estimate, likely at most) may exceed the budget; None
    if not."""
    budget = of(wish, price_per_hour)
    if budget is None or not hours or hours[-1] * 3600 <= budget.seconds:
        return None
    share = budget.seconds / 3600 / hours[1]
    ends = f"stops after about {share:.0%} of its steps" if share < 1 else "may stop before its last step"
    return (
        f"{budget.name} is {budget.seconds / 3600:.3g} hours, {hours[1]:.3g} are planned: training "
        f"{ends}, loading not counted"
    )
