"""The lines of the contract: what was counted, what it is held against, and what to do."""

from collections.abc import Iterator
from typing import Literal

from flytune.data.contract.statistics import Census
from flytune.data.formats import CHATS
from flytune.recipe.sections import Data
from flytune.records.dataset import Manifest
from flytune.schema import Strict

SYSTEMATIC = 0.01
"""A fault in more than this share of samples is one of the recipe, not of single rows."""
_LOST = 0.05
"""Samples cut, dropped or alike that are worth a warning where the recipe has no limit."""
Verdict = Literal["ok", "warning", "stop"]


class Check(Strict):
    """One line of the contract."""

    name: str
    verdict: Verdict
    count: int
    """What was counted: `found` says of what; 0 where all is well, but for shares."""
    of: int
    found: str
    """A sentence with the counts."""
    limit: str
    """What stops the run."""
    example: str = ""
    """Where the first one stands, and an excerpt."""
    advice: str = ""
    """What to do about it; empty where nothing is to be done."""

    @property
    def share(self) -> float:
        return self.count / self.of if self.of else 0.0

    def __str__(self) -> str:
        example = f" ({self.example})" if self.example else ""
        return f"{self.name}: {self.found}{example}; {self.advice}"


def _is_systematic(count: int, of: int) -> bool:
    """Whether it is the recipe's fault: single rows never are, however few there are in all."""
    return count > max(1, SYSTEMATIC * of)


def answers(census: Census, manifest: Manifest, data: Data) -> Iterator[Check]:
    """What is learnt: the answers, and where they end."""
    samples, answers = census.samples, census.answers
    yield _judged(
        "trained tokens", census.untrained, samples, f"{census.untrained:,} of {samples:,} samples have no trained token",
        "any sample without one", stops=census.untrained > 0,
        fine=f"each of {samples:,} samples has one, and so has each batch on each rank",
        advice="drop these samples: a batch of them alone has no loss",
        example=census.examples.get("untrained", ""),
    )  # fmt: skip
    whole, unended = census.last_answers, census.unended
    formats = set(manifest.format.split(", "))
    # With every token trained a chat that ends with a question ends so, and all others were given an end marker.
    is_open = not data.completion_only_loss and bool(formats & set(CHATS))
    may_stop = data.too_long != "split" and "tokens" not in formats and not is_open
    advice = "the model never learns to stop: let the template end each answer with a special token, or the rows with EOS"
    if is_open:
        advice = "a chat that ends with a question needs none; all others let the template end, with a special token"
    ends = ", ".join(f"{count:,} × {mark!r}" for mark, count in census.ends.most_common(3)) or "none"
    yield _judged(
        "end marker", unended, whole, f"{unended:,} of {whole:,} samples do not end in a trained end marker (found: {ends})",
        # A piece of a long sample ends where it was split; rows of tokens are taken as they are, blocks of a corpus too.
        "more than 1 % of uncut samples", stops=_is_systematic(unended, whole) and may_stop,
        fine=f"each of {whole:,} uncut samples ends in a trained one; of all answers {ends}",
        advice=advice,
        example=census.examples.get("unended", ""),
    )  # fmt: skip
    inner = census.unended_inside
    yield _judged(
        "end of each answer", inner, answers, f"{inner:,} of {answers:,} answers, not the last of their samples, have none",
        "only warns", fine=f"all of {answers:,} answers",
        advice="in a conversation the model goes on as the user; a template with an end token after each turn mends that",
        example=census.examples.get("unended_inside", ""),
    )  # fmt: skip
    other, ended = census.ends.total() - census.ends[census.eos], census.ends.total()
    marks = " or ".join(repr(mark) for mark in census.ends if mark != census.eos)
    yield _judged(
        "end marker is EOS", other, ended, f"{other:,} of {ended:,} end markers are {marks}, not EOS ({census.eos!r})",
        "only warns", fine=f"generation stops at {census.eos!r}, as the answers do",
        advice=f"generation stops at EOS alone unless told: make {marks} the eos_token, or give it as eos_token_id",
    )  # fmt: skip
    yield _judged(
        "pad token", census.masked, answers,
        f"{census.masked:,} of {answers:,} answers are followed by an end marker without a label"
        + (f", which is also the pad token {census.pad!r}" if census.pad == census.eos else ""),
        "more than 1 %", stops=_is_systematic(census.masked, answers),
        fine=f"{census.pad!r}" + (" is EOS too, and EOS is trained" if census.pad == census.eos else " is not EOS"),
        advice="the end was masked, as if it were padding: label it; another data.pad_token keeps the two apart",
        example=census.examples.get("masked", ""),
    )  # fmt: skip


