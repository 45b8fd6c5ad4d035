"""How many samples training will have, guessed from the size of the files before any of them is read."""

from pathlib import Path

from flytune.recipe.sections import Data, Source

# Bytes of the beginning of a file that its mean line is taken from.
_LOOKED_AT = 1 << 20


def samples_guess(data: Data) -> int | None:
    """Training samples, held-out ones left out; None where a source is not a local JSON Lines file, or samples are packed.

    A row is taken for a sample: long ones may be split, bad and empty ones are left out later.
    """
    counts = [_rows(source) for source in data.all_sources.values()]
    if data.packing or not all(counts):
        return None
    weighted = sum((count or 0) * source.weight for count, source in zip(counts, data.all_sources.values(), strict=True))
    return max(1, round(weighted * (1.0 if data.heldout_path else 1 - data.heldout_fraction)))


def _rows(source: Source) -> int | None:
    file = Path(source.path).expanduser() if source.path and "://" not in source.path else None
    if file is None or not file.is_file() or file.suffix != ".jsonl":
        return source.max_samples
    with file.open("rb") as opened:
        start = opened.read(_LOOKED_AT)
    rows = round(start.count(b"\n") * file.stat().st_size / len(start)) if start else 0
    return min(rows, source.max_samples or rows)
