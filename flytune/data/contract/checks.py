"""The checks of the data contract: counts, limits and advice."""

from collections.abc import Iterator

from flytune.data import left_out as content
from flytune.data.check import Check, judged
from flytune.data.contract.statistics import Statistics
from flytune.data.formats import CHATS
from flytune.data.rows import RowKind, row_kind
from flytune.data.rows.prompts import BARE_TEXT
from flytune.data.shards import AGAIN
from flytune.recipe import Data
from flytune.records import Manifest
from flytune.row_names import PROMPTS
from flytune.sentences import counted, counted_of

SYSTEMATIC = 0.01
"""Share of samples from which on a fault is one of the recipe, not of single rows."""
_WARNING_SHARE = 0.05
"""Share of cut, dropped or near-duplicate samples from which on there is a warning, if the recipe has no
limit."""


def _is_systematic(count: int, of: int) -> bool:
    """Return whether the faults are too many to be those of single rows; one fault alone never is."""
    return count > max(1, SYSTEMATIC * of)


def answers(statistics: Statistics, manifest: Manifest, data: Data) -> Iterator[Check]:
    """Check the answers, and their ends."""
    samples, answers = statistics.samples, statistics.answers
    if row_kind(manifest.row_kind).trains_labels:
        yield judged(
            "trained tokens",
            statistics.untrained,
            samples,
            f"{counted_of(statistics.untrained, samples, 'sample', 'has', 'have')} no trained token",
            "any such sample",
            stops=statistics.untrained > 0,
            fine=f"each of {counted(samples, 'sample')} has one, and so each batch on each rank",
            advice="remove these samples: a batch of such samples alone has no loss",
            example=statistics.examples.get("untrained", ""),
        )
    elif not answers:
        return
    complete, unended = statistics.last_answers, statistics.unended
    formats = set(manifest.format.split(", "))
    # If every token is trained, a chat that ends with a question has no end marker there; all other texts
    # were given one.
    is_open = not data.completion_only_loss and bool(formats & set(CHATS))
    may_stop = data.too_long != "split" and "tokens" not in formats and not is_open and data.add_eos_token
    advice = (
        "the model does not learn to stop: the template should end each answer with a special token, "
        "or each row with EOS"
    )
    if is_open:
        advice = (
            "a chat that ends with a question needs none; all others should end with a special token "
            "of the template"
        )
    if not data.add_eos_token:
        advice = (
            "data.add_eos_token is false: the model does not learn to stop, unless the rows end with a "
            "special token"
        )
    ends = ", ".join(f"{count:,} × {mark!r}" for mark, count in statistics.ends.most_common(3)) or "none"
    yield judged(
        "end marker",
        unended,
        complete,
        f"{counted_of(unended, complete, 'sample', 'does', 'do')} not end with a trained end marker (found: "
        f"{ends})",
        # A piece of a long sample may end anywhere; rows of tokens, such as blocks of a corpus, are used
        # unchanged.
        "more than 1 % of uncut samples",
        stops=_is_systematic(unended, complete) and may_stop,
        fine=f"each of {counted(complete, 'uncut sample')} ends with a trained one; of all answers: {ends}",
        advice=advice,
        example=statistics.examples.get("unended", ""),
    )
    inner = statistics.unended_inside
    yield judged(
        "end of each answer",
        inner,
        answers,
        f"{inner:,} of {counted(answers, 'answer')}, not the last of their samples, have no end marker",
        "only warns",
        fine=f"all of {counted(answers, 'answer')} have an end marker",
        advice="in a conversation the model would continue as the user; use a template with an end token "
        "after each turn",
        example=statistics.examples.get("unended_inside", ""),
    )
    other, ended = statistics.ends.total() - statistics.ends[statistics.eos], statistics.ends.total()
    marks = " or ".join(repr(mark) for mark in statistics.ends if mark != statistics.eos)
    yield judged(
        "end marker is EOS",
        other,
        ended,
        f"{counted_of(other, ended, 'end marker', 'is', 'are')} {marks}, not EOS ({statistics.eos!r})",
        "only warns",
        fine=f"answers end with {statistics.eos!r}, at which generation stops",
        advice=f"by default generation stops only at EOS: make {marks} the eos_token, or pass it as "
        "eos_token_id",
    )
    yield judged(
        "pad token",
        statistics.masked,
        answers,
        f"{counted_of(statistics.masked, answers, 'answer', 'is', 'are')} followed by an end marker without "
        "a label"
        + (f", which is also the pad token {statistics.pad!r}" if statistics.pad == statistics.eos else ""),
        "more than 1 %",
        stops=_is_systematic(statistics.masked, answers),
        fine=f"{statistics.pad!r} is "
        + ("also EOS, and EOS is trained" if statistics.pad == statistics.eos else "not EOS"),
        advice="the end marker was masked like padding: label it, or set another data.pad_token",
        example=statistics.examples.get("masked", ""),
    )


