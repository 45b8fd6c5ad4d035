"""Which characters are trained under the chat templates of ten model families, and mistakes that others have
made."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flytune.data import Collator
from flytune.data.columns import NamedRow
from flytune.data.formats import Chat, Plain, convert
from flytune.data.labels import IGNORED, encode
from flytune.data.render import ChatTemplate, render
from flytune.errors import DataError
from tests.support.chats import CHATML, chat, prepared, stored, tokenizer_folder
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "support" / "templates"


class Family(NamedTuple):
    """Treatment of an answer by a chat template in tests/support/templates."""

    end: str
    """What ends it, spaces before the marker included."""
    trims: bool = False
    system: bool = True
    more: tuple[str, ...] = ()
    """Its special tokens, beside those of tests.support.chats."""


TURN = "<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <|SYSTEM_TOKEN|>"
DEEP = "<｜User｜> <｜Assistant｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁output｜>"
FAMILIES = {
    "chatml": Family("<|im_end|>"),
    "llama-2": Family(" </s>", trims=True),
    "llama-3": Family("<|eot_id|>", trims=True),
    "mistral": Family("</s>", system=False),  # it writes a system message only before a last question
    "gemma": Family("<end_of_turn>", trims=True, system=False, more=("<start_of_turn>", "<end_of_turn>")),
    "phi-3": Family("<|end|>", more=("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")),
    "zephyr": Family("</s>"),
    "vicuna": Family("</s>", trims=True),
    "deepseek": Family("</s>", more=tuple(DEEP.split())),
    "command-r": Family("<|END_OF_TURN_TOKEN|>", trims=True, more=tuple(TURN.split())),
}


@pytest.fixture(scope="session")
def of_family(tokenizers: Any) -> Any:
    """A family's loaded tokenizer by its name."""

    def get(name: str, trim: bool = False) -> Any:
        return tokenizers((FOLDER / f"{name}.jinja").read_text(), trim=trim, more=FAMILIES[name].more)

    return get


def of_texts(texts: list[str], system: str | None = None) -> Chat:
    first = [{"role": "system", "content": system}] if system is not None else []
    return Chat(first + chat(*texts).messages)


def test_there_are_ten_families() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == FAMILIES.keys()
    assert len(FAMILIES) == 10


# No characters that write a special token; control characters are not text.
letters = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<|>")
contents = st.one_of(
    st.just(""),
    st.sampled_from([" ", "\n\n", "the fox", "[/INST]"]),
    st.text(letters | st.just("\n"), max_size=30),
)
conversations = st.lists(contents, min_size=1, max_size=7)
LONG = "the quick brown 狐 jumps\n" * 2000


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60)
@given(conversations, st.none() | contents)
@example(["q", LONG, "", "", LONG, "a"], "s")
@example(["foo", "bar", "ask", "bar", "ask", "foobar"], None)
@example(["q", "\u2028 a\u200b🦊👩‍👩‍👧 e\u0301", "\ue000", "\ue001"], "")
def test_the_trained_characters_are_the_answers_and_their_end_markers(
    name: str, of_family: Any, texts: list[str], system: str | None
) -> None:
    family, tokenizer = FAMILIES[name], of_family(name)
    asked = of_texts(texts, system if family.system else None)
    rendered = render(asked, ChatTemplate(tokenizer), True, "x:1")
    answers = [text.strip() if family.trims else text for text in texts[1::2] if text.strip()]
    assert [rendered.text[start:end] for start, end in rendered.spans] == [
        answer + family.end for answer in answers
    ]
    assert not rendered.append_eos, "each of these templates ends its answers"
    plain = tokenizer.apply_chat_template(asked.messages, tokenize=False)
    assert rendered.text == plain

    encoding = tokenizer(plain, add_special_tokens=False, return_offsets_mapping=True)
    ids, labels = next(encode([rendered], tokenizer))
    assert ids == encoding["input_ids"]
    trained = {place for start, end in rendered.spans for place in range(start, end)}
    for token, label, (start, end) in list(zip(ids, labels, encoding["offset_mapping"], strict=True))[1:]:
        assert label == (token if trained.intersection(range(start, end)) else IGNORED), plain[start:end]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("trim", [False, True])
