"""Parallel coordinates plot of a sweep: an axis for each field that varies, one for the result, a line for
each run."""

import itertools
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from flytune.sentences import counted

_WIDTH, _TOP, _BOTTOM, _SIDE = 1000, 46, 330, 90
_LOW, _HIGH = (0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)
"""Blue for the best, orange for the worst: from Okabe & Ito's palette, which colour-blind readers can
distinguish."""
_TICKS = 12


class Line(NamedTuple):
    """Line of one run."""

    name: str
    values: list[str]
    """Displayed values, one for each field."""
    result: float | None
    """Result; None if the run failed."""


def draw(
    fields: Sequence[str],
    orders: Sequence[Sequence[str]],
    lines: Sequence[Line],
    result: str,
    best: str | None,
    higher: bool = False,
) -> str:
    """Return an SVG element.

    The result's axis has its best value at the top; lines of failed runs are dashed and end below the axis.

    Args:
        fields: names of the axes.
        orders: each field's values from bottom to top, evenly spaced.
        lines: a line for each run.
        result: name of the result.
        best: name of the best run.
        higher: True if the highest result is the best, and not the lowest.
    """
    results = [line.result for line in lines if line.result is not None]
    top, bottom = min(results, default=0.0), max(results, default=1.0)
    if higher:
        top, bottom = bottom, top
    places = [
        _SIDE + number * (_WIDTH - 2 * _SIDE) / max(1, len(fields)) for number in range(len(fields) + 1)
    ]
    parts = list[str]()
    shares = [
        0.0 if line.result is None or bottom == top else (line.result - top) / (bottom - top)
        for line in lines
    ]
    # Failed runs are drawn first, the best one last.
    order_drawn = sorted(
        zip(lines, shares, strict=True),
        key=lambda item: (item[0].result is not None, item[0].name == best, -item[1]),
    )
    for line, share in order_drawn:
        heights = [
            _height(order.index(value), len(order)) for value, order in zip(line.values, orders, strict=True)
        ]
        heights.append(_BOTTOM + 26 if line.result is None else _TOP + 14 + share * (_BOTTOM - _TOP - 28))
        parts.append(_line(line, list(zip(places, heights, strict=True)), share, line.name == best))
    parts += [_axis(x, field, order) for x, field, order in zip(places, fields, orders, strict=False)]
    parts.append(_result_axis(places[-1], result, top, bottom, any(line.result is None for line in lines)))
    label = (
        f"{counted(len(lines), 'run')} over {', '.join(fields)}; {result} from {min(top, bottom):.4g} "
        f"to {max(top, bottom):.4g}"
    )
    head = (
        f'role="img" aria-label="{escape(label)}" style="max-width: none" viewBox="0 0 {_WIDTH} '
        f'{_BOTTOM + 44}"'
    )
    return f"<svg {head}>{''.join(parts)}</svg>"


def _line(line: Line, points: Sequence[tuple[float, float]], share: float, is_best: bool) -> str:
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (x0 + x1) / 2
        path += f" C{middle:.1f},{y0:.1f} {middle:.1f},{y1:.1f} {x1:.1f},{y1:.1f}"
    color = "var(--muted)" if line.result is None else _mixed(share)
    dashed = ' stroke-dasharray="5 4"' if line.result is None else ""
    width = 4 if is_best else 1.8
    end = "failed" if line.result is None else f"{line.result:.4g}"
    title = escape(f"{line.name}: {', '.join(line.values)}: {end}")
    return (
        f'<path d="{path}" fill="none" stroke="{color}" '
        f'stroke-width="{width}"{dashed}><title>{title}</title></path>'
    )


def _axis(x: float, field: str, order: Sequence[str]) -> str:
    ticks = [(value, _height(number, len(order))) for number, value in enumerate(order)]
    every = -(-len(ticks) // _TICKS)
    return _ruled(x, field, [tick for number, tick in enumerate(ticks) if number % every == 0])


def _result_axis(x: float, name: str, top: float, bottom: float, has_failed: bool) -> str:
    count = 5 if top != bottom else 1
    ticks = []
    for number in range(count):
        share = number / max(1, count - 1)
        ticks.append((f"{top + share * (bottom - top):.4g}", _TOP + 14 + share * (_BOTTOM - _TOP - 28)))
    return _ruled(x, name, [*ticks, ("failed", _BOTTOM + 26)] if has_failed else ticks, lift=-5)


def _ruled(x: float, name: str, ticks: Sequence[tuple[str, float]], lift: float = 6) -> str:
    """Return an axis with its name above and values next to it, `lift` above the lines, on the page's
    colour."""
    line = (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_BOTTOM}" stroke="var(--ink)" stroke-width="1"/>'
    )
    style = 'text-anchor="middle" font-size="15" font-weight="600" fill="var(--ink)"'
    title = f'<text x="{x:.1f}" y="20" {style}>{escape(name)}</text>'
    behind = 'paint-order="stroke" stroke="var(--paper)" stroke-width="4"'
    style = f'font-size="14" fill="var(--ink)" {behind}'
    texts = [
        f'<text x="{x + 8:.1f}" y="{y - lift:.1f}" {style}>{escape(_cut(text))}</text>' for text, y in ticks
    ]
    return line + title + "".join(texts)


def _height(number: int, count: int) -> float:
    return _BOTTOM - 14 - (number + 0.5) * (_BOTTOM - _TOP - 28) / count


def _mixed(share: float) -> str:
    return "#" + "".join(
        f"{round(low + share * (high - low)):02x}" for low, high in zip(_LOW, _HIGH, strict=True)
    )


def _cut(text: str) -> str:
    return text if len(text) <= 16 else f"{text[:15]}…"
