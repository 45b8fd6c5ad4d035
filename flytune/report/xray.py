"""The x-ray: a page with prepared data token by token, as the model will be trained on it."""

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from flytune import data
from flytune.data.bad_rows import BAD_ROWS, BadRow, read_list, write_list
from flytune.data.contract import CONTRACT, Contract, check, stored
from flytune.data.formats import CHATS
from flytune.data.readers import rows_of
from flytune.data.stored_samples import parts
from flytune.errors import DataError
from flytune.files import new_output
from flytune.recipe import Data, DataRequest, Recipe
from flytune.records import Manifest, SourceCounts
from flytune.report import charts
from flytune.report import page as report_page
from flytune.report.xray_samples import sample_views
from flytune.sentences import counted, counted_of

_WIDTH, _LEFT, _HEIGHT, _STEP = 1000, 64, 18, 28
_HATCH = (
    '<defs><pattern id="padding-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" fill="var(--paper)"/><rect width="1.5" '
    'height="6" fill="var(--muted)"/></pattern></defs>'
)
Strip = list[list[bool]]
"""The samples of one row, each as a list of True for trained tokens and False for others."""


def draw_strips(strips: list[Strip], width: int) -> str:
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


SAMPLES = 6
"""Number of first samples that are shown, after those that one looks for."""
_STRIPS = 8
_BAD_SHOWN = 50


class Xray(NamedTuple):
    """A written page, and what a terminal says about it."""

    path: Path
    contract: Contract
    summary: str
    """A sentence on the checks."""
    stops: bool
    """True if a failed check would stop the run."""
    rows: int
    bad_rows: Path | None
    """List of the bad rows; None if there is none."""
    bad: int
    """Number of bad rows."""
    left_out: dict[str, int]
    """Number of rows by what no sample has of them (Manifest.left_out)."""


class _Heldout(NamedTuple):
    """Held-out data of which only the first rows are prepared, from a file of their own."""

    data: Data
    cut: Path
    places: list[str]
    """Location of each row of `cut` in the data; empty if all rows are prepared, from the data itself."""
    bad: list[BadRow]
    """Rows among them that cannot be read, and are not in `cut`."""


def list_beside(out: Path) -> Path:
    """Return the path of the list of bad rows of a page."""
    return out.with_suffix(".bad_rows.jsonl")


def recipe_page(recipe: Recipe, rows: int, out: Path) -> Xray:
    """Prepare the first `rows` rows of each source of a recipe, and of its own held-out data, and write their
    page to `out`.

    Needs the tokenizer, but no plan and no model. Failed checks of the contract are shown and stop nothing.
    Bad rows are listed in a file beside the page, whether there are too many of them or not.

    Raises:
        DataError: as data.prepare; or another file is where the list of bad rows would be.
    """
    listed = list_beside(out)
    _check_list(listed)
    changes: dict[str, Any] = {
        "contract": "warn",
        # Even a few rows must give both splits, if there are two.
        "heldout_fraction": recipe.data.heldout_fraction
        and max(recipe.data.heldout_fraction, min(0.3, 5 / rows)),
    }
    if several := recipe.data.sources:
        changes["sources"] = [
            source.model_copy(update={"max_samples": min(rows, source.max_samples or rows)})
            for source in several
        ]
    else:
        changes["max_samples"] = min(rows, recipe.data.max_samples or rows)
    limited = recipe.data.model_copy(update=changes)
    with tempfile.TemporaryDirectory(prefix="flytune-xray-") as temporary:
        folder = Path(temporary) / "dataset"
        heldout = _with_few_heldout(limited, rows, Path(temporary) / "heldout.jsonl")
        try:
            data.prepare(DataRequest.of(recipe, "xray", heldout.data), folder)
        except DataError as error:
            _keep_list(folder, heldout, listed)
            text = str(error).replace(str(folder / BAD_ROWS), str(listed))
            raise DataError(_with_places(text, heldout)) from error
        bad = _keep_list(folder, heldout, listed)
        page(folder, recipe, out, rows, bad, listed)
        contract = Contract.read(folder / CONTRACT)
        manifest = data.read_manifest(folder)
    read = manifest.rows + len(heldout.bad)
    summary = _summary(contract, recipe.data)
    return Xray(
        out,
        contract,
        summary,
        would_stop(contract, recipe.data),
        read,
        listed if bad else None,
        len(bad),
        manifest.left_out,
    )


def _with_few_heldout(section: Data, rows: int, cut: Path) -> _Heldout:
    """Limit held-out data of its own to its first `rows` rows, which are written to `cut` if it has more."""
    if section.heldout_key is None:
        return _Heldout(section, cut, [], [])
    first = list(rows_of(section, section.heldout_key, most=rows + 1))
    if len(first) <= rows:
        return _Heldout(section, cut, [], [])
    readable = [(row, where) for row, where in first[:rows] if not isinstance(row, DataError)]
    bad = [BadRow.of(where, row) for row, where in first[:rows] if isinstance(row, DataError)]
    cut.write_text("".join(json.dumps(row, default=str) + "\n" for row, _ in readable), encoding="utf-8")
    limited = section.model_copy(update={"heldout_path": str(cut), "eval_split": None})
    return _Heldout(limited, cut, [where for _, where in readable], bad)


def _with_places(text: str, heldout: _Heldout) -> str:
    """Return a text with the locations of held-out rows in the data instead of those in their copy."""
    places = heldout.places
    return re.sub(
        rf"{re.escape(str(heldout.cut))}:(\d+)",
        lambda match: places[int(match[1]) - 1] if 0 < int(match[1]) <= len(places) else match[0],
        text,
    )


