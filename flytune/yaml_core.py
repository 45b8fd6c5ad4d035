"""YAML by the 1.2 core schema: `on`, `off`, `yes` and `no` are strings, `1e-3` is a number, 0o17 is octal,
dates are strings.

PyYAML by itself reads and writes YAML 1.1. Files written here mean the same to readers of both versions.
"""

import re
import sys
from typing import IO, Any

import yaml
from yaml import AliasEvent, MappingNode, Node, ScalarNode, YAMLError
from yaml.constructor import ConstructorError

__all__ = ["CoreLoader", "YAMLError", "dump", "load"]

LARGEST = 300_000
"""Characters of a text that is read: PyYAML reads about 100,000 a second."""
DEEPEST = 100
"""Largest number of mappings and lists inside each other."""
_MOST_NODES = 100_000
"""Values of a text, with each alias counted as all that it stands for."""
_MOST_BITS = 1024
_TAG = "tag:yaml.org,2002:"
_NULL = r"null|Null|NULL|~|"
_BOOL = r"true|True|TRUE|false|False|FALSE"
_INT = r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
_SCALARS = {"null": _NULL, "bool": _BOOL, "int": _INT, "float": _FLOAT}
"""Pattern of the plain scalars of each core tag; the first match counts, and a scalar without a match is a
string."""
# Strings that a reader of YAML 1.1 other than PyYAML takes for something else: y, n, and those that begin
# like a number.
_AMBIGUOUS = re.compile(rf"y|Y|n|N|[-+.]*[0-9].*|[-+]?\.(?:inf|nan)|{_NULL}", re.IGNORECASE)


class CoreLoader(yaml.SafeLoader):
    """Loader of the 1.2 core schema, with `<<` to merge mappings.

    Refused are duplicate keys, aliases inside of what they stand for, and texts that are too deep or too
    large.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 (PyYAML's own way)
    yaml_constructors = {  # noqa: RUF012
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (f"{_TAG}str", f"{_TAG}seq", f"{_TAG}map", None)
    }

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = self._nodes = 0
        self._open: set[str] = set()
        """Anchors of the nodes that are being composed."""
        self._sizes: dict[int, int] = {}
        """Numbers of values by the identity of a node."""

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Compose a node as PyYAML does, within the limits."""
        event = self.peek_event()
        line, anchor = event.start_mark.line + 1, getattr(event, "anchor", None)
        if isinstance(event, AliasEvent) and anchor in self._open:
            raise YAMLError(f"line {line}: *{anchor} is inside of what it stands for")
        before = self._nodes
        self._depth += 1
        if self._depth > DEEPEST:
            raise YAMLError(f"line {line}: mappings and lists are nested deeper than {DEEPEST}")
        is_anchored = anchor is not None and not isinstance(event, AliasEvent)
        if is_anchored:
            self._open.add(str(anchor))
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_anchored:
            self._open.discard(str(anchor))
        self._nodes += self._sizes[id(node)] if isinstance(event, AliasEvent) else 1
        if self._nodes > _MOST_NODES:
            raise YAMLError(
                f"line {line}: more than {_MOST_NODES:,} values, with each alias counted as what it stands "
                "for"
            )
        self._sizes.setdefault(id(node), self._nodes - before)
        return node

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        """Compose a mapping as PyYAML does, and refuse duplicate keys."""
        node = super().compose_mapping_node(anchor)
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            if isinstance(key, ScalarNode):
                line, known = key.start_mark.line + 1, self._key(key)
                if known in lines:
                    raise YAMLError(
                        f"{key.value} is there twice, in lines {lines[known]} and {line}; keep one"
                    )
                lines[known] = line
        return node

    def flatten_mapping(self, node: MappingNode) -> None:
        """Put what `<<` brings into a mapping as PyYAML does, and refuse a mapping whose values another one
        would hide."""
        keys_here = {key.value: value for key, value in node.value if isinstance(key, ScalarNode)}
        super().flatten_mapping(node)
        for key, value in node.value:
            mine = keys_here.get(key.value) if isinstance(key, ScalarNode) else None
            if not (isinstance(mine, MappingNode) and isinstance(value, MappingNode)) or mine is value:
                continue
            there = {key_node.value for key_node, _ in mine.value}
            if lost := [
                str(key_node.value)
                for key_node, _ in value.value
                if key_node.value not in there and "<<" not in there
            ]:
                raise YAMLError(
                    f"line {mine.start_mark.line + 1}: {key.value} is brought by << too, and its "
                    f"{', '.join(lost)} would be lost; write << in {key.value}, or what is lost"
                )

    def _key(self, node: ScalarNode) -> Any:
        """Return a value that is equal for keys that Python's dict takes for one: 1, 0x1 and true."""
        if node.tag.rpartition(":")[2] not in _SCALARS:
            return node.tag, node.value
        value = self._scalar(node)
        return (node.tag, str(value)) if value is None or value != value else value

    def _string(self, node: ScalarNode) -> str:
        text = str(self.construct_scalar(node))
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConstructorError(
                None, None, f"{text!r:.60} has half of a surrogate pair", node.start_mark
            ) from None
        return text

    def _scalar(self, node: ScalarNode) -> Any:
        text, kind = str(self.construct_scalar(node)), node.tag.rpartition(":")[2]
        if not re.fullmatch(_SCALARS[kind], text):
            raise ConstructorError(None, None, f"{text!r:.60} is no {kind}", node.start_mark)
        try:
            return _READ[kind](text)
        except ValueError as error:  # more digits than Python reads
            raise ConstructorError(None, None, f"{text!r:.60}: {error}", node.start_mark) from None


def _integer(text: str) -> int:
    value = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if value.bit_length() > _MOST_BITS:
        raise ValueError("an integer of hundreds of digits")
    return value


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
CoreLoader.add_constructor(f"{_TAG}str", CoreLoader._string)
CoreLoader.add_implicit_resolver(f"{_TAG}merge", re.compile(r"<<\Z"), ["<"])
CoreLoader.add_constructor(
    f"{_TAG}merge", CoreLoader.yaml_constructors[f"{_TAG}str"]
)  # where it is not a key


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes strings that YAML 1.1 or 1.2 would read as another type, or whose lines they break
    differently."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def _text(self, text: str) -> ScalarNode:
        style = '"' if _AMBIGUOUS.fullmatch(text) or not text.isprintable() else None
        return self.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _Dumper._text)


def load(text: str | bytes | IO[str] | IO[bytes], loader: type[CoreLoader] = CoreLoader) -> Any:
    """Return the value of a YAML text, or of a file that is open; bytes are UTF-8.

    Raises:
        YAMLError: it is not YAML, has a duplicate key, or is larger than LARGEST or deeper than DEEPEST.
    """
    try:
        content = text if isinstance(text, str | bytes) else text.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise YAMLError(f"longer than the {LARGEST:,} characters that are read")
        return yaml.load(
            content.decode("utf-8-sig") if isinstance(content, bytes) else content, Loader=loader
        )
    except UnicodeDecodeError as error:
        raise YAMLError(f"not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        # PyYAML's own on escapes and directives that stand for no character or number.
        raise YAMLError(f"cannot be read: {' '.join(str(error).split())[:200]}") from None


def dump(value: Any, in_one_line: bool = False) -> str:
    """Return the YAML text of a value, which readers of YAML 1.1 and 1.2 read back as an equal value."""
    if not in_one_line:
        return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    # In a list, a text is one line whatever its style.
    text = yaml.dump(
        [value],
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True,
        width=sys.maxsize,
    )
    return text.strip()[1:-1]