def tokens(statistics: Statistics, manifest: Manifest, data: Data) -> Iterator[Check]:
    """Check the tokens."""
    samples = statistics.samples
    switched = (
        "" if data.add_bos_token is None else f" (data.add_bos_token is {str(data.add_bos_token).lower()})"
    )
    begin = counted_of(statistics.with_bos, samples, "sample", "begins", "begin")
    if not statistics.bos:
        fine = "the tokenizer has none"
    elif statistics.with_bos:
        fine = f"{begin} with {statistics.bos!r}, none of them twice{switched}"
    else:
        fine = f"no sample begins with {statistics.bos!r}{switched}"
    yield judged(
        "BOS",
        statistics.double_bos,
        samples,
        f"{counted_of(statistics.double_bos, samples, 'sample', 'begins', 'begin')} with BOS twice",
        "more than 1 %",
        stops=_is_systematic(statistics.double_bos, samples),
        fine=fine,
        advice="the text has one and the tokenizer adds another: remove it from the rows or from the "
        "template",
        example=statistics.examples.get("double_bos", ""),
    )
    pieces = statistics.in_pieces
    yield judged(
        "special tokens",
        len(pieces),
        statistics.special,
        f"split into several tokens: {', '.join(pieces)}",
        "BOS or EOS is split",
        stops=bool(statistics.written & set(pieces)),
        fine=f"each of {statistics.special} is a single token",
        advice="list them in model.extra_special_tokens, or use a template with the tokenizer's own",
    )
    undecided, written = data.split_special_tokens is None, manifest.control_tokens
    became = "became control tokens" if data.split_special_tokens is False else "stay text"
    yield judged(
        "control tokens",
        written,
        manifest.rows,
        f"{counted_of(written, manifest.rows, 'row', 'has', 'have')} special tokens in their own text, which "
        f"{became}",
        "more than 1 %, unless data.split_special_tokens is set",
        stops=undecided and _is_systematic(written, manifest.rows),
        is_fine=not undecided or not written,
        fine="" if written else f"none of {counted(manifest.rows, 'row')} has special tokens in its own text",
        advice="set data.split_special_tokens: false if the rows mean these tokens (they were rendered "
        "elsewhere), true if not",
    )
    yield judged(
        "vocabulary",
        statistics.unknown + statistics.outside,
        statistics.tokens,
        f"{counted_of(statistics.unknown, statistics.tokens, 'token', 'is', 'are')} the unknown token, "
        f"{statistics.outside:,} are not in the vocabulary, or have no row in the model's embedding",
        "any outside the vocabulary",
        stops=statistics.outside > 0,
        fine=f"all of {counted(statistics.tokens, 'token')} are in it",
        advice="the data was tokenized for another tokenizer, or it has characters that this one cannot "
        "encode; list tokens that the tokenizer has and the model has not in model.extra_special_tokens",
        example=statistics.examples.get("outside", "") or statistics.examples.get("unknown", ""),
    )
    yield judged(
        "sample boundaries",
        statistics.inconsistent,
        statistics.samples,
        f"{counted(statistics.inconsistent, 'block has', 'blocks have')} seq_lengths that do not add up to "
        "their tokens",
        "any such block",
        stops=statistics.inconsistent > 0,
        fine="the seq_lengths of each block add up to its tokens"
        if statistics.packed
        else "each row is one sample",
        advice=AGAIN,
    )


