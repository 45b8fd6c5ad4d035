"""Prepared data of all formats, compared with texts and labels that are put together by hand; and hostile
templates."""

import copy
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer

from flytune import data
from flytune.errors import DataError
from flytune.recipe import Data as DataSection
from flytune.recipe import DataRequest, Model
from flytune.records import Manifest
from tests.fuzz.isolation import Wrong
from tests.fuzz.kinds import Samples, kind
from tests.fuzz.mutations import documents, json_bytes
from tests.fuzz.oracles import files_of, plain_json, refuse_dropped, refuse_other_files
from tests.support.chats import CHATML, CHATML_TRIMMED, LLAMA3, SHOUTING, tokenizer_folder

Piece = tuple[str, bool, int]
"""A text, whether it is trained, and its number of special tokens."""
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A row, and the sequences that it must become; None for a row that is damaged, () for one that must be
    set aside."""

    row: dict[str, Any]
    sequences: tuple[tuple[Piece, ...], ...] | None
    label: int | None = None


def _chatml(messages: Messages, trim: bool = False) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for message in messages:
        trained, text = message["role"] == "assistant" and message.get("trained", True), message["content"]
        pieces += [
            (f"<|im_start|>{message['role']}\n", False, 1),
            (text.strip() if trim else text, trained, 0),
        ]
        pieces += [("<|im_end|>", trained, 1), ("\n", False, 0)]
    return tuple(pieces)


def _llama3(messages: Messages) -> tuple[Piece, ...]:
    pieces: list[Piece] = [("<s>", False, 1)]
    for message in messages:
        trained = message["role"] == "assistant" and message.get("trained", True)
        pieces += [(f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False, 2)]
        pieces += [(message["content"].strip(), trained, 0), ("<|eot_id|>", trained, 1)]
    return tuple(pieces)


_TEMPLATES: dict[str, tuple[str, Callable[[Messages], tuple[Piece, ...]]]] = {
    "chatml": (CHATML, _chatml),
    "trimmed": (CHATML_TRIMMED, lambda messages: _chatml(messages, trim=True)),
    "llama3": (LLAMA3, _llama3),
}
_LETTERS = "abcdefgh ijkl, mnop. qrst\n\tüß日本🙂'\"<|>{}%"
_LONG = "x" * 4_100_000
_BAD: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": "text"},
    {"messages": [{"role": "assistant", "content": 5}]},
    {"other": 1},
    {},
    {"text": _LONG},
    {"prompt": _LONG, "completion": "y"},
    {"messages": [{"role": "user", "content": _LONG}, {"role": "assistant", "content": "y"}]},
    {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        "images": ["x.png"],
    },
    {"prompt": "x", "completion": "y", "text": "x", "image": "x.png"},
    {"chosen": "x", "rejected": "x"},
    {"messages": [{"role": "martian", "content": "x"}, {"role": "assistant", "content": "y"}]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "x.png"}]},
            {"role": "assistant", "content": "y"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "x", "images": ["x.png"]},
            {"role": "assistant", "content": "y"},
        ]
    },
]


def _said(draw: st.DrawFn, what: str, number: int) -> str:
    """Draw a text that begins and ends with a word of its own, so that no token is half of the text."""
    return f"{what} {number} {draw(st.text(_LETTERS, max_size=12))} ok"


@st.composite
def _row(
    draw: st.DrawFn, form: str, number: int, render: Callable[[Messages], tuple[Piece, ...]], as_text: bool
) -> Row:
    ask, say, other = (_said(draw, what, number) for what in ("ask", "say", "deny"))
    if draw(st.integers(0, 9)) == 0:
        ask = f"ask {number} <|im_end|> <|eot_id|> ok"
    user, answer = {"role": "user", "content": ask}, {"role": "assistant", "content": say}
    wrong = {"role": "assistant", "content": other}
    plain = ((f"{ask}:", False, 0), (f" {say}", True, 0), ("</s>", True, 1))
    if form == "messages":
        before = [{"role": "system", "content": f"be {number} ok"}] if draw(st.booleans()) else []
        more = [{"role": "user", "content": f"more {number} ok"}, wrong] if draw(st.booleans()) else []
        return Row({"messages": [*before, user, answer, *more]}, (render([*before, user, answer, *more]),))
    if form == "sharegpt":
        return Row(
            {"conversations": [{"from": "human", "value": ask}, {"from": "gpt", "value": say}]},
            (render([user, answer]),),
        )
    if form == "instruction":
        row = {"instruction": ask, "output": say} | ({"input": other} if as_text else {})
        return Row(
            row, (render([{"role": "user", "content": f"{ask}\n\n{other}"} if as_text else user, answer]),)
        )
    if form == "prompt_completion":
        return Row({"prompt": f"{ask}:", "completion": f" {say}"}, (plain,))
    if form == "text":
        return Row({"text": say}, (((say, True, 0), ("</s>", True, 1)),))
    if form == "preference":
        if as_text:
            refused = (plain[0], (f" {other}", True, 0), plain[2])
            return Row({"prompt": f"{ask}:", "chosen": f" {say}", "rejected": f" {other}"}, (plain, refused))
        row = {"prompt": [user], "chosen": [answer], "rejected": [wrong]}
        return Row(row, (render([user, answer]), render([user, wrong])))
    label = draw(st.booleans())
    if as_text:
        return Row({"prompt": f"{ask}:", "completion": f" {say}", "label": label}, (plain,), int(label))
    return Row(
        {"prompt": [user], "completion": [answer], "label": label}, (render([user, answer]),), int(label)
    )


@st.composite
def _spoiled(draw: st.DrawFn, row: dict[str, Any]) -> dict[str, Any]:
    """Draw a row of the same format that must be set aside, because of one part that was added."""
    spoiled = copy.deepcopy(row)
    turns = [
        turn for value in spoiled.values() if isinstance(value, list) for turn in value if "content" in turn
    ]
    kind_ = draw(st.sampled_from(["column", "text", *["message"] * bool(turns)]))
    if kind_ == "column":
        spoiled[draw(st.sampled_from(["image", "images", "audio", "video"]))] = draw(
            st.sampled_from(["x.png", ["x.png"]])
        )
    elif kind_ == "message":
        draw(st.sampled_from(turns))["images"] = ["x.png"]
    else:
        name = draw(st.sampled_from([key for key, value in spoiled.items() if isinstance(value, str | list)]))
        if isinstance(spoiled[name], str):
            spoiled[name] = _LONG
        else:
            turn = draw(st.sampled_from(spoiled[name]))
            turn["content" if "content" in turn else "value"] = _LONG
    return spoiled


_FORMS = [
    "messages",
    "messages",
    "sharegpt",
    "instruction",
    "prompt_completion",
    "text",
    "preference",
    "unpaired",
]


@st.composite
def _sets(draw: st.DrawFn) -> tuple[str, str, list[Row], dict[str, Any], int]:
    form, template = draw(st.sampled_from(_FORMS)), draw(st.sampled_from(sorted(_TEMPLATES)))
    as_text = draw(st.booleans())  # of all rows: a file of pairs has texts or messages
    rows = [
        draw(_row(form, number, _TEMPLATES[template][1], as_text))
        for number in range(draw(st.integers(10, 16)))
    ]
    options: dict[str, Any] = {"contract": draw(st.sampled_from(["warn", "warn", "stop"]))}
    options["split_special_tokens"] = draw(st.sampled_from([True, True, None]))
    kind_ = draw(
        st.sampled_from(
            ["plain", "bad", "bad", "mutated", "short", "drop", "packing", "twice", "all", "columns"]
        )
    )
    if kind_ in ("bad", "mutated"):
        for _ in range(draw(st.integers(1, 3))):
            bad = st.one_of(st.sampled_from(_BAD), _spoiled(rows[0].row))
            row = draw(bad if kind_ == "bad" else documents(rows[0].row))
            rows.insert(draw(st.integers(0, len(rows))), Row(row, () if kind_ == "bad" else None))
        options["max_bad_fraction"] = draw(st.sampled_from([0.9, 0.9, 0.02]))
    elif kind_ in ("short", "drop"):
        options |= {
            "max_length": draw(st.sampled_from([30, 40, 60])),
            "too_long": "truncate" if kind_ == "short" else "drop",
        }
    elif kind_ == "packing" and form not in ("preference", "unpaired"):
        options["packing"] = True
    elif kind_ == "twice":
        rows += rows[: draw(st.integers(1, 5))]
        options["deduplicate"] = True
    elif kind_ == "all" and form not in ("preference", "unpaired"):
        options["completion_only_loss"] = False
    elif kind_ == "columns":
        options["columns"] = {name: f"their_{name}" for name in rows[0].row if name != "label"}
        rows = [
            Row(
                {options["columns"].get(key, key): one for key, one in row.row.items()},
                row.sequences,
                row.label,
            )
            for row in rows
        ]
    return (
        form,
        template,
        rows,
        {"format": form, "max_length": 2048, "heldout_fraction": 0.3, **options},
        draw(st.sampled_from([1, 1, 3])),
    )


@kind("samples", lambda samples: _sets())
def check_samples(
    samples: Samples, given: tuple[str, str, list[Row], dict[str, Any], int], folder: Path
) -> None:
    """Each row is stored as what is put together by hand, with the answers trained and nothing else; or is
    set aside."""
    form, template, rows, options, files = given
    path = _written([json_bytes(row.row) for row in rows], folder, files)
    base = tokenizer_folder(folder / "tokenizer", _TEMPLATES[template][0])
    section = DataSection(path=str(path), **options)
    kinds = {"pairs": form == "preference", "labels": form == "unpaired"}
    request = DataRequest(model=Model(name_or_path=str(base)), data=section, fingerprint="x", **kinds)
    manifest = data.prepare(request, folder / "dataset", processes=1)
    check_manifest(manifest, folder / "dataset", options["max_length"])
    if manifest.rows != len(rows):
        raise Wrong(f"{manifest.rows} of {len(rows)} rows")
    tokenizer = Tokenizer.from_file(str(folder / "dataset" / "tokenizer" / "tokenizer.json"))
    found = [
        _Stored(row, tokenizer)
        for split in ("train", "heldout")
        for row in stored(folder / "dataset" / split, form, options)
    ]
    _compare(found, [row for row in rows if row.sequences != ()], options, manifest)
    if manifest.bad > options.get("max_bad_fraction", 0) * manifest.rows:
        raise Wrong(
            f"{manifest.bad} of {manifest.rows} rows are set aside, and {options.get('max_bad_fraction', 0)} "
            "may be"
        )
    if (bad := sum(row.sequences == () for row in rows)) and manifest.bad != bad:
        raise Wrong(f"{manifest.bad} of {bad} rows are set aside")


def _written(lines: list[bytes], folder: Path, files: int) -> Path:
    """Write rows into one file, or into several of a folder, some of them in a folder below; return what is
    to be read."""
    if files == 1:
        (folder / "rows.jsonl").write_bytes(b"\n".join(lines))
        return folder / "rows.jsonl"
    size = -(-len(lines) // files)
    for number in range(files):
        file = folder / "rows" / ("below" * (number % 2)) / f"part-{number}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"\n".join(lines[number * size : (number + 1) * size]))
    return folder / "rows"


def check_manifest(manifest: Manifest, folder: Path, longest: int = 2048) -> None:
    """Compare a manifest with the files of its folder, all counted anew.

    Raises:
        Wrong: a count, a size or a hash is another one; or the file has other content.
    """
    refuse_dropped(
        plain_json((folder / "manifest.json").read_bytes()),
        json.loads(manifest.model_dump_json()),
        "manifest.json",
    )
    for split in ("train", "heldout"):
        counts = getattr(manifest, split)
        shards = [
            {"file": shard.file.removeprefix(f"{split}/"), "sha256": shard.sha256} for shard in counts.shards
        ]
        refuse_other_files(folder / split, shards)
        tables = [parquet.read_table(folder / split / name) for name in sorted(files_of(folder / split))]
        rows = [row for table in tables for row in table.to_pylist()]
        tokens = sum(len(row["input_ids"]) for row in rows)
        trained = sum(label != -100 for row in rows for label in row["labels"])
        if (counts.rows, counts.tokens, counts.trained_tokens) != (len(rows), tokens, trained) or not rows:
            raise Wrong(
                f"{split}: {counts!r:.200}, and there are {len(rows)} rows of {tokens} tokens, {trained} of "
                "them trained"
            )
        for row in rows:
            if (most := max(row.get("seq_lengths") or [len(row["input_ids"])])) > longest:
                raise Wrong(f"{split}: a sample of {most} tokens, and {longest} are the most")
            wrong = len(row["labels"]) != len(row["input_ids"])
            if wrong or any(
                label not in (-100, token)
                for label, token in zip(row["labels"], row["input_ids"], strict=True)
            ):
                raise Wrong(f"{split}: labels that are not the tokens: {row!r:.200}")


def stored(folder: Path, form: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the stored samples, each as its sequences' tokens and labels; blocks are taken apart."""
    rows = [row for name in sorted(files_of(folder)) for row in parquet.read_table(folder / name).to_pylist()]
    found = []
    for row in rows:
        lengths, parts = row.get("seq_lengths") or [len(row["input_ids"])], []
        for length in lengths:
            start = sum(len(ids) for ids, _ in parts)
            parts.append((row["input_ids"][start : start + length], row["labels"][start : start + length]))
        each = [parts] if form == "preference" else [[part] for part in parts]
        found += [{"sequences": one, "label": row.get("label")} for one in each]
    return found


