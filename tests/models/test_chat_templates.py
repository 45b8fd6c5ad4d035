"""Chat templates that are slow, enormous or broken: one error each, and the next chat is rendered as
before."""

import json
import os
import signal
import subprocess
import sys

import pytest

from flytune.data import load_tokenizer
from flytune.errors import DataError
from flytune.models import chat_templates
from flytune.recipe import Data, Model
from tests.support.chats import CHATML, tokenizer_folder
from tests.support.paths import ROOT

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
PLAIN = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
DOUBLE = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TIME, MEMORY = (
    "it takes more than 2 s; use another template",
    "it takes more than 400 MB of memory; use another template",
)


@pytest.fixture
def second(monkeypatch):
    """Give the second process a short time."""
    monkeypatch.setattr(chat_templates, "_current", None)
    monkeypatch.setattr(chat_templates, "SECONDS", 0.3)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (DOUBLE, "it takes more than 0.3 s; use another template"),
        ("{% for message in messages %}" + DOUBLE + "{% endfor %}", "it takes more than 0.3 s"),
        ("{{ lipsum(n=10000000) }}", "it takes more than 0.3 s"),
        (
            "{% set n = namespace(a=7) %}{% for i in range(60) %}{% set n.a = n.a * n.a %}{% endfor %}",
            "it takes more than",
        ),
        ("{{ 1 | round(-1000000000) }}", "it takes more than"),
        ("{{ 'a' * 3000000000 }}", MEMORY),
        ("{{ messages[0].content * 1000000000 }}", MEMORY),
        ("{{ '%1000000000d' % 1 }}", MEMORY),
        ("{{ '{:1000000000}'.format(1) }}", MEMORY),
        ("{{ 'a'.center(1000000000) }}", MEMORY),
        ("{{ [1] * 1000000000 }}", MEMORY),
        (
            "{% set n = namespace(a='x') %}{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
            "it takes more than",
        ),
        ("{{ 'a' * 5000000 }}", "it makes 5,000,000 characters of a chat, and "),
        ("a" * 1_000_001, "it has 1,000,001 characters, and 1,000,000 are the most"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ " + "(" * 5000, r"\(user, assistant\): "),
        ("{{ 1 / 0 }}", r"refuses these messages \(user, assistant\): ZeroDivisionError: division by zero"),
        ("{{ raise_exception('no') }}", r"refuses these messages \(user, assistant\): no"),
    ],
)
def test_a_template_ends_at_a_limit_and_the_next_one_is_rendered(template, said, second):
    with pytest.raises(DataError, match=said):
        chat_templates.render(template, CHAT)
    assert chat_templates.render(PLAIN, CHAT) == ("<user>hi<assistant>ho", [])


def test_a_template_that_is_slow_to_compile_or_no_text_is_refused(second):
    with pytest.raises(
        DataError, match=r"the file x: line 2: not a Jinja template: unexpected 'end of template'"
    ):
        chat_templates.check("\n{% for", "the file x")
    with pytest.raises(DataError, match="the file x: not a Jinja template: it takes more than"):
        chat_templates.check("{{ 9 ** (9 ** 9) }}", "the file x")
    with pytest.raises(
        DataError, match="x: chat_template must be text, found 5; correct tokenizer_config.json"
    ):
        chat_templates.check(5, "x")
    chat_templates.check(PLAIN, "x")


def test_generation_blocks_and_halves_of_surrogate_pairs_are_as_in_one_process():
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert chat_templates.render(template, CHAT, return_assistant_tokens_mask=True) == (
        "hiho",
        [(0, 2), (2, 4)],
    )
    assert chat_templates.render(PLAIN, [{"role": "user", "content": "\ud800"}])[0] == "<user>\ud800"


def test_more_templates_than_are_kept_and_a_process_that_somebody_kills():
    for number in range(100):
        assert chat_templates.render(f"{number}{{{{ messages[0].content }}}}", CHAT)[0] == f"{number}hi"
    os.kill(chat_templates._process()._pid, signal.SIGKILL)
    assert chat_templates.render(PLAIN, CHAT)[0] == "<user>hi<assistant>ho"


def test_an_end_by_a_signal_is_told_when_it_comes_twice(monkeypatch):
    def ask(source, request):
        os.write(chat_templates._process()._stderr, b"terminate called\nafter")
        os.kill(chat_templates._process()._pid, signal.SIGKILL)
        return real(chat_templates._process(), source, request)

    real = chat_templates._Process.ask
    monkeypatch.setattr(chat_templates._Process, "ask", lambda self, *given: ask(*given))
    with pytest.raises(
        DataError, match=r"it ends the process that renders it \(signal 9: terminate called after\)"
    ):
        chat_templates.render(PLAIN, CHAT)


AFTER_GRPC = """
import grpc
from concurrent import futures
from flytune.models import chat_templates
server = grpc.server(futures.ThreadPoolExecutor(1))
channel = grpc.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
server.start()
try:
    channel.unary_unary("/a/b")(b"", timeout=60, wait_for_ready=True)
except grpc.RpcError as error:
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED
for _ in range(20):
    second = chat_templates._process()
    assert chat_templates.render("{{ messages[0].content }}", [{"role": "user", "content": "a"}])[0] == "a"
    assert chat_templates._process() is second, "it did not have to be replaced"
    chat_templates._forget()
"""
"""A client and a server of gRPC, as in a process that submits a run, and then templates in new second
processes."""


def test_a_process_that_has_used_grpc_renders():
    environment = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", AFTER_GRPC], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_process_that_trains_renders_by_itself(monkeypatch):
    monkeypatch.setattr(chat_templates, "_process", None)  # no second process can be had
    with chat_templates.in_process():
        assert chat_templates._render_all([CHAT], chat_template=PLAIN) == (["<user>hi<assistant>ho"], [])
    assert not chat_templates._is_in_process


def test_a_forked_process_has_a_second_process_of_its_own():
    chat_templates.render(PLAIN, CHAT)
    first = chat_templates._process()._pid
    reader, writer = os.pipe()
    if not (child := os.fork()):
        text = chat_templates.render(PLAIN, CHAT[:1])[0]
        os.write(writer, f"{text} {chat_templates._process()._pid}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    text, pid = os.read(reader, 99).decode().split()
    os.close(reader)
    os.close(writer)
    assert text == "<user>hi"
    assert int(pid) != first
    assert chat_templates.render(PLAIN, CHAT)[0] == "<user>hi<assistant>ho"


@pytest.mark.parametrize("written", [{}, [], [{"name": "tool_use", "template": CHATML}]])
def test_templates_by_names_without_a_default_are_none(written, tmp_path):
    folder = tokenizer_folder(tmp_path / "tokenizer", CHATML)
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": written}))
    assert load_tokenizer(Model(name_or_path=str(folder)), Data(path="unread")).chat_template is None
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "x"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert load_tokenizer(Model(name_or_path=str(folder)), Data(path="unread")).get_chat_template() == CHATML


def test_a_template_writes_the_day_that_it_is_given():
    source, chat = "{{ strftime_now('%d %b %Y') }}", [{"role": "user", "content": "a"}]
    text, _ = chat_templates.render(source, chat, template_date="2026-01-31")
    assert text == "31 Jan 2026"
    assert chat_templates.render(source, chat)[0] != text
