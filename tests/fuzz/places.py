"""Paths that a recipe names: pipes, devices, endless and enormous files, in each of its fields."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from flytune import data
from flytune.errors import FlytuneError
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe, read_recipe
from tests.fuzz.isolation import OF_FILE, Wrong
from tests.fuzz.kinds import Samples, kind
from tests.fuzz.oracles import refuse_shown

THINGS = (
    "fifo",
    "zero",
    "full",
    "kmsg",
    "memory",
    "socket",
    "sparse",
    "loop",
    "folder",
    "nothing",
    "to-fifo",
    "secret",
)


def make_things(folder: Path, suffix: str) -> None:
    """Write all THINGS into a folder, with this suffix."""
    os.mkfifo(folder / f"fifo{suffix}")
    links = {
        "zero": "/dev/zero",
        "full": "/dev/full",
        "kmsg": "/proc/kmsg",
        "memory": "/proc/self/mem",
        "to-fifo": f"fifo{suffix}",
    }
    for name, target in links.items():
        (folder / f"{name}{suffix}").symlink_to(target)
    (folder / f"loop{suffix}").symlink_to(f"loop{suffix}")
    with socket.socket(socket.AF_UNIX) as one, suppress(OSError):  # the path may be too long for one
        one.bind(str(folder / f"socket{suffix}"))
    with (folder / f"sparse{suffix}").open("wb") as file:
        file.truncate(3 * 10**9)
    (folder / f"folder{suffix}").mkdir()
    (folder / f"nothing{suffix}").touch()
    (folder / f"secret{suffix}").write_text(f'{{"private_key": "{OF_FILE}"}}\n', encoding="utf-8")


_FIELDS = {
    "data.path": ".jsonl",
    "data.heldout_path": ".jsonl",
    "data.chat_template": ".jinja",
    "sharding.config": ".json",
    "method.adapter": "",
    "model.name_or_path": "",
    "evaluation.include_path": "",
    "checkpoints.folder": "",
    "publish.address": "",
}
"""Fields of recipes that name a path, and the suffix that is read there."""
_INSIDE = {
    "data.path": ["rows.jsonl", "rows.parquet"],
    "method.adapter": ["adapter_config.json", "artifact.json", "recipe.yaml", "adapter_model.safetensors"],
    "model.name_or_path": [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
        "artifact.json",
    ],
}
"""Files of folders that are read by their names."""
_draws = st.one_of(
    st.tuples(st.sampled_from(sorted(_FIELDS)), st.just(""), st.sampled_from(THINGS)),
    st.sampled_from(sorted(_INSIDE)).flatmap(
        lambda field: st.tuples(st.just(field), st.sampled_from(_INSIDE[field]), st.sampled_from(THINGS))
    ),
)


@kind("places", lambda samples: _draws)
def check_places(samples: Samples, given: tuple[str, str, str], folder: Path) -> None:
    """A path is not touched while a recipe is validated; then what is not a regular file of a fair size is
    refused in time."""
    field, inside, thing = given
    things = folder / "things"
    things.mkdir()
    make_things(things, _FIELDS[field] if not inside else "")
    named = things / f"{thing}{_FIELDS[field]}"
    if inside:
        named = folder / "named"
        named.mkdir()
        source = samples.base if field == "model.name_or_path" else None
        for file in source.iterdir() if source else ():
            (named / file.name).symlink_to(file)
        (named / inside).unlink(missing_ok=True)
        (named / inside).symlink_to(things / thing)
    changes: dict[str, Any] = {field: str(named)}
    if field == "sharding.config":
        changes = {"sharding": {"name": "zero2", "config": str(named)}, "hardware.shape": "cpu-2"}
    if field == "method.adapter":
        changes = {"method": {"name": "lora", "adapter": str(named)}}
    content = samples.recipe(**changes)
    with nothing_asked(folder):
        Recipe.model_validate(content)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    recipe = read_recipe(folder / "recipe.yaml")
    refused: FlytuneError | None = None
    try:
        planner.make(recipe, samples=20)
    except FlytuneError as error:
        refused = error
    try:
        data.prepare(DataRequest.of(recipe, "x"), folder / "dataset", processes=1)
    except FlytuneError as error:
        refused = error
    refuse_shown(folder=folder, but=("things/", "named/"))
    if refused is not None:
        raise refused


@contextmanager
def nothing_asked(folder: Path | None = None) -> Iterator[None]:
    """Watch what the block does.

    Raises:
        Wrong: it asks a server; or, with a folder, opens or lists something below it, a device or a process's
        file.
    """
    found: list[str] = []
    watching = [True]

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching[0]:
            return
        if event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.connect", "socket.sendto"):
            found.append(f"{event} {arguments!r:.100}")
        if (
            folder is not None
            and event in ("open", "os.listdir", "os.scandir")
            and str(arguments[0]).startswith((str(folder), "/dev/", "/proc/"))
        ):
            found.append(f"{event} of {arguments[0]!s:.200}")

    sys.addaudithook(note)
    try:
        yield
    finally:
        watching[0] = False
    if found:
        raise Wrong(f"what asks nobody and reads no such file does {found[0]}")
