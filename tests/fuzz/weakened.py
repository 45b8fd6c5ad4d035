"""Replacements of protections that are removed: functions of Flytune without a check."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flytune.errors import TrainingError
from flytune.rewards import process as worker_process


def without_shards(manifest: Any) -> Any:
    splits = {name: getattr(manifest, name) for name in ("train", "heldout")}
    return manifest.model_copy(
        update={name: split.model_copy(update={"shards": [], "samples": 0}) for name, split in splits.items()}
    )


def halved(needs: list[Any]) -> list[Any]:
    def half(phases: dict[str, dict[str, float]]) -> Any:
        return {phase: {name: size // 2 for name, size in parts.items()} for phase, parts in phases.items()}

    return [need.model_copy(update={"phases": half(need.phases)}) for need in needs]


def all_labelled(found: Any) -> Any:
    ids, _ = found
    return ids, list(ids)


def shipped_accelerator(old: Any) -> Any:
    from flytune.hardware import accelerators

    rows = accelerators.load_accelerators()
    return lambda name: rows.get(name) or old(name)


def plain_decoder(**kept: Any) -> Callable[[Any], Any]:
    """Return a maker of a JSON decoder with these hooks of Flytune's alone."""

    def make(old: Any) -> Any:
        import json

        names = ("object_pairs_hook", "parse_float", "parse_constant")
        return json.JSONDecoder(**{name: getattr(old, name) for name in names if name not in kept})

    return make


def plain_yaml(name: str) -> Callable[[Any], Any]:
    import yaml

    return lambda old: getattr(yaml.SafeLoader, name)


def without_last(old: Any) -> Any:
    def read(*given: Any, **named: Any) -> Iterator[Any]:
        rows = list(old(*given, **named))
        yield from rows[:-1]

    return read


def unchecked_size(old: Any) -> Any:
    return lambda self, key, default=None, **_: (
        default if self.content.get(key) is None else self.content[key]
    )


def whole_steps(old: Any) -> Any:
    return lambda training, rows: training.max_steps or rows // training.global_batch_size


def doubled(layers: Any) -> Any:
    return [(name, layer, None if delta is None else 2 * delta, size) for name, layer, delta, size in layers]


def rows_of_any_name(old: Any) -> Any:
    from flytune.written_files import load_yaml, validated

    return lambda path, container, field, because="": getattr(
        validated({field: load_yaml(path)}, container, str(path)), field
    )


def all_of_file(old: Any) -> Any:
    return lambda file, largest, path: bytes(file.read())


def larger_file(old: Any) -> Any:
    return lambda header, length, where, size: old(header, length, where, 10**18)


def any_number(old: Any) -> Any:
    return lambda where, grid, changes, most: old(where, grid, changes, 10**9)


def size_alone(old: Any) -> Any:
    def applied(self: Any, plan: Any) -> Any:
        size = self.per_device_train_batch_size or plan.per_device_train_batch_size
        return plan.model_copy(update={"per_device_train_batch_size": size})

    return applied


def undamaged_alone(old: Any) -> Any:
    def stored(address: str) -> Any:
        try:
            return old(address)
        except TrainingError:
            return []

    return stored


def any_place(name: str) -> tuple[str, str]:
    return name.removeprefix("file://"), ""


def never_rolled_back(old: Any) -> Any:
    return lambda decisions: [decision for decision in decisions if decision.outcome == "accepted"]


def unlimited(request: Any, seconds: float, largest: int) -> Any:
    import urllib.request

    from flytune.servers.exchange import HttpAnswer, _EachStatus

    with urllib.request.build_opener(_EachStatus).open(request) as response:
        return HttpAnswer(response.status, response.read() if largest else b"")


def following(request: Any, seconds: float) -> Any:
    import urllib.request

    return urllib.request.urlopen(request, timeout=seconds)


class _Fields(dict[str, Any]):
    """Object of a JSON text, whose fields are attributes too."""

    __getattr__ = dict.__getitem__


def of_any_form(old: Any) -> Any:
    import json

    def read(self: Any, path: str, content: bytes | None, kind: Any) -> Any:
        status, body = self._answer(path, content)
        return json.loads(body, object_hook=_Fields) if status == 200 else old(self, path, content, kind)

    return read


def worker(**changes: str) -> Callable[[Path], Path]:
    """Return what makes a copy of the scripts that compute rewards, in which the lines of LINES have others
    in their place."""

    def copied(worker: Path) -> Path:
        # Not of `worker`, which may be a copy without another protection.
        source = Path(worker_process.__file__).parent
        folder = Path(shutil.copytree(source, Path(tempfile.mkdtemp()) / "rewards"))
        text = (source / worker.name).read_text(encoding="utf-8")
        for name, other in changes.items():
            assert text.count(_LINES[name]) == 1, f"{worker.name} has no line {_LINES[name]!r}"
            text = text.replace(_LINES[name], other)
        (folder / worker.name).write_text(text, encoding="utf-8")
        return folder / worker.name

    return copied


_LINES = {
    "walls": "        walls.put_up()\n    _watch()\n",
    "programs": "    _posixsubprocess.fork_exec = None  # type: ignore[assignment]\n"
    "    sys.addaudithook(hook)",
    "files": "            _close_all_but(*kept)\n",
}
"""Lines of worker.py that protect."""
HOOK_ALONE = "        pass\n    _watch()\n"


def comparing_stand_ins(script: Path) -> Path:
    """Return a copy of the scripts in which objects of an answer say themselves what they are equal to."""
    copy = worker()(script)
    calls = copy.with_name("calls.py")
    line = "    if not is_expected:\n"
    assert line in calls.read_text(encoding="utf-8")
    calls.write_text(calls.read_text(encoding="utf-8").replace(line, "    if True:\n"), encoding="utf-8")
    return copy


def fewer_files(found: Any) -> Any:
    return found._replace(files=found.files[:1], labels=found.labels[:1])


def copy_unchecked(reader: Any, content: bytes, folder: Any, address: str) -> None:
    import json

    folder.mkdir(parents=True, exist_ok=True)
    for load in json.loads(content)["files"]:
        (folder / load["file"]).parent.mkdir(parents=True, exist_ok=True)
        reader.get(load["file"], str(folder / load["file"]))
    (folder / "artifact.json").write_bytes(content)


def copy_listed(artifact: Any, folder: Any) -> None:
    import json
    import shutil

    for load in json.loads((artifact / "export.json").read_bytes())["files"]:
        if not load["file"].startswith("adapter_"):
            shutil.copy(artifact / load["file"], folder / load["file"])
