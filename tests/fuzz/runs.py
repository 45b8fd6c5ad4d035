"""What runs leave for later ones: records and notes of attempts, decisions on models; and messages to a
webhook."""

import contextlib
import io
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from flytune import cli
from flytune.artifacts import notify
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.registry import history
from flytune.training import attempt_notes, earlier_attempts
from tests.fuzz.isolation import OF_ADDRESS, Wrong
from tests.fuzz.kinds import Samples, kind
from tests.fuzz.mutations import SECRETS, damaged, documents, json_bytes, with_equal_keys, with_secret
from tests.fuzz.oracles import dropped, files_of, plain_json, refuse_dropped, refuse_shown

_ATTEMPT = {
    "number": 1,
    "execution": "abc",
    "retry": 0,
    "host": "node-1",
    "ended": "hang: rank 0",
    "resumed_from_step": 0,
    "last_step": 20,
    "shape": "cpu-2",
    "world_size": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "price_per_hour": 1.5,
    "seconds": 60.0,
    "held_seconds": 90.0,
    "peaks": {"forward": 1000},
    "reserved_peaks": {},
}
_PHASE = {
    "execution": "abc",
    "attempt": 0,
    "node": 0,
    "task": "train",
    "phase": "load",
    "used_bytes": 10**9,
    "allowed_bytes": 2 * 10**9,
    "saved_step": 0,
    "ended": None,
    "reason": "",
    "signalled": None,
    "host": "node-1",
}
_NODE = _ATTEMPT | {
    "number": 3,
    "retry": 2,
    "action": "",
    "node": 0,
    "task": "train",
    "exports_only": False,
    "phase": "steady step",
    "used_bytes": 10**9,
    "allowed_bytes": 2 * 10**9,
    "kind": "out of GPU memory",
    "signalled": None,
    "reason": "full",
    "advice": "",
    "further": [],
    "details": "",
    "left_out": [3, 4, 7],
    "rollbacks": 2,
    "order": "o",
}
_NOTES = {"per_device_train_batch_size": 1, "left_out": [3, 4], "rollbacks": 1}
_LEFT = {
    "record-0001-aa.json": _ATTEMPT,
    "record-0002-bb.json": _ATTEMPT | {"number": 2, "retry": 1, "resumed_from_step": 20},
    "phase-abc-0-0.json": _PHASE,
    "attempt-0003-0-cc.json": _NODE,
    "notes.json": _NOTES,
}
"""Files that attempts leave beside the checkpoints, those of earlier releases too."""
_OUTSIDE = ["../../out", "x/../../../out", "/etc/passwd", "x" * 400, "\x1b[31m", "a/b"]


def _left(samples: Samples) -> st.SearchStrategy[tuple[str, bytes]]:
    def of(name: str) -> st.SearchStrategy[bytes]:
        text = documents(_LEFT[name]).map(json_bytes)
        whole = st.just(json_bytes(_LEFT[name]))
        return st.one_of(text, text.flatmap(damaged), whole.flatmap(with_equal_keys))

    names = st.sampled_from([*_LEFT, "notes.json"])
    escaping = st.sampled_from(_OUTSIDE).map(
        lambda one: ("phase-abc-0-0.json", json_bytes(_PHASE | {"execution": one}))
    )
    sizes = st.sampled_from([0, -1, 1, 2, 3, 10**30]).map(
        lambda size: ("notes.json", json_bytes(_NOTES | {"per_device_train_batch_size": size}))
    )
    return st.one_of(names.flatmap(lambda name: st.tuples(st.just(name), of(name))), escaping, sizes)


