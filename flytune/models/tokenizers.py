"""Tokenizers in folders: of prepared data, of exports, and of anybody's artifacts."""

from pathlib import Path
from typing import Any

from flytune.errors import ExportError, FlytuneError
from flytune.models import chat_templates, tokenizer_steps
from flytune.models.library_errors import reason


def load(
    folder: Path | str, error: type[FlytuneError] = ExportError, advice: str = "do not use it", trust_remote_code: bool = False
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
    from transformers import AutoTokenizer

    if refused := tokenizer_steps.problem_in(Path(folder)):
        raise error(f"{folder}: its tokenizer is not loaded ({refused}); {advice}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
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
    """Encode and decode a text, which fails with files that could be read and make no sense; any Exception."""
    if reason := tokenizer_steps.problem(tokenizer):
        raise ValueError(reason)
    tokenizer.decode(tokenizer("a text, 1 ö")["input_ids"], skip_special_tokens=True)
    len(tokenizer.get_vocab()), tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.special_tokens_map
