"""Publishing to the Hugging Face Hub: one commit to main and one tag per run.

from_pretrained("owner/name") loads the newest run, and with revision=TAG a certain one. A run is a single
commit, where huggingface_hub's upload_folder may make several, so that main always has the files of one
model.
"""

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune import json_core, names
from flytune.artifacts.publish import hub_errors
from flytune.errors import ExportError
from flytune.evaluation import guards
from flytune.models.library_errors import named
from flytune.recipe import Recipe
from flytune.records import Contents, Manifest, Metrics, Plan, TrainingResult
from flytune.records.contents import CONTENTS, StoredFile, record, stored_file
from flytune.records.lineage import LINEAGE, Lineage
from flytune.report import model_card
from flytune.storage import Storage

log = logging.getLogger(__name__)

CARD = "README.md"
MAIN = "main"
ATTEMPTS = 3
"""Number of tries to commit: another commit may come first, or the hub may be away; uploaded files are not
sent again."""
# Files that the hub creates in a new repository, or that people add by hand.
_NEUTRAL = (".gitattributes", ".gitignore", CARD, "LICENSE", "NOTICE")


def publish(
    artifact: Path,
    contents: Contents,
    address: str,
    name: str,
    weights: Storage | None,
    beside: Mapping[str, bytes],
) -> str:
    """Publish an artifact to a repository as revision `name`, and return its address,
    hf://owner/name@REVISION.

    Files that the folder `artifact` lacks are read from the storage `weights`, one at a time. Files `beside`
    it are in the same commit.

    A missing repository is created, private if the recipe says so; the visibility of an existing one is never
    changed. Files of an earlier run that this run does not have are removed from main; files that people
    added stay.

    Raises:
        ExportError: there is no token, or it may not write there; the hub cannot be reached; main has
            another's model.
    """
    recipe = Recipe.from_yaml(artifact / "recipe.yaml")
    with (
        tempfile.TemporaryDirectory(prefix="flytune-publish-") as temporary,
        hub_errors.open_api(address) as api,
    ):
        repository = Repository(api, address, recipe.publish.private)
        if repository.has(name):
            log.info("%s@%s: already published", address, name)
        else:
            elsewhere = [file for file in contents.files if not (artifact / file.file).is_file()]
            uploaded = repository.upload(weights, elsewhere, Path(temporary)) if weights else []
            files = _files(artifact, contents, recipe, repository, name, Path(temporary), beside)
            repository.tag(name, repository.commit(files, MAIN, f"{name}\n\nPublished by Flytune", uploaded))
    return f"{address}@{name}"


def with_contents(
    files: Mapping[str, Path], temporary: Path, known: Sequence[StoredFile] = (), identity: str = ""
) -> dict[str, Path]:
    """Return `files` and an artifact.json that lists them by their names in the repository, written into the
    folder `made`.

    `known` are files with known hashes: these are not read, and those that are not in `files` are listed too;
    `identity` is the artifact's.
    """
    hashes = {file.file: file for file in known}
    entries = [hashes.get(name) or stored_file(path, name) for name, path in files.items()]
    entries += [file for name, file in hashes.items() if name not in files]
    Contents(files=sorted(entries, key=lambda entry: entry.file), identity=identity).write(
        temporary / CONTENTS
    )
    return {**files, CONTENTS: temporary / CONTENTS}


