"""The x-ray: a page with prepared data token by token, as the model will be trained on it."""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from flytune import data
from flytune.data import Part
from flytune.data.contract import CONTRACT, Contract, check
from flytune.data.formats import CHATS
from flytune.data.readers import read_heldout, strict
from flytune.data.stored_samples import parts
from flytune.errors import DataError
from flytune.files import written_atomically
from flytune.recipe import Data, DataRequest, Recipe
from flytune.records import Manifest, SourceCounts
from flytune.report import charts, token_strips
from flytune.report import page as report_page

SAMPLES = 6
"""Number of first samples that are shown, besides the longest, and one that was cut."""
_SEARCHED = 2000
"""Number of first samples in which the longest is searched."""
_HEAD, _TAIL = 360, 120
"""Numbers of first and last tokens that are shown of a longer sample."""
_STRIPS = 8
_VISIBLE = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍"})


@dataclass(frozen=True, slots=True)
class Piece:
    """The text of one token, or of several tokens that share a character."""

    text: str
    kind: str = ""
    """CSS classes: t trained, s special, c the end of a cut sample; or `gap`."""
    tip: str = ""
    breaks: bool = False
    """True if it ends with a line break."""


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample on the page."""

    title: str
    note: str
    pieces: list[Piece]
    """Tokens of the sample; of a pair, the tokens that both sequences begin with."""
    answers: tuple[list[Piece], ...] = ()
    """Tokens of a pair's chosen and rejected sequence from the place where they part."""


def recipe_page(recipe: Recipe, rows: int, out: Path) -> Path:
    """Prepare the first `rows` rows of each source of a recipe, and of its own held-out data, and write their page to `out`.

    Needs the tokenizer, but no plan and no model. Failed checks of the contract are shown and stop nothing.

    Raises:
        DataError: as data.prepare.
    """
    changes: dict[str, Any] = {
        "contract": "warn",
        # Even a few rows must give both splits.
        "heldout_fraction": max(recipe.data.heldout_fraction, min(0.3, 5 / rows)),
    }
    if several := recipe.data.sources:
        changes["sources"] = [one.model_copy(update={"max_samples": min(rows, one.max_samples or rows)}) for one in several]
    else:
        changes["max_samples"] = min(rows, recipe.data.max_samples or rows)
    limited = recipe.data.model_copy(update=changes)
    with tempfile.TemporaryDirectory(prefix="flytune-xray-") as temporary:
        folder, cut = Path(temporary) / "dataset", Path(temporary) / "heldout.jsonl"
        limited = _with_few_heldout(limited, rows, cut)
        try:
            data.prepare(DataRequest.of(recipe, "xray", limited), folder)
        except DataError as error:
            raise DataError(str(error).replace(f"{cut}:", f"{recipe.data.heldout_name} row ")) from error
        return page(folder, recipe, out, rows)


def _with_few_heldout(section: Data, rows: int, cut: Path) -> Data:
    """Limit held-out data of its own to its first `rows` rows, which are written to `cut` if it has more."""
    if section.heldout_key is None:
        return section
    found = read_heldout(section)
    first = list(islice(found if section.max_bad_fraction else strict(found), rows + 1))
    if len(first) <= rows:
        return section
    readable = [row for row, _ in first[:rows] if not isinstance(row, DataError)]
    cut.write_text("".join(json.dumps(row, default=str) + "\n" for row in readable), encoding="utf-8")
    return section.model_copy(update={"heldout_path": str(cut), "eval_split": None})


