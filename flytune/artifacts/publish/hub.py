"""Publishing to the Hugging Face Hub: one commit to main for a run, and a tag of the run's own.

from_pretrained("owner/name") gives the newest run, and with revision=TAG exactly that one. One commit, and not the several of
huggingface_hub's upload_folder: whoever loads main meets one whole model or another, never half of each.
"""

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flytune.artifacts.publish import hub_errors
from flytune.evaluation import guards
from flytune.recipe.recipe import Recipe
from flytune.records.contents import CONTENTS, Contents, stored_file
from flytune.records.dataset import Manifest
from flytune.records.metrics import Metrics
from flytune.records.plan import Plan
from flytune.records.training import TrainingResult
from flytune.report import model_card

log = logging.getLogger(__name__)

CARD = "README.md"
MAIN = "main"
ATTEMPTS = 3
"""At a commit: another may have come in between, or the hub was briefly away; what is uploaded is not uploaded again."""
# What the hub's page makes of a new repository, and what people add to one.
_NOBODYS = (".gitattributes", ".gitignore", CARD, "LICENSE", "NOTICE")


def publish(artifact: Path, contents: Contents, address: str, name: str) -> str:
    """Publishes an artifact to a repository as revision `name`, and returns the address of that: hf://owner/name@REVISION.

    A repository that is not there is made, private if the recipe says so; of one that is there, that is never changed. What an
    earlier run has published and this one has not is removed from main; what people have added stays.

    Raises:
        ExportError: there is no token, or it may not write there; the hub cannot be reached; main holds another's model.
    """
    recipe = Recipe.from_yaml(artifact / "recipe.yaml")
    with tempfile.TemporaryDirectory(prefix="flytune-publish-") as made, hub_errors.told(address) as api:
        repository = Repository(api, address, recipe.publish.private)
        if repository.has(name):
            log.info("%s@%s: already published", address, name)
        else:
            files = _files(artifact, contents, recipe, repository, name, Path(made))
            repository.tag(name, repository.commit(files, MAIN, f"{name}\n\nPublished by Flytune"))
    return f"{address}@{name}"


def listed(files: Mapping[str, Path], made: Path) -> dict[str, Path]:
    """`files` and the artifact.json that lists them as they lie in the repository; it is written into the folder `made`."""
    entries = [stored_file(path, name) for name, path in sorted(files.items())]
    Contents(files=entries).write(made / CONTENTS)
    return {**files, CONTENTS: made / CONTENTS}


class Repository:
    """One model repository of the hub; made if it is not there."""

    def __init__(self, api: Any, address: str, private: bool) -> None:
        self.api, self.address, self.name = api, address, hub_errors.repository(address)
        api.create_repo(self.name, private=private, exist_ok=True)

    def has(self, revision: str) -> bool:
        """Whether there is a branch or tag of that name."""
        refs = self.api.list_repo_refs(self.name)
        return any(ref.name == revision for ref in [*refs.branches, *refs.tags])

    def commit(self, files: Mapping[str, Path], branch: str, message: str) -> str:
        """Makes `files` what the head of `branch` holds of ours, in one commit, and returns it; none where that is so already.

        Raises:
            ExportError: main holds what Flytune has not published.
        """
        title, _, description = message.partition("\n\n")
        for attempt in range(1, ATTEMPTS + 1):
            head = self.api.repo_info(self.name, revision=branch)
            operations = self._operations(files, head)
            try:
                arguments = {"commit_description": description, "revision": branch, "parent_commit": head.sha}
                return str(self.api.create_commit(self.name, operations, commit_message=title, **arguments).oid)
            except Exception as error:
                if attempt == ATTEMPTS or not hub_errors.is_passing(error):
                    raise
                log.info("%s: %s; once more", self.address, type(error).__name__)
        raise AssertionError("the last attempt returns or raises")

    def tag(self, name: str, commit: str) -> None:
        """Gives a commit a name that stays."""
        self.api.create_tag(self.name, tag=name, revision=commit, exist_ok=True)

    def branch(self, name: str) -> None:
        """Makes a branch that starts at main's head, unless it is there."""
        self.api.create_branch(self.name, branch=name, exist_ok=True)

    def _operations(self, files: Mapping[str, Path], head: Any) -> list[Any]:
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        there = {sibling.rfilename for sibling in head.siblings}
        ours = self._published(head.sha) if CONTENTS in there else set()
        foreign = sorted(name for name in there - ours if not name.startswith(_NOBODYS))
        if CONTENTS not in there and foreign:
            raise hub_errors.taken(self.address, foreign)
        # All of them: what is equal is left out by create_commit, by its hash.
        added = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(path)) for name, path in sorted(files.items())]
        return [*added, *(CommitOperationDelete(path_in_repo=name) for name in sorted(ours & there - set(files)))]

    def _published(self, commit: str) -> set[str]:
        """What the run before has published, by its artifact.json; an older or newer Flytune's may have other keys beside."""
        with tempfile.TemporaryDirectory(prefix="flytune-publish-") as folder:
            file = Path(self.api.hf_hub_download(self.name, CONTENTS, revision=commit, local_dir=folder))
            contents = json.loads(file.read_text(encoding="utf-8"))
        return {stored["file"] for stored in contents["files"]} | {CONTENTS}


def _files(
    artifact: Path, contents: Contents, recipe: Recipe, repository: Repository, revision: str, made: Path
) -> dict[str, Path]:
    """By their names in the repository: the artifact's, with a card that loads them from there."""
    metrics = Metrics.read(artifact / "metrics.json")
    text = model_card.render(
        recipe,
        Plan.read(artifact / "plan.json"),
        Manifest.read(artifact / "manifest.json"),
        TrainingResult.read(artifact / "training.json"),
        metrics,
        broken=guards.broken(recipe, metrics),
        published=model_card.Published(repository.name, revision, base_license(repository.api, recipe)),
    )
    (made / CARD).write_text(text, encoding="utf-8")
    return listed({**{file.file: artifact / file.file for file in contents.files}, CARD: made / CARD}, made)


def base_license(api: Any, recipe: Recipe) -> dict[str, str]:
    """What the card of a base model on the hub says of its license; empty where that is not known."""
    if not model_card.is_hub_id(recipe.model.name_or_path):
        return {}
    try:
        data = api.model_info(recipe.model.name_or_path, revision=recipe.model.revision).card_data
    except Exception as error:  # noqa: BLE001 (a base that is gone, gated or renamed is no reason not to publish)
        log.warning("%s: its license is not known: %s", recipe.model.name_or_path, type(error).__name__)
        return {}
    found = json.loads(json.dumps(data.to_dict() if data else {}, default=str))
    return {key: found[key] for key in model_card.LICENSE if found.get(key)}
