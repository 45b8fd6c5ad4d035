"""Artifacts with one thing spoiled and hashes that fit, as somebody else may hand them over."""

import copy
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from flytune.records.contents import stored_file
from tests.support.paths import ROOT
from tests.support.stages import seal

RELEASE = ROOT / "tests" / "support" / "releases" / "0.1.0"
"""Artifact, base model and data set that 0.1.0 wrote."""
MISSING = object()
"""Placeholder for a value whose key is removed."""
VALUES = (MISSING, None, "x", -1, 10**12, 1.5, True, [], {}, [5], {"a": 5})
"""Values of other types and of absurd sizes."""
TEXTS = {
    "empty": b"",
    "an object": b"{}",
    "a list": b"[]",
    "null": b"null",
    "a number": b"5",
    "words": b"hello",
    "bytes": b"\x00\xff\xfe",
    "deep": b"[" * 5000 + b"]" * 5000,
}
"""Contents that no file of an artifact has."""


def spoil(artifact: Path, folder: Path, name: str, content: bytes | None) -> Path:
    """Copy an artifact with another content of one file, or without it; export.json and artifact.json have
    fitting hashes."""
    path = Path(shutil.copytree(artifact, folder))
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    (path / name).unlink(missing_ok=True)
    if content is not None:
        (path / name).write_bytes(content)
    if name != "export.json":
        export = json.loads((path / "export.json").read_bytes())
        listed = [one["file"] for one in export["files"] if (path / one["file"]).is_file()]
        export["files"] = [stored_file(path / one, one).model_dump() for one in listed]
        (path / "export.json").write_text(json.dumps(export), encoding="utf-8")
    return seal(path)


def flip(file: Path, at: float = 0.5) -> None:
    """Change one bit of a file, at a share of its length."""
    content = bytearray(file.read_bytes())
    content[int(at * (len(content) - 1))] ^= 1
    file.write_bytes(content)


def change(file: Path, **values: Any) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_bytes()) | values), encoding="utf-8")


def with_values(content: bytes, changes: dict[str, Any], is_yaml: bool = False) -> bytes:
    """Return a JSON object with other values of dotted keys."""
    document = yaml.safe_load(content) if is_yaml else json.loads(content)
    for path, value in changes.items():
        document = _changed(document, path.split("."), value)
    return yaml.safe_dump(document).encode() if is_yaml else json.dumps(document).encode()


def every_value(content: bytes, depth: int, is_yaml: bool = False) -> Iterator[tuple[str, bytes]]:
    """Yield a document with each value, down to a depth, replaced by each of VALUES, and what was done."""
    document = yaml.safe_load(content) if is_yaml else json.loads(content)
    for path in _paths(document, depth):
        for value in VALUES:
            said = "missing" if value is MISSING else repr(value)
            yield f"{path} {said}", with_values(content, {path: value}, is_yaml)


def _paths(document: Any, depth: int) -> Iterator[str]:
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document[:1])
        if isinstance(document, list)
        else ()
    )
    for key, value in items:
        yield str(key)
        if depth > 1:
            yield from (f"{key}.{inner}" for inner in _paths(value, depth - 1))


def _changed(document: Any, path: list[str], value: Any) -> Any:
    made = copy.copy(document)
    key: Any = int(path[0]) if isinstance(made, list) else path[0]
    if len(path) > 1:
        made[key] = _changed(made[key], path[1:], value)
    elif value is MISSING:
        del made[key]
    else:
        made[key] = value
    return made


def _each_tensor(change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that changes the first tensor."""
    return lambda tensors: tensors | {next(iter(tensors)): change(tensors[next(iter(tensors))])}


def tensor_files(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield a safetensors file with one tensor, or its header, spoiled in each way, and what was done."""
    import torch
    from safetensors.torch import load, save

    whole = load(content)
    first = next(iter(whole))
    length = struct.unpack("<Q", content[:8])[0]
    header, values = json.loads(content[8 : 8 + length]), content[8 + length :]
    changes: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "no first tensor": lambda tensors: {
            name: tensor for name, tensor in tensors.items() if name != first
        },
        "no tensors": lambda tensors: {},
        "another name": lambda tensors: {
            f"{name}x" * (name == first) or name: tensor for name, tensor in tensors.items()
        },
        "one more": lambda tensors: tensors | {f"{first}.more": tensors[first].clone()},
        "all zero": lambda tensors: {name: tensor * 0 for name, tensor in tensors.items()},
        "a row more": _each_tensor(lambda one: torch.cat([one, one[:1]])),
        "a dimension more": _each_tensor(lambda one: one[None].clone()),
        "a scalar": _each_tensor(lambda one: one.flatten()[0].clone()),
        "no row": _each_tensor(lambda one: one[:0].clone()),
        "not finite": _each_tensor(lambda one: one * float("nan")),
        **{str(kind): _each_tensor(lambda one, kind=kind: one.to(kind)) for kind in _dtypes()},  # type: ignore[misc]
    }
    metadata = header.get("__metadata__")
    for said, change in changes.items():
        yield said, save({name: one.contiguous() for name, one in change(whole).items()}, metadata=metadata)
    for end in (0, 4, 8, 8 + length // 2, 8 + length, len(content) - 1):
        yield f"cut at {end}", content[:end]
    yield "longer", content + b"\0" * 8
    yield "an endless header", struct.pack("<Q", 2**62) + content[8:]
    for said, change_of in {
        "an unknown type": {"dtype": "X"},
        "a negative shape": {"shape": [-1, 2]},
        "an endless shape": {"shape": [2**40, 2**40]},
        "other offsets": {"data_offsets": [0, 2**60]},
    }.items():
        text = json.dumps(header | {first: header[first] | change_of}).encode()
        yield said, struct.pack("<Q", len(text)) + text + values


def _dtypes() -> tuple[Any, ...]:
    import torch

    return (
        torch.float16,
        torch.float64,
        torch.int8,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
        torch.complex64,
    )
