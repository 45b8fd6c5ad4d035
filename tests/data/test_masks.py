"""Which tokens are trained: exactly the answers and their end markers, whatever the template."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flytune.data import load_tokenizer
from flytune.data.formats import Chat, Plain
from flytune.data.labels import IGNORED, encode
from flytune.data.render import ChatTemplate, render
from flytune.errors import DataError
from tests.support.chats import (
    CHATML,
    CHATML_MARKED,
    CHATML_TRIMMED,
    LLAMA3,
    SHOUTING,
    UNENDED,
    chat,
    request,
    tokenizer_folder,
)
from tests.support.paths import ROOT

TEMPLATES = ROOT / "chat_templates"
STYLES = {
    "chatml": (CHATML, "<|im_end|>"),
    "chatml-marked": (CHATML_MARKED, "<|im_end|>"),
    "chatml-trimmed": (CHATML_TRIMMED, "<|im_end|>"),
    "chatml-shipped": ((TEMPLATES / "chatml.jinja").read_text(), "<|im_end|>"),
    "chatml-tools-shipped": ((TEMPLATES / "chatml_tools.jinja").read_text(), "<|im_end|>"),
    "llama3-shipped": ((TEMPLATES / "llama3.jinja").read_text(), "<|eot_id|>"),
    "alpaca-shipped": ((TEMPLATES / "alpaca.jinja").read_text(), "</s>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "marked-content-only": (
        CHATML_MARKED.replace(
            "{{ message['content'] + '<|im_end|>' }}{% endgen", "{{ message['content'] }}{% endgen"
        ).replace("{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>' }}"),
        "<|im_end|>",
    ),
}


def trained(
    sample: Chat | Plain, tokenizer: Any, completion_only: bool = True
) -> tuple[list[int], list[int]]:
    template = ChatTemplate(tokenizer) if isinstance(sample, Chat) else None
    ids, labels = next(encode([render(sample, template, completion_only, "x:1")], tokenizer))
    assert len(ids) == len(labels)
    assert all(label in (IGNORED, token) for label, token in zip(labels, ids, strict=True))
    return ids, [label for label in labels if label != IGNORED]


def test_eos_takes_the_place_of_an_end_marker_that_is_not_there(tokenizers: Any) -> None:
    ids, labels = trained(chat("ok", "yes", "more", "the fox"), tokenizers(UNENDED))
    assert tokenizers(UNENDED).decode(ids) == "user: ok\nassistant: yes\nuser: more\nassistant: the fox</s>"
    assert tokenizers(UNENDED).decode(labels).split() == ["yes", "the", "fox</s>"]


def test_outer_white_space_is_trained_where_the_template_keeps_it(tokenizers: Any) -> None:
    for template in (CHATML, CHATML_MARKED):
        _, labels = trained(chat("ok", "  \n yes\n "), tokenizers(template))
        assert tokenizers(template).decode(labels).endswith(" yes\n <|im_end|>")
    _, labels = trained(chat("ok", "  \n yes\n "), tokenizers(CHATML_TRIMMED))
    assert tokenizers(CHATML_TRIMMED).decode(labels) == "yes<|im_end|>"
    half = CHATML.replace("message['content']", "message['content'].lstrip('\\n')")
    _, labels = trained(chat("ok", "\n yes \n"), tokenizers(half))
    assert tokenizers(half).decode(labels).lstrip() == "yes \n<|im_end|>"


@pytest.mark.parametrize(
    "messages", [chat("only a question"), chat("ok", ""), chat("ok", " \n"), Plain("ok", "")]
)
@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, CHATML_TRIMMED, UNENDED])
def test_nothing_is_trained_without_an_answer(messages: Chat | Plain, template: str, tokenizers: Any) -> None:
    assert trained(messages, tokenizers(template))[1] == []


def test_a_template_that_changes_answers_is_refused(tokenizers: Any) -> None:
    # Upper-casing alone keeps the marks where they are; the first rendering already has it.
    assert tokenizers(SHOUTING).decode(trained(chat("ok", "yes"), tokenizers(SHOUTING))[1]) == "YES<|im_end|>"
    twisted = CHATML.replace("message['content']", "message['content'] | reverse")
    with pytest.raises(
        DataError,
        match=r"x:1: the chat template changes the assistant's messages.*\{% generation "
        r"%\}.*data\.chat_template",
    ):
        trained(chat("ok", "yes"), tokenizers(twisted))


def with_context(sample: Chat, *indices: int) -> Chat:
    """The chat with these messages not to be trained."""
    return Chat(
        [
            {**message, "train": False} if index in indices else message
            for index, message in enumerate(sample.messages)
        ]
    )


@pytest.mark.parametrize("style", STYLES)
def test_answers_that_are_context_are_not_trained(style: str, tokenizers: Any) -> None:
    template, end = STYLES[style]
    tokenizer = tokenizers(template)
    asked = chat("q", "the fox", "q", "jumps", "q", "", "q", "the fox", "q", "over")
    whole, _ = trained(asked, tokenizer)
    for indices, said in (
        ((1, 7), "jumps over"),
        ((3, 9), "the fox the fox"),
        ((1, 3, 5, 7, 9), ""),
        ((0, 2, 5), None),
    ):
        ids, labels = trained(with_context(asked, *indices), tokenizer)
        assert ids == whole, "a template never sees what is trained"
        answers = [text.strip() for text in tokenizer.decode(labels).split(end)]
        assert " ".join(answers).strip() == ("the fox jumps the fox over" if said is None else said)
        assert answers[-1] == ""


def test_nothing_is_cut_or_ended_behind_a_last_answer_that_is_context(tokenizers: Any) -> None:
    marked = UNENDED.replace(
        "message['content']", "'' }}{% generation %}{{ message['content'] }}{% endgeneration %}{{ ''"
    ).replace(
        "{% for message in messages %}", "{% for message in messages %}{% if message['role'] != 'user' %}"
    )
    marked = marked.replace(
        "{% endfor %}", "{% else %}{{ 'user: ' + message['content'] + '\n' }}{% endif %}{% endfor %}"
    )
    asked = chat("ok", "yes", "more", "the fox")
    for template in (UNENDED, marked):
        tokenizer = tokenizers(template)
        ids, labels = trained(with_context(asked, 3), tokenizer)
        assert tokenizer.decode(ids) == "user: ok\nassistant: yes\nuser: more\nassistant: the fox\n"
        assert tokenizer.decode(labels).strip() == "yes"
        ids, labels = trained(with_context(asked, 1), tokenizer)
        assert tokenizer.decode(ids) == "user: ok\nassistant: yes\nuser: more\nassistant: the fox</s>"
        assert tokenizer.decode(labels).strip() == "the fox</s>"
        # The last answer with words decides.
        ids, _ = trained(with_context(chat("ok", "yes", "more", " "), 3), tokenizer)
        assert tokenizer.decode(ids) == "user: ok\nassistant: yes</s>"


def test_blocks_that_cannot_be_told_apart_are_refused(tokenizers: Any) -> None:
    opened = "{% generation %}" + UNENDED + "{% endgeneration %}"
    asked = chat("ok", "yes", "more", "the fox")
    assert "yes" in tokenizers(opened).decode(trained(asked, tokenizers(opened))[1])
    with pytest.raises(
        DataError, match=r"x:1: a turn has train: false .* the generation blocks .* one block for each answer"
    ):
        trained(with_context(asked, 1), tokenizers(opened))


def test_an_end_token_need_not_be_special(tokenizers: Any, tmp_path: Path) -> None:
    """Where the template puts an added token behind each answer; one that begins the next turn ends none."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    for template, ended in (
        (CHATML.replace("im_end", "done"), "<|done|>"),
        (CHATML.replace(" + '<|im_end|>' }}{{ '\n'", ""), "</s>"),
    ):
        folder = tokenizer_folder(tmp_path / ended.strip("</>|"), template.replace("im_start", "turn"))
        made = AutoTokenizer.from_pretrained(str(folder))
        made.add_tokens([AddedToken("<|done|>", special=False), AddedToken("<|turn|>", special=False)])
        made.save_pretrained(folder)
        asked = request(folder, path="unread")
        tokenizer = load_tokenizer(asked.model, asked.data)
        _, labels = trained(chat("ok", "yes", "more", "the fox"), tokenizer)
        assert tokenizer.decode(labels) == (
            "yes<|done|>the fox<|done|>" if ended == "<|done|>" else "yesthe fox</s>"
        )
        assert ("<|done|>" in ChatTemplate(tokenizer).marks) == (ended == "<|done|>")
        assert "<|turn|>" not in ChatTemplate(tokenizer).marks


