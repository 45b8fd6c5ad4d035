"""Approval of one artifact by a person: what is asked, and how an answer is compared with the artifact that
is there.

The question names the artifact by the SHA-256 of its artifact.json, which lists the hash of every file.
Whatever is at the address when the answer comes is published or accepted only if it has that hash. All faces
ask and settle by this module.
"""

import hashlib
import html
import re
import select
import shlex
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from flytune import addresses, yaml_core
from flytune.artifacts.publish import publish, published_name
from flytune.console import step_lines
from flytune.errors import ExportError, FlytuneError, RecipeError
from flytune.recipe import Recipe
from flytune.records.approval import APPROVAL, PAGE, ApprovalAnswer, Sha256
from flytune.records.contents import CONTENTS, read_contents, verify
from flytune.registry import history
from flytune.registry.history import Decision
from flytune.schema import Record, RecordError
from flytune.storage import Storage

_ANSWER = re.compile(r"\W*(yes|no|y|n)\b", re.IGNORECASE)
_MOST_CHANGES = 40
"""Changed fields of a recipe that a question shows."""
_BODY = re.compile(r"<body[^>]*>")


class ApprovalQuestion(Record):
    """First line of approval.jsonl: what is asked, and what a yes does."""

    artifact_sha256: Sha256
    time: datetime
    hours: float
    """Hours that the run waits."""
    recipe: str
    """Name of the recipe."""
    publish_to: str = ""
    """Address that a yes publishes to; empty if nothing is published."""
    accepted: str = ""
    """Address of the history of accepted models, of a refresh."""
    champion: str = ""
    """Address of the accepted artifact that the model was compared with; empty for its base model."""
    decision: Decision | None = None
    """Decision that a yes records in that history."""
    changes: list[str] = Field(default=[])
    """Differences from the accepted model, in words."""

    @property
    def name(self) -> str:
        """Name of the signal or condition: it has the artifact's hash."""
        return f"approve-{self.artifact_sha256[:12]}"

    @property
    def timeout(self) -> str:
        """Answer where nobody has given one."""
        return f"no: no answer within {self.hours:g} hours"


class Recorded(NamedTuple):
    """Content of approval.jsonl."""

    question: ApprovalQuestion
    answers: list[ApprovalAnswer]

    @property
    def is_approved(self) -> bool:
        """True if somebody has said yes."""
        return any(answer.answer == "yes" for answer in self.answers)


class Settled(NamedTuple):
    """Outcome of an answer."""

    is_approved: bool
    text: str
    """Outcome in words, with the way to publish the artifact after all."""


def ask(address: str, recipe: Recipe, **asked: Any) -> ApprovalQuestion:
    """Write the question about the artifact at `address` beside it, with the page to look at; return it.

    Args:
        recipe: a recipe with publish.approval.
        asked: the question's `publish_to`, `accepted`, `champion`, `decision`, as far as it has them.
    """
    assert recipe.publish.approval is not None
    storage = _storage(address)
    changes = _changes(storage, asked["champion"]) if asked.get("champion") else []
    question = ApprovalQuestion(
        artifact_sha256=hashlib.sha256(_content(storage)).hexdigest(),
        time=datetime.now(UTC),
        hours=recipe.publish.approval.hours,
        recipe=recipe.name,
        changes=changes,
        **asked,
    )
    _write(storage, Recorded(question, []))
    return question


def recorded(address: str) -> Recorded | None:
    """Return the question and answers beside an artifact; None if nothing was asked.

    Raises:
        ExportError: the record is damaged, or the address cannot be read.
    """
    storage = _storage(address)
    try:
        first, *others = storage.read(APPROVAL).splitlines()
        return Recorded(ApprovalQuestion.parse(first), [ApprovalAnswer.parse(line) for line in others])
    except FileNotFoundError:
        return None
    except (RecordError, ValueError) as error:
        raise ExportError(
            f"{storage.where}/{APPROVAL}: cannot be read: {error}; run the recipe again"
        ) from None


def pending(address: str) -> ApprovalQuestion | None:
    """Return the question about an artifact, if it was asked and not answered."""
    record = recorded(address)
    return record.question if record is not None and not record.answers else None


def link(address: str) -> str:
    """Return the address of the page that the person is to look at."""
    return f"{address.rstrip('/')}/{PAGE}"


def command(address: str, sha256: str) -> str:
    """Return the command that approves the artifact, whatever was answered before."""
    return f"flytune approve {shlex.quote(address)} --sha256 {sha256}"


def text(question: ApprovalQuestion, address: str, how: str) -> str:
    """Return the question in words, with its one link and the time for an answer; `how` says how to
    answer."""
    unit = "hour" if question.hours == 1 else "hours"
    within = f"answer within {question.hours:g} {unit}, else it is a no: {how}"
    return _in_words(question, address, within)


