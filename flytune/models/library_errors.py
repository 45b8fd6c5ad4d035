"""Errors that libraries raise on the files of a model, as Flytune's own."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from flytune import files
from flytune.addresses import redact
from flytune.errors import FlytuneError

_LONGEST = 300
_MISMATCH = "ignore_mismatched_sizes"
"""Setting of transformers that its error about tensors of other shapes names; the tensors are in a table
before it."""
_OF_FILES = (_MISMATCH, "no file named")
"""Words of transformers' RuntimeErrors and OSErrors that are about files for certain."""
_OBJECT = re.compile(r"<(?:class|function|module) '?([\w.<>]+?)'?(?: (?:at|from) [^>]*)?>")


@contextmanager
def named(what: str, error: type[FlytuneError], keep: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn an error that a library raises in the block into `error`, whose message begins with `what`.

    transformers, PEFT, tokenizers and safetensors check little: a field that is missing or of another type
    ends with an AttributeError, a KeyError, or any other error. Flytune's own, those of a full disk, and
    `keep` stay as they are.
    """
    try:
        yield
    except (FlytuneError, MemoryError):
        raise
    except Exception as found:
        is_of_files = any(words in str(found) for words in _OF_FILES) or isinstance(
            found, RecursionError | NotImplementedError
        )
        is_kept = isinstance(found, keep) and not is_of_files
        if is_kept or files.full_error(found) is not None:
            raise
        raise error(f"{what}: {reason(found)}") from found


def reason(error: Exception) -> str:
    """Return the text of a library's error in one line of 300 characters at most; with its type, where the
    text has no words.

    A KeyError's text is a name, and an AttributeError's is about Python: the type says at least what was
    looked for.
    """
    if _MISMATCH in str(error):
        return (
            "its files have tensors of other shapes than its configuration says; the table above names them"
        )
    text = " ".join(_OBJECT.sub(r"\1", redact(str(error))).split())
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST].rpartition(' ')[0] or text[:_LONGEST]} ..."
    speaks = isinstance(error, OSError | ValueError | RuntimeError | Warning) and text
    return text if speaks else f"{type(error).__name__}: {text}"
