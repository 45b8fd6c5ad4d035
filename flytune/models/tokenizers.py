"""Tokenizers: of base models, of prepared data, of exports, and of anybody's artifacts. All are loaded here.

transformers 5 builds some classes (GPT2Tokenizer, Qwen2Tokenizer ...) of the vocabulary and the merges in
tokenizer.json, and splits texts by rules of the class, whatever rules the file has. Here the file decides.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from flytune import json_core, names
from flytune.errors import DataError, ExportError, FlytuneError
from flytune.files import read_regular
from flytune.models import chat_templates, published
from flytune.models.library_errors import reason
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
    tokens = set[str]()
    for file in _ADDED_FILES:
        if (path := published.cached(name, revision, file)) is not None:
            tokens.update(_texts(json_core.load_object(path.read_bytes(), published.LARGEST)))
    return tokens


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict):
        yield from content
    for _, part in json_core.entries(content):
        yield from _texts(part)


def add_missing(target: Any, source: Any, is_wanted: Callable[[str], bool]) -> None:
    """Add tokens of one tokenizer of the tokenizers library to another that lacks them, in the order of their
    ids."""
    there = {token.content for token in target.get_added_tokens_decoder().values()}
    added = sorted(source.get_added_tokens_decoder().items())
    target.add_tokens(
        [token for _, token in added if token.content not in there and is_wanted(token.content)]
    )


def are_equal(first: Any, other: Any) -> bool:
    """Return whether two tokenizers of the tokenizers library have the same vocabulary and take the same
    steps."""
    vocabularies = [
        {token.content: at for at, token in tokenizer.get_added_tokens_decoder().items()}
        for tokenizer in (first, other)
    ]
    return vocabularies[0] == vocabularies[1] and all(
        _state(getattr(first, step)) == _state(getattr(other, step)) for step in _STEPS
    )


def _state(step: Any) -> Any:
    return None if step is None else step.__getstate__()


def end_texts(tokenizer: Any, model: Model) -> None:
    """Let a tokenizer end each text with its end token, where it ends texts with none; `write_files` stores
    that.

    Raises:
        DataError: it begins texts with other tokens than BOS, or has no BOS or EOS that could be added.
    """
    from tokenizers.processors import TemplateProcessing

    backend = tokenizer.backend_tokenizer
    bare = backend.encode("a text", add_special_tokens=False).ids
    ids = backend.encode("a text").ids
    start = next(at for at in range(len(ids)) if ids[at : at + len(bare)] == bare)
    before, after = ids[:start], ids[start + len(bare) :]
    if after:
        return
    if before not in ([], [tokenizer.bos_token_id]):
        raise DataError(
            f"model.name_or_path: the tokenizer of {model.name_or_path} begins texts with "
            f"{tokenizer.decode(before)!r:.60}, and an end token cannot be added to its rules; choose "
            "another base model"
        )
    tokens = [*([tokenizer.bos_token] if before else []), "$A", tokenizer.eos_token]
    pair = [*tokens[:-1], "$B", tokenizer.eos_token]
    known = [(token, tokenizer.convert_tokens_to_ids(token)) for token in tokens if token != "$A"]
    backend.post_processor = TemplateProcessing(single=tokens, pair=pair, special_tokens=known)
    # As transformers writes these two, it makes the same rule of them.
    tokenizer.end_rule = {"add_bos_token": bool(before), "add_eos_token": True}


def write_files(tokenizer: Any, model: Model, folder: Path) -> None:
    """Write the tokenizer of a base model, with the recipe's changes, into a new folder.

    tokenizer.json is the base's byte for byte, or with the recipe's added tokens and the rule of `end_texts`;
    tokenizer_config.json is the base's, with the keys that the recipe changes. Where transformers' class
    makes other tokens, another class is named.
    """
    tokenizer.save_pretrained(folder)
    saved = json_core.load_object((folder / CONFIG).read_bytes(), published.LARGEST)
    base = published.content_of(model, CONFIG)
    config = _config(tokenizer, saved, base) | getattr(tokenizer, "end_rule", {})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    path = path_of(published.base_name(model), model.revision, tokenizer)
    if path is not None:
        content = _with_tokens(path.read_bytes(), tokenizer, model)
        if hasattr(tokenizer, "end_rule"):
            stored = json_core.load_object(content, published.LARGEST)
            stored["post_processor"] = json.loads(tokenizer.backend_tokenizer.post_processor.__getstate__())
            content = json.dumps(stored, indent=2, ensure_ascii=False).encode()
        (folder / TOKENIZER).write_bytes(content)


def _config(tokenizer: Any, saved: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any]:
    """Return tokenizer_config.json: the base's, with what differs in the one that transformers has saved."""
    config = {key: value for key, value in (base or saved).items() if key not in _PATHS}
    for key, token in tokenizer.special_tokens_map.items():
        if isinstance(token, str) and _text(config.get(key)) != token:
            config[key] = token
    for key in config:
        if key.endswith("_token") and getattr(tokenizer, key, "") is None:
            config[key] = None
    _put_special_tokens(config, saved, base)
    if isinstance(config.get("added_tokens_decoder"), dict):
        for number, token in tokenizer.added_tokens_decoder.items():
            config["added_tokens_decoder"].setdefault(str(number), token.__getstate__())
    if isinstance(config.get("chat_template"), str):
        config["chat_template"] = tokenizer.chat_template
    if "auto_map" in saved:
        config["auto_map"] = saved["auto_map"]
    if base and "backend" in base:
        # transformers 5 wrote it, and adds these at each save: equal bases have had equal files from the
        # first release on.
        config |= {key: saved[key] for key in _ADDED_AT_SAVES if key in saved}
        # It says whether the hub was to be asked (HF_HUB_OFFLINE), which is nothing of the tokenizer; the
        # value is that of the first release's own files.
        config |= dict.fromkeys({"local_files_only"} & config.keys(), True)
        config = dict(sorted(config.items()))
    if tokenizer.otherwise:
        config["tokenizer_class"] = ANY_CLASS
    elif "tokenizer_class" not in (base or {}):
        kind = saved["tokenizer_class"]
        config["tokenizer_class"] = ANY_CLASS if kind == "TokenizersBackend" else kind
    return config