def tokens(census: Census) -> Iterator[Check]:
    """What the tokens are."""
    samples = census.samples
    yield _judged(
        "BOS", census.double_bos, samples, f"{census.double_bos:,} of {samples:,} samples begin with BOS twice",
        "more than 1 %", stops=_is_systematic(census.double_bos, samples),
        fine=f"{census.bos!r} begins {census.with_bos:,} of {samples:,} samples, never twice" if census.bos else "it has none",
        advice="the text has one and the tokenizer adds another: take it out of the rows or of the template",
        example=census.examples.get("double_bos", ""),
    )  # fmt: skip
    pieces = census.in_pieces
    yield _judged(
        "special tokens", len(pieces), census.special, f"not a single token: {', '.join(pieces)}",
        "BOS or EOS in pieces", stops=bool(census.written & set(pieces)),
        fine=f"each of {census.special} is a single token",
        advice="add them to the tokenizer as special tokens, or use a template with those that it has",
    )  # fmt: skip
    yield _judged(
        "vocabulary", census.unknown + census.outside, census.tokens,
        f"{census.unknown:,} of {census.tokens:,} tokens are the unknown token, {census.outside:,} are no token at all",
        "any that is no token", stops=census.outside > 0, fine=f"all of {census.tokens:,} tokens are in it",
        advice="the data needs another tokenizer, or characters in it cannot be written with this one",
        example=census.examples.get("outside", "") or census.examples.get("unknown", ""),
    )  # fmt: skip
    yield _judged(
        "borders", census.torn, census.samples, f"{census.torn:,} blocks whose seq_lengths do not add up to their tokens",
        "any", stops=census.torn > 0, fine="samples of a block add up to it" if census.packed else "a row is a sample",
        advice="prepare the data again",
    )  # fmt: skip


def round_trip(census: Census) -> Iterator[Check]:
    """Whether the text of the tokens gives these tokens."""
    trip = census.round_trip()
    what = (
        "token for token"
        if trip.by_tokens
        else "in their words (by tokens this tokenizer cannot be judged: it alters plain text)"
    )
    yield _judged(
        "round trip", trip.failed, trip.tried, f"{trip.failed:,} of {trip.tried:,} samples, tokenized again from text, differ",
        "more than half; warns over 1 %", stops=trip.failed > trip.tried / 2,
        is_fine=trip.failed <= SYSTEMATIC * trip.tried,
        fine=f"{trip.tried - trip.failed:,} of {trip.tried:,} samples, tokenized again from text, agree {what}",
        advice="they were tokenized otherwise than they will be in use, or hold the text of special tokens",
        example=trip.example,
    )  # fmt: skip


