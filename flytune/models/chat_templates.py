"""Chat templates of anybody, rendered in a process of their own, with limits of time, memory and output.

A template is a program. jinja2's sandbox keeps it from files and from Python's own objects, but not from
computing for ever or from making a text of any length, often within one operation that nothing in its process
can interrupt. So each process that renders has a second one, a copy of itself without any of its files, which
the kernel ends at a limit. A chat takes some 30 microseconds longer by it.
"""

import datetime
import gc
import json
import os
import pickle
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from flytune import patches
from flytune.errors import DataError
from flytune.sentences import one_line

SECONDS = 2.0
"""Processor time of one rendering; a usual chat takes some 20 microseconds, the longest ones some
milliseconds."""
MEMORY = 400_000_000
"""Bytes of address space that renderings may add."""
LONGEST = 1_000_000
"""Characters of a rendered text, in addition to ten times the bytes of its messages."""
LONGEST_SOURCE = 1_000_000
"""Characters of a template; the longest published ones have some 30,000."""
_MOST_SOURCES = 64
IMAGE = "\U0010ff7f"
"""Character for private use that stands for an image in a content."""
_WORD = "flytune"
_ADVICE = "use another template (data.chat_template)"
_NEVER_RESET = {signal.SIGKILL, signal.SIGSTOP}
Span = tuple[int, int]
"""Characters [start, end) of a text."""