class Repository:
    """Model repository of the hub; created if it does not exist."""

    def __init__(self, api: Any, address: str, private: bool) -> None:
        self.api, self.address, self.name = api, address, hub_errors.repository(address)
        api.create_repo(self.name, private=private, exist_ok=True)

    def has(self, revision: str) -> bool:
        """Return whether there is a branch or tag of that name."""
        refs = self.api.list_repo_refs(self.name)
        return any(ref.name == revision for ref in [*refs.branches, *refs.tags])

    def upload(self, weights: Storage, files: Sequence[StoredFile], scratch: Path) -> list[Any]:
        """Upload large files of a storage before a commit, one at a time, and return what the commit needs of
        them.

        The disk holds one of them at a time, in the folder `scratch`.
        """
        from huggingface_hub import CommitOperationAdd

        added = []
        for file in tqdm(files, desc="publishing the weights", unit=" files", delay=2):
            path = scratch / "weights" / file.file
            weights.download(file.file, path)
            addition = CommitOperationAdd(path_in_repo=file.file, path_or_fileobj=str(path))
            self.api.preupload_lfs_files(self.name, [addition])
            if addition.path_or_fileobj:  # too small for the hub's large files: the commit contains it
                addition.path_or_fileobj = path.read_bytes()
            path.unlink()
            added.append(addition)
        return added

    def commit(
        self, files: Mapping[str, Path], branch: str, message: str, uploaded: Sequence[Any] = ()
    ) -> str:
        """Replace our files at the head of `branch` by `files` in one commit, and return it; equal files add
        no commit.

        `uploaded` are files that `upload` has returned.

        Raises:
            ExportError: main has files that Flytune did not publish.
        """
        title, _, description = message.partition("\n\n")
        for attempt in range(1, ATTEMPTS + 1):
            head = self.api.repo_info(self.name, revision=branch)
            operations = self._operations(files, head, uploaded)
            try:
                arguments = {"commit_description": description, "revision": branch, "parent_commit": head.sha}
                return str(
                    self.api.create_commit(self.name, operations, commit_message=title, **arguments).oid
                )
            except Exception as error:
                if attempt == ATTEMPTS or not hub_errors.is_passing(error):
                    raise
                log.info("%s: %s; trying again", self.address, type(error).__name__)
        raise AssertionError("the last attempt returns or raises")

    def tag(self, name: str, commit: str) -> None:
        """Tag a commit."""
        self.api.create_tag(self.name, tag=name, revision=commit, exist_ok=True)

    def branch(self, name: str) -> None:
        """Create a branch from the head of main, unless it exists."""
        self.api.create_branch(self.name, branch=name, exist_ok=True)

    def _operations(self, files: Mapping[str, Path], head: Any, uploaded: Sequence[Any]) -> list[Any]:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        present = {sibling.rfilename for sibling in head.siblings}
        ours = self._published(head.sha) if CONTENTS in present else set()
        foreign = sorted(name for name in present - ours if not name.startswith(_NEUTRAL))
        if CONTENTS not in present and foreign:
            raise hub_errors.foreign_files(self.address, foreign)
        # All files: create_commit skips equal ones, by their hashes.
        added = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path))
            for name, path in sorted(files.items())
        ]
        kept = {*files, *(addition.path_in_repo for addition in uploaded)}
        removed = [CommitOperationDelete(path_in_repo=name) for name in sorted(ours & present - kept)]
        return [*added, *uploaded, *removed]

    def _published(self, commit: str) -> set[str]:
        """Return the files of the previous run, by its artifact.json, whose other keys depend on the version
        of Flytune."""
        with tempfile.TemporaryDirectory(prefix="flytune-publish-") as folder:
            file = Path(self.api.hf_hub_download(self.name, CONTENTS, revision=commit, local_dir=folder))
            try:
                listed = json_core.load_object(file.read_bytes())["files"]
                files = names.check_list([stored["file"] for stored in listed])
            except (ValueError, KeyError, TypeError) as error:
                raise ExportError(
                    f"{self.address}: its {CONTENTS} cannot be read: {error}; nothing was published"
                ) from None
        return {*files, CONTENTS}


def _files(
    artifact: Path,
    contents: Contents,
    recipe: Recipe,
    repository: Repository,
    revision: str,
    temporary: Path,
    beside: Mapping[str, bytes],
) -> dict[str, Path]:
    """Return the artifact's files by their names in the repository, with a card that loads them from
    there."""
    metrics = record(Metrics, artifact / "metrics.json")
    plan = record(Plan, artifact / "plan.json")
    manifest = record(Manifest, artifact / "manifest.json")
    training = record(TrainingResult, artifact / "training.json")
    lineage = record(Lineage, artifact / LINEAGE) if (artifact / LINEAGE).is_file() else None
    published = model_card.Published(repository.name, revision, base_license(repository.api, recipe))
    with named(f"{artifact}: its records do not fit together, so that no card can be written", ExportError):
        text = model_card.render(
            recipe,
            plan,
            manifest,
            training,
            metrics,
            broken=guards.broken(recipe, metrics),
            lineage=lineage,
            published=published,
        )
    (temporary / CARD).write_text(text, encoding="utf-8")
    here = {file.file: artifact / file.file for file in contents.files if (artifact / file.file).is_file()}
    for file, content in beside.items():
        here[file] = temporary / file
        here[file].write_bytes(content)
    known = [file for file in contents.files if file.file != CARD]
    return with_contents({**here, CARD: temporary / CARD}, temporary, known, contents.identity)


def base_license(api: Any, recipe: Recipe) -> dict[str, str]:
    """Return the license keys of the card of a base model on the hub; empty if they are unknown."""
    if not model_card.is_hub_id(recipe.model.name_or_path):
        return {}
    try:
        data = api.model_info(recipe.model.name_or_path, revision=recipe.model.revision).card_data
    except Exception as error:  # noqa: BLE001 (a base that is deleted, gated or renamed must not prevent publishing)
        log.warning("%s: its license is not known: %s", recipe.model.name_or_path, type(error).__name__)
        return {}
    fields = json_core.load_object(json.dumps(data.to_dict() if data else {}, default=str))
    return {key: fields[key] for key in model_card.LICENSE if fields.get(key)}
