"""Files of other tools, of which recipes are made: what is in the recipe, compared with what the file
says."""

import contextlib
import copy
import re
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from flytune.conversion import convert
from flytune.planning import planner
from flytune.recipe import Recipe, peers
from tests.fuzz.isolation import Wrong
from tests.fuzz.kinds import Samples, kind
from tests.fuzz.oracles import equal_keys, plain_yaml, refuse_shown
from tests.fuzz.plans import texts
from tests.support.paths import ROOT

_FILES = ROOT / "tests" / "conversion"
_NUMBERS = {
    "axolotl": {
        "learning_rate": "training.learning_rate",
        "lora_r": "method.r",
        "lora_alpha": "method.lora_alpha",
        "lora_dropout": "method.lora_dropout",
        "weight_decay": "training.weight_decay",
        "sequence_len": "data.max_length",
        "adam_beta2": "training.adam_beta2",
        "micro_batch_size": "training.per_device_train_batch_size",
    },
    "LLaMA-Factory": {
        "learning_rate": "training.learning_rate",
        "lora_rank": "method.r",
        "weight_decay": "training.weight_decay",
        "cutoff_len": "data.max_length",
        "lora_dropout": "method.lora_dropout",
        "per_device_train_batch_size": "training.per_device_train_batch_size",
    },
    "TRL": {
        "learning_rate": "training.learning_rate",
        "lora_r": "method.r",
        "lora_alpha": "method.lora_alpha",
        "max_length": "data.max_length",
        "weight_decay": "training.weight_decay",
        "per_device_train_batch_size": "training.per_device_train_batch_size",
    },
}
"""Keys of each tool whose numbers are in the recipe as they are, and the recipe's fields; `lora` ones only
with an adapter."""
_BATCH = {
    "axolotl": ("micro_batch_size", "gradient_accumulation_steps"),
    "LLaMA-Factory": ("per_device_train_batch_size", "gradient_accumulation_steps"),
    "TRL": ("per_device_train_batch_size", "gradient_accumulation_steps"),
}
_CHANGING = {
    "axolotl": ["relora", "rope_scaling", "process_reward_model", "landmark_attention", "qat"],
    "LLaMA-Factory": ["use_galore", "rope_scaling", "train_from_scratch", "use_badam", "mask_history"],
    "TRL": ["sync_ref_model", "reference_free", "use_weighting"],
}
"""Keys that change what is learned, which no recipe has."""
_UNKNOWN = ["lerning_rate", "my_own_key", "lora_rr"]
_OUTBREAKS = [
    "a\nnotify: {}  # BROKEN",
    "a\r\nnotify: {}  # BROKEN",
    "a\x85notify: {}  # BROKEN",
    "a\u2028notify: {}  # BROKEN",
    "a\x1b[31mBROKEN",
    "a\x9bBROKEN",
]
"""Texts that end a comment and write a field that no converted recipe has, or that a terminal obeys."""
_TRL = {
    "model_name_or_path": "Qwen/Qwen3-0.6B",
    "dataset_name": "trl-lib/Capybara",
    "learning_rate": 2e-5,
    "use_peft": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "max_length": 512,
    "weight_decay": 0.01,
    "num_train_epochs": 1,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "packing": True,
}


def _valid() -> dict[str, list[dict[str, Any]]]:
    """Return files of each tool of which recipes can be made."""
    found: dict[str, list[dict[str, Any]]] = {"TRL": [_TRL]}
    for tool, name, more in (
        ("axolotl", "axolotl.yaml", "adapter"),
        ("LLaMA-Factory", "llamafactory.yaml", ""),
    ):
        content = yaml.safe_load((_FILES / name).read_bytes())
        common = content["common"] | content.get(more, {})
        files = [file for file in content["files"].values() if file["planned"] is True]
        found[tool] = [common | {key: one for key, one in file.items() if key != "planned"} for file in files]
    return found


