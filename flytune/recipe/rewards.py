"""Rewards that a recipe names: the project's own, by name, or a function of a file of one's own, by its
content."""

import json
import re
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from flytune import limits
from flytune.recipe import patterns
from flytune.schema import Strict

OWN = ("exact_answer", "regular_expression", "json_schema", "unit_tests")
"""Rewards of this project (flytune.rewards.shipped)."""
COLUMNS = {"exact_answer": "answer", "json_schema": "schema", "unit_tests": "tests"}
"""Column that each of them reads by default."""
REFERENCE = re.compile(r"(?P<file>[^\0]*[^/\0:]\.py):(?P<function>[A-Za-z_]\w*)")
"""Form in which a person names a function of a file."""
MOST = 16


class RewardFunction(Strict):
    """A pure function of a completion and its row: a number, or true or false."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """`exact_answer`, `regular_expression`, `json_schema` or `unit_tests` (docs/objectives.md), or a function
    of `code`."""
    weight: Annotated[float, Field(ge=-limits.FACTOR, le=limits.FACTOR)] = 1.0
    """Factor of its value in the sum of all rewards."""
    column: Annotated[str, Field(min_length=1, max_length=limits.NAME)] | None = None
    """Column of the data that it reads, or a part of one (extra_info.answer); by default answer, schema or
    tests."""
    pattern: Annotated[str, Field(min_length=1, max_length=patterns.LONGEST)] | None = None
    """Regular expression that a whole completion must match (regular_expression)."""
    code: Annotated[str, Field(max_length=limits.TEXT)] | None = None
    """Content of the file of one's own that has the function; written `path/to/rewards.py:function`, the file
    is read."""

    accept_no_wall: bool = False
    """Permission to run answers (unit_tests) where the kernel has no walls around them (docs/security.md)."""

    @model_validator(mode="after")
    def _fields_of_names(self) -> Self:
        if self.code is None and self.name not in OWN:
            raise ValueError(f"{self.name}: there is no such reward; the project's own are {', '.join(OWN)}")
        if self.code is not None and self.name in OWN:
            raise ValueError(
                f"{self.name}: is the name of a reward of the project; give the function another name"
            )
        if not (self.name.isascii() and self.name.isidentifier()):
            raise ValueError(
                f"{self.name!r}: is not a name of a function; write letters, digits and underscores"
            )
        if (self.name == "regular_expression") != (self.pattern is not None):
            raise ValueError("pattern: regular_expression needs one, and no other reward has one")
        if self.pattern is not None:
            patterns.require([self.pattern])
        if self.column is not None and self.name not in COLUMNS:
            raise ValueError(f"column: only {', '.join(COLUMNS)} read one; a function gets all columns")
        if self.accept_no_wall and self.name != "unit_tests":
            raise ValueError(
                "accept_no_wall: only for unit_tests, which alone runs code of answers; remove it"
            )
        if abs(self.weight) < limits.LEAST_FACTOR:
            raise ValueError(f"weight: {self.weight:g}, so that the reward counts for nothing; remove it")
        return self


def _by_name(value: Any) -> Any:
    """Accept `exact_answer` for `{name: exact_answer}`; refuse a file that nothing has read."""
    if not isinstance(value, str):
        return value
    if REFERENCE.fullmatch(value):
        raise ValueError(
            f"{value}: only a person's own recipe file may name a file of rewards, whose content is then "
            "part of the recipe; give the recipe as a file to flytune or pyflyte"
        )
    return {"name": value}


Reward = Annotated[RewardFunction, BeforeValidator(_by_name, json_schema_input_type=str | RewardFunction)]


def as_json(rewards: list[RewardFunction]) -> str:
    """Return rewards as the process that computes them reads them."""
    return json.dumps(
        [reward.model_dump() | {"column": reward.column or COLUMNS.get(reward.name)} for reward in rewards]
    )