class _Stored:
    """Texts of a stored sample: of all tokens, and of those with a label; and its number of special
    tokens."""

    def __init__(self, row: dict[str, Any], tokenizer: Tokenizer) -> None:
        special = {one for one, token in tokenizer.get_added_tokens_decoder().items() if token.special}

        def text(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special_tokens=False)

        self.texts = tuple(text(ids) for ids, _ in row["sequences"])
        self.trained = tuple(
            text([label for label in labels if label != -100]) for _, labels in row["sequences"]
        )
        self.special = tuple(sum(one in special for one in ids) for ids, _ in row["sequences"])
        self.label = row["label"]


def _compare(found: list[_Stored], rows: list[Row], options: dict[str, Any], manifest: Manifest) -> None:
    """Compare stored samples with those that were put together by hand.

    Raises:
        Wrong: one is missing, is there too often, or has another text or other trained tokens.
    """
    wanted: dict[tuple[str, ...], Row] = {_texts(row): row for row in rows if row.sequences}
    is_cut, are_damaged = options.get("too_long") is not None, any(row.sequences is None for row in rows)
    for one in found:
        row = wanted.get(one.texts)
        if row is None and is_cut:
            cut = tuple(text.rstrip("\ufffd") for text in one.texts)
            row = next((row for texts, row in wanted.items() if all(map(str.startswith, texts, cut))), None)
        if row is None:
            if not are_damaged:
                raise Wrong(f"a sample that is in no row: {one.texts!r:.300}")
            continue
        assert row.sequences is not None
        for sequence, text, trained, special in zip(
            row.sequences, one.texts, one.trained, one.special, strict=True
        ):
            answer = "".join(piece for piece, is_trained, _ in sequence if is_trained)
            whole = text in _texts(row)
            everything = options.get("completion_only_loss") is False or all(piece[1] for piece in sequence)
            if everything:  # the first token has nothing before it to be learned from
                right = text.endswith(trained) and len(text) - len(trained) <= 20
            else:
                right = trained == answer if whole else answer.startswith(trained.rstrip("\ufffd"))
            if not right:
                raise Wrong(f"trained is {trained!r:.200}, and the answers are {answer!r:.200}")
            if options["split_special_tokens"] and whole and special != sum(piece[2] for piece in sequence):
                raise Wrong(f"{special} control tokens in {text!r:.300}")
        if one.label != row.label:
            raise Wrong(f"the label {one.label} of {one.texts!r:.200}")
    counted = Counter(one.texts for one in found)
    missing = [texts for texts in wanted if texts not in counted]
    if not is_cut and (missing or (max(counted.values()) > 1 and not are_damaged)):
        raise Wrong(f"{len(missing)} rows are missing, {counted.most_common(1)[0]!r:.200} is there")
    lost = manifest.dropped_too_long + manifest.dropped_untrained
    if not are_damaged and len(found) != len(rows) - lost - manifest.duplicates:
        raise Wrong(
            f"{len(found)} samples of {len(rows)} rows, {lost} dropped and {manifest.duplicates} there twice"
        )


