"""Thoughts of answers: trained as the answer is, or context where the recipe says so, whatever their
spelling."""

from typing import Any

import pytest

from flytune import data
from flytune.data.columns import NamedRow
from flytune.data.formats import convert
from flytune.data.render import ChatTemplate, render
from flytune.data.rows.pairs import pair_of
from flytune.errors import DataError
from flytune.recipe import Data
from tests.support.chats import CHATML, CHATML_MARKED, checks_of, prepared, request, stored, tokenizer_folder
from tests.support.tiny import write_rows

_HEAD = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% set content = message['content'] %}{% set why = '' %}{% if message['role'] == 'assistant' %}"
)
_TAIL = (
    "{% endif %}{{ (content if message['role'] != 'assistant' else '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\nOPENED' }}{% endif %}"
)
_TAKEN_APART = (
    "{% if message.reasoning_content is string %}{% set why = message.reasoning_content %}"
    "{% elif '</think>' in content %}{% set why = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{% if loop.last %}{{ '<think>\n' + why.strip() + '\n</think>\n\n' }}{% endif %}{{ content.lstrip() }}"
)
QWEN3 = _HEAD + _TAKEN_APART + _TAIL.replace("OPENED", "")
"""Takes thoughts apart, leaves out those of earlier answers, and writes tags without a thought."""
OPENED = QWEN3.replace("assistant\nOPENED", "assistant\n").replace(
    "'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'"
)
"""The same, with the opening tag in the generation prompt."""
MARKED = (
    _HEAD
    + "{% generation %}"
    + _TAKEN_APART
    + "{{ '<|im_end|>' }}{% endgeneration %}"
    + _TAIL.replace("OPENED", "")
)
CHANNELS = (
    _HEAD
    + "{% if message.thinking %}{{ '[why]' + message.thinking + '[end]' }}{% endif %}{{ content }}"
    + _TAIL
).replace("OPENED", "")
"""As gpt-oss's: thoughts have a key and marks of their own."""
R1 = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
R1_MARKED = CHATML_MARKED.replace("message['content'] +", "message['content'].split('</think>')[-1] +")
USER = {"role": "user", "content": "q"}
SPELLINGS = {
    "reasoning_content": {"content": "yes", "reasoning_content": "why"},
    "thinking": {"content": "yes", "thinking": "why"},
    "reasoning": {"content": "yes", "reasoning": "why", "thinking": "why"},
    "content": {"content": "<think>\nwhy\n</think>\n\nyes"},
    "content without an opening tag": {"content": "why\n</think>\n\nyes"},
    "a part": {"content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "yes"}]},
}
TAGGED = "<think>\nwhy\n</think>\n\nyes<|im_end|>"


@pytest.fixture
def trained(tokenizers: Any) -> Any:
    """A function from messages to their trained texts, and the numbers of thoughts trained, as context and
    left out."""

    def get(messages: list[Any], source: str, trains: bool = True) -> tuple[list[str], tuple[int, ...]]:
        chat = convert(NamedRow({"messages": messages}, {}, "x:1"), "messages")
        made = render(chat, ChatTemplate(tokenizers(source), trains), True, "x:1")
        return [made.text[start:end].replace("</s>", "") for start, end in made.spans], tuple(made.thoughts)

    return get


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("source", "whole"),
    [
        (CHATML, TAGGED),
        (CHATML_MARKED, TAGGED),
        (QWEN3, TAGGED),
        (MARKED, TAGGED),
        (OPENED, TAGGED.removeprefix("<think>\n")),
        (CHANNELS, "[why]why[end]yes<|im_end|>"),
    ],
    ids=["chatml", "chatml, marked", "qwen3", "qwen3, marked", "opened by the prompt", "channels"],
)
def test_both_spellings_are_one_thing_and_trained_as_the_recipe_says(source, whole, spelling, trained):
    messages = [USER, {"role": "assistant", **SPELLINGS[spelling]}]
    if source in (CHATML, CHATML_MARKED) and spelling == "content without an opening tag":
        whole = whole.removeprefix("<think>\n")
    assert trained(messages, source) == ([whole], (1, 0, 0))
    assert trained(messages, source, trains=False) == (["yes<|im_end|>"], (0, 1, 0))


@pytest.mark.parametrize("source", [QWEN3, MARKED])
def test_earlier_thoughts_are_as_the_template_has_them(source, trained):
    first, last = ({"role": "assistant", "content": f"<think>why{n}</think>yes{n}"} for n in (1, 2))
    said, counts = trained([USER, first, USER, last], source)
    assert said == ["yes1<|im_end|>", "<think>\nwhy2\n</think>\n\nyes2<|im_end|>"]
    assert counts == (1, 0, 1)
    said, counts = trained([USER, first, USER, last], CHATML)
    assert said == ["<think>why1</think>yes1<|im_end|>", "<think>why2</think>yes2<|im_end|>"]
    assert counts == (2, 0, 0)
    assert trained([USER, last | {"train": False}], QWEN3) == ([], (0, 1, 0))


