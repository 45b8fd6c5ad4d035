"""Mistakes in what a person or another machine wrote: each in words of ours, at its place, once."""

import re
import typing
from contextlib import suppress

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

import flytune.cli.reproduce
import tasks.report
import workflows.sweep
from flytune import limits
from flytune.errors import FlytuneError, RecipeError
from flytune.hardware.accelerators import Accelerators
from flytune.hardware.cluster import Cluster
from flytune.hardware.shapes import Shapes
from flytune.mistakes import EXPECTED, FORMS, mistakes
from flytune.models.generation import Generation
from flytune.recipe import Recipe
from flytune.schema import RecordError, Strict
from flytune.sharding.deepspeed_config import DeepSpeedConfig
from flytune.written_files import validated
from tests.support.recipes import content, models_of

VALUES = [
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    -1e300,
    "",
    "x",
    "x" * 5000,
    "9" * 5000,
    [],
    [[]],
    [None, True],
    {},
    {1: 2},
]
VALUES += [
    {"a": True},
    {"": {}},
    [{}],
    [{"name": None}],
    list(range(limits.LISTED + 1)),
    b"x",
    {"a": [{"b": None}]},
]
UPSTREAM = re.compile(
    r"[Ii]nput should|[Ss]hould (be|match|have)|instance "
    r"of|<(function|class|bound)|function-|constrained-|literal\[|\[key\]|type=|parsing|valid "
    r"(dict|int|str|bool|list|number)|\bNone\b|pydantic|input_value|Assertion failed|Value error"
    r"|dict\[|list\[",
)


def subclasses(kind):
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


assert {flytune.cli.reproduce, tasks.report, workflows.sweep}  # all models are loaded
MODELS = [
    fromkey
    for fromkey in dict.fromkeys(subclasses(Strict))
    if fromkey.__module__.startswith(("flytune", "tasks"))
]


def said_of(model, value):
    """Return the mistakes that are shown for a value, without the values that a person would find in them."""
    found = []
    try:
        model.model_validate(value)
    except ValidationError as error:
        found = mistakes(error, model)
    except (FlytuneError, RecordError) as error:
        found = str(error).splitlines()
    return [line.partition("; found ")[0] for line in found]


def inside(model):
    """Yield contents with a value at each field, alone and in a list or mapping."""
    for name in model.model_fields:
        for value in VALUES:
            yield {name: value}
        yield from ({name: [value]} for value in VALUES[:14])
        yield from ({name: {"a": value}} for value in VALUES[:14])


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_word_of_pydantic_is_shown(model):
    for value in (*VALUES, *inside(model)):
        assert [
            line for line in said_of(model, value) if UPSTREAM.search(line) or "another value" in line
        ] == [], value


@pytest.mark.slow
def test_no_word_of_pydantic_is_shown_for_a_whole_recipe():
    for section in (
        "model",
        "data",
        "method",
        "sharding",
        "training",
        "objective",
        "evaluation",
        "checkpoints",
        "publish",
    ):
        models = models_of(Recipe.model_fields[section].annotation)
        for value in (*VALUES, *(one for model in models for one in inside(model))):
            whole = content()
            whole[section] = value
            assert [line for line in said_of(Recipe, whole) if UPSTREAM.search(line)] == [], value


def patterns(schema):
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from patterns(part)


def test_every_pattern_has_words():
    assert {pattern for model in MODELS for pattern in patterns(model.model_json_schema())} == set(FORMS)


