"""Names of other tools: the recipe's keys for them (peers.yaml), and the tool that a whole file is of."""

import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from flytune import yaml_core
from flytune.mistakes import alternatives, is_model
from flytune.recipe.objectives import SECTIONS
from flytune.recipe.sections import TRACKER_NAMES
from flytune.sentences import enumerated

_FILE = Path(__file__).with_name("peers.yaml")
_BASE = "transformers"
_WHOLE = {
    "axolotl": (
        ("base_model",),
        ("datasets", "pretraining_dataset", "micro_batch_size", "sequence_len", "adapter", "rl"),
    ),
    "LLaMA-Factory": (
        ("model_name_or_path",),
        (
            "stage",
            "finetuning_type",
            "template",
            "cutoff_len",
            "lora_rank",
            "lora_target",
            "dataset_dir",
            "export_dir",
        ),
    ),
    "LLaMA-Factory's v1": (("model", "train_dataset"), ("model", "peft_config", "template", "dist_config")),
    "TRL": (
        ("model_name_or_path",),
        ("dataset_name", "datasets", "output_dir", "use_peft", "learning_rate", "max_length"),
    ),
    "accelerate": (("compute_environment",), ("distributed_type", "num_processes")),
    "DeepSpeed": (
        ("zero_optimization",),
        ("train_batch_size", "bf16", "fp16", "optimizer", "zero_optimization"),
    ),
}
"""Keys at the top of a whole file of a tool: all of the first, and one of the second."""
_COMMANDS = {
    "LLaMA-Factory": re.compile(
        r"(?:^|[\s/;&])(?:llamafactory-cli|lmf)\s+train\s|(?:^|[\s/])train\w*\.py\s+(?:\S+\.(?:ya?ml|json)\b|(?=.*--stage\b))",
        re.DOTALL,
    ),
    "axolotl": re.compile(r"(?:^|[\s/;&])axolotl\s+train\s|\baxolotl\.cli\.train\s"),
    "TRL": re.compile(
        r"(?:^|[\s/;&])(?:trl\s+[a-z]\w*|[\w.-]*(?:sft|dpo|kto|reward|grpo|gkd|distill|ppo|orpo|train|run)[\w.-]*\.py|trl\.scripts\.\w+)\s[\s\\]*--\w"
    ),
}
"""Command lines of each tool, or of one of its scripts."""
_SHELL_COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)


class Counterpart(NamedTuple):
    """The recipe's key for a name of another tool."""

    tool: str
    key: str | None
    """Dotted key; None if the recipe has none."""
    change: str
    """The change of the value; without a key, the reason."""
    is_refused: bool = False
    """True if it changes what is trained and no recipe can, so that a file with it is refused."""
    harmless: Any = None
    """Value with which it changes nothing, beside those that switch it off."""

    @property
    def advice(self) -> str:
        """Advice for an error."""
        if self.key is None or re.search(r"(^|; )write ", self.change):
            return self.change
        return f"write {self.key}" + (f"; {self.change}" if self.change else "")


@cache
def table() -> dict[str, dict[str, Counterpart]]:
    """Return the names of each tool with their counterparts; a name that ends in `*` stands for all that
    begin so."""
    content = _FILE.read_bytes().replace(b"{trackers}", enumerated(TRACKER_NAMES).encode())
    return {tool: _counterparts(tool, groups) for tool, groups in yaml_core.load(content).items()}


def _counterparts(tool: str, groups: Mapping[str, Mapping[str, str]]) -> dict[str, Counterpart]:
    counterparts = {}
    for name, row in groups["keys"].items():
        key, _, change = row.partition("; ")
        counterparts[name] = Counterpart(tool, key, change)
    for group in ("refused", "without"):
        for reason, names in groups.get(group, {}).items():
            for entry in names.split():
                name, _, value = entry.partition("=")
                harmless = yaml_core.load(value) if value else None
                counterparts[name] = Counterpart(tool, None, reason, group == "refused", harmless)
    return counterparts