class TemplateError(DataError):
    """Failure of a template; `kind` is the name of the error's class, "" at a limit; `line` is one of the
    template, or 0."""

    def __init__(self, message: str, kind: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.kind, self.line = kind, line


def render(
    source: str, messages: Sequence[Any], is_text: bool = False, tools: Any = None, **options: Any
) -> tuple[str, list[Span]]:
    """Return the text of a chat, and the characters of each generation block if
    `return_assistant_tokens_mask` is given.

    Args:
        source: the template. messages: the chat. is_text: True for messages of nothing but texts, and no
        option but special tokens: this takes a third of the time. tools: as `options`, what transformers'
        render_jinja_template takes; also `template_date`, the day (2026-01-31) that the
            template's strftime_now writes in place of today.

    Raises:
        TemplateError: the template fails with these messages, or has reached a limit.
    """
    try:
        return _ask(source, (messages, is_text, {"tools": tools, **options}))
    except TemplateError as error:
        roles = ", ".join(str(message.get("role")) for message in messages[:8] if isinstance(message, dict))
        verb = "refuses" if error.kind else "cannot be used for"
        message = f"the chat template {verb} these messages ({roles:.200}): {error}"
        raise TemplateError(message, error.kind, error.line) from None


def check(source: Any, where: str) -> None:
    """Check that a template can be compiled.

    Raises:
        DataError: it is not a Jinja template, too long, or takes too long.
    """
    try:
        _ask(require_text(source, where), None)
    except TemplateError as error:
        at = f"line {error.line}: " if error.line else ""
        raise DataError(f"{where}: {at}not a Jinja template: {error}") from None


def require_text(source: Any, where: str) -> str:
    """Return a template after a check that it is a text.

    Raises:
        DataError: it is not.
    """
    if not isinstance(source, str):
        raise DataError(
            f"{where}: chat_template must be text, found {source!r:.60}; correct tokenizer_config.json"
        )
    return source


def takes_parts(source: str, write: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Return whether a template writes contents that are lists of parts alone, as those of some
    vision-language models; `write` renders a chat with it."""
    if "image" not in source:
        return False
    try:
        return _WORD not in write([{"role": "user", "content": _WORD}])
    except Exception:  # noqa: BLE001 (in this process a template may fail with any error)
        return True


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its content, a text with IMAGE for each image, as a list of parts."""
    texts = re.split(f"({IMAGE})", message["content"])
    parts = [{"type": "image"} if text == IMAGE else {"type": "text", "text": text} for text in texts if text]
    return {**message, "content": parts or [{"type": "text", "text": ""}]}


def limited(tokenizer: Any, where: str) -> Any:
    """Return a tokenizer whose chat templates are texts, and whose apply_chat_template renders with the
    limits.

    Templates by names of which none is `default` are none: transformers would refuse each use that names
    none.

    Raises:
        DataError: a chat template is not text.
    """
    templates = tokenizer.chat_template
    if templates is not None:
        for template in templates.values() if isinstance(templates, dict) else [templates]:
            require_text(template, where)
    if isinstance(templates, dict) and "default" not in templates:
        tokenizer.chat_template = None
    patches.transformers.CHAT_TEMPLATES.install(_render_all)
    return tokenizer


def _render_all(
    conversations: Sequence[Any],
    *,
    chat_template: str,
    return_assistant_tokens_mask: bool = False,
    **options: Any,
) -> tuple[list[str], list[list[Span]]]:
    """Return what transformers' render_jinja_template does."""
    options["return_assistant_tokens_mask"] = return_assistant_tokens_mask

    def write(chat: Any) -> tuple[str, list[Span]]:
        if not _is_in_process:
            return render(chat_template, chat, **options)
        from transformers.utils.chat_template_utils import render_jinja_template

        rendered: Any = render_jinja_template([chat], chat_template=chat_template, **options)
        (text,), blocks = rendered
        return text, blocks[0] if blocks else []

    if takes_parts(chat_template, lambda chat: write(chat)[0]):
        conversations = [
            [in_parts(message) if isinstance(message.get("content"), str) else message for message in chat]
            for chat in conversations
        ]
    written = [write(chat) for chat in conversations]
    if any("\ud800" <= letter <= "\udfff" for text, _ in written if not text.isascii() for letter in text):
        raise DataError(
            "the chat template writes half of a surrogate pair, which is not a character; correct the "
            "template"
        )
    return [text for text, _ in written], [
        blocks for _, blocks in written
    ] if return_assistant_tokens_mask else []


@contextmanager
def in_process() -> Iterator[None]:
    """Let tokenizers render in this process: in one that trains, whose template has rendered all samples with
    the limits.

    A copy of a process with the threads and connections of torch.distributed may not live.
    """
    global _is_in_process
    before, _is_in_process = _is_in_process, True
    try:
        yield
    finally:
        _is_in_process = before


_is_in_process = False


class _Ended(TemplateError):
    """End of the second process for another reason than a limit."""


class _Process:
    """The second process; it ends with the first one, and is replaced after a limit."""

    def __init__(self) -> None:
        import transformers.utils.chat_template_utils as upstream

        upstream._compile_jinja_template("")  # imports what the second process needs
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self.connection, other = Pipe()
        self._stderr = (
            os.memfd_create("stderr") if hasattr(os, "memfd_create") else os.open(os.devnull, os.O_RDWR)
        )
        try:
            self._pid = os.fork()
        except OSError as error:
            raise DataError(
                f"no process can be started that renders chat templates: {error.strerror}"
            ) from None
        if not self._pid:
            try:
                _serve(other, self._stderr, upstream)
            finally:
                os._exit(1)
        other.close()

    def ask(self, source: str, request: Any) -> tuple[str, list[Span]]:
        """Return the text and blocks that the second process renders; TemplateError if it fails or is
        ended."""
        global _current
        if len(source) > LONGEST_SOURCE:
            raise TemplateError(
                f"it has {len(source):,} characters, and {LONGEST_SOURCE:,} are the most; {_ADVICE}"
            )
        with self._lock:
            number = self._numbers.get(source)
            is_new = number is None
            if number is None:
                number = self._numbers[source] = len(self._numbers)
            try:
                self.connection.send_bytes(
                    pickle.dumps((number, source if is_new else None, request), protocol=5)
                )
                answer = self.connection.recv_bytes()
            except (EOFError, OSError):
                _current = None
                reason, ended_at_limit = self._ended()
                raise (TemplateError if ended_at_limit else _Ended)(f"it {reason}; {_ADVICE}") from None
            except BaseException:  # an interruption in between: the answer would be taken for the next one
                _current = None
                self.close()
                raise
            if answer[:1] == b"!" or len(self._numbers) >= _MOST_SOURCES:
                _current = None
                self._ended()
        if answer[:1] in b"!?":
            raise TemplateError(*json.loads(answer[1:]))
        head, _, text = answer.partition(b"\n")
        return text.decode("utf-8", "surrogatepass"), [
            (start, end) for start, end in json.loads(head)
        ] if head else []

    def close(self) -> None:
        """Let the second process end."""
        self.connection.close()
        os.close(self._stderr)

    def _ended(self) -> tuple[str, bool]:
        """Close the connection, by which the second process ends; return why it has ended, and if that is the
        limit of time."""
        self.connection.close()
        try:
            status = os.waitpid(self._pid, 0)[1]
        except ChildProcessError:  # somebody else has waited for all processes
            status = 0
        words = os.pread(self._stderr, 2000, 0)
        os.close(self._stderr)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGPROF:
            last_words = f": {one_line(words.decode(errors='replace'))}" if words else ""
            return f"ends the process that renders it (signal {os.WTERMSIG(status)}{last_words})", False
        return f"takes more than {SECONDS:g} s", True


_current: _Process | None = None
_starting = threading.Lock()


def _process() -> _Process:
    global _current
    with _starting:
        if _current is None:
            _current = _Process()
        return _current


def _ask(source: str, request: Any) -> tuple[str, list[Span]]:
    """Ask the second process, and a new one if it ended below the limits, which need not be the template's
    fault."""
    try:
        return _process().ask(source, request)
    except _Ended:
        return _process().ask(source, request)


def _forget() -> None:
    """Let a forked process start one of its own: two that ask one would get each other's answers."""
    global _current, _starting
    if _current is not None:
        _current.close()
    _current, _starting = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _serve(connection: Connection, stderr: int, upstream: Any) -> None:
    """Answer requests until the connection is closed. Runs in the second process."""
    _leave_all(connection.fileno(), stderr)
    sources: dict[int, str] = {}
    while True:
        try:
            content = connection.recv_bytes()
        except EOFError:
            return
        number, source, request = pickle.loads(content)
        source = sources.setdefault(number, source)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            answer = _answer(upstream, source, request, LONGEST + 10 * len(content))
        except MemoryError:
            answer = (
                b"!" + json.dumps([f"it takes more than {MEMORY // 10**6} MB of memory; {_ADVICE}"]).encode()
            )
        except Exception as error:  # noqa: BLE001 (a template may raise any)
            answer = b"?" + json.dumps(_failure(error)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(answer)


def _leave_all(kept: int, stderr: int) -> None:
    """Leave files, signals and memory to the first process, and set limits; `stderr` becomes standard
    error."""
    for number in signal.valid_signals() - _NEVER_RESET:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, for the first process
    null = os.open(os.devnull, os.O_RDWR)
    for standard, source in enumerate((null, null, stderr)):
        if standard != kept:
            os.dup2(source, standard)
    _close_all_but(kept)
    gc.freeze()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    except OSError:  # not Linux
        return
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = used + MEMORY
    resource.setrlimit(
        resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most)
    )


def _close_all_but(kept: int) -> None:
    """Close all files but the standard ones, `kept`, and the kernel's own for waiting.

    gRPC starts its threads again in a fork of a process that has used it, and aborts where what they wait at
    is closed.
    """
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # not Linux
        numbers = list(range(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
    for number in numbers:
        with suppress(OSError):
            if number > 2 and number != kept and not _waits(number):
                os.close(number)


def _waits(number: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}") in ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")
    except FileNotFoundError:
        return False


def _answer(upstream: Any, source: str, request: Any, longest: int) -> bytes:
    if request is None:
        upstream._compile_jinja_template(source)
        return b"\n"
    messages, is_text, options = request
    template = upstream._compile_jinja_template(source)
    blocks: list[Any] = []
    with _dated(template, options.pop("template_date", None)):
        if is_text:
            # render_jinja_template takes three times as long, for values that are not text.
            text = template.render(messages=messages, documents=None, **options)
        else:
            texts, block_lists = upstream.render_jinja_template([messages], chat_template=source, **options)
            text, blocks = texts[0], block_lists[0] if block_lists else []
    if len(text) > longest:
        raise _TooLong(
            f"it makes {len(text):,} characters of a chat, and {longest:,} are the most; {_ADVICE}"
        )
    return (json.dumps(blocks).encode() if blocks else b"") + b"\n" + text.encode("utf-8", "surrogatepass")


@contextmanager
def _dated(template: Any, day: str | None) -> Iterator[None]:
    """Let a compiled template write a day in place of today within the block.

    transformers keeps compiled templates, and renders no function that it is given as an argument.
    """
    if day is None:
        yield
        return
    today = template.globals["strftime_now"]
    template.globals["strftime_now"] = datetime.datetime.fromisoformat(day).strftime
    try:
        yield
    finally:
        template.globals["strftime_now"] = today


class _TooLong(Exception):
    pass


def _failure(error: Exception) -> tuple[str, str, int]:
    """Return the arguments of the TemplateError about an error of the template."""
    if isinstance(error, _TooLong):
        return str(error), "", 0
    name, text = type(error).__name__, " ".join(str(getattr(error, "message", None) or error).split())[:300]
    line = getattr(error, "lineno", None)
    return (
        text if text and name.startswith("Template") else f"{name}: {text}",
        name,
        line if isinstance(line, int) else 0,
    )