def test_messages_that_the_template_refuses(tokenizers: Any) -> None:
    strict = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with user') }}{% endif %}" + CHATML
    )
    with pytest.raises(
        DataError, match=r"x:1: the chat template refuses these messages \(assistant\): begin with user"
    ):
        trained(Chat([{"role": "assistant", "content": "yes"}]), tokenizers(strict))


def test_every_token_is_trained_when_the_recipe_says_so(tokenizers: Any) -> None:
    for sample in (chat("ok", "yes"), chat("ok", "yes", "more"), Plain("foo", "bar"), Plain("", "text")):
        for template in (CHATML, UNENDED):
            ids, labels = trained(sample, tokenizers(template), completion_only=False)
            assert labels == ids[1:]  # nothing stands before the first token that could predict it
    assert (
        tokenizers(UNENDED).decode(trained(chat("ok", "yes"), tokenizers(UNENDED), False)[0])
        == "user: ok\nassistant: yes\n</s>"
    )


def test_a_template_that_writes_bos_is_not_given_another(tokenizers: Any) -> None:
    ids, _ = trained(chat("ok", "yes"), tokenizers(LLAMA3, adds_bos=True))
    assert tokenizers(LLAMA3, adds_bos=True).decode(ids).count("<s>") == 1


def test_a_prompt_tokenized_alone_and_counted_would_be_wrong(tokenizers: Any) -> None:
    tokenizer = tokenizers(CHATML)
    prompt, completion = "The foo", "bar foobar"
    whole = tokenizer(prompt + completion)["input_ids"]
    alone = tokenizer(prompt)["input_ids"]
    ids, labels = trained(Plain(prompt, completion), tokenizer)
    assert ids == [*whole, tokenizer.eos_token_id]
    assert whole[: len(alone)] != alone, "the tokenizer must merge over the border for this test"
    # Counted, the mask begins too late: answers lose their first letters, or all of them.
    assert completion not in tokenizer.decode(whole[len(alone) :])
    assert tokenizer.decode(labels) == " foobar foobar</s>"


