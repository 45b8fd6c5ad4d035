"""Regular expressions that name layers: those that people write are accepted, those that would take hours are
refused."""

import re

import pytest

from flytune.errors import RecipeError
from flytune.models import config_json
from flytune.recipe import Recipe, patterns
from tests.support.recipes import content

PROJECTIONS = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
PARTS = "self_attn|attention|attn|mlp|feed_forward|ffn|dense|mixer"
WRITTEN = [
    "",
    r"model\.layers\.(1[0-9]|2\d|3[01])\.(self_attn|mlp)\..*",
    ".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$",
    r"(\w+\.)*(q|k)_proj",
    r"([^.]+\.)+mlp\.[^.]+",
    "(q_proj|k_proj)+",
    rf"^(?!(.*vision.*|.*audio.*|.*lm_head.*)).*\.({PROJECTIONS})$",
    r"(?:(?!vision).)*\.(q|v)_proj",
    "(?=.*attn)(?=.*q_proj).*",
    ".*(?<!lm_)head",
    rf"(?:.*?(?:vision|image|visual|patch_embed|model|tower).*?(?:{PARTS}).*?(?:{PROJECTIONS}|lm_head).*?)"
    rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{PARTS})\.(?:(?:{PROJECTIONS})))",
]
SLOW = [
    "(.*)*x",
    "(a|aa)+$",
    "([a-z]+)*$",
    "(.*a){20}x",
    ".*.*.*.*.*.*=",
    "a?" * 40 + "a" * 40,
    "(?!(.|.)*b).*",
    "(?>(a+)+)b",
    r"(.*)\1(.*)\2(.*)\3(.*)x",
    "(a)?(?(1)(b+)+|c)",
    r"(\w+\.?)*x",
]
WRONG = {
    "[": "'[' is not a regular expression: unterminated character set at position 0; write a layer's name",
    "(?<=a*)b": "look-behind requires fixed-width pattern",
    "a{999999999999}": "'a{999999999999}' is not a regular expression: the number of a repetition is too "
    "large",
    "(" * 500 + ")" * 500: "groups are nested deeper than 40; write fewer brackets",
    "(" * 50 + "a" + ")" * 50: "groups are nested deeper than 40; write fewer brackets",
    "a)|(b": "unbalanced parenthesis",
    "x" * 5001 + "+": "a regular expression of 5,002 characters; write 5,000 at most",
}


@pytest.mark.parametrize("pattern", WRITTEN)
@pytest.mark.parametrize("within", [patterns.WHOLE, patterns.END])
def test_what_people_write_is_accepted(pattern, within):
    assert patterns.problem(pattern, within) is None


@pytest.mark.parametrize("pattern", SLOW)
def test_what_would_take_hours_is_refused(pattern):
    for within in (patterns.END, patterns.SAVED, patterns.NUMBERED, patterns.CONVERTED):
        assert patterns.problem(pattern, within)
    assert "many ways, for hours" in patterns.problem(pattern)


@pytest.mark.parametrize(("pattern", "said"), WRONG.items())
def test_what_is_no_expression_is_refused_with_the_reason(pattern, said):
    assert said in patterns.problem(pattern)


def test_every_set_of_characters_is_the_one_that_python_matches():
    names = "aZ_09.-~ \n\u00e9"
    sets = ["[a-z]", "[^a-z]", "[^.]", r"\w", r"\W", r"\d", r"\D", r"\s", r"\S", ".", "a", r"[\d.]"]
    for text in (*sets, "[a-\u00ff]", "[\u00c0-\u00ff]"):
        (item,) = patterns._parser.parse(text)
        characters = patterns._characters(*item)
        for letter in names:
            if re.match(f"(?i:{text})", letter, re.DOTALL):
                assert characters & patterns._bit(ord(letter)), (text, letter)
    assert not patterns._characters(*patterns._parser.parse("[^.]")[0]) & patterns._bit(ord("."))
    assert not patterns._characters(*patterns._parser.parse(r"\d")[0]) & patterns._bit(ord("a"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("target_modules", "(.*)*x"), ("rank_pattern", {"q_proj": 4, "(.*)*x": 8}), ("alpha_pattern", {"[": 8})],
)
def test_a_recipe_s_are_refused_with_their_key(field, value):
    with pytest.raises(RecipeError, match=rf"method\.{field}: .*(for hours|is not a regular expression)"):
        Recipe.model_validate(content(method={"name": "lora", field: value}))


def test_a_thousand_keys_are_the_most():
    with pytest.raises(RecipeError, match=r"method\.rank_pattern"):
        Recipe.model_validate(
            content(method={"name": "lora", "rank_pattern": {f"layers.{n}": 4 for n in range(1001)}})
        )


@pytest.mark.parametrize("key", ["modules_to_not_convert", "llm_int8_skip_modules"])
@pytest.mark.parametrize("value", [["(.*)*x"], ["["], "lm_head", [3]])
def test_those_of_a_config_json_are_refused(key, value):
    given = {"quantization_config": {"quant_method": "gptq", key: value}}
    with pytest.raises(RecipeError, match=rf"its config.json .*quantization_config\.{key}"):
        config_json.check_expressions(given, "a/model")
