"""Windows of data by day or hour: paths with strftime codes in a recipe, filled in from the kickoff time of a
run.

    data: {path: "s3://bucket/chats/%Y-%m-%d.jsonl"}      with %H, each hour of those days

A window of N days is the N days, in UTC, before the day of the kickoff: all of them are complete by then.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from flytune.errors import DataError
from flytune.recipe import OF_HELDOUT, Recipe, Source
from flytune.storage import Storage

# Other codes, and %20 in an address, are left unchanged.
_CODE = re.compile(r"%[YmdHjGVu]")
_DAY, _HOUR = timedelta(days=1), timedelta(hours=1)


class RenderedWindow(NamedTuple):
    """The existing data of a recipe's window."""

    recipe: Recipe | None
    """Recipe with the existing paths; None if no path of the window exists."""
    missing: list[str]
    """Paths of the window that do not exist."""


def render(
    recipe: Recipe, kickoff: datetime, days: int, exists: Callable[[str], bool] | None = None
) -> RenderedWindow:
    """Return the recipe with a source for each day (or hour) of the window that has data, oldest first.

    Each has all settings of the path: weight, format, and max_samples, which then applies to each day. A
    recipe without codes in its paths is returned unchanged.

    Args:
        kickoff: in UTC if it has no time zone.
        exists: a check of a path instead of that of its file system.

    Raises:
        DataError: `days` is below 1, or an address cannot be reached.
    """
    if days < 1:
        raise DataError(f"days: {days}: a window has at least one day")
    exists = exists or _exists
    data, sources, missing = recipe.data, [], []
    has_windows = False
    for source in data.all_sources.values():
        if not source.path or not is_windowed(source.path):
            sources.append(source)
            continue
        paths = _paths(source.path, kickoff, days)
        existing = [path for path in paths if exists(path)]
        missing += [path for path in paths if path not in existing]
        sources += [source.model_copy(update={"path": path}) for path in existing]
        has_windows = has_windows or bool(existing)
    if not has_windows:
        return RenderedWindow(None if missing else recipe, missing)
    # These are now in each source; next to `sources` they would apply to heldout_path alone.
    kept = OF_HELDOUT if data.heldout_path else ()
    plain = {name: field.get_default() for name, field in Source.model_fields.items() if name not in kept}
    update = {} if data.sources else plain
    rendered = type(data).model_validate(
        data.model_dump() | update | {"sources": [source.model_dump() for source in sources]}
    )
    return RenderedWindow(recipe.model_copy(update={"data": rendered}), missing)


def _paths(path: str, kickoff: datetime, days: int) -> list[str]:
    moment = kickoff.replace(tzinfo=UTC) if kickoff.tzinfo is None else kickoff.astimezone(UTC)
    first = moment.replace(hour=0, minute=0, second=0, microsecond=0) - days * _DAY
    step = _HOUR if "%H" in path else _DAY
    moments = [first + number * step for number in range(days * _DAY // step)]

    def path_at(moment: datetime) -> str:
        return _CODE.sub(lambda code: moment.strftime(code.group()), path)

    # A path without %d is the same for several days.
    return list(dict.fromkeys(path_at(moment) for moment in moments))


def is_windowed(path: str) -> bool:
    """Return whether it is a pattern for one path a day, or an hour."""
    return bool(_CODE.search(path))


def _exists(path: str) -> bool:
    return Storage(path, "data", error=DataError, failed="cannot be reached", retry=False).exists()
