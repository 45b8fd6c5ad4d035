"""YAML by the 1.2 core schema, wherever Flytune reads it; what it writes is equal to readers of 1.1 and of
1.2."""

import json
import math
import re
from contextlib import suppress

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flytune import yaml_core
from flytune.errors import RecipeError
from flytune.hardware import load_accelerators, load_cluster, load_shapes
from flytune.recipe import Recipe
from tests.support.recipes import content

CORE = {
    **{
        word: word
        for word in ("on", "off", "yes", "no", "On", "OFF", "Yes", "NO", "y", "n", "tRUE", "nULL", "none")
    },
    **{"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False},
    **{"null": None, "Null": None, "NULL": None, "~": None, "": None},
    **{
        "1e-3": 1e-3,
        "1E5": 1e5,
        "1e5": 1e5,
        "2.5e-5": 2.5e-5,
        ".5": 0.5,
        "-.5E3": -500.0,
        "1.": 1.0,
        "+1.5": 1.5,
    },
    **{".inf": math.inf, "-.Inf": -math.inf, "+.INF": math.inf},
    **{"7": 7, "-7": -7, "+7": 7, "017": 17, "0o17": 15, "0xfF": 255},
    **{
        text: text
        for text in (
            "0b11",
            "1_000",
            "12:30:45",
            "1:30.5",
            "2026-11-22",
            "2026-11-22T01:02:03Z",
            "1.2.3",
            "=",
            "e3",
        )
    },
    **{text: text for text in ("0o8", "-0o7", "0x", ".", "-", "+", "inf", "nan", ".infinity", "١")},
}


@pytest.mark.parametrize("text", [text for text in CORE if text != "-"], ids=repr)
def test_a_scalar_is_what_the_core_schema_says(text):
    wanted = CORE[text]
    for read in (yaml_core.load(f"key: {text}")["key"], yaml_core.load(f"- {text}\n- x")[0]):
        assert (type(read), read) == (type(wanted), wanted)
    if text:
        assert yaml_core.load(f"{text}: 1") == {wanted: 1}


def test_nan_and_quoted_scalars():
    assert math.isnan(yaml_core.load(".nan"))
    assert yaml_core.load("['1', \"on\", !!str 1, !!int '7', !!float 1]") == ["1", "on", "1", 7, 1.0]


@pytest.mark.parametrize(
    "text",
    ["!!int x", "!!bool yes", "!!timestamp 2026-11-22", "!!python/name:os.system ''", "9" * 5000, "[1"],
)
def test_what_is_no_core_yaml_is_an_error(text):
    with pytest.raises(yaml_core.YAMLError):
        yaml_core.load(text)


def test_merged_mappings_stay_and_keys_that_stand_twice_are_refused_with_both_lines(tmp_path):
    text = "base: &base {x: 1, y: 2}\nmid: &mid {<<: *base, x: 3}\nlast: {<<: *mid, y: 4}\n"
    assert yaml_core.load(text) == {
        "base": {"x": 1, "y": 2},
        "mid": {"x": 3, "y": 2},
        "last": {"x": 3, "y": 4},
    }
    (tmp_path / "recipe.yaml").write_text("name: a\ntraining:\n  max_steps: 1\n  seed: 2\n\n  max_steps: 3\n")
    with pytest.raises(
        RecipeError, match=r"recipe\.yaml: not YAML: max_steps is there twice, in lines 3 and 6; keep one"
    ):
        Recipe.from_yaml(tmp_path / "recipe.yaml")


TEXTS = (
    st.text()
    | st.sampled_from([*filter(None, CORE), "\x85", "a\u2028 b", "\ufeff", "\t", " a", "<<"])
    | st.from_regex(r"[-+.0-9eEoxXb_:~=<nyoNY ]{1,9}", fullmatch=True)
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def same(value, other):
    """Equal in value and type: 1, 1.0 and True are not."""
    return json.dumps(value) == json.dumps(other)


@given(VALUES)
def test_what_is_written_is_read_back_equal_by_1_1_and_1_2(value):
    text = yaml_core.dump(value)
    assert same(yaml_core.load(text), value)
    assert same(yaml.safe_load(text), value)


# Words and numbers of YAML 1.1 that PyYAML does not know: other readers do.
@pytest.mark.parametrize(
    "text", ["y", "N", "1e3", "0o17", "1_0.5", "190:20:30.15", "+12", "0b1_0", "2026-1-1", "1,000", ".1_"]
)
def test_a_text_that_some_reader_takes_for_something_else_is_quoted(text):
    assert yaml_core.dump([text]) == f'- "{text}"\n'


# A recipe has no control characters; an address in it is a mistake where it has credentials.
PLAIN = TEXTS.filter(lambda text: "://" not in text and not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text))


@given(st.builds(dict, description=PLAIN))
def test_a_recipe_in_an_artifact_is_read_back_equal(changes):
    recipe = Recipe.model_validate(content(**changes))
    for read in (yaml_core.load, yaml.safe_load):
        assert Recipe.model_validate(read(recipe.to_yaml())) == recipe


def test_recipes_shapes_accelerators_and_the_cluster_are_read_by_it(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(content()).rstrip() + "\nnotify:\n  on: [failed]\ndescription: off\n")
    recipe = Recipe.from_yaml(file)
    assert (recipe.notify.on, recipe.description) == (["failed"], "off")
    (row, *_) = [json.loads(shape.model_dump_json()) for shape in load_shapes()]
    file.write_text("- " + json.dumps(row | {"name": "?"}).replace('"?"', "on") + "\n")
    assert load_shapes(file)[0].name == "on"
    (row, *_) = [json.loads(accelerator.model_dump_json()) for accelerator in load_accelerators().values()]
    file.write_text("- " + json.dumps(row | {"name": "?"}).replace('"?"', "no") + "\n")
    assert list(load_accelerators(file)) == ["no"]
    file.write_text("queue: off\nspot_taints: [2026-11-22]\nnode_start_minutes: 1e1\n")
    found = load_cluster(file)
    assert (found.queue, found.spot_taints, found.node_start_minutes) == ("off", ["2026-11-22"], 10.0)


def aliases(inside: str) -> str:
    return f"a0: &a0 {inside}\n" + "".join(
        f"a{n}: &a{n} {{k{n}: [{','.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
    )


HOSTILE = {
    "a: 1\nb: 2\na: 3": "a is there twice, in lines 1 and 3; keep one",
    "1: a\n0x1: b": "0x1 is there twice, in lines 1 and 2; keep one",
    "~: a\nnull: b": "null is there twice, in lines 1 and 2",
    "[" * 2000: "line 1: mappings and lists are nested deeper than 100",
    "{a: " * 101 + "1" + "}" * 101: "line 1: mappings and lists are nested deeper than 100",
    "x: 1\na: &a [*a]": r"line 2: \*a is inside of what it stands for",
    "&a {x: {y: *a}}": r"line 1: \*a is inside of what it stands for",
    aliases("[x, x, x]"): "more than 100,000 values, with each alias counted as what it stands for",
    aliases("{x: 1}").replace(": [", ": 1, <<: ["): "more than 100,000 values",
    "x: " + "9" * 5000: "Exceeds the limit",
    "x: 0x" + "f" * 5000: "an integer of hundreds of digits",
    '"\\U00110000"': "cannot be read: chr",
    '"\\ud800"': "has half of a surrogate pair",
    "%YAML 1." + "9" * 5000 + "\n---\na": "cannot be read: Exceeds the limit",
    "a" * 300_001: "longer than the 300,000 characters that are read",
    "!!timestamp 2024-99-99": "could not determine a constructor",
    "!!python/object/apply:os.getcwd []": "could not determine a constructor",
    "? [a]\n: 1": "found unhashable key",
}


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_refused(text):
    with pytest.raises(yaml_core.YAMLError, match=HOSTILE[text]):
        yaml_core.load(text)


def test_other_encodings_are_refused_and_files_are_read_to_the_limit(tmp_path):
    for coding in ("utf-16", "utf-32", "cp1252"):
        (tmp_path / "a.yaml").write_bytes("a: ö".encode(coding))
        with (
            (tmp_path / "a.yaml").open(encoding="utf-8") as text,
            pytest.raises(yaml_core.YAMLError, match="not UTF-8: byte"),
        ):
            yaml_core.load(text)  # as `pyflyte run` opens it
        with pytest.raises(yaml_core.YAMLError, match="not UTF-8: byte"):
            yaml_core.load((tmp_path / "a.yaml").read_bytes())
    with (
        open("/dev/zero", "rb") as endless,
        pytest.raises(yaml_core.YAMLError, match="longer than the 300,000 characters"),
    ):
        yaml_core.load(endless)
    assert yaml_core.load("\ufeffa: 1".encode()) == {"a": 1}


@given(st.text(alphabet="{}[]&*a1:- \n!|>?'\"%<~#,\\x0.e"))
def test_any_text_is_read_or_refused(text):
    with suppress(yaml_core.YAMLError):
        yaml_core.load(text)


def test_a_mapping_that_hides_a_merged_one_is_refused_with_what_would_be_lost():
    base = "base: &base {a: 1, training: {rate: 1, steps: 2}}\n"
    with pytest.raises(
        yaml_core.YAMLError, match=r"line 2: training is brought by << too, and its steps would be lost"
    ):
        yaml_core.load(f"{base}own: {{<<: *base, training: {{rate: 3}}}}\n")
    whole = yaml_core.load(f"{base}own: {{<<: *base, a: 2, training: {{rate: 3, steps: 4}}}}\n")
    assert whole["own"] == {"a": 2, "training": {"rate": 3, "steps": 4}}
