"""Recipes made of the files of other tools: axolotl, LLaMA-Factory, TRL."""

from pathlib import Path

from flytune import files, json_core, yaml_core
from flytune.conversion import axolotl, command, llamafactory, trl
from flytune.conversion.draft import Draft, run_name
from flytune.errors import RecipeError
from flytune.recipe import peers
from flytune.written_files import load_yaml

__all__ = ["convert"]


def convert(path: str, gpus: int | None = None, objective: str | None = None) -> str:
    """Return a recipe, as a YAML file with comments, for a file of another tool.

    Args:
        path: a YAML or JSON of axolotl, LLaMA-Factory or TRL, or a file with a command line of one of them.
        gpus: the number of GPUs that the tool was started on; by default as the file says, 8 with DeepSpeed
            or FSDP, or 1.
        objective: that of a recipe (sft, dpo ...), for a TRL YAML, which does not name it.

    Raises:
        RecipeError: the file cannot be read, is of no known tool, or trains what no recipe can; in one
            sentence.
    """
    place = Path(path)
    content = _read(place)
    tool = peers.tool_of(content)
    if isinstance(content, str):
        if tool is None:
            raise RecipeError(
                f"{path}: neither a YAML of axolotl, LLaMA-Factory or TRL, nor a command line of one of them"
            )
        tool, content, gpus, objective = command.read(place, content, gpus, objective)
    elif tool == "TRL" and isinstance(content, dict):
        content, gpus = command.of_file(place, content, gpus)
    if not isinstance(content, dict) or tool not in ("axolotl", "LLaMA-Factory", "TRL"):
        remedy = peers.remedy(tool) if tool else "no file of axolotl, LLaMA-Factory or TRL, by its keys"
        raise RecipeError(f"{path}: cannot be converted: {remedy}")
    draft = Draft(tool, place, content)
    draft.put("name", run_name(place))
    draft.put("description", f"Made of {tool}'s {place.name}.")
    try:
        if tool == "TRL":
            trl.convert(draft, gpus, objective)
        else:
            (axolotl if tool == "axolotl" else llamafactory).convert(draft, gpus)
        return draft.text()
    except (
        OSError,
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
        IndexError,
        OverflowError,
        ZeroDivisionError,
    ):
        # The tool itself would refuse the value: its own checks are not repeated here.
        return draft.refuse(f"{draft.last}: a value that {tool} does not take")


def _read(path: Path) -> object:
    """Return the content of a YAML or JSON file, or the text of another one."""
    try:
        text = files.read_regular(path, yaml_core.LARGEST).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return load_yaml(path)  # whose error says what is wrong
    try:
        # JSON may have tabs, which YAML refuses.
        content = json_core.load(text) if text.lstrip().startswith("{") else load_yaml(path)
    except json_core.JSONError:
        return load_yaml(path)
    except RecipeError:
        if peers.tool_of(text) is None:
            raise
        return text
    is_command = not (isinstance(content, dict) and peers.tool_of(content)) and peers.tool_of(text)
    return text if is_command else content