def _texts(row: Row) -> tuple[str, ...]:
    return tuple("".join(piece for piece, _, _ in sequence) for sequence in row.sequences or ())


_HOSTILE: list[Any] = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 300000000 }}",
    5,
    [],
    {},
    "",
    "{% for message in messages %}{{ message['content'] * 100000000 }}{% endfor %}",
    "{{ 1 / 0 }}",
    "{% for",
    "{{ x.y.z }}",
    "{% set a = 'x' * 100000 %}{% for i in range(1000000) %}{{ a }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception('no') }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ cycler.__init__.__globals__.os.environ }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ range(10 ** 12) | list }}",
    "((" * 5000,
    "{{ messages }}",
    SHOUTING,
    CHATML.replace("message['content']", "''"),
    "{{ messages[0]['content'] }}",
    CHATML.replace("messages %}", "messages[1:] %}"),
    CHATML.replace("message['content']", "message['content'] | replace('a', 'b')"),
    CHATML,
    CHATML.replace("<|im_end|>", "<|im_end|>" * 50),
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ lipsum(n=10000000) }}",
    "{% set ns = namespace(a='x') %}{% for i in range(40) %}"
    "{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
]
"""Chat templates that are slow, enormous, broken or curious, or that drop and change what rows say."""


@kind(
    "template",
    lambda samples: st.tuples(st.sampled_from(["file", "config", "jinja"]), st.sampled_from(_HOSTILE)),
    share=0.3,
)
def check_template(samples: Samples, given: tuple[str, Any], folder: Path) -> None:
    """A chat template is refused in time, or all that rows say is in the text, and the answers alone are
    trained."""
    place, template = given
    rows = [(f"ask number {n} abc", f"say number {n} abc") for n in range(12)]
    turns = [[{"role": "user", "content": ask}, {"role": "assistant", "content": say}] for ask, say in rows]
    (folder / "rows.jsonl").write_bytes(b"\n".join(json_bytes({"messages": turn}) for turn in turns))
    base = tokenizer_folder(folder / "tokenizer", CHATML)
    options = {}
    if place == "file":
        (folder / "own.jinja").write_text(str(template), encoding="utf-8")
        options["chat_template"] = str(folder / "own.jinja")
    elif place == "jinja":
        (base / "chat_template.jinja").write_text(str(template), encoding="utf-8")
    else:
        (base / "chat_template.jinja").unlink(missing_ok=True)
        config = json.loads((base / "tokenizer_config.json").read_bytes())
        (base / "tokenizer_config.json").write_bytes(json_bytes(config | {"chat_template": template}))
    section = DataSection(path=str(folder / "rows.jsonl"), heldout_fraction=0.3, **options)
    request = DataRequest(model=Model(name_or_path=str(base)), data=section, fingerprint="x")
    manifest = data.prepare(request, folder / "dataset", processes=1)
    check_manifest(manifest, folder / "dataset")
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    found = [
        _Stored(row, tokenizer)
        for split in ("train", "heldout")
        for row in stored(folder / "dataset" / split, "messages", {})
    ]
    for ask, say in rows:
        ask, say = (ask.upper(), say.upper()) if template is SHOUTING else (ask, say)
        if not any(
            ask in one.texts[0] and say in one.trained[0] and ask not in one.trained[0] for one in found
        ):
            raise Wrong(f"{say!r} is not trained as the answer to {ask!r}")
    if len(found) != len(rows):
        raise DataError(f"samples: {len(found)} of {len(rows)}")