def _put_special_tokens(config: dict[str, Any], saved: dict[str, Any], base: dict[str, Any] | None) -> None:
    """Add the special tokens to the configuration that the saved one lists beside the base's."""
    if base is None:
        config.pop("extra_special_tokens", None)
    # transformers 4 takes no list as extra_special_tokens.
    is_list = base is not None and isinstance(base.get("extra_special_tokens"), list)
    key = "extra_special_tokens" if is_list else "additional_special_tokens"
    listed = config.get(key) or []
    texts = [_text(token) for token in listed]
    extra = saved.get("extra_special_tokens")
    new = [_text(token) for token in extra if _text(token) not in texts] if isinstance(extra, list) else []
    if new:
        config[key] = [*listed, *new]


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


def problem_in_steps(folder: Path) -> str | None:
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
        named = config.get(key)
        if isinstance(named, str) and _is_elsewhere(folder, named):
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


def steps_problem(tokenizer: Any) -> str | None:
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
        for part in step:
            more, further = _growth(part)
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
        tokens = {name: len(part.get("ids", ())) for name, part in (step.get("special_tokens") or {}).items()}
        parts = [part.get("SpecialToken", {}).get("id") for part in step.get("single", ())]
        return 1, sum(tokens.get(name, 0) for name in parts)
    return 1, len(str(step.get("prepend", "")))


log = logging.getLogger(__name__)
PROBES = (
    "Add 12345 and 7:\n\n\n  then it's DON'T, we'LL",
    "0 12 345 6789 3.14159 1,000,000 2024-01-31 x86_64 1e-5 v2.0.1",
    "def f(x):\n    return x\n\n\tif x:\r\n\t\t  pass  \n\n\n\n    # end   ",
    "  leading, trailing  and   inner    runs     of spaces   ",
    "I'm you're he'll we've they'd it's; I'M YOU'RE HE'LL; \u2019s",
    'https://example.org/a_b?c=d&e=%20#f, a@b.cc <tag/> {"k": [1, null]} $x^2$ C++ @@ -- ... !?',
    "Grüße, œuvre, naïve, Ångström, İstanbul, ﬁ ½ e\u0301 \u00e9",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "नमस्ते दुनिया สวัสดีชาวโลก 你好，世界。こんにちは世界 안녕하세요",
    "\U0001f600\U0001f469\u200d\U0001f4bb\U0001f1eb\U0001f1f7 \u2764\ufe0f \U0001f44d\U0001f3fd",
    "a\x00b\x07c\x1b[0m\x7f\u00a0\u200b\u202e\ufeff\u3000\u2028",
)
"""Texts that tokenizers split differently: digits, spaces, contractions, code, scripts, emoji, control
characters."""


