"""The table of other tools' names: what it says of a recipe is true of the recipe's schema."""

import json
import re

import pytest

from flytune import yaml_core
from flytune.cli import convert
from flytune.recipe import json_schema, peers
from flytune.recipe.objectives import SECTIONS
from tests.support.paths import ROOT

SCHEMA = json.loads(json_schema())
PREFIX = re.compile(r"^(lora|peft|dpo|rl|kto|pref|moe|trl)_")
OTHER_MEANING = {
    # Of the answers that LLaMA-Factory writes after training, and of what is not the recipe's own field of
    # this name.
    ("LLaMA-Factory", "temperature"),
    ("LLaMA-Factory", "top_k"),
    ("LLaMA-Factory", "top_p"),
    ("LLaMA-Factory", "task"),
    # Megatron's, which divides norms between the processes of tensor parallelism.
    ("LLaMA-Factory", "sequence_parallel"),
}


def fields_and_values(part):
    """Return the names of all fields of a schema, and all values that a field may have by name."""
    fields, values = set(), set()
    if isinstance(part, dict):
        fields |= set(part.get("properties", ()))
        values |= {str(value) for value in [*part.get("enum", ()), part.get("const")] if value is not None}
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        more = fields_and_values(inner)
        fields, values = fields | more[0], values | more[1]
    return fields, values


FIELDS, VALUES = fields_and_values(SCHEMA)
WITHOUT = [
    (tool, name, row)
    for tool, names in peers.table().items()
    for name, row in names.items()
    if row.key is None
]


def test_nothing_that_a_recipe_has_is_said_to_have_no_counterpart():
    assert {"router_aux_loss_coef", "max_completion_length"} <= FIELDS
    assert {"grpo", "adafactor", "nf4"} <= VALUES
    named = {(tool, name) for tool, name, _ in WITHOUT if {name, PREFIX.sub("", name)} & FIELDS}
    assert named - OTHER_MEANING == set()


def test_nothing_that_a_recipe_offers_is_said_not_to_be_offered():
    reasons = {row.change for _, _, row in WITHOUT}
    denied = {
        word.lower() for reason in reasons for word in re.findall(r"([\w-]+) (?:is|are) not offered", reason)
    }
    assert {"ppo", "orpo", "megatron"} <= denied
    assert denied & {value.lower() for value in VALUES} == set()


@pytest.mark.parametrize(
    ("beginning", "field"),
    [
        ("trackers are ", SCHEMA["$defs"]["Tracking"]["properties"]["report_to"]["items"]["enum"]),
        (
            "the adapters are ",
            [name for name in SCHEMA["$defs"]["Method"]["properties"]["name"]["enum"] if name != "full"],
        ),
    ],
)
def test_a_list_of_what_is_offered_has_all_of_it(beginning, field):
    lists = {row.change.removeprefix(beginning) for _, _, row in WITHOUT if row.change.startswith(beginning)}
    assert [sorted(re.split(", | and ", text)) for text in lists] == [sorted(field)]


def test_the_command_line_takes_every_objective():
    # TRL trains no embedding models.
    assert set(convert.OBJECTIVES) == set(SECTIONS) - {"embed"}


def test_each_name_stands_once_below_its_tool():
    content = yaml_core.load((ROOT / "flytune/recipe/peers.yaml").read_bytes())
    for tool, groups in content.items():
        names = [*groups["keys"]]
        for group in ("refused", "without"):
            names += [
                entry.partition("=")[0] for row in groups.get(group, {}).values() for entry in row.split()
            ]
        assert sorted(names) == sorted(peers.table()[tool])


@pytest.mark.parametrize(
    ("tool", "name", "refused"),
    [
        ("axolotl", "unfrozen_parameters", True),
        ("axolotl", "swanlab_anything", False),
        ("TRL", "vllm_mode", False),
        ("LLaMA-Factory", "loraplus_lr_ratio", True),
        ("TRL", "label_smoothing_factor", True),
    ],
)
def test_a_name_is_found_below_its_tool_by_its_beginning_or_below_transformers(tool, name, refused):
    found = peers.counterpart(tool, name)
    assert found is not None
    assert (found.key, found.is_refused) == (None, refused)
    assert peers.counterpart(tool, "my_own_key") is None