def page(folder: Path, recipe: Recipe, out: Path, limit: int | None = None) -> Path:
    """Write the page of the prepared data in `folder` to `out`: self-contained HTML, everything from the data escaped.

    `limit` is the largest number of rows that were read; None for all.
    """
    manifest, tokenizer = data.read_manifest(folder), _tokenizer(folder)
    contract = _contract(folder, manifest, recipe, tokenizer)
    rows = list(islice(_rows(folder, manifest), _STRIPS))
    widest = max(sum(len(labels) for labels in row) for row in rows)
    text = report_page.environment(escape=True).get_template("xray.html.jinja").render(
        recipe=recipe,
        manifest=manifest,
        contract=contract,
        sentence=_summary(contract),
        limited=limit is not None and manifest.rows >= limit,
        samples=sample_views(folder, manifest, tokenizer, SAMPLES),
        strips=token_strips.draw(rows, manifest.max_length if manifest.train.blocks else widest),
        padding=1 - sum(len(labels) for row in rows for labels in row) / (len(rows) * widest),
        sources=_sources(manifest, recipe),
        template=tokenizer.get_chat_template() if set(manifest.format.split(", ")) & set(CHATS) else "",
        charts=charts,
    )  # fmt: skip
    with written_atomically(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return out


def section(folder: Path) -> str:
    """Return the contract and the first samples of the prepared data in `folder` for the report; "" without a contract."""
    if not (folder / CONTRACT).is_file():
        return ""
    manifest = data.read_manifest(folder)
    return str(
        report_page.environment(escape=True).get_template("xray_section.jinja").render(
            contract=Contract.read(folder / CONTRACT), samples=sample_views(folder, manifest, _tokenizer(folder), 2)
        )
    )  # fmt: skip


def sample_views(folder: Path, manifest: Manifest, tokenizer: Any, count: int) -> list[SampleView]:
    """Return the first `count` training samples, and of the first _SEARCHED the longest, and the first that was cut."""
    found: dict[str, tuple[Part, int]] = {}
    seen = longest = 0
    # A pair is two samples, one after the other.
    each, name = (2, "Pair") if manifest.pairs else (1, "Sample")
    for part in parts(folder, manifest.train):
        lengths = part.lengths.tolist()
        for sample in range(0, len(lengths), each):
            group = range(sample, sample + each)
            length = sum(lengths[one] for one in group)
            if seen < count:
                found[f"{name} {seen + 1}"] = part, sample
            if length > longest:
                found[f"Longest {name.lower()}"], longest = (part, sample), length
            if manifest.truncated and any(_may_be_cut(part, one, manifest) for one in group):
                found.setdefault("An answer that may have been cut", (part, sample))
            seen += 1
        if seen >= _SEARCHED:
            break
    last = f"Longest {name.lower()}"
    found[last] = found.pop(last)
    # A sample with several titles is shown once, under the first.
    titles: dict[tuple[int, int], str] = {}
    for title, (part, sample) in found.items():
        titles.setdefault((id(part), sample), title)
    return [
        (_view if each == 1 else _pair_view)(title, part, sample, manifest, tokenizer)
        for title, (part, sample) in found.items()
        if titles[id(part), sample] == title
    ]


def _may_be_cut(part: Part, sample: int, manifest: Manifest) -> bool:
    length = int(part.lengths[sample])
    return length == manifest.max_length and bool(part.trained[part.starts[sample] + length - 1])


def _pair_view(title: str, part: Part, sample: int, manifest: Manifest, tokenizer: Any) -> SampleView:
    """Return a pair: what both sequences begin with once, then both side by side from where they part."""
    both = []
    for one in (sample, sample + 1):
        start, length = int(part.starts[one]), int(part.lengths[one])
        both.append((part.tokens(one).tolist(), part.trained[start : start + length].tolist()))
    (chosen, first), (rejected, second) = both
    shared = sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(chosen, rejected, strict=False)))
    note = (
        f"{part.where(sample)}: chosen {len(chosen):,} tokens, {sum(first):,} trained; rejected {len(rejected):,}, "
        f"{sum(second):,} trained; they part after {shared:,}"
    )
    before = _shortened(chosen[:shared], first[:shared], tokenizer)
    answers = []
    for ids, trained in both:
        pieces = list(_pieces(ids[: shared + _HEAD], trained, tokenizer, 0, shared))
        if rest := len(ids) - shared - _HEAD:
            pieces += [Piece(f"{rest:,} tokens are not shown", "gap")] if rest > 0 else []
        if manifest.truncated and len(ids) == manifest.max_length:
            pieces.append(Piece(f"cut at {manifest.max_length:,} tokens", "c"))
        answers.append(pieces)
    return SampleView(title, note, before, tuple(answers))


