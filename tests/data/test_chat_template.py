"""Generation marks, where transformers itself finds them."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flytune.data.chat_template import Template
from flytune.recipe import Data
from tests.support.chats import CHATML, checks_of, prepared, stored, tokenizer_folder

TURN = "{{ '<|' + m['role'] + '|>' }}\n"
MARKED = {
    "plain": "{% for m in messages %}" + TURN + "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}</s>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n"
    "{% endfor %}",
    "white space": "{% for m in messages %}\n  " + TURN + "  {%- if m['role'] == 'assistant' %}\n"
    "  {%- generation -%}\n   {{ m['content'] }}  \n  {%- endgeneration +%}\n  x"
    "{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}",
    "lines": "{% for m in messages %}\n"
    + TURN
    + "{% if m['role'] == 'assistant' %}\n    {% generation %}\n{{ m['content'] }}\n"
    "    {% endgeneration %}\nend{% else %}\n{{ m['content'] | trim }}{% endif %}\n{% endfor %}",
    "scope": "{% set said = 'none' %}{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
    "{% set said = m['content'] %}{{ said }}{{ loop.index }}{% endgeneration %}{% endif %}[{{ said }}]{% "
    "endfor %}",
    "looks": "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ "
    "m['content'].split('</think>')[-1] }}{% endgeneration %}{{ m['content'] | length }}{% else %}{{ "
    "m['content'] }}{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}",
    "captured": "{% for m in messages %}{% set turn %}{% generation %}{{ m['content'] }}{% endgeneration "
    "%}{% endset %}{{ turn | upper | replace('A', 'BB') }}{% endfor %}",
}
TOOLS = [{"type": "function", "function": {"name": "\ue000", "parameters": {}}}]


def asked(source: str, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, blocks = render_jinja_template(
        [messages], tools=tools, chat_template=source, return_assistant_tokens_mask=True
    )
    return texts[0], blocks[0]


@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=60)
@given(
    st.lists(
        st.text(st.sampled_from(" \naB</think>狐\ue000\ue001\ue002"), max_size=12), min_size=1, max_size=6
    ),
    st.booleans(),
)
@example(["q", "\ue000 and \ue001", "q", "plain"], False)
@example(["q", "<think>a</think> b \n"], True)
def test_blocks_are_those_of_transformers(name: str, texts: list[str], with_tools: bool) -> None:
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)
    ]
    tools = TOOLS if with_tools else None
    template = Template(MARKED[name], {})
    assert template.blocks(messages, tools, "x") == asked(MARKED[name], messages, tools)
    assert template.text(messages, tools, "x") == asked(MARKED[name], messages, tools)[0]


CHATS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]}
    for n in range(40)
]
DATED = CHATML.replace("{% for", "{{ 'Today: ' + strftime_now('%d %b %Y') + '\n' }}{% for", 1)


def test_the_date_of_the_recipe_is_written_into_chats_of_all_kinds() -> None:
    question = {"role": "user", "content": "q"}
    for message in (question, {**question, "name": "ann"}):
        for tools in (None, TOOLS):
            for day in ("2026-01-31", "2025-12-24"):
                template = Template("{{ strftime_now('%Y-%m-%d') }}", {"template_date": day})
                assert template.text([message], tools, "x") == day
    assert Template("{{ strftime_now('%Y') }}", {}).text([question], None, "x") >= "2026"


@pytest.mark.parametrize(("written", "verdict"), [({}, "warning"), ({"template_date": "2026-01-31"}, "ok")])
def test_a_template_that_writes_a_date_is_told_and_takes_that_of_the_recipe(tmp_path, written, verdict):
    folder = tokenizer_folder(tmp_path / "base", DATED)
    prepared(folder, CHATS, tmp_path / "a", **written)
    assert checks_of(tmp_path / "a")["date"].verdict == verdict
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(folder).decode(stored(tmp_path / "a", "train")[0]["input_ids"])
    assert text.startswith("Today: 31 Jan 2026\n") == bool(written)
    prepared(tokenizer_folder(tmp_path / "plain", CHATML), CHATS, tmp_path / "b")
    assert "date" not in checks_of(tmp_path / "b")


def test_another_date_holds_the_same_rows_out(tmp_path):
    from transformers import AutoTokenizer

    folder = tokenizer_folder(tmp_path / "base", DATED)
    heldout = []
    for number, day in enumerate(("2026-01-31", "2026-02-01")):
        prepared(folder, CHATS, tmp_path / f"{number}", template_date=day)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        texts = [tokenizer.decode(row["input_ids"]) for row in stored(tmp_path / f"{number}", "heldout")]
        heldout.append([text.partition("\n")[2] for text in texts])
    assert heldout[0] == heldout[1]
    assert heldout[0]


@pytest.mark.parametrize("day", ["31.1.2026", "2026-02-30", "today"])
def test_a_date_of_a_template_is_one(day):
    with pytest.raises(ValueError, match="template_date"):
        Data(path="x", template_date=day)
