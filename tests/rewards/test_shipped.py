"""The project's own rewards."""

import pytest

from flytune.rewards.shipped import exact_answer, json_schema, regular_expression


@pytest.mark.parametrize(
    ("completion", "reference", "value"),
    [
        ("so it is 1,234.", "1234", 1.0),
        ("First 3, then 4.\n#### 7", "He has 3 + 4 = 7.\n#### 7", 1.0),
        ("#### $7.00 in 2 days", 7, 1.0),
        (r"hence \boxed{3}", 3, 1.0),
        ("Paris.", "paris", 1.0),
        ("-5", "5", 0.0),
        ("7 and then 8", "7", 0.0),
        ("", "7", 0.0),
        ("  ", "", 0.0),
    ],
)
def test_final_answers_are_compared_as_gsm8k_does(completion, reference, value):
    assert exact_answer(completion, reference) == value


def test_a_reference_that_is_no_answer_is_refused():
    with pytest.raises(TypeError, match="must be text or a number"):
        exact_answer("1", None)


def test_a_regular_expression_matches_all_of_the_answer():
    assert [regular_expression(text, r"<a>.*</a>") for text in (" <a>x\ny</a>\n", "<a>x</a>!", "")] == [
        1.0,
        0.0,
        0.0,
    ]


SCHEMA = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}},
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"name": "a", "age": 3}', 1.0),
        ('Here:\n```json\n{"name": "a"}\n```', 1.0),
        ('{"name": ""}', 0.0),
        ('{"name": "a", "age": true}', 0.0),
        ('{"name": "a", "age": -1}', 0.0),
        ('{"name": "a", "other": 1}', 0.0),
        ('{"age": 1}', 0.0),
        ('{"name": "a", "age": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_is_compared_with_a_schema(completion, value):
    assert json_schema(completion, SCHEMA) == value


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        ({"enum": [1, "a"]}, "1", "true"),
        ({"type": "array", "items": {"type": "number"}, "maxItems": 2}, "[1, 2.5]", "[1, 2, 3]"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 5}]}, "3", "7"),
        ({"not": {"type": "null"}}, "0", "null"),
        ({"anyOf": [{"const": 1}, {"type": "string"}], "allOf": [True]}, '"x"', "2"),
        ('{"exclusiveMinimum": 0}', "1", "0"),
    ],
)
def test_the_keywords_of_a_schema(schema, accepted, refused):
    assert [json_schema(text, schema) for text in (accepted, refused)] == [1.0, 0.0]


@pytest.mark.parametrize(
    "schema", [{"$ref": "x"}, {"properties": {"a": {"pattern": "x"}}}, {"type": "text"}, 3]
)
def test_what_of_a_schema_is_not_compared_is_refused(schema):
    with pytest.raises(ValueError, match=r"^schema"):
        json_schema("{}", schema)