def shares(census: Census, manifest: Manifest, data: Data) -> Iterator[Check]:
    """How much is trained, cut and dropped, against the recipe's limits."""
    trained, tokens = census.trained, census.tokens
    least = data.min_trained_fraction
    yield _judged(
        "trained share", trained, tokens, f"{_percent(trained, tokens)} of {tokens:,} tokens",
        f"less than {least:.3g} (data.min_trained_fraction)" if least else "data.min_trained_fraction, unset; warns under 1 %",
        stops=least is not None and trained < least * tokens, is_fine=trained >= (least or 0.01) * tokens,
        advice="long prompts and short answers: shorten the prompts, or look whether the answers are what is labelled",
    )  # fmt: skip
    lost = manifest.tokens_read - tokens
    behind = f"; {_percent(lost, manifest.tokens_read)} of the tokens read are gone in all" if lost > 0 else ""
    dropped = manifest.dropped_too_long + manifest.dropped_untrained
    for name, count, found, field, most, advice in (
        ("truncated", manifest.truncated, f"cut at {manifest.max_length:,} tokens", "max_truncated_fraction",
         data.max_truncated_fraction, f"raise data.max_length (the longest has {manifest.longest:,} tokens)"),
        ("dropped", dropped, f"dropped ({manifest.dropped_too_long:,} too long, {manifest.dropped_untrained:,} without answer)",
         "max_dropped_fraction", data.max_dropped_fraction, "raise data.max_length, or mend the rows without an answer"),
    ):  # fmt: skip
        yield _judged(
            name, count, manifest.rows, f"{count:,} of {manifest.rows:,} samples were {found}{behind if count else ''}",
            f"data.{field}, unset; warns over 5 %" if most is None else f"more than {most:.3g} (data.{field})",
            stops=most is not None and count > most * manifest.rows,
            is_fine=count <= (_LOST if most is None else most) * manifest.rows, advice=advice,
        )  # fmt: skip


def duplicates(census: Census, manifest: Manifest) -> Iterator[Check]:
    """What stands there more than once, beyond what weights above 1 repeat."""
    found = census.duplicates()
    repeated = [source for source in manifest.sources if source.weight > 1]
    names = ", ".join(f"{source.name}: {source.weight:g}" for source in repeated)
    copies = sum(source.samples * (1 - 1 / source.weight) for source in repeated)
    # Of the samples asked of; a little too many, for held-out samples are not repeated.
    meant = min(found.equal, round(copies * found.train / max(1, manifest.train.samples)))
    what_equal = "training samples equal an earlier one" + (
        f" (about {meant:,} by a weight above 1: {names})" if repeated else ""
    )
    remove = "data.deduplicate leaves them out"
    if repeated:
        remove = f"take them out of the data; data.deduplicate can only where no weight is above 1 (here {names})"
    for name, count, of, what, most, advice in (
        ("duplicates", found.equal, found.train, what_equal, SYSTEMATIC, f"they are learnt by heart first: {remove}"),
        ("overlap", found.overlap, found.heldout, "held-out samples are also trained on", 0.0,
         f"the evaluation measures memory: {remove}"),
        ("near duplicates", found.near, found.near_train, "training samples nearly equal an earlier one", _LOST,
         "look at them: text made from templates, or copies that differ in a date"),
        ("near overlap", found.near_overlap, found.near_heldout, "held-out samples nearly equal a training sample", _LOST,
         "the evaluation is kinder than the world: hold out by source or by topic, in data.heldout_path"),
    ):  # fmt: skip
        stops = name == "overlap" and _is_systematic(count, of)
        faults = count - meant if name == "duplicates" else count
        note = ", drawn from all" if name in found.drawn else ""
        yield _judged(
            name, count, of, f"{count:,} of {of:,} {what}{note}",
            "more than 1 %" if name == "overlap" else f"only warns, over {100 * most:.0f} %",
            stops=stops, is_fine=faults <= most * of, advice=advice, example=found.examples.get(name, ""),
        )  # fmt: skip


def _judged(
    name: str, count: int, of: int, found: str, limit: str, *, stops: bool = False, is_fine: bool | None = None,
    fine: str = "", advice: str, example: str = "",
) -> Check:  # fmt: skip
    """A line; fine where `count` is 0, unless `is_fine` says otherwise."""
    fault = stops or not (count == 0 if is_fine is None else is_fine)
    verdict: Verdict = "stop" if stops else "warning" if fault else "ok"
    said = found if fault or not fine else fine
    return Check(
        name=name, verdict=verdict, count=count, of=of, found=said, limit=limit,
        example=example if fault else "", advice=advice if fault else "",
    )  # fmt: skip


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "0 %"
