"""Hashes of files."""

import hashlib
from pathlib import Path


def sha256_of(file: Path) -> str:
    """Of a file's content, 64 hex digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
