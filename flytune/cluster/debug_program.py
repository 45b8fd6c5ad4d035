"""Program of a pod to look into: it puts a stage's inputs on disk, writes the command that runs the stage
again, and waits.

python -m flytune.cluster.debug_program SECONDS -- COMMAND OF THE STAGE'S POD
"""

import importlib.util
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flytune.errors import FlytuneError
from flytune.storage import Storage

READY = "ready to be looked into"
"""End of the program's last line before it waits."""
PORT = 8888
"""Port of a notebook in the pod."""
_INPUTS = "--inputs"
_OUTPUTS = {
    "--output-prefix": "outputs",
    "--raw-output-data-prefix": "raw",
    "--checkpoint-path": "checkpoint",
    "--outputs-path": "outputs",
    "--raw-data-path": "raw",
}
"""Options of both Flytes' commands that name a place to write to, with the pod's folder that takes its
place."""
_EARLIER = ("--prev-checkpoint",)
"""Options that name what an earlier attempt has written."""


def main(arguments: list[str]) -> int:
    """Write inputs and script into the temporary directory, say where they are, and wait."""
    seconds, command = float(arguments[0]), arguments[arguments.index("--") + 1 :]
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    folder = Path(tempfile.gettempdir()) / "flytune-debug"
    folder.mkdir(exist_ok=True)
    try:
        _say(f"inputs of the stage: {write_inputs(command, folder / 'inputs')}")
    except (FlytuneError, OSError, ValueError, ImportError) as error:  # the pod is of use without them
        _say(f"inputs of the stage: not read: {type(error).__name__}: {error}")
    script = folder / "again.sh"
    script.write_text(again(command, folder), encoding="utf-8")
    _say(f"run the stage again, with its ranks; its outputs stay in {folder}: sh {script}")
    notebook = next((name for name in ("jupyterlab", "notebook") if importlib.util.find_spec(name)), None)
    if notebook:
        kind = "lab" if notebook == "jupyterlab" else "notebook"
        _say(f"notebook, after the port-forward: jupyter {kind} --no-browser --port {PORT}")
    else:
        _say("notebook: this image has no Jupyter")
    _say(f"process {os.getpid()}: {READY}")
    ended.wait(seconds)
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def again(command: list[str], folder: Path) -> str:
    """Return a script that runs the stage with its inputs, and writes what it makes into a folder of the
    pod."""
    changed = list[str]()
    words = iter(command)
    for word in words:
        option, equals, _ = word.partition("=")
        if option in _EARLIER:
            if not equals:
                next(words, None)
        elif option in _OUTPUTS:
            if not equals:
                next(words, None)
            changed += [option, str(folder / _OUTPUTS[option])]
        else:
            changed.append(word)
    lines = [
        "# Runs the stage of this pod again: a first attempt, whose outputs and checkpoints stay in this "
        "pod.",
        f"cd {shlex.quote(os.getcwd())}",
        f"mkdir -p {' '.join(shlex.quote(str(folder / name)) for name in dict.fromkeys(_OUTPUTS.values()))}",
        "export FLYTE_ATTEMPT_NUMBER=0",
        f"exec {shlex.join(changed)}",
    ]
    return "\n".join(lines) + "\n"


def write_inputs(command: list[str], folder: Path) -> Path:
    """Write each input of the stage into a folder: files and folders as they are, all others as JSON.

    Raises:
        ValueError: the command names no inputs.
    """
    address = _value_of(command, _INPUTS)
    if not address:
        raise ValueError(f"the pod's command has no {_INPUTS}")
    folder.mkdir(exist_ok=True)
    file = folder / "inputs.pb"
    Storage(address, "the inputs of the stage").download("", file)
    for name, literal in _literals(file.read_bytes(), command).items():
        _write(folder, name, literal)
    return folder


def _value_of(command: list[str], option: str) -> str | None:
    for place, word in enumerate(command):
        if word == option and place + 1 < len(command):
            return command[place + 1]
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def _literals(content: bytes, command: list[str]) -> Mapping[str, Any]:
    """Return the literals by their names: Flyte 1's map, or the list of Flyte 2."""
    if any(word.startswith("pyflyte-") for word in command):
        from flyteidl.core import literals_pb2

        return dict(literals_pb2.LiteralMap.FromString(content).literals)
    from flyteidl2.task import common_pb2

    return {literal.name: literal.value for literal in common_pb2.Inputs.FromString(content).literals}


def _write(folder: Path, name: str, literal: Any) -> None:
    from google.protobuf.json_format import MessageToDict

    # Names of inputs are Python's; another name in a changed file must not lead out of the folder.
    path = folder / re.sub(r"\W", "_", name)
    kind = literal.scalar.WhichOneof("value")
    if kind != "blob":
        if kind == "binary" and literal.scalar.binary.tag == "msgpack":  # of dataclasses and models
            import msgpack

            content = msgpack.unpackb(literal.scalar.binary.value)
        else:
            content = MessageToDict(literal)
        text = json.dumps(content, indent=2, ensure_ascii=False, default=repr)
        path.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
        return
    storage = Storage(literal.scalar.blob.uri, f"input {name}")
    is_folder = literal.scalar.blob.metadata.type.dimensionality
    for part in storage.files() if is_folder else [""]:
        target = path / part if part else path
        target.parent.mkdir(parents=True, exist_ok=True)
        storage.download(part, target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