def kinds(schema):
    """Yield the types of pydantic's core schemas in one."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema["type"]
        schema = [part for key, part in schema.items() if key not in ("metadata", "default", "serialization")]
    for part in schema if isinstance(schema, list | tuple) else ():
        yield from kinds(part)


def test_every_type_that_a_field_may_have_has_words():
    used = {kind for model in MODELS for kind in kinds(model.__pydantic_core_schema__)}
    wrappers = {
        "default",
        "nullable",
        "union",
        "definitions",
        "definition-ref",
        "model-fields",
        "model-field",
        "any",
        "no-info",
        "tagged-union",
        "dataclass-args",
        "dataclass-field",
    }
    wrappers |= {"function-after", "function-before", "function-wrap", "with-info"}
    assert {"string" if kind == "str" else kind for kind in used - wrappers} <= set(EXPECTED)


def numbers(annotation):
    """Return whether a type takes numbers, and neither true and false nor any value."""
    parts = list(typing.get_args(annotation)) if typing.get_origin(annotation) is not typing.Literal else []
    if typing.get_origin(annotation) is typing.Annotated:
        parts = parts[:1]
    return annotation in (int, float) or (bool(parts) and any(map(numbers, parts)))


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("value", [True, [True], {"a": True}, [[True]]], ids=repr)
def test_no_boolean_is_a_number(model, value):
    for name, field in model.model_fields.items():
        if numbers(field.annotation) and not re.search(
            r"\bbool\b|\bAny\b|Literal\[True", str(field.annotation)
        ):
            said = said_of(model, {name: value})
            assert any(re.match(rf"\s*(generation\.)?{name}\b", line) for line in said), (name, said)


@pytest.mark.parametrize(
    ("model", "value", "said"),
    [
        (
            Shapes,
            {"shapes": [{"name": "a", "processes": True}]},
            "shapes[0].processes: must be an integer; found true",
        ),
        (Cluster, {"node_start_minutes": True}, "node_start_minutes: must be a number; found true"),
        (Cluster, {"volumes": 5}, "volumes: must be a list; found 5"),
        (Accelerators, {"accelerators": {}}, "accelerators: must be a list; found {}"),
        (
            DeepSpeedConfig,
            {"train_batch_size": "x"},
            "train_batch_size: must be a number or 'auto'; found 'x'",
        ),
    ],
)
def test_a_mistake_is_a_sentence_with_its_place(model, value, said):
    with pytest.raises(RecipeError) as error:
        validated(value, model, "x.yaml")
    assert f"  {said}" in str(error.value).splitlines()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"evaluation": {"eval_steps": "x"}},
            "evaluation.eval_steps: must be an integer or a number or 'epoch'; found 'x'",
        ),
        (
            {"evaluation": {"eval_steps": -1}},
            "evaluation.eval_steps: must be greater than 0 or 'epoch'; found -1",
        ),
        (
            {"method": {"name": "lora", "target_modules": 5}},
            "method.target_modules: must be a string or a list; found 5",
        ),
        (
            {"method": {"name": "lora", "target_modules": [5]}},
            "method.target_modules[0]: must be a string; found 5",
        ),
        (
            {"method": {"name": "lora", "rank_pattern": {"a": True}}},
            "method.rank_pattern.a: must be an integer; found true",
        ),
        ({"data": {"path": "x", "columns": {1: "a"}}}, "data.columns[1]: the key must be a string; found 1"),
        (
            {"name": "A B"},
            "name: must be 1 to 63 lower-case letters, digits and dashes, and begin with no dash; found 'A "
            "B'",
        ),
        ({"training": None}, "training: must be a mapping; found null"),
    ],
)
def test_a_union_is_one_mistake(change, said):
    with pytest.raises(RecipeError) as error:
        Recipe.model_validate(content(**change))
    assert str(error.value).splitlines()[1:] == [f"  {said}"]


def test_a_generation_is_refused_in_the_same_words():
    with pytest.raises(RecipeError, match="max_new_tokens: must be an integer; found true"):
        Generation.model_validate({"max_new_tokens": True})


def test_defaults_are_of_their_own_types():
    """A default that validation would refuse could not be written into a file and read back."""
    for model in MODELS:
        for name, field in model.model_fields.items():
            # Keys that DeepSpeed alone reads have no default of ours: None is their absence.
            is_absent = field.default is None and model.__module__ == DeepSpeedConfig.__module__
            if field.default is not PydanticUndefined and not is_absent:
                with suppress(FlytuneError):
                    assert not any(
                        line.startswith(f"{name}:") for line in said_of(model, {name: field.default})
                    ), (model, name)
