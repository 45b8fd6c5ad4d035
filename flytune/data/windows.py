"""Data by day or hour: the paths of a recipe that hold strftime codes, as the time that a run was kicked off fills them in.

    data: {path: "s3://bucket/chats/%Y-%m-%d.jsonl"}      with %H, each hour of those days

A window of N days is the N days, in UTC, before the day of the kickoff: the last of them is over by then.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from flytune.errors import DataError
from flytune.recipe.recipe import Recipe
from flytune.recipe.sections import Source
from flytune.storage import Storage

# Others, and %20 in an address, are left as they stand.
_CODE = re.compile(r"%[YmdHjGVu]")
_DAY, _HOUR = timedelta(days=1), timedelta(hours=1)


class Window(NamedTuple):
    """What of a recipe's window is there."""

    recipe: Recipe | None
    """Without what is missing; None where nothing is left of the window."""
    missing: list[str]
    """Paths of the window with nothing behind them."""


def render(recipe: Recipe, kickoff: datetime, days: int) -> Recipe:
    """The recipe with a source for each day (or hour) of the window, oldest first; unchanged where no path has a code.

    Each has all that was said of the path: weight, format, and max_samples, which so counts for each day.

    Args:
        kickoff: UTC, where it names no time zone.

    Raises:
        DataError: `days` is below 1.
    """
    return _rendered(recipe, kickoff, days, lambda path: True)[0] or recipe


def look(recipe: Recipe, kickoff: datetime, days: int) -> Window:
    """As `render`, but without the days behind which there is no file.

    Raises:
        DataError: `days` is below 1; an address cannot be reached.
    """
    return _rendered(recipe, kickoff, days, _exists)


def _rendered(recipe: Recipe, kickoff: datetime, days: int, exists: Callable[[str], bool]) -> Window:
    if days < 1:
        raise DataError(f"days: {days}: a window has at least one")
    data, sources, missing = recipe.data, [], []
    has_windows = False
    for source in data.all_sources.values():
        if not source.path or not is_windowed(source.path):
            sources.append(source)
            continue
        paths = _paths(source.path, kickoff, days)
        there = [path for path in paths if exists(path)]
        missing += [path for path in paths if path not in there]
        sources += [source.model_copy(update={"path": path}) for path in there]
        has_windows = has_windows or bool(there)
    if not has_windows:
        return Window(None if missing else recipe, missing)
    # Written into each source; beside sources they would stand for heldout_path alone.
    kept = {"format", "columns"} if data.heldout_path else set()
    plain = {name: field.get_default() for name, field in Source.model_fields.items() if name not in kept}
    update = {} if data.sources else plain
    rendered = type(data).model_validate(data.model_dump() | update | {"sources": [one.model_dump() for one in sources]})
    return Window(recipe.model_copy(update={"data": rendered}), missing)


def _paths(path: str, kickoff: datetime, days: int) -> list[str]:
    moment = kickoff.replace(tzinfo=UTC) if kickoff.tzinfo is None else kickoff.astimezone(UTC)
    first = moment.replace(hour=0, minute=0, second=0, microsecond=0) - days * _DAY
    step = _HOUR if "%H" in path else _DAY
    moments = [first + number * step for number in range(days * _DAY // step)]
    # A path without %d is the same on several days.
    return list(dict.fromkeys(_CODE.sub(lambda code, at=at: at.strftime(code.group()), path) for at in moments))  # type: ignore[misc]


def is_windowed(path: str) -> bool:
    """Return whether it is the pattern of a path a day, or an hour."""
    return bool(_CODE.search(path))


def _exists(path: str) -> bool:
    return Storage(path, "data", error=DataError, failed="cannot be reached", retry=False).exists()
