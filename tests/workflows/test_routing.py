"""Tests of conditions within branches of other conditions in local runs."""

from typing import NamedTuple

import pytest
from flytekit import conditional, task, workflow

from workflows.routing import route_to, run_inline

RAN: list[str] = []


class Decision(NamedTuple):
    action: str
    shape: str


@task
def decide(a: int) -> Decision:
    return Decision("train" if a else "skip", "b" if a > 1 else "a")


@task
def skip(a: int) -> str:
    RAN.append("skip")
    return "skipped"


@task
def one(a: int) -> int:
    RAN.append("one")
    return a + 1


@task
def two(a: int) -> int:
    RAN.append("two")
    return a + 10


@task
def joined(a: int, b: int) -> str:
    RAN.append("joined")
    return f"{a} {b}"


@workflow
def inner(a: int, shape: str) -> int:
    found: int = route_to("inner", shape, {"a": one, "b": two}, a=a)
    return found


@workflow
def both(a: int, shape: str) -> str:
    first = inner(a=a, shape=shape)
    second = route_to("second", shape, {"a": one, "b": two}, a=first)
    return joined(a=first, b=second)


@workflow
def outer(a: int) -> str:
    decided = decide(a=a)
    branch = (
        conditional("outer").if_(decided.action == "train").then(run_inline(both, a=a, shape=decided.shape))
    )
    return branch.else_().then(skip(a=a))


@pytest.mark.parametrize(
    ("a", "said", "ran"),
    [(0, "skipped", ["skip"]), (1, "2 3", ["one", "one", "joined"]), (2, "12 22", ["two", "two", "joined"])],
)
def test_only_the_taken_branch_runs_with_its_own_conditions(a, said, ran):
    RAN.clear()
    assert outer(a=a) == said
    assert ran == RAN
