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
        ("it is 1,00,000", "100,000", 1.0),
        ("1 + 2 = 3", "3", 1.0),
        ("#### 5 of 10", "5", 1.0),
        (r"so \boxed{\frac{1}{2}}", r"\boxed{\dfrac{1}{2}}", 1.0),
        (r"so \boxed{\frac{3}{2}}", r"\boxed{\frac{1}{2}}", 0.0),
        (r"so \boxed{\frac{3}{2}}", "2", 0.0),
        (r"\boxed{0.5}", "1/2", 1.0),
        ("that makes 3/2.", "1/2", 0.0),
        ("#### 1/2", "#### 1/3", 0.0),
        (r"\boxed{-\frac12}", "-0.5", 1.0),
        (r"\boxed{1\frac{1}{2}}", "5.5", 0.0),
        (r"\boxed{5\sqrt{3}}", r"\boxed{2\sqrt{3}}", 0.0),
        (r"\boxed{2\sqrt{3}}", r"$2 \sqrt{3}$", 1.0),
        (r"\boxed{(5, 4)}", "(3, 4)", 0.0),
        (r"\boxed{\left(3,4\right)}", "(3, 4)", 1.0),
        (r"first \boxed{3}, then \boxed{4", "3", 1.0),
        (r"\boxed{x = 3}", "3", 1.0),
        (r"\boxed{\text{Yes}}", "yes", 1.0),
        (r"\boxed{1{,}234\text{ km}}", "1234", 1.0),
        ("1/0", "1/0", 1.0),
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