def tokenizer(manifest: Manifest) -> Iterator[Check]:
    """Say that the base's tokenizer.json is used, where transformers' class makes other tokens."""
    if manifest.other_tokens:
        yield judged(
            "tokenizer",
            0,
            1,
            "",
            "only says",
            advice="",
            fine=f"{manifest.other_tokens}: the base's tokenizer.json is used, and stored as "
            "PreTrainedTokenizerFast",
        )


def template(statistics: Statistics, manifest: Manifest, data: Data) -> Iterator[Check]:
    """Say what the chat template writes before answers that the generation prompt has not; check that it
    writes what that has."""
    if statistics.template and (before := statistics.template.before_answers.strip()):
        became = "is trained with them, so that sample answers, inference and servers ask alike, without it"
        if data.train_on == "answers":
            became = "is context of them, so that sample answers are asked with it"
        yield judged(
            "begin of answers",
            0,
            1,
            "",
            "only says",
            advice="",
            fine=f"before an answer without thoughts the template writes {before!r}, which the generation "
            f"prompt has not: it {became}",
        )
    elif statistics.template and statistics.answers and (prompted := statistics.template.before_thoughts):
        with_thoughts = sum(manifest.thoughts.get(name, 0) for name in ("trained", "context"))
        without = max(0, statistics.answers - with_thoughts)
        yield judged(
            "begin of answers",
            without,
            statistics.answers,
            f"the generation prompt ends with {prompted!r}, and {without:,} of "
            f"{counted(statistics.answers, 'answer')} without thoughts are trained without it",
            "only warns",
            fine=f"each of {counted(statistics.answers, 'answer')} is trained after {prompted!r}, with which "
            "the generation prompt ends",
            advice="a model that is asked continues what it was never trained after: give the answers "
            "thoughts, or a template without it in data.chat_template",
        )


def bare_prompts(statistics: Statistics, manifest: Manifest) -> Iterator[Check]:
    """Check that prompts which a model answers have the chat template that it was tuned with."""
    if not statistics.template or manifest.row_kind != PROMPTS:
        return
    rows, bare = manifest.train.samples + manifest.heldout.samples, manifest.notes.get(BARE_TEXT, 0)
    yield judged(
        "chat template",
        bare,
        rows,
        f"{counted_of(bare, rows, 'prompt', 'is', 'are')} bare text, without the chat template that the base "
        "has",
        "only warns",
        fine=f"each of {counted(rows, 'prompt')} has it",
        advice="an instruct model answers bare text with nothing, or continues it: write prompts as "
        "messages, or data.columns: {instruction: prompt}, by which each is the question of a chat; bare "
        "text is right for a base that was not tuned to chat",
    )


def day(statistics: Statistics, data: Data) -> Iterator[Check]:
    """Check that a template which writes a date writes that of the recipe."""
    if statistics.template and statistics.template.has_date:
        yield judged(
            "date",
            int(data.template_date is None),
            1,
            "the chat template writes the date of the day that data is prepared",
            "only warns",
            fine=f"the chat template writes {data.template_date} (data.template_date), servers today's date",
            advice="the same recipe has other tokens tomorrow, and no run continues with them: write "
            "data.template_date: 2026-01-31, or a date of yours",
        )


def round_trip(statistics: Statistics) -> Iterator[Check]:
    """Check that the decoded text gives the same tokens again."""
    trip = statistics.round_trip()
    comparison = "token for token" if trip.by_tokens else "word for word (this tokenizer alters plain text)"
    yield judged(
        "round trip",
        trip.failed,
        trip.tried,
        f"{trip.failed:,} of {counted(trip.tried, 'sample')}, decoded and tokenized again, differ",
        "more than half; warns over 1 %",
        stops=trip.failed > trip.tried / 2,
        is_fine=trip.failed <= SYSTEMATIC * trip.tried,
        fine=f"{trip.tried - trip.failed:,} of {counted(trip.tried, 'sample')}, decoded and tokenized again, "
        f"agree {comparison}",
        advice="they were tokenized differently from inference, or their text contains special tokens",
        example=trip.example,
    )


