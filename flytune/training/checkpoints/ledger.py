"""The ledger of one run's checkpoints: what is stored at an address, what of it is whole, and what may go.

    ADDRESS/STEP-ATTEMPT/...              the files that all nodes wrote
    ADDRESS/STEP-ATTEMPT/part-NODE.json   what one node wrote; once all of it is there
    ADDRESS/STEP-ATTEMPT/manifest.json    all of it; once all parts are there

A folder without a manifest is no checkpoint. Each attempt writes into folders of its own, so that two that are alive at once
cannot harm each other.
"""

import hashlib
import logging
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError

from flytune.records.contents import StoredFile
from flytune.schema import Record
from flytune.storage import Storage

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_FOLDER = re.compile(r"(\d+)-((\d{4,})-[0-9a-f]{6})")


class Part(Record):
    """part-NODE.json."""

    files: list[StoredFile]


class Checkpoint(Record):
    """manifest.json: what a checkpoint holds, and what it is of."""

    step: int
    """Optimizer steps done."""
    attempt: str
    decisions: str
    """Key of the recipe (less hardware) and the data; differs only where checkpoints.name says that it may."""
    sharding: str
    world_size: int
    eval_loss: float | None = None
    """On the held-out samples, if they were scored after this very step."""
    trackers: dict[str, str] = Field(default={})
    """The run's id at each experiment tracker, to go on in the same run."""
    seconds: Annotated[float, Field(exclude_if=lambda seconds: not seconds)] = 0.0
    """Of training so far, all attempts together (flytune.planning.budget)."""
    flytune: str
    """Version that wrote it."""
    files: list[StoredFile] = Field(default=[])

    digest: str = ""
    """Of all that stands above: a bit that flips in here must not be believed."""

    @property
    def folder(self) -> str:
        return f"{self.step}-{self.attempt}"

    def sealed(self) -> Self:
        """The same, with its digest."""
        text = self.model_dump_json(exclude={"digest"})
        return self.model_copy(update={"digest": hashlib.sha256(text.encode()).hexdigest()})


