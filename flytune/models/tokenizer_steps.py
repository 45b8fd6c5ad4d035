"""Steps of a tokenizer that write text: how much longer they may make one.

The normalizer, the post-processor and the decoder of a tokenizer.json are programs too: forty replacements of
`a` by `aa` make a text of a terabyte out of one letter, within a call that nothing interrupts. The growth is
counted from above before any is run.
"""

import json
from pathlib import Path
from typing import Any

from flytune import names
from flytune.files import read_regular

LARGEST_GROWTH = 1_000
"""Characters that one character may become; NFKC makes 18 of one, and published tokenizers replace one by one
to three."""
LARGEST_ADDITION = 10_000
"""Characters or tokens that may be added to a text; published tokenizers add one to five."""

_PARTS = ("normalizer", "decoder", "post_processor")
_FILES = ("gguf_file", "vocab_file", "merges_file", "tokenizer_file", "spm_file", "source_spm", "target_spm")
"""Keys of tokenizer_config.json that some class of tokenizers takes for a file; none is written by
transformers 5."""
_READ = ("*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")
"""Files that transformers reads for a tokenizer, if they are there."""
_LARGEST = 200_000_000
"""Bytes of a tokenizer.json; the largest published ones have some 40 million."""


def problem_in(folder: Path) -> str | None:
    """Return why the tokenizer files of a folder are not loaded: loading normalizes the added tokens; None if
    they are."""
    for file in sorted(path for pattern in _READ for path in folder.glob(pattern)):
        # Files of the kernel (/proc/kmsg) are regular and have 0 bytes, and some block the process that reads
        # them.
        if file.is_file() and not file.stat().st_size:
            return f"{file.name} is empty"
    config = _object(folder / "tokenizer_config.json")
    listed = config.get("fast_tokenizer_files")
    for name in map(str, listed if isinstance(listed, list) else ()):
        if names.problem(name) or "/" in name:
            return f"tokenizer_config.json names the file {name!r:.80}, which is not beside it"
    for key in _FILES:
        if isinstance(named := config.get(key), str) and _is_elsewhere(folder, named):
            return f"tokenizer_config.json names a file elsewhere ({key}: {named!r:.80})"
    for file in sorted(folder.glob("tokenizer*.json")):
        content = _object(file)
        try:
            reason = _problem({part: content.get(part) for part in _PARTS})
        except (AttributeError, TypeError):  # of no such form: the tokenizers library refuses it
            continue
        if reason:
            return reason
    return None


def _object(file: Path) -> dict[str, Any]:
    """Return the object in a file; transformers says what is missing or damaged."""
    try:
        content = json.loads(read_regular(file, _LARGEST))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_elsewhere(folder: Path, name: str) -> bool:
    """Return whether a file is named that is not in the folder; published files name some of their author's
    machine."""
    try:
        is_inside = (folder / name).absolute().is_relative_to(folder.absolute())
        return ".." in Path(name).parts or (not is_inside and (folder / name).is_file())
    except (OSError, ValueError):
        return True


def problem(tokenizer: Any) -> str | None:
    """Return why a fast tokenizer is not used; None if it is, or is none."""
    backend, parts = getattr(tokenizer, "backend_tokenizer", None), dict[str, Any]()
    for part in _PARTS:
        step = getattr(backend, part, None)
        try:
            parts[part] = json.loads(step.__getstate__()) if step is not None else None
        except Exception:  # noqa: BLE001 (a step of Python's own cannot be written, and is not content of a file)
            continue
    return _problem(parts)


def _problem(parts: dict[str, Any]) -> str | None:
    for part, content in parts.items():
        growth, added = _growth(content)
        if growth > LARGEST_GROWTH or added > LARGEST_ADDITION:
            return f"its {part} makes texts more than {LARGEST_GROWTH:,} times as long"
    return None


def _growth(step: Any) -> tuple[int, int]:
    """Return how many characters become of one at most, and how many are added; of a list of steps, of all
    one by one."""
    if isinstance(step, list):
        growth, added = 1, 0
        for one in step:
            more, further = _growth(one)
            growth, added = min(growth * more, 10**18), min(added * more + further, 10**18)
        return growth, added
    if not isinstance(step, dict):
        return 1, 0
    if lists := [
        step[name] for name in ("normalizers", "decoders", "processors") if isinstance(step.get(name), list)
    ]:
        return _growth(lists[0])
    if step.get("type") == "Replace":
        pattern, content = step.get("pattern"), str(step.get("content", ""))
        text = pattern.get("String") if isinstance(pattern, dict) else None
        # An expression, or an empty text, may match between all characters.
        return (max(1, -(-len(content) // len(text))), 0) if text else (1 + len(content), len(content))
    if step.get("type") == "TemplateProcessing":
        tokens = {name: len(one.get("ids", ())) for name, one in (step.get("special_tokens") or {}).items()}
        parts = [one.get("SpecialToken", {}).get("id") for one in step.get("single", ())]
        return 1, sum(tokens.get(name, 0) for name in parts)
    return 1, len(str(step.get("prepend", "")))