@pytest.mark.parametrize("source", [CHATML, QWEN3, MARKED])
def test_tags_without_a_thought_and_thoughts_without_an_answer_are_trained(source, trained):
    empty = {"role": "assistant", "content": "<think>\n\n</think>\n\nyes"}
    assert trained([USER, empty], source) == (["<think>\n\n</think>\n\nyes<|im_end|>"], (0, 0, 0))
    assert trained([USER, empty], source, trains=False)[0] == ["yes<|im_end|>"]
    alone = {"role": "assistant", "content": "", "reasoning_content": "why"}
    assert trained([USER, alone], source) == (["<think>\nwhy\n</think>\n\n<|im_end|>"], (1, 0, 0))
    assert trained([USER, alone], source, trains=False) == ([], (0, 1, 0))


@pytest.mark.parametrize("source", [R1, R1_MARKED])
@pytest.mark.parametrize("spelling", ["reasoning_content", "content"])
def test_a_template_that_cuts_thoughts_is_refused_unless_answers_alone_are_trained(source, spelling, trained):
    messages = [USER, {"role": "assistant", **SPELLINGS[spelling]}]
    with pytest.raises(
        DataError, match=r"^x:1: the thoughts of the last answer are not in the text .*data.train_on: answers"
    ):
        trained(messages, source)
    said, counts = trained(messages, source, trains=False)
    assert ([text.strip() for text in said], counts) == (["yes<|im_end|>"], (0, 0, 1))


def test_text_that_is_taken_for_thoughts_is_not_lost(trained):
    before, twice = "Sure. <think>why</think> yes", "<think>a</think>b<think>c</think>d"
    with pytest.raises(
        DataError, match=r"messages\[1\] \(assistant\) is not in the text that the chat template renders"
    ):
        trained([USER, {"role": "assistant", "content": before}], MARKED)
    said, _ = trained([USER, {"role": "assistant", "content": twice}], MARKED)
    assert said == ["<think>\na\n</think>\n\nb<think>c</think>d<|im_end|>"]
    for content in (before, twice):
        assert trained([USER, {"role": "assistant", "content": content}], CHATML)[0] == [
            f"{content}<|im_end|>"
        ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"thinking": "other", "reasoning_content": "why"},
            r"messages\[0\] has thoughts in reasoning_content and think",
        ),
        (
            {"thinking": "other", "content": "<think>why</think>yes"},
            "has thoughts in thinking and content, which differ",
        ),
        ({"thinking": ["why"]}, r"messages\[0\].thinking must be a string"),
    ],
)
def test_thoughts_that_contradict_each_other_are_refused(more, said):
    with pytest.raises(DataError, match=said):
        convert(
            NamedRow({"messages": [{"role": "assistant", "content": "yes"} | more]}, {}, "x:1"), "messages"
        )


@pytest.mark.parametrize(
    ("train_on", "said"),
    [
        ("answers and thoughts", "24 are trained with them"),
        ("answers", "24 are trained with them as context"),
    ],
)
def test_the_contract_says_what_became_of_thoughts(train_on, said, tmp_path):
    folder = tokenizer_folder(tmp_path / "base", QWEN3, more=["<think>", "</think>"])
    spellings = list(SPELLINGS.values())[:4]
    asked = [USER | {"content": f"q{n}"} | ({"id": n} if n < 12 else {}) for n in range(24)]
    rows = [{"messages": [asked[n], {"role": "assistant", **spellings[n % 4]}]} for n in range(24)]
    made = prepared(folder, rows, tmp_path / "a", train_on=train_on)
    assert made.control_tokens == 0, "the tags are not text of the row, though these are special tokens"
    check = checks_of(tmp_path / "a")["thoughts"]
    assert said in check.found
    assert check.verdict == "ok"


EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize("source", [QWEN3, MARKED])
def test_an_answer_without_thoughts_is_trained_from_the_end_of_the_generation_prompt(source, trained):
    answer = {"role": "assistant", "content": "yes"}
    assert trained([USER, answer, USER, answer], source)[0] == ["yes<|im_end|>", f"{EMPTY}yes<|im_end|>"]
    if source == QWEN3:  # generation marks say themselves what is trained
        assert trained([USER, answer], source, trains=False)[0] == ["yes<|im_end|>"]
    assert trained([USER, answer], CHATML)[0] == ["yes<|im_end|>"]
    assert trained([USER, answer | {"train": False}], QWEN3)[0] == []


