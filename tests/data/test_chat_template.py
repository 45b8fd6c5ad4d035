"""Generation marks, printed and taken out again, beside where transformers itself finds them."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flytune.data.chat_template import Template

TURN = "{{ '<|' + m['role'] + '|>' }}\n"
MARKED = {
    "plain": "{% for m in messages %}" + TURN + "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}</s>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}",
    "white space": "{% for m in messages %}\n  " + TURN + "  {%- if m['role'] == 'assistant' %}\n"
    "  {%- generation -%}\n   {{ m['content'] }}  \n  {%- endgeneration +%}\n  x"
    "{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}",
    "lines": "{% for m in messages %}\n"
    + TURN
    + "{% if m['role'] == 'assistant' %}\n    {% generation %}\n{{ m['content'] }}\n"
    "    {% endgeneration %}\nend{% else %}\n{{ m['content'] | trim }}{% endif %}\n{% endfor %}",
    "scope": "{% set said = 'none' %}{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}"
    "{% set said = m['content'] %}{{ said }}{{ loop.index }}{% endgeneration %}{% endif %}[{{ said }}]{% endfor %}",
    "looks": "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'].split('</think>')[-1] }}"
    "{% endgeneration %}{{ m['content'] | length }}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}",
    "captured": "{% for m in messages %}{% set turn %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endset %}"
    "{{ turn | upper | replace('A', 'BB') }}{% endfor %}",
}
TOOLS = [{"type": "function", "function": {"name": "\ue000", "parameters": {}}}]


def asked(source: str, messages: list[dict[str, Any]], tools: Any) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, blocks = render_jinja_template([messages], tools=tools, chat_template=source, return_assistant_tokens_mask=True)
    return texts[0], blocks[0]


@pytest.mark.parametrize("name", MARKED)
@settings(max_examples=60)
@given(
    st.lists(st.text(st.sampled_from(" \naB</think>狐\ue000\ue001\ue002"), max_size=12), min_size=1, max_size=6), st.booleans()
)
@example(["q", "\ue000 and \ue001", "q", "plain"], False)
@example(["q", "<think>a</think> b \n"], True)
def test_blocks_are_those_of_transformers(name: str, texts: list[str], with_tools: bool) -> None:
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    tools = TOOLS if with_tools else None
    template = Template(MARKED[name], {})
    assert template.blocks(messages, tools, "x") == asked(MARKED[name], messages, tools)
    assert template.text(messages, tools, "x") == asked(MARKED[name], messages, tools)[0]


def test_which_templates_are_printed() -> None:
    """What captures a block moves it: transformers' places are taken, wrong as they may be."""
    printed = {name for name, source in MARKED.items() if Template(source, {})._printing is not None}
    assert printed == MARKED.keys() - {"captured"}
    assert Template("{{ messages[0]['content'] }}", {})._printing is None
