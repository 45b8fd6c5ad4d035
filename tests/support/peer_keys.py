"""Count of the keys of other tools' files that the table of names knows: python -m tests.support.peer_keys
FILE.

FILE is JSON: {tool: {"keys": {dotted key: ...}}}; `datasets[].name` is name of the entries of the list
datasets.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from flytune.recipe import peers

_TOOLS = {"axolotl": "axolotl", "llamafactory": "LLaMA-Factory"}
_SECTIONS = {"datasets": "axolotl", "pretraining_dataset": "axolotl", "trl": "TRL"}
"""Sections whose keys the table lists by their own names, with the tool that they are of."""


def group_of(tool: str, key: str) -> str:
    """Return the group of a dotted key: a key of a recipe, refused, without a counterpart, or unknown."""
    parts = key.replace("[]", "").split(".")
    section, name = parts[0], parts[-1]
    known = peers.counterpart(_SECTIONS[section], name) if section in _SECTIONS else None
    known = known or peers.counterpart(tool, section)
    if known is None:
        return "unknown"
    if known.key is not None:
        return "key of a recipe"
    return "refused" if known.is_refused else "without a counterpart"


def main(path: str) -> None:
    """Print how many keys are in each group, and those that are unknown."""
    for tool, content in json.loads(Path(path).read_text(encoding="utf-8")).items():
        groups = {key: group_of(_TOOLS[tool], key) for key in content["keys"]}
        unknown = " ".join(key for key, group in groups.items() if group == "unknown")
        sys.stdout.write(
            f"{_TOOLS[tool]}: {len(groups)} keys: {dict(Counter(groups.values()))}\n  unknown: {unknown}\n"
        )


if __name__ == "__main__":
    main(sys.argv[1])