def _view(title: str, part: Part, sample: int, manifest: Manifest, tokenizer: Any) -> SampleView:
    start, length = int(part.starts[sample]), int(part.lengths[sample])
    ids, trained = part.tokens(sample).tolist(), part.trained[start : start + length].tolist()
    note = f"{part.where(sample)}: {length:,} tokens, {sum(trained):,} trained"
    if part.desirable is not None:
        note += ", desirable" if part.desirable[sample] else ", undesirable"
    pieces = _shortened(ids, trained, tokenizer)
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    if manifest.truncated and length == manifest.max_length and not special & set(ids[-2:]):
        pieces.append(Piece(f"cut at {manifest.max_length:,} tokens", "c"))
    return SampleView(title, note, pieces)


def _shortened(ids: list[int], trained: list[bool], tokenizer: Any) -> list[Piece]:
    """Return the pieces of a sequence, with a gap in a long one."""
    length = len(ids)
    if length <= _HEAD + _TAIL:
        return list(_pieces(ids, trained, tokenizer, 0))
    gap = Piece(f"{length - _HEAD - _TAIL:,} tokens, {sum(trained[_HEAD:-_TAIL]):,} of them trained, are not shown", "gap")
    tail = _pieces(ids[-_TAIL:], trained[-_TAIL:], tokenizer, length - _TAIL)
    return [*_pieces(ids[:_HEAD], trained[:_HEAD], tokenizer, 0), gap, *tail]


def _pieces(ids: list[int], trained: list[bool], tokenizer: Any, first: int, start: int = 0) -> Iterator[Piece]:
    """Yield a piece for each token from `start` on, and one piece for tokens that share a character (its bytes)."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}

    def text_of(numbers: list[int]) -> str:
        return str(tokenizer.decode(numbers, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    for end in range(start + 1, len(ids) + 1):
        # Decode with the previous token: some tokenizers drop the space at the beginning of a text.
        before = ids[max(0, start - 1) : start]
        text = text_of(before + ids[start:end])[len(text_of(before)) :]
        if text.endswith("\ufffd") and end - start < 4 and end < len(ids):
            continue
        is_special = end - start == 1 and ids[start] in special
        kind = " ".join(name for name, holds in (("t", any(trained[start:end])), ("s", is_special)) if holds)
        tip = f"{first + start}: {' '.join(str(number) for number in ids[start:end])}"
        lines = text.translate(_VISIBLE).replace("↵", "↵\n")
        yield Piece(lines.removesuffix("\n") or "∅", kind, tip, text.endswith("\n"))
        start = end


def _rows(folder: Path, manifest: Manifest) -> Iterator[list[list[bool]]]:
    """Yield for each row of train its samples, each as a list of True for trained tokens and False for others."""
    for part in parts(folder, manifest.train):
        row: list[list[bool]] = []
        for sample, start in enumerate(part.starts.tolist()):
            if sample and part.rows[sample] != part.rows[sample - 1]:
                yield row
                row = []
            row.append(part.trained[start : start + part.lengths[sample]].tolist())
        if row:
            yield row


def _contract(folder: Path, manifest: Manifest, recipe: Recipe, tokenizer: Any) -> Contract:
    if (folder / CONTRACT).is_file():
        return Contract.read(folder / CONTRACT)
    return check(folder, manifest, recipe.data, tokenizer)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not (folder / "tokenizer").is_dir():
        raise DataError(f"{folder}: no tokenizer/ in the folder; prepare the data again")
    return AutoTokenizer.from_pretrained(str(folder / "tokenizer"), trust_remote_code=False)


def _sources(manifest: Manifest, recipe: Recipe) -> list[SourceCounts]:
    """Return the counts of each source; held-out rows, which may be limited, under the recipe's name for them."""
    sources, data = manifest.sources, recipe.data
    if not sources or not data.heldout_key:
        return sources
    return [*sources[:-1], sources[-1].model_copy(update={"name": data.heldout_name})]


def _summary(contract: Contract) -> str:
    counts = {verdict: sum(found.verdict == verdict for found in contract.checks) for verdict in ("stop", "warning")}
    if counts["stop"]:
        return f"{counts['stop']} of {len(contract.checks)} checks fail and would stop the run."
    warnings = f", {counts['warning']} with a warning" if counts["warning"] else ""
    return f"All {len(contract.checks)} checks pass{warnings}."
