"""Ranks forked from the process that starts them, as Flyte's tasks have them."""

import functools
from collections.abc import Callable
from typing import Any

from flytekit.interfaces.random import random

from flytune.stages import ranks
from tasks.runtime.orchestrator import FLYTE

prepare = functools.partial(ranks.prepare, FLYTE)


def in_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a task for forked ranks, with a seed of its own for flytekit's generator, which
    names folders."""
    return ranks.in_rank(function, begin=random.seed)
