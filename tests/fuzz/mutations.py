"""Mutations of valid documents: dropped, duplicated, retyped, absurd, nested, truncated, flipped and encoded
parts."""

import copy
import json
import re
from typing import Any

import yaml
from hypothesis import strategies as st

from tests.fuzz.isolation import OF_ADDRESS

ABSURD: list[Any] = [
    0,
    -1,
    1,
    True,
    False,
    None,
    10**6,
    10**9,
    10**12,
    10**30,
    10**300,
    1e300,
    1e-300,
    1e-9,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    " ",
    ".inf",
    "1e400",
    "1e-400",
    "0",
    "017",
    "0o17",
    "true",
    "null",
    "auto",
    "\x00",
    "a\x1b[31mb",
    "\u202eb",
    "\ud800",
    "\ufffe",
    "x" * 300,
    "x" * 5000,
    "a/" * 2500,
    "../../etc/passwd",
    "/etc/passwd",
    "~nobody/x",
    "s3://",
    "://",
    "hf://",
    "file:///etc/passwd",
    "http://[::1",
    "[/x]",
    "{{ 7 * 7 }}",
    "(a+)+$",
    "*",
    "2020-13-45",
    [],
    {},
    [[]],
    [{}],
    [1],
    [None],
    {"a": 1},
    {"": ""},
    ["a"] * 1000,
]
"""Values that no field means."""
NASTY = [
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"\n",
    b"\r",
    b"\t",
    b"null",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b"'",
    b":",
    b",",
    b"-",
    b"*a",
    b"&a ",
    b"!!python/object:os.system ",
    b"<<: ",
    b"|",
    b">",
    b"#",
    b"%",
    b"1e999",
    b"NaN",
    b"9" * 5000,
    b"[" * 2000,
    b"---\n",
    b"...\n",
    b"2020-99-99",
]
"""Bytes that a reader may stumble over."""
ENCODINGS = ["utf-16", "utf-16-le", "utf-32", "latin-1", "utf-8-sig", "cp037", "utf-7"]
scalars = st.one_of(
    st.sampled_from(ABSURD),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(st.none() | st.booleans(), lambda inner: st.lists(inner, max_size=3), max_leaves=6),
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values inside of a value."""
    items = list(
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [path for key, item in items for path in ((*at, key), *places(item, (*at, key)))]


def value_at(value: Any, path: tuple[Any, ...]) -> Any:
    """Return the value inside of a value at a path."""
    for key in path:
        value = value[key]
    return value


@st.composite
def with_unknown_key(draw: st.DrawFn, valid: Any) -> Any:
    """Draw a valid document with one more key, at its root or in one of its mappings."""
    content = copy.deepcopy(valid)
    mappings = [(), *(at for at in places(content) if isinstance(value_at(content, at), dict))]
    value_at(content, draw(st.sampled_from(mappings)))["more"] = draw(st.sampled_from([1, "x", [], None]))
    return content


@st.composite
def documents(draw: st.DrawFn, valid: Any, changes: int = 3) -> Any:
    """Draw a valid document with up to `changes` mutations; with none, the document itself."""
    content = copy.deepcopy(valid)
    for number in range(draw(st.integers(0, changes))):
        paths = places(content)
        if not paths:
            break
        *above, last = draw(st.sampled_from(paths))
        parent = value_at(content, tuple(above))
        kind = draw(
            st.sampled_from(
                ["absurd", "absurd", "absurd", "drop", "rename", "copy", "nest", "retype", "double"]
            )
        )
        if kind == "absurd":
            parent[last] = copy.deepcopy(draw(scalars))  # the drawn value is the strategy's own
        elif kind == "drop":
            del parent[last]
        elif kind == "rename" and isinstance(parent, dict):
            parent[
                draw(
                    st.sampled_from(
                        ["", "x", "__class__", "a.b", f"{last}s", str(last).upper(), "\x00", "zz" * 999]
                    )
                )
            ] = parent.pop(last)
        elif kind == "copy":
            other = draw(st.sampled_from(paths))
            found: Any = content
            try:
                for key in other:
                    found = found[key]
            except (KeyError, IndexError, TypeError):
                continue
            parent[last] = copy.deepcopy(found)
        elif kind == "nest":
            inner: Any = parent[last]
            for _ in range(draw(st.sampled_from([1, 2, 50, 101] if number == 0 else [1, 2]))):
                inner = [inner] if draw(st.booleans()) else {"a": inner}
            parent[last] = inner
        elif kind == "retype":
            parent[last] = draw(
                st.sampled_from([str, lambda one: [one], lambda one: {"name": one}, lambda one: not one])
            )(parent[last])
        elif isinstance(parent, list):
            parent.extend(parent * draw(st.sampled_from([1, 5, 100])))
    return content


@st.composite
def damaged(draw: st.DrawFn, content: bytes, often: float = 1.0) -> bytes:
    """Draw bytes with one to three changes: cut, dropped, doubled, flipped, replaced, or in another
    encoding."""
    if draw(st.floats(0, 1)) > often:
        return content
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(content)))
        size = draw(st.sampled_from([1, 1, 1, 2, 8, 64, 512]))
        part = content[at : at + size]
        kind = draw(st.sampled_from(["cut", "drop", "double", "flip", "nasty", "encode", "swap"]))
        if kind == "cut":
            content = content[:at]
        elif kind == "encode":
            text = content.decode("utf-8", "replace")
            content = text.encode(draw(st.sampled_from(ENCODINGS)), "replace")
        else:
            new = {
                "drop": b"",
                "double": part * 2,
                "flip": bytes(byte ^ (1 << draw(st.integers(0, 7))) for byte in part[:1]) + part[1:],
                "nasty": draw(st.sampled_from(NASTY)),
                "swap": part[::-1],
            }[kind]
            content = content[:at] + new + content[at + size :]
    return content


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON, with the constants that only Python's has."""
    return json.dumps(value, default=str).encode()


def yaml_bytes(value: Any) -> bytes:
    """Return a value as YAML, whatever is in it; where PyYAML cannot, as JSON."""
    try:
        return yaml.dump(value, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, UnicodeError, RecursionError):
        return json.dumps(value, default=str).encode()


@st.composite
def with_equal_keys(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw a JSON or YAML text in which one of its keys is there twice, the second time with another value,
    or the same."""
    found = [
        *re.finditer(rb'"(\w+)": ?(null|true|false|[\d.]+|"[^"\\]*")', content),
        *re.finditer(rb"(?m)^( *\w+): .+$", content),
    ]
    if not found:
        return content
    one = draw(st.sampled_from(found))
    again = one[0] if draw(st.booleans()) else re.sub(rb":.*", b": 1", one[0])
    return (
        content[: one.start()] + again + (b"," if one[0].startswith(b'"') else b"\n") + content[one.start() :]
    )


BOMBS = [
    "&a [x, y]",
    "&a [*a]",
    "&a {b: *a}",
    "[" * 5000,
    "{a: " * 200 + "1" + "}" * 200,
    "!!python/object:os.system x",
    "[&a ["
    + "x, " * 99
    + "]"
    + "".join(f", &{to} [" + f"*{of}, " * 99 + "]" for of, to in ("ab", "bc", "cd", "de"))
    + "]",
]
"""YAML values that are endless, enormous or deep, or make objects."""


@st.composite
def with_bomb(draw: st.DrawFn, content: bytes) -> bytes:
    """Draw a YAML text one of whose values is one of BOMBS, or with one as a further key."""
    bomb = draw(st.sampled_from(BOMBS)).encode()
    found = [*re.finditer(rb"(?m)^( *(?:- )?\w+): .+$", content)]
    if not found or draw(st.booleans()):
        return content + b"\nmore: " + bomb + b"\n"
    one = draw(st.sampled_from(found))
    return content[: one.start()] + one[1] + b": " + bomb + content[one.end() :]


SECRETS = [
    f"https://user:{OF_ADDRESS}@files.example.com/x",
    f"s3://key:{OF_ADDRESS}@bucket/x",
    f"https://{OF_ADDRESS}@files.example.com/x",
    f"https://x.blob.example.com/a?sig={OF_ADDRESS}",
    f"s3://bucket/x?X-Amz-Signature={OF_ADDRESS}",
    f"gs://bucket/x?token={OF_ADDRESS}",
    f"https://host/a?API_KEY={OF_ADDRESS}",
    f"hf_{OF_ADDRESS}AbCdEfGhIjKlMnOp",
    f"ghp_{OF_ADDRESS}AbCdEfGhIjKl",
    f"https://hooks.slack.com/services/T0/B0/{OF_ADDRESS}",
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={OF_ADDRESS}==;EndpointSuffix=x",
    f"s3%3A%2F%2Fkey%3A{OF_ADDRESS}%40bucket%2Fx",
    f"see https://user:{OF_ADDRESS}@host/ for more",
]
"""Texts with a credential, whose secret part is a mark that is looked for in all that comes out."""


@st.composite
def with_secret(draw: st.DrawFn, valid: Any) -> Any:
    """Draw a valid document with a credential as one of its values, in one of its texts, or as a key."""
    content = copy.deepcopy(valid)
    *above, last = draw(st.sampled_from(places(content)))
    parent = value_at(content, tuple(above))
    secret = draw(st.sampled_from(SECRETS))
    kind = draw(st.sampled_from(["value", "value", "value", "list", "key"]))
    if kind == "key" and isinstance(parent, dict):
        parent[secret] = 1
    else:
        parent[last] = [secret] if kind == "list" else secret
    return content
