"""Training run into which faults are injected, and which is restarted after each until it has finished."""

import glob
import json
import os
import random
import resource
import shutil
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flytune.selftest import processes
from tests.chaos import checking
from tests.chaos.bucket import Bucket
from tests.chaos.faults import ON_DISK, ON_S3, REFUSED, Bag, Fault
from tests.chaos.pods import Pod

POLL = 0.004
TIMEOUT = 240.0
"""Seconds within which a step must be trained or a pod must end."""
FILE_LIMIT = 2**16


def _found(folder: Path, pattern: str) -> list[Path]:
    """List the matching paths; a folder that a pod removes meanwhile has none, where `Path.glob` raises."""
    return [folder / name for name in glob.glob(pattern, root_dir=folder)]


class RunFailed(Exception):
    """Error of a run that cannot continue."""


class DisturbedRun:
    """Run with its pods, and the observations of them from outside."""

    def __init__(
        self,
        task: Any,
        inputs: Path,
        changed: dict[str, Path],
        folder: Path,
        address: str,
        bucket: Bucket | None,
        draw: random.Random,
        cold: bool,
    ) -> None:
        """Make it; `changed` has the inputs of attempts with another recipe, by the kind of fault."""
        self.task, self.inputs, self.folder, self.address, self.bucket = task, inputs, folder, address, bucket
        self.draw, self.cold, self.changed = draw, cold, changed
        self.alive: list[Pod] = []
        self.done: list[Pod] = []
        """Pods that have stored outputs."""
        self.problems: list[str] = []
        self.lines: set[str] = set()
        """Lines of steps.jsonl of all attempts; a step that was trained twice has two, which differ in
        seconds."""
        self.injected: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()
        """Number of steps trained again, by the preceding fault."""
        self.seconds: list[float] = []
        """Seconds from each kill to the end of the next step."""
        self.pods = self.by_hand = 0
        self.leaves_files = False
        """True if a pod was killed after another had stored outputs, so that its files remain."""
        self._steps: set[int] = set()
        self._folders: set[Path] = set()
        self._damaged: set[str] = set()
        self._last = ""
        self._killed_at: float | None = None
        self._orphaned: list[tuple[float, Pod]] = []
        self._disturbed: set[Pod] = set()

    def run(self, bag: Bag, limit: int, report: Callable[[str | None], None]) -> None:
        """Inject at most `limit` faults; return when the run has finished and all of its pods have ended."""
        try:
            while not self.done or self.alive:
                self._step(bag, limit, report)
            self.read_steps()
        except RunFailed as error:
            self.problems.append(str(error))
        finally:
            for pod in [*self.alive, *(pod for _, pod in self._orphaned)]:
                self._note_files_left_by(pod)
                pod.kill()

    def _step(self, bag: Bag, limit: int, report: Callable[[str | None], None]) -> None:
        if not self.alive:
            self._start()
        if self.injected.total() >= limit:
            self._until(lambda: not self.alive)
            return
        fault = bag.next(self.bucket is not None)
        if self._wait_for_moment(fault) and self.alive:
            self._inject(fault)
            self.injected[fault.kind] += 1
            self._last = fault.kind
            report(None)
            self._until(lambda: False, 0.02)

    def _start(self) -> Pod:
        if self.pods > 100:
            raise RunFailed("the run has not finished after 100 attempts")
        if not self.alive and not self._orphaned:
            self._check_ledger()
        self.alive.append(Pod(self.task, self.inputs, self.folder / f"pod-{self.pods}", self.pods, self.cold))
        self.pods += 1
        return self.alive[-1]

    def _check_ledger(self) -> None:
        if faults := processes.run(1, checking.ledger_problems, self.address, self._damaged):
            self.problems.append(f"after {self._last}: {'; '.join(faults)}")

    # Observations.

    def _until(self, happens: Callable[[], bool], seconds: float | None = None) -> bool:
        """Poll until `happens` is true, all pods have ended, or the time has passed; return True only if it
        happened."""
        end, seen = time.monotonic() + (seconds or TIMEOUT), (len(self.lines), self.pods)
        while time.monotonic() < end:
            self.read_steps()
            self._remove_ended_pods()
            if happens():
                return True
            if not self.alive:
                return False
            if seconds is None and (now := (len(self.lines), self.pods)) != seen:
                end, seen = time.monotonic() + TIMEOUT, now
            time.sleep(POLL)
        if seconds is None:
            raise RunFailed(
                f"nothing happened for {TIMEOUT:.0f} s after {self._last}: {self.alive[0].log_end()}"
            )
        return False

    def _local_folders(self) -> list[Path]:
        """Return the folders to which attempts write before they store."""
        if self.bucket is None:
            return [Path(self.address)]
        return [
            pod.temporary / "flytune-runs" / "chaos"
            for pod in [*self.alive, *(pod for _, pod in self._orphaned)]
        ]

    def read_steps(self) -> None:
        """Record the steps that were trained since the last call."""
        for home in self._local_folders():
            for file in _found(home, "attempt-*/node-0/steps.jsonl"):
                try:
                    self.record(file.read_text(encoding="utf-8").splitlines(keepends=True))
                except OSError:  # moved at the end of the run
                    continue

    def record(self, lines: list[str]) -> None:
        """Record the lines of one steps.jsonl."""
        for line in lines:
            text = line.rstrip("\n")
            if text in self.lines or not line.endswith("}\n"):
                continue
            self.lines.add(text)
            if (step := json.loads(text)["step"]) in self._steps:
                self.repeated[self._last] += 1
            self._steps.add(step)
            if self._killed_at is not None:
                self.seconds.append(time.monotonic() - self._killed_at)
                self._killed_at = None

    def _remove_ended_pods(self) -> None:
        """Remove pods that have ended, and kill the orphaned ranks of killed agents."""
        for when, pod in list(self._orphaned):
            if time.monotonic() > when:
                self._orphaned.remove((when, pod))
                self._clean_up(pod)
        for pod in [pod for pod in self.alive if pod.has_ended()]:
            self.alive.remove(pod)
            self.read_steps()
            self._clean_up(pod)
            if pod.has_outputs():
                self.done.append(pod)
            elif (error := pod.error()) is None and pod not in self._disturbed:
                raise RunFailed(f"an attempt ended without an error: {pod.log_end()}")
            elif error and pod not in self._disturbed:
                raise RunFailed(f"an attempt failed without a fault, after {self._last}: {error[1][:1500]}")
            elif error and not error[0]:
                self.by_hand += 1

    def _note_files_left_by(self, pod: Pod) -> None:
        # Outputs of a pod that has not been looked at since it stored them count too.
        others = [*self.alive, *(other for _, other in self._orphaned)]
        is_stored = bool(self.done) or any(other.has_outputs() for other in others if other is not pod)
        self.leaves_files |= is_stored and not pod.has_outputs()

    def _clean_up(self, pod: Pod) -> None:
        self._note_files_left_by(pod)
        pod.kill()
        # The pod's disk is lost with it.
        shutil.rmtree(pod.temporary, ignore_errors=True)

    # Faults.

    def _wait_for_moment(self, fault: Fault) -> bool:
        """Wait for the fault's moment; return False if the run ends before it."""
        before = len(self.lines)
        if fault.moment == "start":
            self._until(
                lambda: time.monotonic() > self.alive[-1].started + fault.delay if self.alive else True
            )
            return bool(self.alive)
        if not self._until(lambda: len(self.lines) > before + fault.steps):
            return False
        happens = {
            "step": lambda: True,
            "saving": self._save_begins(),
            "storing": self._store_begins(),
            "recorded": self._answers_recorded(),
        }[fault.moment]
        return self._until(happens) and (self._until(lambda: False, fault.delay) or bool(self.alive))

    def _save_begins(self) -> Callable[[], bool]:
        def folders() -> set[Path]:
            return {
                path
                for home in self._local_folders()
                for path in _found(home, "attempt-*/node-0/checkpoint-*")
            }

        before = folders()
        return lambda: bool(folders() - before)

    def _answers_recorded(self) -> Callable[[], bool]:
        if self.bucket is not None:
            return self._store_begins()

        def files() -> set[Path]:
            return set(_found(Path(self.address), "rollouts/*.jsonl"))

        before = files()
        return lambda: bool(files() - before)

    def _store_begins(self) -> Callable[[], bool]:
        if self.bucket is not None:
            uploads, bucket = self.bucket.uploads, self.bucket
            return lambda: bucket.uploads > uploads

        def folders() -> set[Path]:
            return set(_found(Path(self.address), "[0-9]*-*"))

        before = folders()
        return lambda: bool(folders() - before)

    def _inject(self, fault: Fault) -> None:
        pod = self.alive[-1]
        self._disturbed.add(pod)
        kind = fault.kind
        if kind == "two alive":
            self._two_alive(fault)
        elif kind in self.changed:
            self._change_recipe(kind, pod)
        elif kind == "frozen":
            self._during(
                lambda: pod.send(signal.SIGSTOP), 1 + 3 * fault.seconds, lambda: pod.send(signal.SIGCONT)
            )
        elif kind in ON_DISK:
            self._during(lambda: _limit(pod, FILE_LIMIT), 1 + 3 * fault.seconds, lambda: _limit(pod, None))
        elif kind in ON_S3 and (bucket := self.bucket):
            mode = kind.split()[1].replace("stalls", "stall")
            self._during(
                lambda: bucket.set_mode(mode), 1 + 5 * fault.seconds, lambda: bucket.set_mode("normal")
            )
        else:
            self._kill(pod, fault)

    def _during(self, begin: Callable[[], None], seconds: float, end: Callable[[], None]) -> None:
        begin()
        try:
            self._until(lambda: False, seconds)
        finally:
            end()

    def _kill(self, pod: Pod, fault: Fault) -> None:
        self._killed_at = time.monotonic()
        if fault.kind == "rank killed" and (found := pod.ranks() or [pod.pid]):
            _signal(self.draw.choice(found), signal.SIGKILL)
            self._until(lambda: pod not in self.alive)
        elif fault.kind == "agent killed":
            _signal(pod.pid, signal.SIGKILL)
            self.alive.remove(pod)
            self._orphaned.append((time.monotonic() + 3 * fault.seconds, pod))
        elif fault.kind.startswith("SIGTERM"):
            _signal(pod.pid, signal.SIGTERM)
            if fault.kind == "SIGTERM":
                self._until(lambda: pod not in self.alive)
            elif not self._until(lambda: pod not in self.alive, 0.4 * fault.seconds) and pod in self.alive:
                self._end(pod)
        else:
            self._end(pod)
            if fault.kind != "pod killed" and not self.alive and not self._orphaned:
                damaged = processes.run(1, checking.damage, self.address, fault.kind, fault.seconds)
                self._damaged |= {damaged} if damaged else set()

    def _end(self, pod: Pod) -> None:
        pod.kill()
        self._remove_ended_pods()

    def _change_recipe(self, kind: str, pod: Pod) -> None:
        """Kill the pod, and let an attempt with another recipe be refused, or train two steps until it is
        killed."""
        self._end(pod)
        if self.alive or self._orphaned or self.done:
            return
        before, must_be_refused = (
            set(self._attempts()),
            kind in REFUSED and processes.run(1, checking.has_checkpoint, self.address),
        )
        other = Pod(self.task, self.changed[kind], self.folder / f"pod-{self.pods}", self.pods, self.cold)
        self.pods += 1

        def steps() -> int:
            own = [
                *(set(self._attempts()) - before),
                *_found(other.temporary / "flytune-runs" / "chaos", "attempt-*"),
            ]
            files = [file for folder in own for file in _found(folder, "node-0/steps.jsonl")]
            return max((file.read_bytes().count(b"}\n") for file in files), default=0)

        first, end = None, time.monotonic() + TIMEOUT
        while not other.has_ended() and time.monotonic() < end:
            first = steps() if first is None and steps() else first
            if first is not None and steps() > first:
                break
            time.sleep(POLL)
        error, is_refused = other.error(), other.has_ended()
        other.kill()
        for left in [other.temporary, *(set(self._attempts()) - before)]:
            shutil.rmtree(left, ignore_errors=True)
        if is_refused != must_be_refused or (
            is_refused and "does not continue" not in (error or (False, ""))[1]
        ):
            self.problems.append(f"an attempt with {kind}: {error[1][:1500] if error else other.log_end()}")

    def _attempts(self) -> list[Path]:
        return _found(Path(self.address), "attempt-*") if self.bucket is None else []

    def _two_alive(self, fault: Fault) -> None:
        first = self.alive[-1]
        second = self._start()
        before = len(self.lines)
        self._disturbed.add(second)
        self._until(lambda: len(self.lines) > before + 1 and time.monotonic() > second.started + 4)
        self._until(lambda: False, 2 * fault.seconds)
        # Flyte starts a second attempt when it takes the first for lost; mostly the first one is lost.
        ends = first if self.draw.random() < 0.7 else second
        if ends in self.alive:
            self._end(ends)


def _limit(pod: Pod, size: int | None) -> None:
    for pid in pod.members():
        try:
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))
        except ProcessLookupError:
            continue


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def by_step(lines: set[str]) -> dict[int, list[Any]]:
    """Return the compared values of each step, once for each time that it was trained."""
    found: dict[int, list[Any]] = defaultdict(list)
    for row in checking.losses(sorted(lines)):
        found[row[0]].append(row[1:])
    return found
