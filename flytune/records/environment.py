"""Versions of the software that a run was computed with."""

import hashlib
from importlib import metadata
from pathlib import Path

import flytune

_LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes", "tokenizers")
_LOCK = Path(flytune.__file__).resolve().parents[1] / "requirements.lock"


def versions() -> dict[str, str]:
    """Return the versions of Flytune and the libraries that compute, and the start of the lock's SHA-256
    where it is there."""
    numbers = {"flytune": flytune.__version__}
    for name in _LIBRARIES:
        try:
            numbers[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if _LOCK.is_file():
        numbers[_LOCK.name] = hashlib.sha256(_LOCK.read_bytes()).hexdigest()[:16]
    return numbers