def _in_words(question: ApprovalQuestion, address: str, last: str) -> str:
    lines = [f"{question.recipe}: {_what(question)}?", f"artifact {question.artifact_sha256}, at {address}"]
    if question.decision is not None:
        lines.append(question.decision.reason)
    lines += [f"look at: {link(address)}", last]
    return addresses.redact("\n".join(lines))


def settle(address: str, sha256: str, words: str, by: str = "") -> Settled:
    """Record an answer, and after a yes publish and accept what was asked about.

    Args:
        address: address of the artifact.
        sha256: hash of the artifact that the person was asked about.
        words: the answer. What begins with yes is one; anything else is a no.
        by: name of the person, as far as the platform knows it.

    Raises:
        ExportError: another artifact is there now, nothing was asked about it, or it cannot be published.
        AcceptedError: another model was accepted meanwhile.
    """
    record = recorded(address)
    if record is None:
        raise ExportError(
            f"{address}: nobody was asked about it (no {APPROVAL}): a run whose recipe has publish.approval "
            "asks"
        )
    storage = _storage(address)
    content = _checked_content(storage, record.question, sha256)
    answer = ApprovalAnswer(
        artifact_sha256=sha256,
        time=datetime.now(UTC),
        answer="yes" if is_yes(words) else "no",
        words=words.strip(),
        by=by,
    )
    if answer.answer == "no" and record.is_approved:
        return Settled(
            True, f"{record.question.recipe}: approved already; the answer {words!r} comes too late"
        )
    known = next(
        (
            earlier
            for earlier in record.answers
            if (earlier.answer, earlier.words, earlier.by) == (answer.answer, answer.words, by)
        ),
        None,
    )
    # The answer of an attempt that broke off keeps its time: the history knows a decision again by it.
    answer = known or answer
    with tempfile.TemporaryDirectory(prefix="flytune-approved-") as scratch:
        copy = _verified(storage, content, Path(scratch)) if answer.answer == "yes" else None
        record = record if known else Recorded(record.question, [*record.answers, answer])
        _write(storage, record)
        if answer.answer == "no":
            _record(record.question, answer, address)
            return Settled(False, f"{record.question.recipe}: {unpublished(record, address)}")
        published = (
            _published(storage, copy, record) if copy is not None and record.question.publish_to else ""
        )
    # Pods with GPUs, which compare models, have no access to the hub.
    _record(record.question, answer, address if published.startswith("hf://") else published or address)
    done = [f"published at {published}"] if published else []
    done += [f"accepted at {record.question.accepted}"] if record.question.accepted else []
    return Settled(True, f"{record.question.recipe}: {answer.describe()}; {' and '.join(done)}")


def is_yes(words: str) -> bool:
    """Return whether an answer is a yes."""
    verdict = _ANSWER.match(words)
    return verdict is not None and verdict[1].lower().startswith("y")


def unpublished(record: Recorded, address: str) -> str:
    """Return why an artifact is not published, where it is, and the command that publishes it after all."""
    reason = record.answers[-1].describe() if record.answers else "nobody has answered yet"
    state = "" if record.is_approved else ", and neither published nor accepted"
    again = command(address, record.question.artifact_sha256)
    return f"{reason}; the model is stored at {address}{state}; to publish or accept it after all: {again}"


def show_command(address: str, recipe: Recipe) -> None:
    """Show what is asked about an artifact, where nobody waits for the answer, with the command that gives
    it."""
    question = pending(address) if recipe.publish.approval else None
    if question is not None:
        _show_command(question, address)


def _show_command(question: ApprovalQuestion, address: str) -> None:
    how = f"to publish or accept it: {command(address, question.artifact_sha256)}"
    step_lines.show(_in_words(question, address, how))


def answer_here(question: ApprovalQuestion, address: str) -> str | None:
    """Ask in the terminal; return the answer, or None where nobody can be asked, after the command that gives
    one."""
    how = "yes or no, with your reasons"
    if not _is_terminal():
        _show_command(question, address)
        return None
    step_lines.show(text(question, address, how))
    while True:
        sys.stdout.write(f"{how}: ")
        sys.stdout.flush()
        if not select.select([sys.stdin], [], [], question.hours * 3600)[0]:
            step_lines.show("")
            return question.timeout
        line = sys.stdin.readline()
        if not line:
            return None
        if _ANSWER.match(line):
            return line.strip()


def _is_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _what(question: ApprovalQuestion) -> str:
    asked = [f"publish it to {question.publish_to}"] if question.publish_to else []
    asked += [f"accept it at {question.accepted}"] if question.accepted else []
    return " and ".join(asked)


def _storage(address: str) -> Storage:
    return Storage(address, key="", error=ExportError, retry=False)


def _content(storage: Storage) -> bytes:
    try:
        return storage.read(CONTENTS)
    except FileNotFoundError:
        raise ExportError(
            f"{storage.where}: no {CONTENTS}: there is no artifact, or an incomplete one"
        ) from None


