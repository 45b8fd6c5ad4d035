"""Errors of Python, the system and other libraries, in words that say what to do."""

import errno
import os
import re
import sys
import tempfile

from flytune import files
from flytune.errors import RecipeError, chain

_EXTRAS = {
    "data": "PIL adlfs datasets filelock gcsfs huggingface_hub jinja2 numpy pyarrow s3fs tokenizers "
    "transformers",
    "report": "matplotlib",
    "flyte": "flyteidl flytekit flytekitplugins google grpc kubernetes msgpack requests urllib3",
    "train": "accelerate bitsandbytes deepspeed peft safetensors torch trl",
    "harness": "lm_eval",
    "demo": "gguf",
}
"""Libraries by the extra of pyproject.toml that installs them."""


def missing(error: ModuleNotFoundError) -> RecipeError | None:
    """Return the error of a library that is not installed, with what installs it; None if it is none of the
    extras'."""
    name = (error.name or "").partition(".")[0]
    extra = next((extra for extra, names in _EXTRAS.items() if name in names.split()), None)
    if extra == "flyte" and sys.version_info >= (3, 13):
        return RecipeError(
            f"{name}: not installed, and this command asks Flyte: use Python 3.11 or 3.12, as flytekit 1.16 "
            "does"
        )
    return (
        RecipeError(f"{name}: not installed: `pip install 'flytune[{extra}]'` installs it") if extra else None
    )


def memory_error(error: BaseException | None) -> RecipeError | None:
    """Return the error of a process that gets no more memory, in words; None if neither an error nor a cause
    says that."""
    for link in chain(error):
        if (
            isinstance(link, MemoryError)
            or getattr(link, "errno", None) == errno.ENOMEM
            or _NO_MEMORY.search(str(link))
        ):
            return RecipeError(
                "out of memory: this process gets no more: free some, or raise its limit (ulimit -v)"
            )
    return None


_NO_MEMORY = re.compile(
    r"failed to map segment|[Cc]an(?:not|'t) allocate memory|std::bad_alloc|can't start new thread"
)
"""Words of the system, torch, and Python without a class of their own."""


def no_room(problem: str) -> RecipeError:
    return RecipeError(
        f"{problem}: make room in {tempfile.gettempdir()} (TMPDIR), or where the command writes to"
    )


def file_error(error: OSError) -> RecipeError | None:
    """Return the error of a file that cannot be read or written, in words; None if it names no file."""
    if error.filename is None and error.errno in files.FULL:
        return no_room(str(error.strerror))
    if error.filename is None or error.strerror is None:
        return None
    name = (
        os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else f"file {error.filename}"
    )
    return RecipeError(
        f"{name:.300}: {error.strerror}; name a path that can be read, and written where a command writes to "
        "it"
    )
