"""Number of training samples, guessed from file sizes before any file is read completely."""

from pathlib import Path

from flytune.recipe import Data, Source

# Bytes at the beginning of a file from which the mean length of its lines is computed.
_LOOKED_AT = 1 << 20


def samples_guess(data: Data) -> int | None:
    """Return the number of training samples without held-out ones; None if a source is not a local JSON Lines file, or packed.

    A row counts as a sample, although long rows may be split, and bad and empty ones dropped later.
    """
    counts = [_rows(source) for source in data.all_sources.values()]
    if data.packing or not all(counts):
        return None
    weighted = sum((count or 0) * source.weight for count, source in zip(counts, data.all_sources.values(), strict=True))
    return max(1, round(weighted * (1.0 if data.heldout_key else 1 - data.heldout_fraction)))


def _rows(source: Source) -> int | None:
    file = Path(source.path).expanduser() if source.path and "://" not in source.path else None
    if file is None or not file.is_file() or file.suffix != ".jsonl":
        return source.max_samples
    with file.open("rb") as opened:
        start = opened.read(_LOOKED_AT)
    rows = round(start.count(b"\n") * file.stat().st_size / len(start)) if start else 0
    return min(rows, source.max_samples or rows)