def _checked_content(storage: Storage, question: ApprovalQuestion, sha256: str) -> bytes:
    """Return the artifact.json that is there, compared like the question with the one that a person was asked
    about."""
    content = _content(storage)
    there = hashlib.sha256(content).hexdigest()
    for hashed, what in ((question.artifact_sha256, "the question there is about"), (there, "there is now")):
        if hashed != sha256:
            raise ExportError(
                f"{storage.where}: {what} artifact {hashed[:12]}, and the answer is about {sha256[:12]}, "
                "another one; nothing was published or accepted: run the recipe again, and look at what it "
                "asks"
            )
    return content


def _verified(storage: Storage, content: bytes, scratch: Path) -> Path:
    """Return the artifact's folder, of one at an address without its weights, after a check of all hashes."""
    contents = read_contents(content, f"{storage.where}/{CONTENTS}")
    if storage.is_local:
        verify(Path(storage.root), contents)
        return Path(storage.root)
    for file in contents.files:
        is_large = file.file.endswith(".safetensors")
        try:
            # Large files are read, and not kept: the storage copies them to where they are published.
            digest = storage.get(file.file, None if is_large else scratch / file.file)
        except FileNotFoundError:
            digest = ""
        if digest != file.sha256:
            raise ExportError(
                f"{storage.where}: {file.file} is not what was asked about, by {CONTENTS}; nothing was "
                "published: restore it"
            )
    (scratch / CONTENTS).write_bytes(content)
    return scratch


def _published(storage: Storage, copy: Path, record: Recorded) -> str:
    recipe = Recipe.from_yaml(copy / "recipe.yaml")
    weights = None if storage.is_local else storage
    try:
        return publish(
            copy,
            record.question.publish_to,
            published_name(copy, recipe),
            weights,
            {APPROVAL: _lines(record)},
        )
    except ExportError as error:
        again = command(storage.address, record.question.artifact_sha256)
        raise ExportError(
            f"{recipe.name}: approved, but not published: {error}. The artifact is stored at "
            f"{storage.address}; once that is mended: {again}"
        ) from error


def _record(question: ApprovalQuestion, answer: ApprovalAnswer, artifact: str) -> None:
    """Record the decision of a refresh in the history of accepted models."""
    if question.decision is None:
        return
    outcome = "accepted" if answer.answer == "yes" else "refused"
    decision = question.decision.model_copy(
        update={
            "time": answer.time,
            "outcome": outcome,
            "artifact": artifact,
            "approval": answer,
            "reason": f"{question.decision.reason}; {answer.describe()}",
        }
    )
    history.record(question.accepted, decision, expected=question.champion or None)


def _lines(record: Recorded) -> bytes:
    return "".join(f"{line.model_dump_json()}\n" for line in (record.question, *record.answers)).encode()


def _write(storage: Storage, record: Recorded) -> None:
    storage.write(APPROVAL, _lines(record))
    storage.write(PAGE, _page(storage, record).encode())


def _page(storage: Storage, record: Recorded) -> str:
    """Return the report with the question and its answers above it."""
    question = record.question
    state = [answer.describe() for answer in record.answers] or ["not answered yet"]
    rows = [f"{_what(question)}?", f"artifact {question.artifact_sha256}", *state]
    if question.decision is not None:
        compared = question.champion or "its base model"
        rows += [f"compared with {compared}: {question.decision.reason}", *question.changes]
    shown = "".join(f"<p>{html.escape(addresses.redact(row))}</p>" for row in rows)
    section = f"<section><h2>Approval</h2>{shown}</section>"
    try:
        report = storage.read("report.html").decode("utf-8", "replace")
    except FileNotFoundError:
        return f"<!DOCTYPE html><html><body>{section}</body></html>"
    body = _BODY.search(report)
    at = body.end() if body else 0
    return report[:at] + section + report[at:]


def _changes(storage: Storage, champion: str) -> list[str]:
    """Return the fields in which the recipe of an artifact differs from that of the accepted one."""
    try:
        before, after = _fields(_storage(champion)), _fields(storage)
    except (FlytuneError, FileNotFoundError, yaml_core.YAMLError) as error:
        return [f"the accepted model's recipe cannot be read: {error}"]
    names = sorted({name for name in {**before, **after} if before.get(name) != after.get(name)})
    changed = [
        f"{name}: {before.get(name)!r:.200} before, {after.get(name)!r:.200} now"
        for name in names[:_MOST_CHANGES]
    ]
    return changed + [f"{len(names) - _MOST_CHANGES} further fields differ"] * (len(names) > _MOST_CHANGES)


def _fields(storage: Storage) -> dict[str, Any]:
    content = yaml_core.load(storage.read("recipe.yaml"))
    if not isinstance(content, dict):
        raise RecipeError(f"{storage.where}/recipe.yaml: not a recipe")
    return dict(_flat(content, ""))


def _flat(content: Any, place: str) -> list[tuple[str, Any]]:
    if not isinstance(content, dict):
        return [(place, content)]
    return [pair for name, value in content.items() for pair in _flat(value, f"{place}.{name}".lstrip("."))]
