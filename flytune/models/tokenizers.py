"""Tokenizers: of base models, of prepared data, of exports, and of anybody's artifacts. All are loaded here.

transformers 5 builds some classes (GPT2Tokenizer, Qwen2Tokenizer ...) of the vocabulary and the merges in
tokenizer.json, and splits texts by rules of the class, whatever rules the file has. Here the file decides.
"""

import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flytune.errors import ExportError, FlytuneError
from flytune.models import chat_templates, tokenizer_files, tokenizer_steps
from flytune.models.library_errors import reason

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
    file = tokenizer_files.path_of(name, revision, tokenizer)
    # TokenizersBackend itself, PreTrainedTokenizerFast's name in transformers 5, takes everything from the
    # file.
    if file is None or not tokenizer.is_fast or type(tokenizer) is TokenizersBackend:
        return tokenizer
    stored, built = Tokenizer.from_file(str(file)), tokenizer.backend_tokenizer
    stored.no_truncation()
    stored.no_padding()
    stored.encode_special_tokens = built.encode_special_tokens
    named = tokenizer_files.named_tokens(name, revision)
    tokenizer_files.add_missing(stored, built, lambda token: token in named)
    if not tokenizer_files.are_equal(built, stored):
        tokenizer.built, tokenizer._tokenizer = built, stored
        for key, token in tokenizer.special_tokens_map.items():
            # The class's own defaults are not tokens of this file.
            if isinstance(token, str) and stored.token_to_id(token) is None:
                setattr(tokenizer, key, None)
    try:
        if tokenizer_steps.problem(tokenizer) is None:
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
    if (built := tokenizer.built) is None or tokenizer.otherwise:
        return
    stored = tokenizer.backend_tokenizer
    tokenizer_files.add_missing(built, stored, lambda token: True)
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
                    for at, (one, other) in enumerate(zip(mine.tokens, pieces, strict=False))
                    if one != other
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
    if refused := tokenizer_steps.problem_in(Path(folder)):
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
    if reason := tokenizer_steps.problem(tokenizer):
        raise ValueError(reason)
    tokenizer.decode(tokenizer("a text, 1 ö")["input_ids"], skip_special_tokens=True)
    len(tokenizer.get_vocab()), tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.special_tokens_map
