"""Conditions within branches of others, as local runs take them."""

from typing import NamedTuple

import pytest
from flytekit import conditional, task, workflow

from workflows.routing import apart, on

RAN: list[str] = []


class Decided(NamedTuple):
    go: str
    shape: str


@task
def decide(a: int) -> Decided:
    return Decided("train" if a else "skip", "b" if a > 1 else "a")


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
def told(a: int, b: int) -> str:
    RAN.append("told")
    return f"{a} {b}"


@workflow
def inner(a: int, shape: str) -> int:
    found: int = on("inner", shape, {"a": one, "b": two}, a=a)
    return found


@workflow
def both(a: int, shape: str) -> str:
    first = inner(a=a, shape=shape)
    second = on("second", shape, {"a": one, "b": two}, a=first)
    return told(a=first, b=second)


@workflow
def outer(a: int) -> str:
    decided = decide(a=a)
    branch = conditional("outer").if_(decided.go == "train").then(apart(both, a=a, shape=decided.shape))
    return branch.else_().then(skip(a=a))


@pytest.mark.parametrize(
    ("a", "said", "ran"),
    [(0, "skipped", ["skip"]), (1, "2 3", ["one", "one", "told"]), (2, "12 22", ["two", "two", "told"])],
)
def test_the_taken_branch_alone_runs_with_conditions_of_its_own(a, said, ran):
    RAN.clear()
    assert outer(a=a) == said
    assert ran == RAN