def shares(statistics: Statistics, manifest: Manifest, data: Data) -> Iterator[Check]:
    """Compare the trained, cut and dropped shares with the recipe's limits."""
    trained, tokens = statistics.trained, statistics.tokens
    least = data.min_trained_fraction
    if row_kind(manifest.row_kind).trains_labels or least:
        yield judged(
            "trained share",
            trained,
            tokens,
            f"{_percent(trained, tokens)} of {counted(tokens, 'token')}",
            f"less than {least:.3g} (data.min_trained_fraction)"
            if least
            else "data.min_trained_fraction, unset; warns under 1 %",
            stops=least is not None and trained < least * tokens,
            is_fine=trained >= (least or 0.01) * tokens,
            advice="prompts are long and answers short: shorten the prompts, or check that the answers are "
            "labelled",
        )
    longest = f"raise data.max_length (the longest has {counted(manifest.longest, 'token')})"
    rows, read = manifest.rows, manifest.tokens_read
    dropped = manifest.dropped_too_long + manifest.dropped_untrained
    for name, count, of, those, field, most, advice in (
        (
            "truncated",
            manifest.truncated,
            rows,
            f"samples were cut at {counted(manifest.max_length, 'token')}",
            "max_truncated_fraction",
            data.max_truncated_fraction,
            longest,
        ),
        (
            "truncated tokens",
            manifest.truncated_tokens,
            read,
            "tokens were cut off",
            "max_truncated_fraction",
            data.max_truncated_fraction,
            longest,
        ),
        (
            "dropped",
            dropped,
            rows,
            f"samples were dropped ({manifest.dropped_too_long:,} too long, {manifest.dropped_untrained:,} "
            "without an answer)",
            "max_dropped_fraction",
            data.max_dropped_fraction,
            "raise data.max_length, or correct the rows without an answer",
        ),
        (
            "dropped tokens",
            manifest.dropped_tokens,
            read,
            "tokens were in dropped samples",
            "max_dropped_fraction",
            data.max_dropped_fraction,
            "raise data.max_length, or correct the rows without an answer",
        ),
    ):
        yield judged(
            name,
            count,
            of,
            f"{count:,} of {of:,} {those} ({_percent(count, of)})",
            f"data.{field}, unset; warns over 5 %"
            if most is None
            else f"more than {most:.3g} (data.{field})",
            stops=most is not None and count > most * of,
            is_fine=count <= (_WARNING_SHARE if most is None else most) * of,
            advice=advice,
        )


def thoughts(manifest: Manifest, data: Data) -> Iterator[Check]:
    """Say what became of the answers' thoughts, where there are some."""
    if not manifest.thoughts:
        return
    trained, context, lost = (manifest.thoughts.get(name, 0) for name in ("trained", "context", "left_out"))
    became = {
        "trained with them": trained,
        f"trained with them as context{' (data.train_on: answers)' * (data.train_on == 'answers')}": context,
        "trained without them, because the template does not write them there": lost,
    }
    total = trained + context + lost
    uses = ", ".join(
        f"{count:,} {'is' if count == 1 else 'are'} {what}" for what, count in became.items() if count
    )
    yield judged(
        "thoughts",
        0,
        total,
        f"of {counted(total, 'answer')} with thoughts, {uses}",
        "the last answer's are not in the text (data.train_on)",
        advice="",
    )