@st.composite
def _named(draw: st.DrawFn, tool: str, valid: dict[str, Any]) -> bytes:
    """Draw a file with another number, with a key that changes what is learned, or with one that is
    unknown."""
    content = copy.deepcopy(valid)
    if draw(st.booleans()):
        content[draw(st.sampled_from(sorted(_NUMBERS[tool])))] = draw(
            st.sampled_from([3, 7, 64, 0.5, 1e-3, "x", -1, 10**15])
        )
    if draw(st.booleans()):
        content[draw(st.sampled_from(_CHANGING[tool]))] = draw(st.sampled_from([True, 1, "linear"]))
    if draw(st.booleans()):
        content[draw(st.sampled_from(_UNKNOWN))] = draw(st.sampled_from([1, "x", True, [1]]))
    if draw(st.integers(0, 3)) == 0:
        content[draw(st.sampled_from(_OUTBREAKS))] = 1
    return yaml.safe_dump(content, sort_keys=False).encode()


def _draw(samples: Samples) -> st.SearchStrategy[tuple[bytes, int | None]]:
    valid = _valid()
    tools = st.sampled_from(sorted(valid))
    contents = st.one_of(
        tools.flatmap(lambda tool: texts(valid[tool])),
        tools.flatmap(lambda tool: st.sampled_from(valid[tool]).flatmap(lambda one: _named(tool, one))),
    )
    return st.tuples(contents, st.sampled_from([None, None, 1, 4]))


@kind("conversion", _draw, share=0.5)
def check_conversion(samples: Samples, given: tuple[bytes, int | None], folder: Path) -> None:
    """A file of another tool is refused, or its numbers are in a recipe that is one, and each of its keys is
    named."""
    content, gpus = given
    (folder / "theirs.yaml").write_bytes(content)
    made = convert(str(folder / "theirs.yaml"), gpus)
    refuse_shown(made)
    for line in re.split("[\n\r\x85\u2028\u2029]", made):
        if ("BROKEN" in line and not line.startswith("#")) or not line.isprintable():
            raise Wrong(f"a line that is none of a recipe: {line!r:.200}")
    if twice := equal_keys(content):
        raise Wrong(f"accepted, although {twice:.60} is there twice")
    written = plain_yaml(content)
    tool = peers.tool_of(yaml.safe_load(content.decode("utf-8-sig")))
    (folder / "recipe.yaml").write_text(made, encoding="utf-8")
    recipe = Recipe.from_yaml(folder / "recipe.yaml")
    _compare(str(tool), written, recipe, made, gpus)
    with contextlib.suppress(FileNotFoundError):
        planner.make(recipe, samples=100)


def _compare(tool: str, written: dict[str, str], recipe: Recipe, made: str, gpus: int | None) -> None:
    read = recipe.model_dump()
    for key, field in _NUMBERS[tool].items():
        section, _, name = field.partition(".")
        if key.startswith("lora") and recipe.method.name == "full":
            continue
        if (said := _number(written.get(key))) is not None and read[section][name] != said:
            raise Wrong(f"{field} is {read[section][name]!r}, and {key}: {written[key]:.60}")
    if changed := [
        key for key in _CHANGING[tool] if key in written and written[key] not in ("false", "null", "")
    ]:
        raise Wrong(f"{changed[0]} changes what is learned, and a recipe is made without it")
    if unnamed := [key for key in _UNKNOWN if written.get(key) not in (None, "", "null") and key not in made]:
        raise Wrong(f"{unnamed[0]}: in the file, and the recipe does not say that it has none like it")
    micro, steps = (_number(written.get(key)) for key in _BATCH[tool])
    if (
        gpus
        and micro
        and steps
        and recipe.training.global_batch_size != micro * steps * gpus
        and recipe.objective.name != "kto"
    ):
        raise Wrong(f"a batch of {recipe.training.global_batch_size}, and {micro:g} x {steps:g} x {gpus}")


def _number(text: Any) -> float | None:
    """Return the number that a text of a file is; None for anything else."""
    try:
        return float(text) if isinstance(text, str) else None
    except ValueError:
        return None
