"""adapter_config.json from outside: cut, absurd, or of another PEFT; nothing is allocated or imported for
it."""

import json

import pytest

from flytune.models import adapter_files
from tests.support.paths import ROOT

RELEASED = (ROOT / "tests/support/releases/0.1.0/artifact/adapter_config.json").read_text()
CUT = [RELEASED[:length] for length in range(0, len(RELEASED), 97)]
OTHER = [
    "null",
    "[]",
    "3",
    '"x"',
    "<html></html>",
    '{"r": 8, "r": 9}',
    "[" * 3000,
    "\ud800",
    '{"r": 1e400}',
    '{"r": NaN}',
]
MANY = {str(number): 2 for number in range(1001)}
ABSURD = {
    "r": [0, -1, 10**9, 10**400, 1.5, True, "8", None, [], {}],
    "lora_alpha": [-1, 1e9, True, "16", None, [], 10**400],
    "lora_dropout": [-0.5, True, "0", None],
    "rank_pattern": [
        {"a": 10**9},
        {"a": 0},
        {"a": "x"},
        {"a": None},
        [1],
        "x",
        {"(.*)*x": 2},
        {str(n): 2 for n in range(1001)},
    ],
    "alpha_pattern": [{"a": -1}, {"a": True}, {"a": 1e9}, [1], {"a{999999999999}": 2}],
    "target_modules": [3, [3], [None], {"a": 1}, "(.*)*x", "["],
    "exclude_modules": ["(a|aa)+$", "(?<=a*)b"],
    "layers_pattern": ["(.*)*x", ["layers", "(.*)*x"]],
    "modules_to_save": ["x", [1], {}, ["(.*)*x"], ["("]],
    "trainable_token_indices": [{"a": [-1]}, {"a": [1.5]}, {"a": 3}, [True], {"a": [2**40]}, "x"],
    "megatron_config": [{"a": 1}],
    "megatron_core": [3],
    "auto_mapping": [{"parent_library": "os"}],
    "layer_replication": [[[0, 10**6]]],
    "loftq_config": [{"loftq_bits": 4}],
    "eva_config": [{"rho": 1}],
    "peft_type": [3, None],
    "base_model_name_or_path": [3, [], {}],
    "revision": [3, []],
    "bias": [3],
    "unknown_key": [1, None],
}


def test_that_of_a_release_is_read():
    assert adapter_files.read(RELEASED)["r"] == 2


@pytest.mark.parametrize("text", [*CUT, *OTHER])
def test_what_is_none_is_refused(text):
    with pytest.raises(adapter_files.AdapterConfigRefused):
        adapter_files.read(text)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in ABSURD.items() for value in values]
)
def test_an_absurd_value_is_refused_by_its_name(name, value):
    with pytest.raises(adapter_files.AdapterConfigRefused) as error:
        adapter_files.read(json.dumps(json.loads(RELEASED) | {name: value}))
    assert name in str(error.value) or "digits" in str(error.value)
    assert len(str(error.value)) < 300


def test_ranks_are_those_of_the_tensors():
    shapes = {"a.lora_A.weight": [8, 64], "b.lora_A.weight": [4, 64], "a.lora_B.weight": [64, 8]}
    adapter_files.check_ranks({"r": 8}, shapes)
    adapter_files.check_ranks({"r": 8, "rank_pattern": {"b": 4}}, shapes)
    for config in ({"r": 9}, {"r": 8, "rank_pattern": {"b": 9}}, {"r": 60_000, "rank_pattern": {"b": 4}}):
        with pytest.raises(adapter_files.AdapterConfigRefused, match="but the tensors have 8 at most"):
            adapter_files.check_ranks(config, shapes)
