"""One training run that is struck again and again, and started again each time, until it is over."""

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
from tests.chaos.faults import ON_DISK, ON_S3, Bag, Fault
from tests.chaos.pods import Pod

POLL = 0.004
PATIENCE = 240.0
"""Seconds in which something must happen: a step, or the end of a pod."""
FILE_LIMIT = 2**16


class Lost(Exception):
    """The run cannot go on: what happened."""


class Round:
    """The run, its pods, and what was seen of them from outside."""

    def __init__(
        self, task: Any, inputs: Path, folder: Path, address: str, bucket: Bucket | None, draw: random.Random, cold: bool
    ) -> None:
        self.task, self.inputs, self.folder, self.address, self.bucket = task, inputs, folder, address, bucket
        self.draw, self.cold = draw, cold
        self.alive: list[Pod] = []
        self.done: list[Pod] = []
        """Those that have a result."""
        self.problems: list[str] = []
        self.lines: set[str] = set()
        """Of all steps.jsonl of all attempts: a step that was trained twice has two, for they hold its seconds."""
        self.struck: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()
        """Steps trained again, by the fault that came before."""
        self.seconds: list[float] = []
        """From a kill to the end of the next step."""
        self.pods = self.by_hand = 0
        self.is_left = False
        """Whether a pod was killed when another had its result already."""
        self._steps: set[int] = set()
        self._folders: set[Path] = set()
        self._spoiled: set[str] = set()
        self._last = ""
        self._killed_at: float | None = None
        self._doomed: list[tuple[float, Pod]] = []
        self._disturbed: set[Pod] = set()

    def run(self, bag: Bag, most: int, tell: Callable[[str | None], None]) -> None:
        """Strikes at most so often; returns when the run is over and none of its pods lives."""
        try:
            while not self.done or self.alive:
                self._step(bag, most, tell)
            self.look()
        except Lost as error:
            self.problems.append(str(error))
        finally:
            for pod in [*self.alive, *(pod for _, pod in self._doomed)]:
                self.is_left |= bool(self.done) and not pod.has_outputs()
                pod.kill()

    def _step(self, bag: Bag, most: int, tell: Callable[[str | None], None]) -> None:
        if not self.alive:
            self._start()
        if self.struck.total() >= most:
            self._until(lambda: not self.alive)
            return
        fault = bag.next(self.bucket is not None)
        if self._comes(fault) and self.alive:
            self._strike(fault)
            self.struck[fault.kind] += 1
            self._last = fault.kind
            tell(None)
            self._until(lambda: False, 0.02)

    def _start(self) -> Pod:
        if self.pods > 100:
            raise Lost("100 attempts, and it is not over")
        if not self.alive and not self._doomed:
            self._check_ledger()
        self.alive.append(Pod(self.task, self.inputs, self.folder / f"pod-{self.pods}", self.pods, self.cold))
        self.pods += 1
        return self.alive[-1]

    def _check_ledger(self) -> None:
        if faults := processes.run(1, checking.broken, self.address, self._spoiled):
            self.problems.append(f"after {self._last}: {'; '.join(faults)}")

    # What is seen.

    def _until(self, happens: Callable[[], bool], seconds: float | None = None) -> bool:
        """Looks on until it happens, or all pods have ended, or the time is over; says whether it has."""
        end, seen = time.monotonic() + (seconds or PATIENCE), (len(self.lines), self.pods)
        while time.monotonic() < end:
            self.look()
            self._reap()
            if happens():
                return True
            if not self.alive:
                return False
            if seconds is None and (now := (len(self.lines), self.pods)) != seen:
                end, seen = time.monotonic() + PATIENCE, now
            time.sleep(POLL)
        if seconds is None:
            raise Lost(f"nothing happened for {PATIENCE:.0f} s after {self._last}: {self.alive[0].said()}")
        return False

    def _homes(self) -> list[Path]:
        """Where attempts write before they store."""
        if self.bucket is None:
            return [Path(self.address)]
        return [pod.temporary / "flytune-runs" / "chaos" for pod in [*self.alive, *(pod for _, pod in self._doomed)]]

    def look(self) -> None:
        """Takes in the steps that were trained meanwhile."""
        for home in self._homes():
            for file in home.glob("attempt-*/node-0/steps.jsonl"):
                try:
                    self.take(file.read_text(encoding="utf-8").splitlines(keepends=True))
                except OSError:  # moved away as the run ended
                    continue

    def take(self, lines: list[str]) -> None:
        """Lines of one steps.jsonl."""
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

    def _reap(self) -> None:
        """Takes leave of pods that have ended, and of what their agents have left behind."""
        for when, pod in list(self._doomed):
            if time.monotonic() > when:
                self._doomed.remove((when, pod))
                self._bury(pod)
        for pod in [pod for pod in self.alive if pod.has_ended()]:
            self.alive.remove(pod)
            self.look()
            self._bury(pod)
            if pod.has_outputs():
                self.done.append(pod)
            elif (error := pod.error()) is None and pod not in self._disturbed:
                raise Lost(f"an attempt ended without a word: {pod.said()}")
            elif error and pod not in self._disturbed:
                raise Lost(f"an attempt failed by itself, after {self._last}: {error[1][:1500]}")
            elif error and not error[0]:
                self.by_hand += 1

    def _bury(self, pod: Pod) -> None:
        self.is_left |= bool(self.done) and not pod.has_outputs()
        pod.kill()
        # The pod's own disk.
        shutil.rmtree(pod.temporary, ignore_errors=True)

    # What is done.

    def _comes(self, fault: Fault) -> bool:
        """Waits for the fault's moment; not if the run ends before it."""
        before = len(self.lines)
        if fault.moment == "start":
            self._until(lambda: time.monotonic() > self.alive[-1].started + fault.delay if self.alive else True)
            return bool(self.alive)
        if not self._until(lambda: len(self.lines) > before + fault.steps):
            return False
        happens = {"step": lambda: True, "saving": self._save_begins(), "storing": self._store_begins()}[fault.moment]
        return self._until(happens) and (self._until(lambda: False, fault.delay) or bool(self.alive))

    def _save_begins(self) -> Callable[[], bool]:
        def folders() -> set[Path]:
            return {path for home in self._homes() for path in home.glob("attempt-*/node-0/checkpoint-*")}

        before = folders()
        return lambda: bool(folders() - before)

    def _store_begins(self) -> Callable[[], bool]:
        if self.bucket is not None:
            uploads, bucket = self.bucket.uploads, self.bucket
            return lambda: bucket.uploads > uploads

        def folders() -> set[Path]:
            return set(Path(self.address).glob("[0-9]*-*"))

        before = folders()
        return lambda: bool(folders() - before)

    def _strike(self, fault: Fault) -> None:
        pod = self.alive[-1]
        self._disturbed.add(pod)
        kind = fault.kind
        if kind == "two alive":
            self._two_alive(fault)
        elif kind == "frozen":
            self._for_a_while(lambda: pod.send(signal.SIGSTOP), 1 + 3 * fault.seconds, lambda: pod.send(signal.SIGCONT))
        elif kind in ON_DISK:
            self._for_a_while(lambda: _limit(pod, FILE_LIMIT), 1 + 3 * fault.seconds, lambda: _limit(pod, None))
        elif kind in ON_S3 and (bucket := self.bucket):
            mode = kind.split()[1].replace("stalls", "stall")
            self._for_a_while(lambda: bucket.be(mode), 1 + 5 * fault.seconds, lambda: bucket.be("well"))
        else:
            self._kill(pod, fault)

    def _for_a_while(self, begin: Callable[[], None], seconds: float, end: Callable[[], None]) -> None:
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
            self._doomed.append((time.monotonic() + 3 * fault.seconds, pod))
        elif fault.kind.startswith("SIGTERM"):
            _signal(pod.pid, signal.SIGTERM)
            if fault.kind == "SIGTERM":
                self._until(lambda: pod not in self.alive)
            elif not self._until(lambda: pod not in self.alive, 0.4 * fault.seconds) and pod in self.alive:
                self._end(pod)
        else:
            self._end(pod)
            if fault.kind != "pod killed" and not self.alive and not self._doomed:
                spoiled = processes.run(1, checking.spoil, self.address, fault.kind, fault.seconds)
                self._spoiled |= {spoiled} if spoiled else set()

    def _end(self, pod: Pod) -> None:
        pod.kill()
        self._reap()

    def _two_alive(self, fault: Fault) -> None:
        first = self.alive[-1]
        second = self._start()
        before = len(self.lines)
        self._disturbed.add(second)
        self._until(lambda: len(self.lines) > before + 1 and time.monotonic() > second.started + 4)
        self._until(lambda: False, 2 * fault.seconds)
        # Flyte starts another when it takes the first for gone; that one is sooner or later.
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


def grouped(lines: set[str]) -> dict[int, list[Any]]:
    """What is compared of each step, as often as it was trained."""
    found: dict[int, list[Any]] = defaultdict(list)
    for row in checking.losses(sorted(lines)):
        found[row[0]].append(row[1:])
    return found