class Ledger:
    """The checkpoints of one run, as one attempt sees them."""

    def __init__(self, storage: Storage, limit: int) -> None:
        self.storage, self.limit = storage, limit
        self.attempt = ""
        """Set by `begin`; until then the ledger is only read."""

    def begin(self, attempt: str | None = None) -> str:
        """Takes part as a new attempt, or as the one given, and returns its id: a number that grows, and six random digits."""
        if attempt is None:
            # Not the time: clocks of nodes differ.
            last = max((int(number) for _, _, number in self._folders()), default=0)
            attempt = f"{last + 1:04d}-{secrets.token_hex(3)}"
        self.attempt = attempt
        return self.attempt

    def _folders(self) -> list[tuple[int, str, str]]:
        """Step, attempt and the attempt's number of all folders, oldest step first."""
        found = (_FOLDER.fullmatch(name) for name in self.storage.names())
        return sorted((int(match[1]), match[2], match[3]) for match in found if match)

    def checkpoints(self) -> list[Checkpoint]:
        """All that have a manifest, newest first."""
        found = [self._read(f"{step}-{attempt}") for step, attempt, _ in reversed(self._folders())]
        return [checkpoint for checkpoint in found if checkpoint]

    def _read(self, folder: str) -> Checkpoint | None:
        try:
            checkpoint = Checkpoint.model_validate_json(self.storage.read(f"{folder}/{MANIFEST}"))
        except FileNotFoundError:
            return None
        except ValidationError as error:
            damage: str = error.errors()[0]["msg"]
        else:
            if checkpoint.folder == folder and checkpoint.sealed() == checkpoint:
                return checkpoint
            damage = "its content is not what was written"
        log.warning("%s/%s/%s is damaged: %s", self.storage.address, folder, MANIFEST, damage)
        return None

    def fault(self, checkpoint: Checkpoint, into: Path | None = None, share: slice = slice(None)) -> str | None:
        """What is missing or damaged; nothing for a whole checkpoint.

        Args:
            into: receives the files.
            share: of the files, those to be read; of the others, the sizes are looked at.
        """
        if reason := self._short(checkpoint):
            return reason
        for stored in checkpoint.files[share]:
            try:
                found = self.storage.get(f"{checkpoint.folder}/{stored.file}", into and into / stored.file)
            except FileNotFoundError:
                return f"{stored.file} is missing"
            if found != stored.sha256:
                return f"{stored.file}: its content is not what was written (sha256 {found[:12]}, not {stored.sha256[:12]})"
        return None

    def link(self, checkpoint: Checkpoint, into: Path) -> None:
        """On a file system: gives all files of a checkpoint names in `into` as well, so that nothing takes them away."""
        for stored in checkpoint.files:
            source, target = Path(self.storage.path(f"{checkpoint.folder}/{stored.file}")), into / stored.file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            if not source.exists():
                return  # as `fault` will say
            try:
                target.hardlink_to(source)
            except OSError:  # a file system without links, or another one; or it has gone this moment
                if source.exists():
                    shutil.copyfile(source, target)

    def _short(self, checkpoint: Checkpoint) -> str | None:
        sizes = self.storage.sizes(checkpoint.folder)
        for stored in checkpoint.files:
            if stored.file not in sizes:
                return f"{stored.file} is missing"
            if sizes[stored.file] != stored.size:
                return f"{stored.file} has {sizes[stored.file]} bytes of {stored.size}"
        return None

    def put(self, checkpoint: Checkpoint, file: Path, name: str) -> StoredFile:
        """Stores one file of a checkpoint that is being written; on a file system it is moved there."""
        size = file.stat().st_size
        return StoredFile(file=name, size=size, sha256=self.storage.put(file, f"{checkpoint.folder}/{name}"))

    def put_part(self, checkpoint: Checkpoint, node: int, files: Iterable[StoredFile]) -> None:
        """Says that all that a node wrote is there."""
        text = Part(files=list(files)).model_dump_json()
        self.storage.write(f"{checkpoint.folder}/part-{node}.json", text.encode())

    def parts(self, checkpoint: Checkpoint, nodes: int) -> list[StoredFile] | None:
        """All files of a checkpoint, once all nodes have said that theirs are there."""
        files: list[StoredFile] = []
        for node in range(nodes):
            try:
                files += Part.model_validate_json(self.storage.read(f"{checkpoint.folder}/part-{node}.json")).files
            except FileNotFoundError:
                return None
        return files

    def commit(self, checkpoint: Checkpoint) -> None:
        """Makes a checkpoint, all files of which are there, visible; then lets go what is no longer needed."""
        checkpoint = checkpoint.sealed()
        self.storage.write(f"{checkpoint.folder}/{MANIFEST}", checkpoint.model_dump_json(indent=2).encode())
        self.prune(checkpoint)

    def prune(self, newest: Checkpoint) -> None:
        """Removes all but the checkpoints that are kept, and what attempts that ended have left half written."""
        whole = [checkpoint for checkpoint in self.checkpoints() if not self._short(checkpoint)]
        if newest not in whole:
            return
        keep = {checkpoint.folder for checkpoint in kept(whole, self.limit)}
        known = {checkpoint.folder for checkpoint in whole}
        for step, attempt, number in self._folders():
            folder = f"{step}-{attempt}"
            # A later attempt may be writing it at this moment; so may we, but never two at a time.
            is_left = folder not in known and step <= newest.step and (attempt == self.attempt or self._is_earlier(number))
            if folder not in keep and (folder in known or is_left):
                self._remove(folder)

    def _remove(self, folder: str) -> None:
        # First what makes it a checkpoint: cut short, the rest is what is left of none.
        self.storage.remove(f"{folder}/{MANIFEST}")
        self.storage.remove(folder)

    def _is_earlier(self, number: str) -> bool:
        return int(number) < int(self.attempt.partition("-")[0])

    def clear(self) -> None:
        """The run is over: removes this attempt's checkpoints and those of earlier ones."""
        for step, attempt, number in self._folders():
            if attempt == self.attempt or self._is_earlier(number):
                self._remove(f"{step}-{attempt}")


def kept(checkpoints: list[Checkpoint], limit: int) -> list[Checkpoint]:
    """Of whole checkpoints: one of each of the newest `limit` steps, and the one of the lowest eval_loss."""
    by_step = {checkpoint.step: checkpoint for checkpoint in sorted(checkpoints, key=lambda one: (one.step, one.attempt))}
    newest = [by_step[step] for step in sorted(by_step, reverse=True)[:limit]]
    scored = [checkpoint for checkpoint in by_step.values() if checkpoint.eval_loss is not None]
    best = min(scored, key=lambda one: (one.eval_loss, -one.step), default=None)
    return newest if best is None or best in newest else [*newest, best]
