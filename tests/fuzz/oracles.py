"""What must come out of an input, found without the code that is tested: by plain parsers, hashes and
arithmetic by hand."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.isolation import Wrong, shown_mark
from tests.support.damaged_rows import DEEPEST, depth
from tests.support.paths import ROOT

_NULLS = ("null", "Null", "NULL", "~", "")
_YES, _NO = ("true", "yes", "on", "y", "t", "1", "1.0"), ("false", "no", "off", "n", "f", "0", "0.0")


def plain_yaml(content: bytes) -> Any:
    """Return mappings, lists and texts of a YAML file; numbers are texts as they are written."""
    return yaml.load(content.decode("utf-8-sig"), Loader=yaml.BaseLoader)


def equal_keys(content: bytes) -> str | None:
    """Return a key that a mapping of a YAML text has twice; None if none has."""
    nodes, seen = [yaml.compose(content.decode("utf-8-sig"), Loader=yaml.BaseLoader)], set[int]()
    while nodes:
        node = nodes.pop()
        if node is None or id(node) in seen or isinstance(node, yaml.ScalarNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
            continue
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := [name for name in names if names.count(name) > 1]:
            return str(twice[0])
        nodes += [one for pair in node.value for one in pair]
    return None


def numbers(value: Any) -> Iterator[float]:
    """Yield the numbers in a value of mappings and lists."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    for part in _parts(value):
        yield from numbers(part)


class _EqualKeys(Exception):
    pass


def plain_json(content: bytes) -> Any:
    """Return the value of a JSON text that was accepted.

    Raises:
        Wrong: it has equal keys, NaN or an infinity, or is deeper than any file: it should have been refused.
    """

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in found}) < len(found):
            raise _EqualKeys
        return dict(found)

    def constant(name: str) -> float:
        raise Wrong(f"{name} is read as a number")

    try:
        value = json.loads(content.decode("utf-8-sig"), object_pairs_hook=pairs, parse_constant=constant)
    except _EqualKeys:
        raise Wrong("equal keys of an object are read, and one of them is dropped") from None
    if (deep := depth(value)) > DEEPEST:
        raise Wrong(f"{deep} objects and lists inside each other are read")
    return value


def _parts(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def refuse_dropped(written: Any, read: Any, where: str) -> None:
    """Compare all that a person wrote with what was read of it.

    Raises:
        Wrong: a key or an entry is missing, or has another value.
    """
    if lost := next(dropped(written, read), None):
        raise Wrong(f"{where}: {lost}")


def dropped(written: Any, read: Any, at: str = "") -> Iterator[str]:
    """Yield what is missing or different in `read`, of values or texts that were written."""
    if isinstance(written, dict):
        if not isinstance(read, dict):
            yield f"{at}: {read!r:.60} instead of a mapping"
            return
        for key, value in written.items():
            if key == "<<":
                continue
            if key not in read:
                yield f"{at}.{key:.60}: written, but not there"
            else:
                yield from dropped(value, read[key], f"{at}.{key:.60}")
    elif isinstance(written, list):
        if not isinstance(read, list | tuple) or len(read) != len(written):
            yield f"{at}: {read!r:.60} instead of {len(written)} entries"
            return
        for index, value in enumerate(written):
            yield from dropped(value, read[index], f"{at}[{index}]")
    elif (
        isinstance(written, str) and written in _NULLS and isinstance(read, dict | list)
    ):  # an empty section has the defaults
        return
    elif (
        isinstance(read, dict) and isinstance(written, str) and "name" in read
    ):  # `method: full`, a task's name alone
        yield from dropped(written, read["name"], at)
    elif not _is_same(written, read):
        yield f"{at}: {read!r:.60} instead of {written!r:.60}"


def _is_same(written: Any, read: Any) -> bool:
    text = written if isinstance(written, str) else None
    if text is None or isinstance(read, str):
        return bool(written == read)
    if read is None:
        return text in _NULLS
    if isinstance(read, bool):
        return text.lower() in (_YES if read else _NO)
    try:
        return float(text) == read
    except ValueError:
        try:
            return int(text, 0) == read
        except ValueError:
            return False


def files_of(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of each file below a folder, by its name."""
    return {
        os.path.relpath(path, folder): (
            len(content := Path(path).read_bytes()),
            hashlib.sha256(content).hexdigest(),
        )
        for root, _, names in os.walk(folder)
        for path in (os.path.join(root, name) for name in names)
        if os.path.isfile(path)
    }


def refuse_other_files(folder: Path, listed: list[dict[str, Any]], but: tuple[str, ...] = ()) -> None:
    """Compare a list of files with those that are there.

    Raises:
        Wrong: one is missing, is not listed, or has another size or hash.
    """
    there = {name: of for name, of in files_of(folder).items() if name not in but}
    said = {
        one["file"]: (one.get("size", there.get(one["file"], (0, ""))[0]), one["sha256"]) for one in listed
    }
    if there != said:
        other = sorted(set(there.items()) ^ set(said.items()))
        raise Wrong(
            f"the list of {folder.name} has {len(said)} files, of {len(there)}; not equal: {other[0][0]:.100}"
        )


def refuse_shown(*texts: str, folder: Path | None = None, but: tuple[str, ...] = ()) -> None:
    """Look for the marks of secrets in texts, and in the files of a folder whose names do not begin with
    those of inputs.

    Raises:
        Wrong: one is there.
    """
    for text in texts:
        if shown := shown_mark(text):
            raise Wrong(f"{shown}: {text[-300:]}")
    for path in sorted(folder.rglob("*")) if folder else ():
        is_own = (
            path.relative_to(folder).as_posix().startswith(but) or path.is_symlink() or not path.is_file()
        )
        if not is_own and (shown := shown_mark(path.read_bytes().decode("latin-1"))):
            raise Wrong(f"{path.relative_to(folder)}: {shown}")


def shape_row(name: str) -> dict[str, Any]:
    """Return a row of shapes.yaml, with the defaults of the fields that a plan is compared with."""
    rows = yaml.safe_load((ROOT / "shapes.yaml").read_bytes())
    return {"nodes": 1, "gpu_memory_gib": 0.0} | next(row for row in rows if row["name"] == name)


def llama_sizes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the widths into and out of the linear layers of each of a Llama's layers, by their names."""
    width, inner, heads = (
        int(config[key]) for key in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    groups, head = (
        int(config.get("num_key_value_heads") or heads),
        int(config.get("head_dim") or width // heads),
    )
    return {
        "self_attn.q_proj": (width, heads * head),
        "self_attn.k_proj": (width, groups * head),
        "self_attn.v_proj": (width, groups * head),
        "self_attn.o_proj": (heads * head, width),
        "mlp.gate_proj": (width, inner),
        "mlp.up_proj": (width, inner),
        "mlp.down_proj": (inner, width),
    }


def llama_parameters(config: dict[str, Any]) -> dict[str, int]:
    """Return the parameters of a Llama by hand: `all`, `linear` of its layers, and `in+out`, the widths of
    all of these."""
    width, depth, sizes = (
        int(config["hidden_size"]),
        int(config["num_hidden_layers"]),
        llama_sizes(config).values(),
    )
    linear = depth * sum(into * out for into, out in sizes)
    tables = int(config["vocab_size"]) * width * (1 if config.get("tie_word_embeddings") else 2)
    return {
        "all": linear + tables + (2 * depth + 1) * width,
        "linear": linear,
        "in+out": depth * sum(into + out for into, out in sizes),
    }
