"""YAML by the 1.2 core schema: `on`, `off`, `yes` and `no` are strings, `1e-3` is a number, 0o17 is octal, dates are strings.

PyYAML by itself reads and writes YAML 1.1. Files written here mean the same to readers of both versions.
"""

import re
from typing import Any

import yaml
from yaml import MappingNode, ScalarNode, YAMLError
from yaml.constructor import ConstructorError

__all__ = ["CoreLoader", "YAMLError", "dump", "load"]

_TAG = "tag:yaml.org,2002:"
_NULL = r"null|Null|NULL|~|"
_BOOL = r"true|True|TRUE|false|False|FALSE"
_INT = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_SCALARS = {"null": _NULL, "bool": _BOOL, "int": _INT, "float": _FLOAT}
"""Pattern of the plain scalars of each core tag; the first match counts, and a scalar without a match is a string."""
# Strings that a reader of YAML 1.1 other than PyYAML takes for something else: y, n, and those that begin like a number.
_AMBIGUOUS = re.compile(rf"y|Y|n|N|[-+.]*[0-9].*|[-+]?\.(?:inf|nan)|{_NULL}", re.IGNORECASE)


class CoreLoader(yaml.SafeLoader):
    """Loader of the 1.2 core schema, with `<<` to merge mappings; duplicate keys are refused."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own way)
    yaml_constructors = {  # noqa: RUF012
        tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (f"{_TAG}str", f"{_TAG}seq", f"{_TAG}map", None)
    }

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """Compose a mapping as PyYAML does, and refuse duplicate keys."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if isinstance(key, ScalarNode):
                line, known = key.start_mark.line + 1, (key.tag, key.value)
                if known in lines:
                    raise YAMLError(f"{key.value} is there twice, in lines {lines[known]} and {line}; keep one")
                lines[known] = line
        return node

    def _scalar(self, node: ScalarNode) -> Any:
        text, kind = str(self.construct_scalar(node)), node.tag.rpartition(":")[2]
        if not re.fullmatch(_SCALARS[kind], text):
            raise ConstructorError(None, None, f"{text!r:.60} is no {kind}", node.start_mark)
        try:
            return _READ[kind](text)
        except ValueError as error:  # more digits than Python reads
            raise ConstructorError(None, None, f"{text!r:.60}: {error}", node.start_mark) from None


def _integer(text: str) -> int:
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def _float(text: str) -> float:
    return float(text.replace(".", "", 1) if text.lower().lstrip("-+") in (".inf", ".nan") else text)


_READ: dict[str, Any] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": _integer,
    "float": _float,
}
for _kind, _pattern in _SCALARS.items():
    CoreLoader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(rf"(?:{_pattern})\Z"), None)
    CoreLoader.add_constructor(f"{_TAG}{_kind}", CoreLoader._scalar)
CoreLoader.add_implicit_resolver(f"{_TAG}merge", re.compile(r"<<\Z"), ["<"])
CoreLoader.add_constructor(f"{_TAG}merge", CoreLoader.yaml_constructors[f"{_TAG}str"])  # where it is not a key


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes strings that YAML 1.1 or 1.2 would read as another type, or whose lines they break differently."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def _text(self, text: str) -> ScalarNode:
        style = '"' if _AMBIGUOUS.fullmatch(text) or not text.isprintable() else None
        return self.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _Dumper._text)


def load(text: str | bytes, loader: type[CoreLoader] = CoreLoader) -> Any:
    """Return the value of a YAML text.

    Raises:
        YAMLError: it is not YAML, or has a duplicate key.
    """
    return yaml.load(text, Loader=loader)


def dump(value: Any) -> str:
    """Return the YAML text of a value, which readers of YAML 1.1 and 1.2 read back as an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
