"""Token strips: rows of training data as bars of trained tokens, context and padding, with the boundaries of
samples."""

from collections.abc import Iterator
from html import escape
from itertools import groupby

from flytune.sentences import counted, counted_of

_WIDTH, _LEFT, _HEIGHT, _STEP = 1000, 64, 18, 28
_HATCH = (
    '<defs><pattern id="padding-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="var(--paper)"/><rect width="1.5" '
    'height="6" fill="var(--muted)"/></pattern></defs>'
)
Strip = list[list[bool]]
"""The samples of one row, each as a list of True for trained tokens and False for others."""


def draw(strips: list[Strip], width: int) -> str:
    """Draw strips of `width` tokens as one SVG element; the tokens without samples are padding."""
    lines = [_strip(strip, width, number * _STEP) for number, strip in enumerate(strips)]
    labels = [
        f'<text x="0" y="{number * _STEP + 13}">{sum(map(len, strip)):,}</text>'
        for number, strip in enumerate(strips)
    ]
    used = sum(len(sample) for strip in strips for sample in strip)
    label = (
        f"{counted(len(strips), 'row')} of {counted(width, 'token')}; "
        f"{counted_of(used, len(strips) * width, 'token', 'is', 'are')} in samples, the rest is padding"
    )
    return (
        f'<svg class="strips" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {_WIDTH + _LEFT} {len(strips) * _STEP}">'
        f"{_HATCH}{''.join(labels)}{''.join(lines)}</svg>"
    )


def _strip(strip: Strip, width: int, top: int) -> str:
    scale = _WIDTH / width
    start, parts, boundaries = 0, list[str](), list[str]()
    for fill, length in _segments(strip, width):
        if length:
            x, size = f"{_LEFT + start * scale:.1f}", f"{length * scale:.1f}"
            parts.append(f'<rect x="{x}" y="{top + 2}" width="{size}" height="{_HEIGHT}" fill="{fill}"/>')
        start += length
    ends = 0
    for sample in strip[:-1] if sum(map(len, strip)) >= width else strip:
        ends += len(sample)
        x = f"{_LEFT + ends * scale:.1f}"
        boundaries.append(
            f'<line x1="{x}" x2="{x}" y1="{top}" y2="{top + _HEIGHT + 4}" stroke="var(--ink)" '
            'stroke-width="2"/>'
        )
    frame = (
        f'<rect x="{_LEFT}" y="{top + 2}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="var(--muted)"/>'
    )
    return "".join([*parts, frame, *boundaries])


def _segments(strip: Strip, width: int) -> Iterator[tuple[str, int]]:
    for sample in strip:
        for is_trained, tokens in groupby(sample):
            yield "var(--blue)" if is_trained else "var(--panel)", len(list(tokens))
    yield "url(#padding-hatch)", width - sum(map(len, strip))
