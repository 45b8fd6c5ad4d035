"""Command lines of TRL, LLaMA-Factory and axolotl, with their launchers and the shell variables of their
script."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from flytune import yaml_core
from flytune.conversion import sharding
from flytune.conversion.draft import other_objective
from flytune.errors import RecipeError
from flytune.recipe import peers
from flytune.recipe.objectives import SECTIONS
from flytune.written_files import load_yaml

_SCRIPTS = {
    "reward_modeling": "reward",
    "run_classification": "classify",
    "gkd": "distill",
    "distillation": "distill",
}
OBJECTIVES = {name: name for name in SECTIONS} | _SCRIPTS
"""Objectives by the names of commands and scripts of TRL, and of a script of transformers."""
_OTHERS = re.compile(r"online|async|gspo|ppo|rloo|nash|xpo|orpo|cpo|bco|prm")
"""Words in the names of scripts whose objective is none of these, whatever else their names have."""
_MEDIA = re.compile(r"vlm|video|vision|audio|image")
_SCRIPT = re.compile(r"(?:.*/)?([\w.-]+)\.py|trl\.scripts\.(\w+)")
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"\s*(?:export\s+|readonly\s+)?({_NAME})=(\"[^\"]*\"|'[^']*'|[^\s;&|]*)\s*;?\s*")
_VARIABLE = re.compile(rf"\$(?:({_NAME})|\{{({_NAME})(?::?-([^}}]*))?\}})")
_END = re.compile(r"\d?>>?(?:&\d|[\w./~-]*)|&>.*|<|&&?|\|\|?|;")
"""Words after which a shell's line is no longer the command's."""
_LAUNCHER = (
    "num_processes",
    "num_machines",
    "nproc_per_node",
    "nnodes",
    "multi_gpu",
    "mixed_precision",
    "main_process_port",
    "master_port",
    "standalone",
    "module",
    "machine_rank",
    "node_rank",
    "main_process_ip",
    "master_addr",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "dynamo_backend",
    "num_gpus",
    "num_nodes",
    "launcher",
    "gpu_ids",
    "use_deepspeed",
    "hostfile",
    "num_cpu_threads_per_process",
)
"""Arguments of accelerate launch, torchrun and deepspeed."""
_COUNTS = ("num_processes", "num_machines", "nproc_per_node", "nnodes", "num_gpus", "num_nodes")


class Command(NamedTuple):
    """A command line that trains."""

    tool: str
    content: dict[str, Any]
    """The tool's arguments, over those of the file that the command names."""
    gpus: int | None
    """Number of processes on all nodes; None if nothing says it."""
    objective: str | None
    """Objective that TRL's command or script is named after."""


def read(path: Path, text: str, gpus: int | None, objective: str | None) -> Command:
    """Return the first command of a script that trains; `gpus` and `objective` are what the caller says.

    Raises:
        RecipeError: there is none that trains by an objective which is offered; a value is a variable that
            has none here.
    """
    tool, other = str(peers.tool_of(text)), ""
    for variables, words in _commands(path, text):
        for place, word in enumerate(words):
            if (start := _start(tool, words, place)) is None:
                continue
            kind = None
            if tool == "TRL":
                kind = objective or _objective(path, word, words[start - 1])
                if kind is None:
                    other = other or words[start - 1].rpartition("/")[2].removesuffix(".py")
                    break
            given = _given(path, tool, words[:place], words[start:])
            return _launched(path, tool, given, variables, gpus, kind)
    if other:
        _refuse(path, other_objective(other))
    _refuse(path, f"it has neither trl NAME ({', '.join(SECTIONS)}) nor one of TRL's scripts")


def of_file(path: Path, content: dict[str, Any], gpus: int | None) -> tuple[dict[str, Any], int | None]:
    """Return the arguments of TRL's YAML without those of its launcher, and the number of processes."""
    variables = content.get("env") if isinstance(content.get("env"), dict) else {}
    launched = _launched(
        path, "TRL", content, {str(key): str(value) for key, value in (variables or {}).items()}, gpus, None
    )
    return launched.content, launched.gpus


def _refuse(path: Path, reason: str) -> NoReturn:
    raise RecipeError(f"{path}: cannot be converted: {reason}")