def left_out(manifest: Manifest) -> Iterator[Check]:
    """Check what the rows have, and no sample has."""
    meanings = {name: content.meaning(name) for name in manifest.left_out}
    names = sorted(manifest.left_out.items(), key=lambda item: not meanings[item[0]])
    meant = [name for name, meaning in meanings.items() if meaning]
    shown = ", ".join(f"{name} ({counted(rows, 'row')})" for name, rows in names)
    advice = [f"{', '.join(names)}: {meaning}" for meaning, names in _by_meaning(meanings).items() if meaning]
    yield judged(
        "left out",
        max((manifest.left_out[name] for name in meant), default=0),
        manifest.rows,
        f"columns not used: {shown}",
        "only warns",
        is_fine=not meant,
        fine="" if meanings else "all columns of the rows, and all keys of their messages, are used",
        advice="; ".join(advice),
    )


def settings(manifest: Manifest) -> Iterator[Check]:
    """Check that rows use what the recipe says of them."""
    if manifest.unused:
        yield judged(
            "settings",
            len(manifest.unused),
            len(manifest.unused),
            f"not used: {'; '.join(manifest.unused)}",
            "only warns",
            advice="correct the name, or remove the setting",
        )


def _by_meaning(meanings: dict[str, str]) -> dict[str, list[str]]:
    names_by_meaning: dict[str, list[str]] = {}
    for name, meaning in meanings.items():
        names_by_meaning.setdefault(meaning, []).append(name)
    return names_by_meaning


def contradictions(statistics: Statistics, kind: RowKind) -> Iterator[Check]:
    """Check that rows of a kind do not contradict each other."""
    if not kind.contradiction:
        return
    count, rows = statistics.contradictions(), statistics.samples // kind.sequences
    contradicting = f"{kind.title.lower()}s {kind.contradiction}"
    yield judged(
        "contradictions",
        count,
        rows,
        f"{count:,} of {rows:,} {contradicting}",
        "only warns",
        fine=f"none of {rows:,} {contradicting.replace('equal', 'equals', 1)}",
        advice="each undoes what the other teaches; keep one (data.deduplicate keeps both)",
    )


def duplicates(statistics: Statistics, manifest: Manifest) -> Iterator[Check]:
    """Check for duplicates, apart from the repetitions by weights above 1."""
    counts = statistics.duplicates()
    repeated = [source for source in manifest.sources if source.weight > 1]
    names = ", ".join(f"{source.name}: {source.weight:g}" for source in repeated)
    copies = sum(source.samples * (1 - 1 / source.weight) for source in repeated)
    # An upper bound among the compared samples, because held-out samples are not repeated.
    intended = min(counts.equal, round(copies * counts.train / max(1, manifest.train.samples)))
    what_equal = "training samples equal an earlier one" + (
        f" (about {intended:,} by a weight above 1: {names})" if repeated else ""
    )
    remove = "data.deduplicate removes them"
    if repeated:
        remove = (
            f"remove them from the data; data.deduplicate requires that no weight is above 1 (here {names})"
        )
    for name, count, of, what, most, advice in (
        (
            "duplicates",
            counts.equal,
            counts.train,
            what_equal,
            SYSTEMATIC,
            f"the model memorizes them first: {remove}",
        ),
        (
            "overlap",
            counts.overlap,
            counts.heldout,
            "held-out samples are also trained on",
            0.0,
            f"the evaluation would measure memorization: {remove}",
        ),
        (
            "near duplicates",
            counts.near,
            counts.near_train,
            "training samples nearly equal an earlier one",
            _WARNING_SHARE,
            "look for text made from templates, or copies that differ only in a date",
        ),
        (
            "near overlap",
            counts.near_overlap,
            counts.near_heldout,
            "held-out samples nearly equal a training sample",
            _WARNING_SHARE,
            "the evaluation is too optimistic: hold out samples by source or by topic, with "
            "data.heldout_path",
        ),
    ):
        stops = name == "overlap" and _is_systematic(count, of)
        faults = count - intended if name == "duplicates" else count
        note = " (of a random part)" if name in counts.drawn else ""
        yield judged(
            name,
            count,
            of,
            f"{count:,} of {of:,} {what}{note}",
            "more than 1 %" if name == "overlap" else f"only warns, over {100 * most:.0f} %",
            stops=stops,
            is_fine=faults <= most * of,
            advice=advice,
            example=counts.examples.get(name, ""),
        )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3g} %" if whole else "0 %"