@kind("attempts", _left, share=0.5)
def check_attempts(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """Notes of earlier attempts are used as they were written, refused, or not used; nothing outside is
    deleted."""
    changed, content = given
    store = folder / "checkpoints" / "run"
    store.mkdir(parents=True)
    (folder / "out").write_bytes(b"keep")
    for name, whole in _LEFT.items():
        (store / name).write_bytes(content if name == changed else json_bytes(whole))
    records = earlier_attempts.read(str(store))
    for found in earlier_attempts.of_run(records):
        read = json.loads(found.model_dump_json(exclude={"ended"}))
        files = [*store.glob("record-*.json"), *store.glob("attempt-*.json")]
        written = [plain_json(file.read_bytes()) for file in files if _is_of(file, found.number, found.retry)]
        if len(written) != 1:
            raise Wrong(f"the record of attempt {found.number}, which {len(written)} files have")
        figures = {key: one for key, one in written[0].items() if key in _ATTEMPT and key != "ended"}
        refuse_dropped(figures, read, "a record")
    earlier_attempts.lines(records, "abc", before=2)
    recipe = Recipe.model_validate(samples.recipe(**{"hardware.shape": "cpu-2", "sharding": "ddp"}))
    plan = planner.make(recipe, samples=20)
    notes = attempt_notes.read(str(store), "o", halves_on="cpu-2")
    # The newest one has what those before it have left out.
    deciding = [plain_json((store / name).read_bytes()) for name in ("notes.json", "attempt-0003-0-cc.json")]
    of_order = [one for one in deciding if one.get("order", "") in ("", "o") and int(one.get("rollbacks", 0))]
    last = max(of_order, key=lambda one: int(one["rollbacks"]), default={})
    if [int(one) for one in last.get("left_out", [])] != notes.left_out:
        raise Wrong(f"skipped data is {notes.left_out!r:.200}, and the files have {deciding!r:.500}")
    applied = notes.applied(plan)
    micro, steps = applied.per_device_train_batch_size, applied.gradient_accumulation_steps
    if micro < 1 or micro * steps * plan.world_size != plan.global_batch_size:
        raise Wrong(
            f"a batch of {micro} x {steps} x {plan.world_size}, and the recipe's is {plan.global_batch_size}"
        )
    if any(one < 0 for one in (*notes.left_out, notes.rollbacks)):
        raise Wrong(f"negative numbers are used: {notes!r:.200}")
    earlier_attempts.clear(str(store))
    if files_of(folder).keys() - {f"checkpoints/run/{name}" for name in _LEFT} != {"out"}:
        raise Wrong(f"files outside of the notes: {sorted(files_of(folder))}")


def _is_of(file: Path, number: int, retry: int) -> bool:
    try:
        written = json.loads(file.read_bytes())
        return not any((*dropped(written["number"], number), *dropped(written.get("retry", 0), retry)))
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


_DECISION = {
    "number": 1,
    "time": "2026-01-01T00:00:00Z",
    "outcome": "accepted",
    "artifact": "s3://bucket/one",
    "method": "lora",
    "base": "",
    "recipe": "r-0",
    "fingerprint": "f",
    "duel": None,
    "reason": "better",
}


@st.composite
def _decisions(draw: st.DrawFn) -> list[bytes]:
    """Draw files of a history, one of them changed in most draws."""
    outcomes = draw(
        st.lists(st.sampled_from(["accepted", "accepted", "refused", "rolled back"]), min_size=1, max_size=6)
    )
    made = [
        _DECISION | {"number": number, "outcome": outcome, "artifact": f"s3://bucket/{number}"}
        for number, outcome in enumerate(outcomes, 1)
    ]
    contents = [json_bytes(one) for one in made]
    at = draw(st.integers(0, len(made) - 1))
    kind_ = draw(st.sampled_from(["plain", "mutated", "damaged", "twice", "secret"]))
    if kind_ == "mutated":
        contents[at] = json_bytes(draw(documents(made[at])))
    elif kind_ == "damaged":
        contents[at] = draw(damaged(contents[at]))
    elif kind_ == "twice":
        contents[at] = draw(with_equal_keys(contents[at]))
    elif kind_ == "secret":
        contents[at] = json_bytes(draw(with_secret(made[at])))
    return contents


@kind(
    "decisions",
    lambda samples: st.tuples(_decisions(), st.sampled_from(["show", "json", "rollback"])),
    share=0.5,
)
def check_decisions(samples: Samples, given: tuple[list[bytes], str], folder: Path) -> None:
    """The accepted model follows from the decisions as they were written; a rollback adds one, and shows no
    credential."""
    contents, command = given
    files = folder / "store" / "history"
    files.mkdir(parents=True)
    for number, content in enumerate(contents, 1):
        (files / f"{number:06}.json").write_bytes(content)
    store = str(folder / "store")
    decisions = history.decisions_at(store)
    written = [plain_json(content) for content in contents]
    for one, decision in zip(written, decisions, strict=True):
        refuse_dropped(
            {key: part for key, part in one.items() if key != "time"}, decision.model_dump(), "a decision"
        )
    stack = _stack(written)
    current = history.current(decisions)
    if (current.artifact if current else None) != (stack[-1] if stack else None):
        raise Wrong(f"{current!r:.200} is accepted, and by hand {stack[-1:]}")
    words = {"show": ["accepted", store], "json": ["accepted", "--json", store]}.get(command)
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        code = cli.main(words or ["accepted", "--rollback", "--reason", "worse", store])
    refuse_shown(out.getvalue(), said.getvalue())
    if any(
        (files / f"{number:06}.json").read_bytes() != content for number, content in enumerate(contents, 1)
    ):
        raise Wrong("a decision was changed")
    if command == "rollback" and (code == 0) != (len(stack) > 1):
        raise Wrong(
            f"exit code {code} of a rollback, and {len(stack)} models were accepted: {said.getvalue()[-300:]}"
        )
    if command == "rollback" and code == 0:
        now = history.current(history.decisions_at(store))
        pointer = plain_json((folder / "store" / "accepted.json").read_bytes())
        if now is None or {now.artifact, pointer["artifact"]} != {stack[-2]}:
            raise Wrong(f"{now!r:.200} is accepted after a rollback, and by hand {stack[-2]}")


def _stack(decisions: list[dict[str, Any]]) -> list[str]:
    """Return the accepted artifacts that were not rolled back, the one in force last."""
    found: list[str] = []
    for decision in decisions:
        if decision["outcome"] == "accepted":
            found.append(decision["artifact"])
        elif decision["outcome"] == "rolled back":
            del found[-1:]
    return found


_ANSWERS = ["good", "refuses", "moves", "is silent", "drips", "cuts", "talks", "is none"]
_WEBHOOKS = [
    "",
    "file:///etc/hostname",
    "http://[::1",
    "ftp://127.0.0.1/x",
    "data:,x",
    "not an address",
    "http://127.0.0.1:1/\x7f",
]
_messages = st.tuples(
    st.one_of(st.sampled_from(_ANSWERS), st.sampled_from(_WEBHOOKS)),
    st.one_of(
        st.sampled_from(SECRETS).map("failed: {} is away".format), st.just("x" * 10**6), st.text(max_size=50)
    ),
)


@kind("webhook", lambda samples: _messages, share=0.1)
def check_webhook(samples: Samples, given: tuple[str, str], folder: Path) -> None:
    """A message is sent without credentials, or is not and costs no more than its time; no log has the
    webhook's address."""
    answer, text = given
    notify.SECONDS = 1.0
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    recipe = Recipe.model_validate(samples.recipe(notify={"webhook": True, "on": ["failed"]}))
    with _server(answer) as (port, received):
        of_server = f"http://127.0.0.1:{port}/{OF_ADDRESS}"
        os.environ["FLYTUNE_WEBHOOK"] = (
            of_server if answer in _ANSWERS else answer and f"{answer}?{OF_ADDRESS}"
        )
        sent = notify.send(recipe, "failed", text)
    if sent != (answer == "good"):
        raise Wrong(f"a message to a webhook that {answer or 'is not set'}: sent is {sent}")
    refuse_shown(*logged)
    for request in received:
        head, _, body = request.partition(b"\r\n\r\n")
        refuse_shown(head.partition(b"\r\n")[2].decode("latin-1"), body.decode("latin-1"))
        if len(body) > 50_000 or (answer == "good" and not plain_json(body)["text"] and text):
            raise Wrong(f"a message of {len(body):,} bytes: {body!r:.200}")


@contextlib.contextmanager
def _server(answer: str) -> Iterator[tuple[int, list[bytes]]]:
    """Serve one request with an answer, and collect requests."""
    received: list[bytes] = []
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        if answer != "is none":
            threading.Thread(target=_serve, args=(listening, answer, received), daemon=True).start()
        yield listening.getsockname()[1], received


def _serve(listening: socket.socket, answer: str, received: list[bytes]) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listening.accept()
            with connection:
                request = connection.recv(65536)
                length = next(
                    (
                        int(line[15:])
                        for line in request.split(b"\r\n")
                        if line.lower().startswith(b"content-length")
                    ),
                    0,
                )
                while len(request.partition(b"\r\n\r\n")[2]) < length:
                    request += connection.recv(65536)
                received.append(request)
                port = listening.getsockname()[1]
                connection.sendall(
                    {
                        "good": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
                        "refuses": b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n",
                        "moves": b"HTTP/1.1 302 Away\r\nContent-Length: 0\r\n"
                        b"Location: http://127.0.0.1:%d/x\r\n\r\n" % port,
                        "talks": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10**6,
                    }.get(answer, b"")
                )
                if answer == "drips":
                    for letter in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10**6:
                        connection.sendall(bytes([letter]))
                        time.sleep(0.05)
                if answer == "is silent":
                    time.sleep(10**6)