def counterpart(tool: str, name: str) -> Counterpart | None:
    """Return the counterpart of a tool's name; None if the table has none."""
    return _of_tool(tool, name) or _of_tool(_BASE, name)


def _of_tool(tool: str, name: str) -> Counterpart | None:
    names = table().get(tool, {})
    if name in names:
        return names[name]
    beginnings = [known for known in names if known.endswith("*") and name.startswith(known[:-1])]
    return names[max(beginnings, key=len)] if beginnings else None


class Advice(Mapping[str, str]):
    """Advice on names that are unknown where they are in a recipe."""

    def __init__(self, recipe: Callable[[], type[BaseModel]]) -> None:
        self._recipe = recipe

    def __getitem__(self, name: str) -> str:
        """Return the advice on a name; one that the recipe has elsewhere belongs there, unless a tool means
        something else."""
        tools_by_advice: dict[str, list[str]] = {}
        for tool in table():
            known = _of_tool(tool, name)
            if known and (known.key is None or known.key.rpartition(".")[2] != name):
                tools_by_advice.setdefault(known.advice, []).append(tool)
        if not tools_by_advice:
            places = list(
                dict.fromkeys(
                    place for place, fields in _sections(self._recipe()) if place and name in fields
                )
            )
            if not places:
                raise KeyError(name)
            return (
                "it belongs in "
                f"{' or '.join(places)}{_of_objectives(name) if places == ['objective'] else ''}"
            )
        if len(tools_by_advice) == 1:
            return next(iter(tools_by_advice))
        return "; ".join(
            f"for that of {' and '.join(tools)}, {text}" for text, tools in tools_by_advice.items()
        )

    def __iter__(self) -> Iterator[str]:
        return iter({name for names in table().values() for name in names})

    def __len__(self) -> int:
        return len(set(self))


def _of_objectives(name: str) -> str:
    """Return the objectives that have a field, in brackets; empty where all have it."""
    having = [objective for objective, section in SECTIONS.items() if name in section.model_fields]
    return f", with name: {' or '.join(having)}" if len(having) < len(SECTIONS) else ""


@cache
def _sections(model: type[BaseModel]) -> list[tuple[str, Collection[str]]]:
    """Return the dotted sections of a recipe, and of its rows, with their fields; first the recipe itself."""
    sections: list[tuple[str, Collection[str]]] = [("", model.model_fields)]
    for key, field in model.model_fields.items():
        for kind in alternatives(field.annotation):
            for inner in filter(is_model, (kind, *typing.get_args(kind))):
                sections += [(f"{key}.{place}".rstrip("."), fields) for place, fields in _sections(inner)]
    return sections


def tool_of(content: Any) -> str | None:
    """Return the tool that a whole file is of, by its keys or its command; None for all others, and for
    recipes."""
    if isinstance(content, str):
        text = _SHELL_COMMENT.sub("", content)
        return next((tool for tool, command in _COMMANDS.items() if command.search(text)), None)
    if not isinstance(content, Mapping) or any(
        isinstance(content.get(section), Mapping) for section in ("model", "training")
    ):
        return None
    for tool, (all_of, one_of) in _WHOLE.items():
        if all(key in content for key in all_of) and any(key in content for key in one_of):
            return tool
    return None


def remedy(tool: str, path: str | Path = "FILE") -> str:
    """Return what to do with a file of a tool."""
    if tool == "accelerate":
        return (
            "this is accelerate's configuration, which names processes and no model: write sharding: "
            "NAME in a recipe"
        )
    if tool == "DeepSpeed":
        return "this is a DeepSpeed configuration: name it in a recipe, sharding: {name: zero3, config: FILE}"
    if tool == "LLaMA-Factory's v1":
        return (
            "this is a file of LLaMA-Factory's v1 form, which is not read: name its keys as "
            "LLaMA-Factory's stable form does"
        )
    return f"this is a file of {tool}, not a recipe; make a recipe of it: flytune convert {path}"
