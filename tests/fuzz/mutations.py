"""Mutations of valid documents: dropped, duplicated, retyped, absurd, nested, truncated, flipped and encoded parts."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

ABSURD: list[Any] = [
    0, -1, 1, True, False, None, 10**6, 10**9, 10**12, 10**30, 10**300, 1e300, 1e-300, 1e-9, float("inf"), float("-inf"),
    float("nan"), "", " ", ".inf", "1e400", "1e-400", "0", "017", "0o17", "true", "null", "auto", "\x00", "a\x1b[31mb",
    "\u202eb", "\ud800", "\ufffe", "x" * 300, "x" * 5000, "a/" * 2500, "../../etc/passwd", "/etc/passwd", "~nobody/x", "s3://", "://",
    "hf://",
    "file:///etc/passwd", "http://[::1", "[/x]", "{{ 7 * 7 }}", "(a+)+$", "*", "2020-13-45", [], {}, [[]], [{}], [1], [None],
    {"a": 1}, {"": ""}, ["a"] * 1000,
]  # fmt: skip
"""Values that no field means."""
NASTY = [
    b"\x00", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\n", b"\r", b"\t", b"null", b"[", b"]", b"{", b"}", b'"', b"'", b":", b",",
    b"-", b"*a", b"&a ", b"!!python/object:os.system ", b"<<: ", b"|", b">", b"#", b"%", b"1e999", b"NaN", b"9" * 5000,
    b"[" * 2000,
    b"---\n", b"...\n", b"2020-99-99",
]  # fmt: skip
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
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [path for key, item in items for path in ((*at, key), *places(item, (*at, key)))]


@st.composite
def documents(draw: st.DrawFn, valid: Any, changes: int = 3) -> Any:
    """Draw a valid document with up to `changes` mutations; with none, the document itself."""
    content = copy.deepcopy(valid)
    for number in range(draw(st.integers(0, changes))):
        paths = places(content)
        if not paths:
            break
        *above, last = draw(st.sampled_from(paths))
        parent = content
        for key in above:
            parent = parent[key]
        kind = draw(st.sampled_from(["absurd", "absurd", "absurd", "drop", "rename", "copy", "nest", "retype", "double"]))
        if kind == "absurd":
            parent[last] = copy.deepcopy(draw(scalars))  # the drawn value is the strategy's own
        elif kind == "drop":
            del parent[last]
        elif kind == "rename" and isinstance(parent, dict):
            parent[draw(st.sampled_from(["", "x", "__class__", "a.b", f"{last}s", str(last).upper(), "\x00", "zz" * 999]))] = (
                parent.pop(last)
            )
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
            parent[last] = draw(st.sampled_from([str, lambda one: [one], lambda one: {"name": one}, lambda one: not one]))(
                parent[last]
            )
        elif isinstance(parent, list):
            parent.extend(parent * draw(st.sampled_from([1, 5, 100])))
    return content


@st.composite
def damaged(draw: st.DrawFn, content: bytes, often: float = 1.0) -> bytes:
    """Draw bytes with one to three changes: cut, dropped, doubled, flipped, replaced, or in another encoding."""
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
