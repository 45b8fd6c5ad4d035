"""Files of a tokenizer: what a base model's say, and those that are stored with prepared data, exports and
artifacts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flytune import json_core
from flytune.models import published
from flytune.recipe import Model

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
_ADDED_FILES = (CONFIG, "special_tokens_map.json", "added_tokens.json")
_PATHS = (
    "fast_tokenizer_files",
    "merges_file",
    "name_or_path",
    "special_tokens_map_file",
    "tokenizer_file",
    "vocab_file",
)
"""Keys of tokenizer_config.json that name files, of which others are stored."""
_ADDED_AT_SAVES = ("is_local", "local_files_only")
ANY_CLASS = "PreTrainedTokenizerFast"
"""Class that takes everything from tokenizer.json, in transformers 4 and 5."""


def path_of(name: str, revision: str | None, tokenizer: Any) -> Path | None:
    """Return the local path of a loaded tokenizer's tokenizer.json in a folder or on the hub; None if it has
    none."""
    from transformers.tokenization_utils_base import get_fast_tokenizer_file

    # Some have files for several versions.
    listed = tokenizer.init_kwargs.get("fast_tokenizer_files")
    return published.cached(name, revision, get_fast_tokenizer_file(listed) if listed else TOKENIZER)


def named_tokens(name: str, revision: str | None) -> set[str]:
    """Return all texts in the files beside a tokenizer.json which may name tokens."""
    found = set[str]()
    for file in _ADDED_FILES:
        if (path := published.cached(name, revision, file)) is not None:
            found.update(_texts(json_core.load_object(path.read_bytes(), published.LARGEST)))
    return found


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        yield from content
    for one in (
        content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    ):
        yield from _texts(one)


def add_missing(target: Any, source: Any, is_wanted: Callable[[str], bool]) -> None:
    """Add tokens of one tokenizer of the tokenizers library to another that lacks them, in the order of their
    ids."""
    there = {token.content for token in target.get_added_tokens_decoder().values()}
    added = sorted(source.get_added_tokens_decoder().items())
    target.add_tokens(
        [token for _, token in added if token.content not in there and is_wanted(token.content)]
    )


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two tokenizers of the tokenizers library have the same vocabulary and take the same
    steps."""
    vocabularies = [
        {token.content: at for at, token in each.get_added_tokens_decoder().items()} for each in (one, other)
    ]
    return vocabularies[0] == vocabularies[1] and all(
        _state(getattr(one, step)) == _state(getattr(other, step)) for step in _STEPS
    )


def _state(step: Any) -> Any:
    return None if step is None else step.__getstate__()


def write(tokenizer: Any, model: Model, folder: Path) -> None:
    """Write the tokenizer of a base model, with the recipe's changes, into a new folder.

    tokenizer.json is the base's byte for byte, or with the recipe's added tokens; tokenizer_config.json is
    the base's, with the keys that the recipe changes. Where transformers' class makes other tokens, another
    class is named.
    """
    tokenizer.save_pretrained(folder)
    saved = json_core.load_object((folder / CONFIG).read_bytes(), published.LARGEST)
    base = published.content_of(model, CONFIG)
    config = _config(tokenizer, saved, base)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if (path := path_of(published.base_name(model), model.revision, tokenizer)) is not None:
        (folder / TOKENIZER).write_bytes(_with_tokens(path.read_bytes(), tokenizer, model))


def _config(tokenizer: Any, saved: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    """Return tokenizer_config.json: the base's, with what differs in the one that transformers has saved."""
    config = {key: value for key, value in (base or saved).items() if key not in _PATHS}
    for key, token in tokenizer.special_tokens_map.items():
        if isinstance(token, str) and _text(config.get(key)) != token:
            config[key] = token
    for key in [key for key in config if key.endswith("_token") and getattr(tokenizer, key, "") is None]:
        config[key] = None
    # transformers 4 takes no list as extra_special_tokens.
    key = (
        "extra_special_tokens"
        if base and isinstance(base.get("extra_special_tokens"), list)
        else "additional_special_tokens"
    )
    extra, there = saved.get("extra_special_tokens"), [_text(one) for one in config.get(key) or ()]
    if base is None:
        config.pop("extra_special_tokens", None)
    if (
        new := [_text(token) for token in extra or () if _text(token) not in there]
        if isinstance(extra, list)
        else []
    ):
        config[key] = [*(config.get(key) or ()), *new]
    if isinstance(config.get("added_tokens_decoder"), dict):
        for at, token in tokenizer.added_tokens_decoder.items():
            config["added_tokens_decoder"].setdefault(str(at), token.__getstate__())
    if isinstance(config.get("chat_template"), str) and tokenizer.chat_template != config["chat_template"]:
        config["chat_template"] = tokenizer.chat_template
    if "auto_map" in saved:
        config["auto_map"] = saved["auto_map"]
    if base and "backend" in base:
        # transformers 5 wrote it, and adds these at each save: equal bases have had equal files from the
        # first release on.
        config |= {key: saved[key] for key in _ADDED_AT_SAVES if key in saved}
        config = dict(sorted(config.items()))
    if tokenizer.otherwise:
        config["tokenizer_class"] = ANY_CLASS
    elif "tokenizer_class" not in (base or {}):
        config["tokenizer_class"] = (
            ANY_CLASS if saved["tokenizer_class"] == "TokenizersBackend" else saved["tokenizer_class"]
        )
    return config


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _with_tokens(content: bytes, tokenizer: Any, model: Model) -> bytes:
    """Return a tokenizer.json with the recipe's added tokens; unchanged if it has them all."""
    stored = json_core.load_object(content, published.LARGEST)
    there = {token["content"] for token in stored.get("added_tokens") or ()}
    if {*model.extra_special_tokens} <= there:
        return content
    added = [
        {"id": at, **token.__getstate__()}
        for at, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.content not in there
    ]
    stored["added_tokens"] = sorted(
        [*(stored.get("added_tokens") or ()), *added], key=lambda token: int(token["id"])
    )
    return json.dumps(stored, indent=2, ensure_ascii=False).encode()