def _keep_list(folder: Path, heldout: _Heldout, listed: Path) -> list[BadRow]:
    """Return the bad rows of the preparation in `folder`, and write them to `listed`, or remove an older
    list."""
    rows = [*read_list(folder / BAD_ROWS), *heldout.bad]
    rows = [
        BadRow.of(heldout.places[row.line - 1], DataError(row.reason))
        if row.file == str(heldout.cut) and row.line
        else row
        for row in rows
    ]
    if rows:
        listed.parent.mkdir(parents=True, exist_ok=True)
        write_list(rows, listed)
    else:
        listed.unlink(missing_ok=True)
    return rows


def _check_list(listed: Path) -> None:
    try:
        is_own = not listed.exists() or read_list(listed) is not None
    except (ValueError, OSError):
        is_own = False
    if not is_own:
        raise DataError(
            f"{listed}: exists already, and is not a list of bad rows; move it, or give another --out"
        )


def page(
    folder: Path,
    recipe: Recipe,
    out: Path,
    limit: int | None = None,
    bad: Sequence[BadRow] | None = None,
    listed: Path | None = None,
) -> Path:
    """Write the page of the prepared data in `folder` to `out`: self-contained HTML, everything from the data
    escaped.

    `limit` is the largest number of rows that were read; None for all. `bad` are the bad rows, by default
    those of `folder`; `listed` is the file with all of them.
    """
    bad, listed = read_list(folder / BAD_ROWS) if bad is None else bad, listed or folder / BAD_ROWS
    manifest, tokenizer = data.read_manifest(folder), _tokenizer(folder)
    contract = stored(folder) or check(folder, manifest, recipe.data, tokenizer)
    rows = list(islice(_rows(folder, manifest), _STRIPS))
    widest = max(sum(len(labels) for labels in row) for row in rows)
    text = (
        report_page.environment(escape=True)
        .get_template("xray.html.jinja")
        .render(
            recipe=recipe,
            manifest=manifest,
            contract=contract,
            sentence=_summary(contract, recipe.data),
            bad=bad,
            shown_bad=bad[:_BAD_SHOWN],
            listed=listed,
            limited=limit is not None and manifest.rows >= limit,
            samples=sample_views(folder, manifest, tokenizer, SAMPLES, contract),
            strips=draw_strips(rows, manifest.max_length if manifest.train.blocks else widest),
            padding=1 - sum(len(labels) for row in rows for labels in row) / (len(rows) * widest),
            sources=_sources(manifest, recipe),
            template=tokenizer.get_chat_template() if set(manifest.format.split(", ")) & set(CHATS) else "",
            charts=charts,
        )
    )
    with new_output(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return out


def section(folder: Path) -> str:
    """Return the contract and the first samples of the prepared data in `folder` for the report; "" without a
    contract."""
    if (contract := stored(folder)) is None:
        return ""
    manifest, bad = data.read_manifest(folder), read_list(folder / BAD_ROWS)
    return str(
        report_page.environment(escape=True)
        .get_template("xray_section.jinja")
        .render(
            contract=contract,
            samples=sample_views(folder, manifest, _tokenizer(folder), 2, contract),
            bad=bad,
            shown_bad=bad[:_BAD_SHOWN],
            listed=BAD_ROWS,
            rows=manifest.rows,
        )
    )


def _rows(folder: Path, manifest: Manifest) -> Iterator[list[list[bool]]]:
    """Yield for each row of train its samples, each as a list of True for trained tokens and False for
    others."""
    for part in parts(folder, manifest.train):
        row: list[list[bool]] = []
        for sample, start in enumerate(part.starts.tolist()):
            if sample and part.rows[sample] != part.rows[sample - 1]:
                yield row
                row = []
            row.append(part.trained[start : start + part.lengths[sample]].tolist())
        if row:
            yield row


def _tokenizer(folder: Path) -> Any:
    if not (folder / "tokenizer").is_dir():
        raise DataError(f"{folder}: no tokenizer/ in the folder; prepare the data again")
    return data.stored_tokenizer(folder)


def _sources(manifest: Manifest, recipe: Recipe) -> list[SourceCounts]:
    """Return the counts of each source; held-out rows, which may be limited, under the recipe's name for
    them."""
    sources, data = manifest.sources, recipe.data
    if not sources or not data.heldout_key:
        return sources
    return [*sources[:-1], sources[-1].model_copy(update={"name": data.heldout_name})]


def would_stop(contract: Contract, section: Data) -> bool:
    """Return whether failed checks stop a run with this section `data`."""
    return contract.verdict == "stop" and (section.contract == "stop" or contract.has_unknown_tokens)


def _summary(contract: Contract, section: Data) -> str:
    names_by_verdict = {
        verdict: [check.name for check in contract.checks if check.verdict == verdict]
        for verdict in ("stop", "warning")
    }
    count = len(contract.checks)
    if stops := names_by_verdict["stop"]:
        effect = (
            "would stop the run"
            if would_stop(contract, section)
            else "stop nothing, because of data.contract: warn"
        )
        return f"{counted_of(len(stops), count, 'check', 'fails', 'fail')} and {effect}: {', '.join(stops)}."
    warnings = (
        f", {len(names_by_verdict['warning'])} with a warning: {', '.join(names_by_verdict['warning'])}"
        if names_by_verdict["warning"]
        else ""
    )
    return f"All {counted(count, 'check')} pass{warnings}."
