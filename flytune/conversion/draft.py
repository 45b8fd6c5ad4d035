"""Recipe in the making: fields with comments, and the keys of the other tool that have no counterpart."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from flytune import yaml_core
from flytune.errors import RecipeError
from flytune.mistakes import alternatives, is_model
from flytune.planning import candidates
from flytune.recipe import Recipe, peers
from flytune.recipe.method import Quantization
from flytune.recipe.objectives import SECTIONS

_WIDTH = 128
_SECTIONS = {
    section: list(
        dict.fromkeys(
            name for kind in filter(is_model, alternatives(field.annotation)) for name in kind.model_fields
        )
    )
    for section, field in Recipe.model_fields.items()
}
"""Names of the fields of each section; none of a field that is not a section."""
_SHORT = ("method", "sharding", "objective")
"""Sections of which a name alone may be written."""
_RENAMED = ("model", "data", "training")
"""Sections that say what is trained, beside objective and method."""
_OFF: tuple[Any, ...] = (None, False, 0, [], {}, "none", "no")
"""Values that switch a key off."""
_TO_FILL_IN = ("objective.rewards", "objective.labels")
"""Fields that may be left empty, so that the recipe is not accepted before a person has filled them in."""


class Draft:
    """A recipe in the making."""

    def __init__(self, tool: str, path: Path, content: Mapping[str, Any]) -> None:
        self.tool, self.path = tool, path
        self._left = {str(key): value for key, value in content.items() if value is not None and value != ""}
        self._empty = {str(key) for key, value in content.items() if value is None}
        self._values: dict[str, Any] = {}
        self._notes: dict[str, str] = {}
        self._tools: dict[str, str] = {}
        """Tools of the keys that are not those of the file's."""
        self._without: dict[str, str] = {}
        """Keys without a counterpart, with the reason."""
        self.last = ""
        """Key that was taken last."""

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of the tool's key, which is then done; a key without a value has the default."""
        self.last = key if key in self._left else self.last
        return self._left.pop(key, default)

    def has(self, key: str) -> bool:
        """Return whether a key of the tool has a value that is not done yet."""
        return key in self._left

    def peek(self, key: str) -> Any:
        """Return the value of a key that is not done yet, and stays so; None if there is none."""
        return self._left.get(key)

    def is_empty(self, key: str) -> bool:
        """Return whether the file has a key without a value, which is not the tool's default."""
        return key in self._empty

    def put(self, field: str, value: Any, note: str = "") -> None:
        """Set a dotted field of the recipe; None leaves it out."""
        if value is not None:
            self._values[field] = value
            self._notes[field] = note

    def get(self, field: str) -> Any:
        """Return the value of a field, None if it is not set."""
        return self._values.get(field)

    def remove(self, field: str) -> None:
        """Leave a field out."""
        self._values.pop(field, None)

    def same(self, *pairs: tuple[str, str]) -> None:
        """Set fields to the values of the tool's keys: (key, field) each."""
        for key, field in pairs:
            self.put(field, self.take(key))

    def leave(self, key: str, reason: str = "") -> None:
        """Note that a key has no counterpart, by default with the reason that the table of names has."""
        if key in self._left:
            del self._left[key]
            self._without[key] = reason or self._reason(key)

    def note(self, label: str, reason: str) -> None:
        """Note something of the file that has no counterpart, and is not a key of its own."""
        self._without[label] = reason

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error of a file that no recipe can stand for."""
        raise RecipeError(f"{self.path}: cannot be converted: {reason}")

    def refuse_changes(self) -> None:
        """Refuse the file if a key of it changes what is trained, and no recipe can have it."""
        for key in list(self._left):
            known = self._counterpart(key)
            if known is None or not known.is_refused:
                continue
            value = self.take(key)
            # Where a word or true changes nothing, false and none are further words, which do.
            off = () if isinstance(known.harmless, bool | str) else _OFF
            if value not in (*off, known.harmless):
                shown = (
                    yaml_core.dump(value, in_one_line=True) if isinstance(value, str | int | float) else "..."
                )
                self.refuse(f"{key}: {shown}: {known.advice}")

    def lift(self, key: str, tool: str) -> None:
        """Put the keys of a section beside the others; they are those of another tool."""
        self.add(self.take(key) or {}, tool)

    def add(self, section: Mapping[Any, Any], tool: str) -> None:
        """Put further keys, of a tool, beside the others."""
        self._left |= {
            str(name): value for name, value in section.items() if value is not None and value != ""
        }
        self._tools |= dict.fromkeys(map(str, section), tool)

    def _counterpart(self, key: str) -> peers.Counterpart | None:
        return peers.counterpart(self._tools.get(key, self.tool), key)

    def _reason(self, key: str) -> str:
        known = self._counterpart(key)
        return (
            known.advice if known else f"not known as a key of {self.tool}; nothing of it is in this recipe"
        )

    def _rename(self, key: str) -> None:
        """Set the field of a key whose value means the same in a recipe, if it is a field of what is trained
        here."""
        known = self._counterpart(key)
        if known is None or known.key is None or known.change or self.get(known.key) is not None:
            return
        section, _, name = known.key.partition(".")
        if section == "objective":
            is_used = self.get("objective.name") is not None
        elif section == "method":
            is_used = self.get("method.name") == "qlora" or (
                self.get("method.name") == "lora" and name not in Quantization.model_fields
            )
        else:
            is_used = section in _RENAMED
        if is_used:
            self.put(known.key, self.take(key))

    def text(self) -> str:
        """Return the recipe as a YAML file with comments.

        Raises:
            RecipeError: it is not a recipe; with its first mistake.
        """
        for key in list(self._left):
            self._rename(key)
            self.leave(key)
        lines = [
            "# yaml-language-server: $schema=recipe.schema.json",
            f"# Made of {self.tool}'s {_in_a_line(self.path.name)} by flytune convert; a comment says what "
            "is not the same there.",
            "# Next: flytune plan FILE, then flytune xray FILE, which shows the samples as they are trained.",
        ]
        for section, names in _SECTIONS.items():
            lines += self._section(section, names)
        if self._without:
            lines += ["", f"# Keys of {self.tool} without a counterpart here:"]
            lines += [line for key, reason in self._without.items() for line in _comment(f"{key}: {reason}")]
        text = "\n".join(lines) + "\n"
        try:
            content = yaml_core.load(text)
            for field in _TO_FILL_IN:
                if self.get(field) == []:
                    del content["objective"][field.partition(".")[2]]
            recipe = Recipe.from_content(content, self.path)
        except yaml_core.YAMLError as error:
            self.refuse(
                f"the recipe that it makes is {error}; divide the data sets into fewer, or name a folder of "
                "them"
            )
        except RecipeError as error:
            problems = [line.strip() for line in str(error).splitlines() if line.startswith("  ")]
            self.refuse(problems[0] if problems else str(error))
        if wrong := candidates.contradictions(recipe):
            self.refuse(wrong[0])
        return text

    def _section(self, section: str, names: list[str]) -> list[str]:
        if not names:
            return self._line(section, section, "") if section in self._values else []
        order = sorted(names, key=lambda name: name != "name")
        fields = [name for name in order if f"{section}.{name}" in self._values]
        if section in _SHORT and fields == ["name"]:
            return self._line(f"{section}.name", section, "")
        lines = [line for name in fields for line in self._line(f"{section}.{name}", name, "  ")]
        return [f"{section}:", *lines] if lines else []

    def _line(self, field: str, name: str, indent: str) -> list[str]:
        value, note = self._values[field], _in_a_line(self._notes[field])
        if field == "data.sources":
            rows = [f"{indent}  - {yaml_core.dump(row, in_one_line=True)}" for row in value]
            return [*(_comment(note, indent) if note else ()), f"{indent}{name}:", *rows]
        line = f"{indent}{name}: {yaml_core.dump(value, in_one_line=True)}"
        if note and len(line) + len(note) + 4 <= _WIDTH:
            return [f"{line}  # {note}"]
        return [*(_comment(note, indent) if note else ()), line]


def _comment(text: str, indent: str = "") -> list[str]:
    """Return the lines of a comment."""
    words, lines = _in_a_line(text).split(" "), [""]
    for word in words:
        if len(indent) + len(lines[-1]) + len(word) + 3 > _WIDTH:
            lines.append("  ")
        lines[-1] += f" {word}"
    return [f"{indent}#{line}" for line in lines]


def _in_a_line(text: str) -> str:
    """Return a text that ends no comment, and shows its unprintable characters as escapes."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1]
        for character in " ".join(text.split())
    )


def run_name(path: Path) -> str:
    """Return a recipe's name for a file; that of its folder too, where files are called config."""
    generic = path.stem.lower() in (
        "config",
        "train",
        "sft",
        "dpo",
        "lora",
        "qlora",
        "full",
        "fft",
        "run",
        "axolotl",
    )
    text = f"{path.absolute().parent.name}-{path.stem}" if generic else path.stem
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].strip("-") or "converted"


def other_objective(name: str) -> str:
    """Return why a file is refused whose objective no recipe has."""
    return f"{name}: the objectives are {', '.join(SECTIONS)}"