def from_pretrained(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a folder or of a model on the hub, which makes the tokens of its
    tokenizer.json.

    Its attribute `otherwise` says which class of transformers makes other tokens, and of which text; None
    where none does.

    Raises:
        TokensDiffer: it makes other tokens all the same; and whatever transformers and tokenizers raise.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer, TokenizersBackend

    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    tokenizer.otherwise, tokenizer.built = None, None
    file = path_of(name, revision, tokenizer)
    # TokenizersBackend itself, PreTrainedTokenizerFast's name in transformers 5, takes everything from the
    # file.
    if file is None or not tokenizer.is_fast or type(tokenizer) is TokenizersBackend:
        return tokenizer
    stored, built = Tokenizer.from_file(str(file)), tokenizer.backend_tokenizer
    stored.no_truncation()
    stored.no_padding()
    stored.encode_special_tokens = built.encode_special_tokens
    named = named_tokens(name, revision)
    add_missing(stored, built, lambda token: token in named)
    if not are_equal(built, stored):
        tokenizer.built, tokenizer._tokenizer = built, stored
        for key, token in tokenizer.special_tokens_map.items():
            # The class's own defaults are not tokens of this file.
            if isinstance(token, str) and stored.token_to_id(token) is None:
                setattr(tokenizer, key, None)
    try:
        if steps_problem(tokenizer) is None:
            note_difference(tokenizer, probes(stored))
            return _checked(tokenizer, stored)
    except TokensDiffer:
        raise
    except Exception as found:  # noqa: BLE001 (try_out, which every loader calls, says that it encodes no text)
        log.debug("%s: %s", name, found)
    return tokenizer


class TokensDiffer(ValueError):
    """A tokenizer whose own code makes other tokens than its tokenizer.json."""


def _checked(tokenizer: Any, stored: Any) -> Any:
    for text in probes(stored):
        if list(tokenizer(text)["input_ids"]) != stored.encode(text).ids:
            raise TokensDiffer(
                f"the code of {type(tokenizer).__name__} makes other tokens of {text!r:.60} than its "
                "tokenizer.json, and which of the two is meant is not known"
            )
    return tokenizer


def note_difference(tokenizer: Any, texts: Iterable[str]) -> None:
    """Set the attribute `otherwise` of a loaded tokenizer, if its class makes other tokens of one of the
    texts."""
    built = tokenizer.built
    if built is None or tokenizer.otherwise:
        return
    stored = tokenizer.backend_tokenizer
    add_missing(built, stored, lambda token: True)
    for text in texts:
        mine, theirs = stored.encode(text), None
        # A class that cannot make tokens of its own makes others too.
        with suppress(Exception):
            theirs = built.encode(text)
        if theirs is None or mine.ids != theirs.ids:
            pieces = theirs.tokens if theirs else []
            at = next(
                (
                    at
                    for at, (piece, other) in enumerate(zip(mine.tokens, pieces, strict=False))
                    if piece != other
                ),
                0,
            )
            first, other = (str(tokens[max(0, at - 1) : at + 3]) for tokens in (mine.tokens, pieces))
            tokenizer.otherwise = (
                f"{type(tokenizer).__name__} makes {other} of {text!r:.60}, tokenizer.json {first}"
            )
            return


def probes(stored: Any) -> list[str]:
    """Return the texts that a tokenizer is compared with: PROBES, and its special tokens within words."""
    special = [token.content for token in stored.get_added_tokens_decoder().values()][:64]
    return [*PROBES, *(f"a{token}b {token} 1\n" for token in special)]


def load(
    folder: Path | str,
    error: type[FlytuneError] = ExportError,
    advice: str = "do not use it",
    trust_remote_code: bool = False,
) -> Any:
    """Return the tokenizer of a folder, whose chat template is rendered with limits.

    Args:
        folder: the folder with its files.
        error: the class of error.
        advice: end of the error's message.
        trust_remote_code: True if its own code may run.

    Raises:
        FlytuneError: as `error`, if it cannot be read or encodes no text.
    """
    if refused := problem_in_steps(Path(folder)):
        raise error(f"{folder}: its tokenizer is not loaded ({refused}); {advice}")
    try:
        tokenizer = from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as found:  # noqa: BLE001 (OSError, ValueError, KeyError, and the plain Exceptions of tokenizers, in Rust)
        raise error(f"{folder}: its tokenizer cannot be read ({reason(found)}); {advice}") from None
    try:
        try_out(chat_templates.limited(tokenizer, f"{folder}: its tokenizer"))
    except FlytuneError as found:
        raise error(f"{found}; {advice}") from None
    except Exception as found:  # noqa: BLE001
        raise error(f"{folder}: its tokenizer encodes no text ({reason(found)}); {advice}") from None
    return tokenizer


def try_out(tokenizer: Any) -> None:
    """Encode and decode a text, which fails with files that could be read and make no sense; any
    Exception."""
    if reason := steps_problem(tokenizer):
        raise ValueError(reason)
    tokenizer.decode(tokenizer("a text, 1 ö")["input_ids"], skip_special_tokens=True)
    len(tokenizer.get_vocab()), tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.special_tokens_map
