"""Ledger of one run's checkpoints: the files at an address, which checkpoints are complete, and which are
deleted.

    ADDRESS/STEP-ATTEMPT/...              the files that all nodes wrote
    ADDRESS/STEP-ATTEMPT/part-NODE.json   list of the files that one node wrote; written after them
    ADDRESS/STEP-ATTEMPT/manifest.json    list of all files; written after all parts

A folder without a manifest is not a checkpoint. Each attempt writes into folders of its own, so that two that
run at once cannot harm each other.
"""

import hashlib
import logging
import math
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from flytune.names import NameRefused, check_list, inside
from flytune.pods import spec
from flytune.records import StoredFile
from flytune.schema import Record, RecordError, omitted
from flytune.storage import Storage

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_FOLDER = re.compile(r"(\d+)-((\d{4,})-[0-9a-f]{6})")


class NodeFiles(Record):
    """Content of part-NODE.json."""

    files: list[StoredFile]


class Checkpoint(Record):
    """Content of manifest.json: the files of a checkpoint, and the state that they hold."""

    step: int
    """Number of optimizer steps done."""
    attempt: str
    decisions: str
    """Key of the recipe (less hardware) and the data; differs from the run's only under the same
    checkpoints.name."""
    settings: dict[str, str] = omitted({})
    """Decisions of the recipe that wrote it (flytune.training.checkpoints.changes); empty in those of earlier
    releases."""
    base: str = omitted("")
    """Identity of the base model, with those of the adapter that training started from and of a teacher;
    empty where it is unknown."""
    history: list[tuple[int, str]] = omitted([])
    """Number of steps before each change of what trains, with the key of what trained from there on; the
    first is 0."""
    scored_on: str = omitted("")
    """Key of the held-out samples and the measure of eval_loss; empty where nothing is scored, and in earlier
    releases."""
    scored_since: int = omitted(0)
    """Step after which all scores of the run have that key."""
    sharding: str
    world_size: int
    eval_loss: float | None = None
    """Loss on the held-out samples, if the model was scored after this step."""
    trackers: dict[str, str] = Field(default={})
    """The run's id at each experiment tracker, to resume the same run there."""
    seconds: float = omitted(0.0)
    """Seconds of training so far, all attempts together (flytune.planning.budget)."""
    flytune: str
    """Version that wrote it."""
    files: list[StoredFile] = Field(default=[])

    digest: str = ""
    """Sha256 of all fields above, against flipped bits in the manifest itself."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        check_list(file.file for file in self.files)
        return self

    @property
    def folder(self) -> str:
        return f"{self.step}-{self.attempt}"

    def sealed(self) -> Self:
        """Return a copy with its digest."""
        text = self.model_dump_json(exclude={"digest"})
        return self.model_copy(update={"digest": hashlib.sha256(text.encode()).hexdigest()})


class Ledger:
    """Checkpoints of one run, as one attempt sees them."""

    def __init__(self, storage: Storage, limit: int, keeps_best: bool = False) -> None:
        """Keep the newest `limit` checkpoints at `storage`, and with `keeps_best` that of the lowest
        eval_loss."""
        self.storage, self.limit, self.keeps_best = storage, limit, keeps_best
        self.attempt = ""
        """Id of this attempt, set by `begin`; until then the ledger is only read."""

    def begin(self, attempt: str | None = None) -> str:
        """Join as a new attempt, or as the one given, and return its id: an increasing number and six random
        digits."""
        if attempt is None:
            # Not the time: clocks of nodes differ. Flyte's number, because an attempt that was taken for lost
            # may be alive, and may not have stored anything yet: it is the earlier one, and the end of the
            # run deletes what it stores.
            last = max((int(number) for _, _, number in self._folders()), default=0)
            attempt = f"{last + 1 + spec.attempts_before():04d}-{secrets.token_hex(3)}"
        self.attempt = attempt
        return self.attempt

    def _folders(self) -> list[tuple[int, str, str]]:
        """Return step, attempt and the attempt's number of all folders, oldest step first."""
        matches = (_FOLDER.fullmatch(name) for name in self.storage.names())
        return sorted((int(match[1]), match[2], match[3]) for match in matches if match)

    def checkpoints(self) -> list[Checkpoint]:
        """Return all checkpoints that have a manifest, newest first."""
        read_checkpoints = [self._read(f"{step}-{attempt}") for step, attempt, _ in reversed(self._folders())]
        return [checkpoint for checkpoint in read_checkpoints if checkpoint]

    def _read(self, folder: str) -> Checkpoint | None:
        try:
            checkpoint = Checkpoint.parse(self.storage.read(f"{folder}/{MANIFEST}"))
        except FileNotFoundError:
            return None
        except RecordError as error:
            damage = str(error)
        else:
            if checkpoint.folder == folder and checkpoint.sealed() == checkpoint:
                return checkpoint
            damage = "its content is not what was written"
        log.warning("%s/%s/%s is damaged: %s", self.storage.address, folder, MANIFEST, damage)
        return None

    def fault(
        self, checkpoint: Checkpoint, into: Path | None = None, share: slice = slice(None)
    ) -> str | None:
        """Return what is missing or damaged; None for a complete checkpoint.

        Args:
            into: receives the files.
            share: the files whose content is read; of the others, only the sizes are compared.
        """
        if reason := self._missing(checkpoint) or self._led_out(checkpoint):
            return reason
        for stored in checkpoint.files[share]:
            try:
                digest = self.storage.get(f"{checkpoint.folder}/{stored.file}", into and into / stored.file)
            except FileNotFoundError:
                return f"{stored.file} is missing"
            if digest != stored.sha256:
                return (
                    f"{stored.file}: its content is not what was written (sha256 {digest[:12]}, not "
                    f"{stored.sha256[:12]})"
                )
        return None

    def link(self, checkpoint: Checkpoint, into: Path) -> None:
        """Link all files of a checkpoint on a file system into `into` as well, so that no other attempt can
        delete them."""
        for stored in checkpoint.files:
            folder = Path(self.storage.path(checkpoint.folder))
            try:
                source, target = inside(folder, stored.file), into / stored.file
            except NameRefused as error:
                log.warning("%s: %s", folder, error)
                return  # `fault` will report it
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            if not source.is_file():
                return  # missing, or a folder: `fault` will report it
            try:
                target.hardlink_to(source)
            except (
                OSError
            ):  # no links on this file system, or across file systems; or the file was deleted meanwhile
                if source.exists():
                    shutil.copyfile(source, target)

    def _led_out(self, checkpoint: Checkpoint) -> str | None:
        """Return why a file of a local checkpoint is not used: a symbolic link leads out of its folder; None
        if none does."""
        if not self.storage.is_local:
            return None
        try:
            for stored in checkpoint.files:
                inside(Path(self.storage.path(checkpoint.folder)), stored.file)
        except NameRefused as error:
            return str(error)
        return None

    def _missing(self, checkpoint: Checkpoint) -> str | None:
        sizes = self.storage.sizes(checkpoint.folder)
        for stored in checkpoint.files:
            if stored.file not in sizes:
                return f"{stored.file} is missing"
            if sizes[stored.file] != stored.size:
                return f"{stored.file} has {sizes[stored.file]} bytes of {stored.size}"
        return None

    def put(self, checkpoint: Checkpoint, file: Path, name: str) -> StoredFile:
        """Store one file of a checkpoint that is being written; on a file system it is moved there."""
        size = file.stat().st_size
        return StoredFile(file=name, size=size, sha256=self.storage.put(file, f"{checkpoint.folder}/{name}"))

    def put_part(self, checkpoint: Checkpoint, node: int, files: Iterable[StoredFile]) -> None:
        """Record that all files of a node are stored."""
        text = NodeFiles(files=list(files)).model_dump_json()
        self.storage.write(f"{checkpoint.folder}/part-{node}.json", text.encode())

    def parts(self, checkpoint: Checkpoint, nodes: int) -> list[StoredFile] | None:
        """Return all files of a checkpoint; None until all nodes have recorded theirs."""
        files: list[StoredFile] = []
        for node in range(nodes):
            try:
                files += NodeFiles.parse(self.storage.read(f"{checkpoint.folder}/part-{node}.json")).files
            except FileNotFoundError:
                return None
        return files

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make a checkpoint visible whose files are all stored, and delete what is no longer needed."""
        checkpoint = checkpoint.sealed()
        self.storage.write(f"{checkpoint.folder}/{MANIFEST}", checkpoint.model_dump_json(indent=2).encode())
        self.prune(checkpoint)

    def prune(self, newest: Checkpoint) -> None:
        """Delete all checkpoints but the kept ones, and the incomplete ones of attempts that have ended."""
        complete = [checkpoint for checkpoint in self.checkpoints() if not self._missing(checkpoint)]
        if newest not in complete:
            return
        kept_folders = {checkpoint.folder for checkpoint in kept(complete, self.limit, self.keeps_best)}
        complete_folders = {checkpoint.folder for checkpoint in complete}
        for step, attempt, number in self._folders():
            folder = f"{step}-{attempt}"
            # A later attempt may be writing its folder at this moment. This one writes one checkpoint at a
            # time.
            is_complete, is_ours = (
                folder in complete_folders,
                attempt == self.attempt or self._is_earlier(number),
            )
            if folder not in kept_folders and (is_complete or (step <= newest.step and is_ours)):
                self._remove(folder)

    def _remove(self, folder: str) -> None:
        # The manifest first: if the removal is interrupted, the rest is not a checkpoint.
        self.storage.remove(f"{folder}/{MANIFEST}")
        self.storage.remove(folder)

    def _is_earlier(self, number: str) -> bool:
        return int(number) < int(self.attempt.partition("-")[0])

    def clear(self) -> None:
        """Delete the checkpoints of this attempt and of earlier ones."""
        for step, attempt, number in self._folders():
            if attempt == self.attempt or self._is_earlier(number):
                self._remove(f"{step}-{attempt}")


def kept(checkpoints: list[Checkpoint], limit: int, keeps_best: bool) -> list[Checkpoint]:
    """Return one complete checkpoint of each of the newest `limit` steps, and with `keeps_best` that of the
    lowest loss."""
    by_step = _by_step(checkpoints)
    newest = [by_step[step] for step in sorted(by_step, reverse=True)[:limit]]
    best = by_loss(checkpoints, newest[0])[:1] if keeps_best and newest else []
    return [*newest, *(checkpoint for checkpoint in best if checkpoint not in newest)]


def by_loss(checkpoints: list[Checkpoint], like: Checkpoint) -> list[Checkpoint]:
    """Return a checkpoint of each scored step, the lowest eval_loss first; of equal ones, the later step.

    Those that are not of the run of `like`, and those whose loss is of other held-out samples, are left out.
    """
    scored = [
        checkpoint
        for checkpoint in _by_step(checkpoints).values()
        if checkpoint.eval_loss is not None and math.isfinite(checkpoint.eval_loss)
    ]
    return sorted(
        (checkpoint for checkpoint in scored if _compares(checkpoint, like)),
        key=lambda checkpoint: (checkpoint.eval_loss, -checkpoint.step),
    )


def _compares(checkpoint: Checkpoint, other: Checkpoint) -> bool:
    if not (checkpoint.scored_on and other.scored_on):  # of an earlier release
        return checkpoint.decisions == other.decisions
    same_steps = history_until(checkpoint.step, checkpoint.history) == history_until(
        checkpoint.step, other.history
    )
    return checkpoint.scored_on == other.scored_on and same_steps


def history_until(step: int, history: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the part of a history that the weights after `step` follow from."""
    return [(before, key) for before, key in history if before < step]


def _by_step(checkpoints: list[Checkpoint]) -> dict[int, Checkpoint]:
    return {
        checkpoint.step: checkpoint
        for checkpoint in sorted(checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.attempt))
    }
