"""GGUF files of models and adapters, by llama.cpp's converter where it is installed; Flytune does not fetch
it."""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from flytune.adapters import merging
from flytune.artifacts import opening
from flytune.artifacts.opening import Consent
from flytune.errors import ExportError
from flytune.files import new_output
from flytune.records.contents import CONTENTS

CONVERTER = "convert_hf_to_gguf.py"
VARIABLE = "FLYTUNE_GGUF_CONVERTER"
"""Environment variable with the path of the converter."""
_MAGIC = b"GGUF"


def convert(
    artifact: Path,
    out: Path,
    outtype: str = "auto",
    converter: str | None = None,
    consent: Consent = opening.NONE,
) -> None:
    """Write the model of `artifact` to the GGUF file `out`; an adapter is merged into its base first.

    Args:
        artifact: the folder of an artifact, or of a merged model.
        out: a file that does not exist; it is created only when it is complete.
        outtype: type of the weights, which the converter checks.
        converter: the path of convert_hf_to_gguf.py; by default that of VARIABLE, or the one on PATH.
        consent: what the person allows, of code and base.

    Raises:
        ExportError: `out` exists; `artifact` has no model, is not what was written, or asks for code; there
            is no converter, or it fails.
    """
    if out.exists():
        raise ExportError(f"{out}: exists already; give a new file")
    is_adapter = (artifact / "adapter_config.json").is_file()
    if not is_adapter and not (artifact / "config.json").is_file():
        raise ExportError(
            f"{artifact}: no config.json and no adapter_config.json; name the folder of an artifact or "
            "merged model"
        )
    _check(artifact, consent)
    program = _program(artifact, out, outtype, converter, is_adapter)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="flytune-", dir=out.absolute().parent) as scratch:
        model = artifact
        if is_adapter:
            model = Path(scratch) / "merged"
            merging.merge(artifact, model, consent, _merged_dtype(outtype))
        with new_output(out) as temporary:
            _run([*program, *_arguments(model, temporary, outtype)], temporary)


def _check(folder: Path, consent: Consent) -> None:
    """Verify a language model: an artifact, or a merged one. Of other folders nothing is known but their own
    files."""
    if (folder / CONTENTS).is_file():
        opening.require_language_model(opening.open_artifact(folder, consent).recipe, folder)
        return
    if merging.is_merged(folder):
        merging.check_merged(folder, consent)
        merging.require_language_model(folder)
        return
    # The converter itself runs the files that auto_map names.
    opening.check_code(folder, None, consent.trust_remote_code)


def _merged_dtype(outtype: str) -> str:
    """Return the dtype into which an adapter is merged: no file of 32 bits has weights that were rounded to
    16."""
    return "float32" if outtype == "f32" else "auto"


def _arguments(model: Path, out: Path, outtype: str) -> list[str]:
    return [str(model), "--outfile", str(out), "--outtype", outtype]


def _program(artifact: Path, out: Path, outtype: str, converter: str | None, is_adapter: bool) -> list[str]:
    """Return the command of the converter without its arguments."""
    given = converter or os.environ.get(VARIABLE) or shutil.which(CONVERTER)
    if given is None or not Path(given).is_file():
        merged = Path(f"{out.with_suffix('')}-merged") if is_adapter else artifact
        first = ""
        if is_adapter:
            merge = ["flytune", "merge", str(artifact), "--out", str(merged)]
            first = f"{shlex.join([*merge, '--dtype', _merged_dtype(outtype)])} && "
        wanted = shlex.join(["python", CONVERTER, *_arguments(merged, out, outtype)])
        what = f"{given}: no such file" if given else f"no {CONVERTER} on PATH"
        raise ExportError(
            f"{what}; install llama.cpp (with requirements/requirements-convert_hf_to_gguf.txt) and name its "
            f"{CONVERTER} by --converter or {VARIABLE}, or run there: {first}{wanted}"
        )
    return [given] if os.access(given, os.X_OK) else [sys.executable, given]


def _run(command: list[str], out: Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ExportError(f"{command[0]}: cannot be started: {error.strerror or error}") from None
    if done.returncode:
        output = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise ExportError(f"{shlex.join(command)}: exit code {done.returncode}; it said:\n{output}")
    start = b""
    if out.is_file():
        with out.open("rb") as file:
            start = file.read(len(_MAGIC))
    if start != _MAGIC:
        raise ExportError(f"{shlex.join(command)}: it ended without an error, and wrote no GGUF file")