@pytest.mark.parametrize("source", [QWEN3, OPENED, CHATML, CHANNELS])
def test_compared_answers_begin_where_those_of_trl_do(source, tokenizers):
    """TRL's prompt is the generation prompt, or what it has in common with the text of the chosen answer
    (maybe thoughts)."""
    from trl.data_utils import apply_chat_template

    tokenizer = tokenizers(source)
    key = {CHANNELS: "thinking"}.get(source, "reasoning_content")
    chosen = (
        {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nyes"}
        if source == CHATML
        else {"role": "assistant", "content": "yes", key: "why"}
    )
    row = {"prompt": [USER], "chosen": [chosen], "rejected": [{"role": "assistant", "content": "no"}]}
    texts = apply_chat_template(row, tokenizer)
    found = pair_of(NamedRow(row, {}, "x:1"))
    for name, sample in (("chosen", found.chosen), ("rejected", found.rejected)):
        made = render(sample, ChatTemplate(tokenizer), True, "x:1")
        assert [made.text[start:end] for start, end in made.spans] == [texts[name].removesuffix("\n")]


def test_both_answers_of_a_pair_begin_at_one_token_whatever_the_template_writes_before_one_of_them(tmp_path):
    only_thoughts = QWEN3.replace("{% if loop.last %}", "{% if why %}").replace(
        "'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'"
    )
    folder = tokenizer_folder(tmp_path / "base", only_thoughts)
    yes = {"role": "assistant", "content": "yes", "reasoning_content": "why"}
    no = {"role": "assistant", "content": "no"}
    rows = write_rows(
        tmp_path / "rows.jsonl",
        [
            {"prompt": [{"role": "user", "content": f"q{number}"}], "chosen": [yes], "rejected": [no]}
            for number in range(8)
        ],
    )
    asked = request(folder, path=str(rows), heldout_fraction=0.0, max_length=64).model_copy(
        update={"row_kind": "pairs"}
    )
    data.prepare(asked, tmp_path / "a")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for row in stored(tmp_path / "a", "train"):
        at = row["seq_lengths"][0]
        trained = [
            [token for token in part if token != -100] for part in (row["labels"][:at], row["labels"][at:])
        ]
        texts = [tokenizer.decode(tokens) for tokens in trained]
        assert texts == ["<think>\nwhy\n</think>\n\nyes<|im_end|>", "no<|im_end|>"]


def test_thoughts_of_a_compared_answer_are_no_context(tokenizers):
    row = {"prompt": [USER], "chosen": "<think>why</think>yes", "rejected": "no"}
    with pytest.raises(
        DataError, match=r"^x:1: the answer has thoughts, which data.train_on: answers .*different prompts"
    ):
        render(pair_of(NamedRow(row, {}, "x:1")).chosen, ChatTemplate(tokenizers(QWEN3), False), True, "x:1")


def test_raw_text_has_no_thoughts_to_leave_out(tokenizer, tmp_path):
    with pytest.raises(
        DataError,
        match=r"^data.train_on: thoughts are found in chats .* data's format is prompt_completion; ",
    ):
        prepared(
            tokenizer,
            [{"prompt": "q", "completion": "<think>why</think>yes"}],
            tmp_path / "a",
            train_on="answers",
        )


def test_all_tokens_and_answers_alone_contradict_each_other():
    with pytest.raises(ValueError, match="train_on: answers leaves them out"):
        Data(path="x", train_on="answers", completion_only_loss=False)


def test_thoughts_beside_calls_are_trained(trained):
    calls = QWEN3.replace(
        "{{ content.lstrip() }}",
        "{{ content.lstrip() ~ (message.tool_calls | tojson if message.tool_calls else '') }}",
    )
    function = {"name": "f", "arguments": {}}
    call = {"role": "assistant", "content": "", "thinking": "why", "tool_calls": [{"function": function}]}
    written = '[{"function": {"name": "f", "arguments": {}}}]<|im_end|>'
    assert trained([USER, call], calls) == ([f"<think>\nwhy\n</think>\n\n{written}"], (1, 0, 0))
    assert trained([USER, call], calls, trains=False) == ([written], (0, 1, 0))


def test_answers_without_what_the_generation_prompt_ends_with_are_counted(tmp_path):
    source = CHATML.replace("assistant\n'", "assistant\n<think>\n'")
    base = tokenizer_folder(tmp_path, source)
    plain, thinking = (
        [USER, {"role": "assistant", "content": answer}] for answer in ("a", "<think>\nwhy\n</think>\n\nb")
    )
    prepared(base, [{"messages": plain}, {"messages": thinking}], tmp_path / "a", heldout_fraction=0)
    check = checks_of(tmp_path / "a")["begin of answers"]
    assert (check.verdict, check.count, check.of) == ("warning", 1, 2)
    assert "the generation prompt ends with '<think>', and 1 of 2 answers without" in check.found
    prepared(base, [{"messages": thinking}] * 2, tmp_path / "b", heldout_fraction=0)
    assert checks_of(tmp_path / "b")["begin of answers"].verdict == "ok"