def _commands(path: Path, text: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the words of each command of a script, with the variables that are set there."""
    variables: dict[str, str] = {}
    open_quote = ""
    for line in re.sub(r"\\[ \t]*\r?\n", " ", text).splitlines():
        whole = f"{open_quote}\n{line}" if open_quote else line
        if not open_quote and (match := _ASSIGNMENT.fullmatch(line)):
            variables[match[1]] = _filled(match[2].strip("\"'"), variables)
            continue
        try:
            words = shlex.split(_filled(whole, variables), comments=True)
        except ValueError as error:
            open_quote, problem = whole, error
            continue
        open_quote = ""
        assigned = dict(variables)
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            assigned[match[1]] = match[2]
            words = words[1:]
        if words:
            yield assigned, words
    if open_quote:
        _refuse(path, f"the command line cannot be read: {problem}")


def _filled(text: str, variables: dict[str, str]) -> str:
    """Return a text with the values of the variables that are known, or their defaults."""
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[3] or match[0]), text)


def _start(tool: str, words: Sequence[str], place: int) -> int | None:
    """Return the place of the arguments of a command of a tool that begins at a place; None if none does."""
    name, following = words[place].rpartition("/")[2], words[place + 1 : place + 2]
    if tool == "LLaMA-Factory":
        if re.fullmatch(r"train\w*\.py", name):
            return place + 1
        return place + 2 if name in ("llamafactory-cli", "lmf") and following == ["train"] else None
    if tool == "axolotl":
        if words[place] == "axolotl.cli.train":
            return place + 1
        return place + 2 if name == "axolotl" and following == ["train"] else None
    if _SCRIPT.fullmatch(words[place]):
        return place + 1
    return place + 2 if name == "trl" and following and re.fullmatch(r"[a-z_]+", following[0]) else None


def _objective(path: Path, word: str, name: str) -> str | None:
    """Return the objective that a command or script of TRL is named after."""
    if (script := _SCRIPT.fullmatch(word)) is None:
        return OBJECTIVES.get(name)
    stem = (script[1] or script[2]).lower()
    if _MEDIA.search(stem):
        _refuse(
            path,
            f"{stem}: scripts for images, video and audio are not read; write a recipe (data.images: true)",
        )
    if _OTHERS.search(stem):
        return None
    return OBJECTIVES.get(stem) or next((ours for part, ours in OBJECTIVES.items() if part in stem), None)


def _given(path: Path, tool: str, launcher: Sequence[str], words: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a command, those of its launcher, and those of a file that it names."""
    given, places = _arguments(words)
    given = {
        key.removeprefix("no_"): False if _negated(tool, key, value) else value
        for key, value in given.items()
    }
    named = given.pop("config", None) if tool == "TRL" else next(iter(places), None)
    content = load_yaml(sharding.near(path, str(named)) or str(named)) if named else {}
    if tool == "LLaMA-Factory":
        changes = (place.partition("=") for place in places[1:] if "=" in place)
        given |= {key: _value(value) for key, _, value in changes}
    return (content if isinstance(content, dict) else {}) | _arguments(launcher)[0] | given


def _arguments(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return `--key value`, `--key=value`, `--key a b` and `--key` as a mapping, and the words before
    them."""
    content: dict[str, Any] = {}
    places: list[str] = []
    key = None
    for word in words:
        if _END.fullmatch(word):
            break
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            content[name] = _value(text) if equals else True
            key = None if equals else name
        elif re.fullmatch(r"-[A-Za-z]", word):  # python's -m and -u
            key = None
        elif key is not None:
            content[key] = _with_value(content[key], _value(word))
        else:
            places.append(word)
    return {key: value for key, value in content.items() if key}, places


def _with_value(before: Any, value: Any) -> Any:
    """Return an option's value after a further one; True stands for none so far."""
    if before is True:
        return value
    return [*before, value] if isinstance(before, list) else [before, value]


def _value(word: str) -> Any:
    try:
        value = yaml_core.load(word)
    except yaml_core.YAMLError:
        return word
    if isinstance(value, dict):
        return value
    return {"True": True, "False": False, "None": None}.get(
        word, value if isinstance(value, int | float | bool) else word
    )


def _negated(tool: str, key: str, value: Any) -> bool:
    """Return whether an argument is transformers' --no_KEY, which switches KEY off."""
    return key.startswith("no_") and value is True and bool(peers.counterpart(tool, key.removeprefix("no_")))


def _launched(
    path: Path,
    tool: str,
    given: dict[str, Any],
    variables: dict[str, str],
    gpus: int | None,
    objective: str | None,
) -> Command:
    """Return the command without its launcher's arguments, whose sharding is named as transformers does."""
    given = sharding.of_launcher(given, path)
    for key, value in given.items():
        shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        known = peers.counterpart(tool, key)
        if "$" not in shown or isinstance(value, dict):
            continue
        if key in _COUNTS and gpus is None:
            _refuse(
                path, f"--{key} {shown}: the shell knows its value; write the number there, or say --gpus N"
            )
        if key not in _LAUNCHER and known and known.key:
            _refuse(path, f"--{key} {shown}: a variable that this file does not set; write its value there")
    content = {
        key: value for key, value in given.items() if key not in _LAUNCHER and (key != "env" or tool != "TRL")
    }
    return Command(tool, content, gpus or _gpus(given, variables), objective)


def _gpus(given: dict[str, Any], variables: dict[str, str]) -> int | None:
    """Return the number of processes that a launcher starts on all nodes; None if nothing says it."""
    counts = [_count(given.get(key)) for key in _COUNTS]
    processes, nodes = counts[0], counts[1] or counts[3] or counts[5] or _count(variables.get("NNODES")) or 1
    if processes:
        return processes
    visible = variables.get("CUDA_VISIBLE_DEVICES", "").strip("\"' ")
    of_node = (
        counts[2]
        or counts[4]
        or _count(variables.get("NPROC_PER_NODE"))
        or (len(visible.split(",")) if visible else None)
    )
    if of_node is None and (nodes > 1 or given.get("multi_gpu")):
        of_node = sharding.GPUS_OF_A_NODE
    return of_node * nodes if of_node else None


def _count(value: Any) -> int | None:
    text = str(value)
    return int(text) if re.fullmatch(r"[1-9]\d{0,5}", text) else None
