"""Preparing in several processes, killed, and gone on with: the same bytes."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from flytune import data
from flytune.data import mixture, packing, preparation, progress, shards, workers
from flytune.errors import DataError
from flytune.recipe import DataRequest
from tests.support.chats import request as data_request
from tests.support.tiny import write_rows
from tests.support.waiting import LIMIT, until


def chat(asked: str, said: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}


@pytest.fixture(scope="module", params=["duplicates left out", "weighted"])
def asked(
    tokenizer: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> DataRequest:
    """Two sources of unequal length, with duplicates and bad rows."""
    folder = tmp_path_factory.mktemp("rows")
    chats: list[dict[str, Any]] = [
        chat(f"ask {n % 240}", f"say {n % 240}" + " fox" * (n % 240 % 9)) for n in range(300)
    ]
    chats[70] = chats[190] = {"messages": []}
    pairs = [{"prompt": f"ask {n}:", "completion": f" say {n}" * (n % 7)} for n in range(200)]
    files = [
        str(write_rows(folder / name, rows))
        for name, rows in (("chats.jsonl", chats), ("pairs.jsonl", pairs))
    ]
    once = request.param == "duplicates left out"
    return data_request(
        tokenizer,
        sources=[{"path": files[0], "weight": 0.8 if once else 2.5}, {"path": files[1]}],
        deduplicate=once,
        packing=True,
        max_length=64,
        max_bad_fraction=0.1,
        contract="warn",
    )


SMALL = (
    (mixture, "_CHUNK_ROWS", 16),
    (shards, "SAMPLES_A_SHARD", 60),
    (packing, "WINDOW_TOKENS", 500),
    (packing, "WINDOW_BLOCKS", 2),
)


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in SMALL:
            patch.setattr(module, name, value)
        yield


def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes processes start behind the first chunk and be waited for; the list tells that they were."""
    started: list[int] = []
    start = workers.Workers._start

    def waiting(self: workers.Workers) -> None:
        start(self)
        assert self._is_ready.wait(600)
        started.append(1)

    monkeypatch.setattr(workers, "CHUNKS_BEFORE_START", 1)
    monkeypatch.setattr(workers.Workers, "_start", waiting)
    return started


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def whole(asked: DataRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run gives that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    manifest = data.prepare(asked, folder, processes=1)
    assert len(manifest.train.shards) > 3 < len(manifest.heldout.shards)
    assert (manifest.duplicates > 10) == asked.data.deduplicate
    assert 0 < manifest.bad <= 2
    assert not (folder / "progress.json").exists()
    return content(folder)


def test_several_processes_give_the_same_bytes(
    asked: DataRequest, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = at_once(monkeypatch)
    data.prepare(asked, tmp_path / "out", processes=2)
    assert started
    assert content(tmp_path / "out") == whole


def test_errors_of_several_processes_come_in_the_order_of_the_rows(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[dict[str, Any]] = [chat(f"ask {n}", f"say {n}") for n in range(200)]
    rows[100] = {"messages": [{"role": "user"}]}
    source = write_rows(tmp_path / "rows.jsonl", rows)
    source.write_text(source.read_text() + "nope\n")  # is read ahead of the other one
    started = at_once(monkeypatch)
    with pytest.raises(DataError, match=r"rows\.jsonl:101: messages\[0\] must have role and content"):
        data.prepare(data_request(tokenizer, path=str(source)), tmp_path / "out", processes=2)
    assert started


def test_a_process_that_is_killed_is_told(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [chat(f"ask {n}", f"say {n}") for n in range(400)])
    at_once(monkeypatch)
    add, killed = shards.SplitWriter.add, []

    def killing(self: shards.SplitWriter, sample: Any, source: int) -> None:
        add(self, sample, source)
        if not killed and (children := multiprocessing.active_children()):
            killed.append(os.kill(int(children[0].pid or 0), signal.SIGKILL))

    monkeypatch.setattr(shards.SplitWriter, "add", killing)
    with pytest.raises(
        DataError, match="one of 2 tokenizing processes was killed, most likely because memory ran out; give"
    ):
        data.prepare(data_request(tokenizer, path=str(source)), tmp_path / "out", processes=2)


class Killed(BaseException):
    """Stands for the kill of this process: nothing that prepare does catches it."""


def test_a_killed_preparation_goes_on_to_the_same_bytes(
    asked: DataRequest, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed each time behind a few more rows, until it is done; each time it goes on behind whole shards."""
    add, save = shards.SplitWriter.add, progress.save
    added = 0
    saved: list[int] = []

    def killing(self: shards.SplitWriter, sample: Any, source: int) -> None:
        nonlocal added
        add(self, sample, source)
        added += 1
        if added == 130:
            raise Killed

    def saving(found: progress.Progress, folder: Path) -> None:
        save(found, folder)
        saved.append(found.train.samples + found.heldout.samples)

    monkeypatch.setattr(shards.SplitWriter, "add", killing)
    monkeypatch.setattr(progress, "save", saving)
    kills = 0
    for _ in range(20):
        added = 0
        try:
            data.prepare(asked, tmp_path / "out", processes=1)
            break
        except Killed:
            kills += 1
            assert not (tmp_path / "out" / "manifest.json").exists()
    assert kills > 2
    assert saved == sorted(saved), "it never falls back"
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
def test_a_kill_that_nobody_can_catch_leaves_no_process_and_nothing_lost(
    asked: DataRequest, whole: dict[str, bytes], tmp_path: Path
) -> None:
    mark = f"FLYTUNE_TEST={tmp_path}"
    script = f"""
import os, signal
from pathlib import Path
from flytune import data
from flytune.data import mixture, packing, progress, shards, workers
from flytune.recipe.recipe import DataRequest
for module, name, value in {[(module.__name__, name, value) for module, name, value in SMALL]!r}:
    setattr(__import__(module, fromlist=["_"]), name, value)
workers.CHUNKS_BEFORE_START = 1
start, save, saves = workers.Workers._start, progress.save, []
def waiting(self):
    start(self)
    assert self._is_ready.wait(600)
def saving(found, folder):
    save(found, folder)
    saves.append(1)
    if len(saves) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
workers.Workers._start, progress.save = waiting, saving
asked = DataRequest.model_validate_json({asked.model_dump_json()!r})
data.prepare(asked, Path({str(tmp_path / "out")!r}), 2)
"""
    environment = {**os.environ, **dict([mark.split("=", 1)])}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, timeout=LIMIT
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    until(lambda: not _processes_with(mark))
    assert (tmp_path / "out" / "progress.json").exists()
    data.prepare(asked, tmp_path / "out", processes=1)
    assert content(tmp_path / "out") == whole


def _processes_with(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def test_what_was_changed_since_is_made_anew_and_what_is_not_ours_is_left(
    asked: DataRequest,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = tmp_path / "out"

    def stop(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(preparation, "refuse_empty", stop)
        data.prepare(asked, out, processes=1)
    other = asked.model_copy(update={"fingerprint": "1" * 64})
    before = content(out)
    with pytest.raises(
        DataError, match="out: has the progress of another preparation; prepared data needs a folder of its"
    ):
        data.prepare(other, out, processes=1)
    assert content(out) == before
    (out / "train" / "00001.parquet").write_bytes(b"torn")
    data.prepare(asked, out, processes=1)
    assert "train/00001.parquet does not match progress.json; the preparation starts again" in caplog.text
    assert content(out) == whole
    with pytest.raises(DataError, match="out: not empty"):
        data.prepare(asked, out, processes=1)


def test_a_kill_between_manifest_and_end_is_mended(
    asked: DataRequest, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    manifest = data.prepare(asked, out, processes=1)
    progress.find(tmp_path / "new", asked, ["data.sources[0]", "data.sources[1]"])
    (tmp_path / "new" / "progress.json").rename(out / "progress.json")
    assert data.prepare(asked, out, processes=1) == manifest
    assert content(out) == whole


def test_cores_are_those_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= workers.cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for quota, cores in (("400000 100000", 4), ("50000 100000", 1), ("max 100000", 64), ("", 64)):
        monkeypatch.setattr(Path, "read_text", lambda *_, quota=quota, **__: quota)
        assert workers.cores() == cores