# Python's strip() and the tokenizer's word pattern disagree about control characters; they are not text
# either.
letters = st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<|>")
contents = st.one_of(
    st.just(""), st.text(letters | st.just("\n"), max_size=40), st.text("ab \n", min_size=300, max_size=400)
)


@settings(max_examples=150)
@given(st.lists(contents, min_size=1, max_size=7))
def test_any_conversation_trains_its_answers_and_end_markers(tokenizers: Any, texts: list[str]) -> None:
    texts = [text.strip() for text in texts]
    for template, end in STYLES.values():
        tokenizer = tokenizers(template)
        _, labels = trained(chat(*texts), tokenizer)
        assert tokenizer.decode(labels) == "".join(text + end for text in texts[1::2] if text)


@settings(max_examples=150)
@given(st.lists(contents, min_size=1, max_size=7))
def test_generation_marks_and_sentinels_agree(tokenizers: Any, texts: list[str]) -> None:
    """Outer white space included: both templates render the same text."""
    # Where the texts are even in number, two answers in a row.
    asked = Chat([*chat(*texts).messages, {"role": "assistant", "content": texts[0]}])
    assert trained(asked, tokenizers(CHATML)) == trained(asked, tokenizers(CHATML_MARKED))


@settings(max_examples=100)
@given(st.text(letters | st.just("\n"), max_size=60), st.text(letters | st.just("\n"), max_size=60))
@example("#", "#")
@example("ask", "  say  ")  # spaces that trim_offsets leaves out of the offsets
def test_any_completion_is_trained_whole(tokenizers: Any, prompt: str, completion: str) -> None:
    for options in ({"trim": True}, {"trim": False}, {"adds_bos": True, "trim": True}):
        tokenizer = tokenizers(CHATML, **options)
        ids, labels = trained(Plain(prompt, completion), tokenizer)
        assert tokenizer.decode(ids).removeprefix("<s>") == prompt + completion + "</s>"
        # The first token of a text has nothing before it, also where it holds characters of both.
        if completion and ("adds_bos" in options or 0 < len(tokenizer.decode(ids[:1])) <= len(prompt)):
            assert tokenizer.decode(labels).endswith(completion + "</s>")
            # Nothing but the one token over the border is trained before the completion.
            assert not tokenizer.decode(labels[1:]).endswith(completion + "</s>")


@pytest.mark.parametrize("adds_bos", [False, True])
def test_raw_text_has_the_bos_and_eos_that_the_recipe_asks_for(adds_bos: bool, tokenizers: Any) -> None:
    tokenizer = tokenizers(CHATML, adds_bos=adds_bos)
    for add_bos, add_eos, ending in product((None, True, False), (True, False), ("", "</s>")):
        # One that ends the text already is not doubled; without add_eos it stays.
        rendered = [render(Plain("The fox:", f" jumps{ending * add_eos}"), None, True, "x:1")]
        ids, labels = next(encode(rendered, tokenizer, add_bos, add_eos))
        bos = adds_bos if add_bos is None else add_bos
        assert tokenizer.decode(ids) == "<s>" * bos + "The fox: jumps" + "</s>" * add_eos
        assert (
            tokenizer.decode([label for label in labels if label != IGNORED]) == " jumps" + "</s>" * add_eos
        )
        only = next(encode([render(Plain("", "The fox"), None, True, "x:1")], tokenizer, add_bos, add_eos))
        assert only[1] == [IGNORED, *only[0][1:]]
    marked = next(
        encode([render(chat("ok", "yes"), ChatTemplate(tokenizer), True, "x:1")], tokenizer, True, False)
    )
    assert marked == next(
        encode([render(chat("ok", "yes"), ChatTemplate(tokenizer), True, "x:1")], tokenizer)
    )


def test_an_eos_that_the_tokenizer_adds_is_removed_where_the_recipe_wants_none(tokenizers: Any) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tokenizers(CHATML, trim=True)
    before = tokenizer.backend_tokenizer.post_processor
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    rendered = [render(Plain("", "The fox"), None, True, "x:1")]
    assert [tokenizer.decode(next(encode(rendered, tokenizer, None, ends))[0]) for ends in (True, False)] == [
        "The fox</s>",
        "The fox",
    ]
    tokenizer.backend_tokenizer.post_processor = before