def test_the_trained_tokens_say_the_answers(name: str, trim: bool, of_family: Any) -> None:
    """Byte-level BPE takes the space before a word into its token: where the template puts one, it is trained
    with it."""
    tokenizer = of_family(name, trim)
    asked = chat("q?", "The fox 日本", "", "", "more", "12")
    ids, labels = next(encode([render(asked, ChatTemplate(tokenizer), True, "x")], tokenizer))
    said = tokenizer.decode([label for label in labels if label != IGNORED])
    end = re.escape(FAMILIES[name].end)
    assert re.fullmatch(f" ?The fox 日本{end} ?12{end}", said)
    assert ids.count(tokenizer.bos_token_id) <= (3 if name == "llama-2" else 1)


@pytest.mark.parametrize("name", ["llama-2", "mistral", "gemma"])
def test_templates_that_want_speakers_in_turn_refuse_two_answers_in_a_row(name: str, of_family: Any) -> None:
    turns = [{"from": speaker, "value": speaker} for speaker in ("human", "gpt", "gpt")]
    asked = convert(NamedRow({"conversations": turns}, {}, "x:1"), "sharegpt")
    with pytest.raises(
        DataError,
        match=r"x:1: the chat template refuses these messages \(user, assistant, assistant\): .* in turn",
    ):
        render(asked, ChatTemplate(of_family(name)), True, "x:1")


@pytest.mark.parametrize("name", ["chatml", "llama-3", "phi-3", "zephyr", "vicuna", "deepseek", "command-r"])
def test_two_answers_in_a_row_of_sharegpt_are_both_trained(name: str, of_family: Any) -> None:
    turns = [
        {"from": speaker, "value": said} for speaker, said in (("human", "q"), ("gpt", "one"), ("gpt", "two"))
    ]
    rendered = render(
        convert(NamedRow({"conversations": turns}, {}, "x:1"), "sharegpt"),
        ChatTemplate(of_family(name)),
        True,
        "x:1",
    )
    end = FAMILIES[name].end
    assert [rendered.text[start:stop] for start, stop in rendered.spans] == ["one" + end, "two" + end]


def test_a_template_that_wants_arguments_as_text_gets_them(of_family: Any) -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    row = {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    }
    rendered = render(
        convert(NamedRow(row, {}, "x:1"), "messages"), ChatTemplate(of_family("deepseek")), True, "x:1"
    )
    ((start, end),) = rendered.spans
    assert rendered.text[start:end] == '<｜tool▁call▁begin｜>weather\n{"city": "Köln"}<｜tool▁call▁end｜></s>'


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=30)
@given(conversations, st.sets(st.integers(0, 6)))
def test_answers_that_are_context_are_no_spans(
    name: str, of_family: Any, texts: list[str], context: set[int]
) -> None:
    template, asked = ChatTemplate(of_family(name)), chat(*texts)
    some = Chat(
        [
            {**message, "train": False} if index in context else message
            for index, message in enumerate(asked.messages)
        ]
    )
    whole, rendered = render(asked, template, True, "x:1"), render(some, template, True, "x:1")
    said = [index for index in range(1, len(texts), 2) if texts[index].strip()]
    assert rendered.spans == [
        span for index, span in zip(said, whole.spans, strict=True) if index not in context
    ]
    assert (rendered.text, rendered.append_eos) == (whole.text, whole.append_eos)


def test_eos_is_trained_also_where_it_is_the_pad_token(tmp_path: Path) -> None:
    """Masking by the id of the pad token would hide every EOS, and the model would never stop."""
    tokenizer = tokenizer_folder(
        tmp_path / "tokenizer", (FOLDER / "zephyr.jinja").read_text(), pad_token="</s>"
    )
    rows = [{"instruction": f"ask {n}", "input": "", "output": "say" + " more" * (n % 5)} for n in range(40)]
    prepared(tokenizer, rows, tmp_path / "out")
    eos = 2
    found = stored(tmp_path / "out", "train")
    for row in found:
        assert [label for label in row["labels"] if label != IGNORED][-1] == eos
    batch = Collator(eos, 512)(found[:8])
    assert ((batch["labels"] == eos).sum(dim=1) == 1).all(), "the answer's EOS is trained, padding is not"


@pytest.mark.parametrize("text", ["The fox", "<s>The fox"])
def test_bos_is_never_doubled(text: str, tokenizers: Any) -> None:
    tokenizer = tokenizers(CHATML, adds_bos=True)
    ids, labels = next(encode([render(Plain("", text), None, True, "x:1")], tokenizer))
    assert tokenizer.decode(ids) == "<s>The fox</s>"
    assert labels == [IGNORED, *ids[1:]]
