"""Command lines: their arguments, what they write, and the streams that they are given."""

import contextlib
import io
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from flytune import cli
from flytune.errors import RecipeError
from flytune.recipe import Recipe
from tests.fuzz.isolation import OF_ENVIRONMENT, Wrong
from tests.fuzz.kinds import RELEASE, Samples, kind
from tests.fuzz.mutations import SECRETS
from tests.fuzz.oracles import refuse_shown
from tests.fuzz.places import THINGS, make_things
from tests.support.paths import ROOT

_PLACES = [
    "new",
    "new/deep/page",
    "recipe.yaml",
    "full",
    "empty",
    "file",
    "link",
    "dangling",
    "file/x",
    "",
    "/dev/null",
    "x" * 300,
    "a/" * 2400,
    "\udcff",
    "own.html",
    ".",
    "..",
    "s3://b/x",
    "full/keep.txt",
    "fifo.yaml",
    f"new-{OF_ENVIRONMENT}",
    SECRETS[0],
]
_NUMBERS = ["0", "-1", "1", "3", str(10**12 + 1), str(10**400), "1e400", "nan", "", "x", "inf"]
_SOURCES = [
    "recipe.yaml",
    "full",
    "empty",
    "file",
    "nowhere",
    "",
    "/dev/zero",
    "BASE",
    "foo://x",
    "hf://x",
    "x" * 5000,
    "dangling",
    f"nowhere/{OF_ENVIRONMENT}",
    *(f"{name}.yaml" for name in THINGS),
    *SECRETS[:6],
]
_place, _number, _source = map(st.sampled_from, (_PLACES, _NUMBERS, _SOURCES))


def _line(*parts: Any) -> st.SearchStrategy[list[str]]:
    """Draw the arguments of a command: texts are themselves."""
    return st.tuples(*(st.just(part) if isinstance(part, str) else part for part in parts)).map(list)


_commands = st.one_of(
    _line("xray", _source, "--out", _place, "--rows", _number),
    _line("xray", "recipe.yaml", _place.map("--out={}".format)),
    _line("plan", _source, "--samples", _number),
    _line("plan", "recipe.yaml", "--shape", _source),
    _line(st.sampled_from(["merge", "gguf", "reproduce"]), _source, _place.map("--out={}".format)),
    _line("fetch", _source, _place),
    _line("combine", _place, _source, _source, "--weights", _number, _number),
    _line(
        "combine",
        _place,
        _source,
        _source,
        st.sampled_from(["--rank", "--density", "--seed", "--how"]),
        _number,
    ),
    _line(st.sampled_from(["calibrate", "adapters", "accepted", "doctor"]), _source),
    _line("accepted", _source, "--rollback", "--reason", st.sampled_from(["[/x]", "\x1b[31m", ""])),
    _line(
        "selftest", "--pairs", st.sampled_from(["full/x", ",,", "x" * 5000]), _place.map("--keep={}".format)
    ),
    st.lists(
        st.sampled_from(["plan", "--json", "xray", "--", "-h", "schema", "\x00", "--out", "x"]), max_size=4
    ),
)


@kind("command", lambda samples: _commands)
def check_command(samples: Samples, given: list[str], folder: Path) -> None:
    """A command ends with 0 to 3 and words, without a traceback, and replaces no file."""
    recipe = Recipe.model_validate(samples.recipe())
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    for name in ("full", "empty"):
        (folder / name).mkdir()
    (folder / "full" / "keep.txt").write_text("keep", encoding="utf-8")
    (folder / "file").write_text("keep", encoding="utf-8")
    (folder / "own.html").write_text("", encoding="utf-8")
    (folder / "link").symlink_to(folder / "file")
    (folder / "dangling").symlink_to(folder / "nowhere-at-all")
    make_things(folder, ".yaml")
    kept = {name: (folder / name).read_bytes() for name in ("recipe.yaml", "file", "full/keep.txt")}
    os.chdir(folder)
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            code = cli.main([str(samples.base) if one == "BASE" else one for one in given])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    if code or not any(OF_ENVIRONMENT in one for one in given):  # the path that was asked for is told
        refuse_shown(out.getvalue(), said.getvalue())
    if changed := [name for name, content in kept.items() if (folder / name).read_bytes() != content]:
        raise Wrong(f"replaced {changed[0]}")
    if (
        code not in (0, 1, 2, 3)
        or "Traceback (most" in said.getvalue()
        or (code and not (said.getvalue() + out.getvalue()).strip())
    ):
        raise Wrong(f"exit code {code}: {said.getvalue()[-1500:]}")
    if code:
        raise RecipeError(f"exit code {code}: {said.getvalue()[-300:]}")


_LINES = [
    "plan RECIPE",
    "plan --json RECIPE",
    "plan nowhere.yaml",
    "schema",
    "adapters STORE",
    "adapters --json STORE",
    "-h",
    "accepted --json STORE",
    "plan --shape auto --json RECIPE",
    "doctor -h",
    "plan",
]
_STREAMS = {
    "full": ">/dev/full",
    "closed": ">&-",
    "closed, stderr too": ">&- 2>&-",
    "full, stderr too": ">/dev/full 2>/dev/full",
    "input closed": "<&-",
    "reader gone": "",
    "folder gone": "",
}


_stream_draws = st.tuples(st.sampled_from(_LINES), st.sampled_from(sorted(_STREAMS)), st.booleans())
"""Line, streams, and whether Python writes each text at once."""


@kind("streams", lambda samples: _stream_draws, share=0.1)
def check_streams(samples: Samples, given: tuple[str, str, bool], folder: Path) -> None:
    """A command whose output is full, closed or read by nobody ends with words, and not with 0 if words were
    lost."""
    line, streams, at_once = given
    (folder / "recipe.yaml").write_text(Recipe.model_validate(samples.recipe()).to_yaml(), encoding="utf-8")
    names = {"RECIPE": str(folder / "recipe.yaml"), "STORE": str(RELEASE)}
    command = [sys.executable, "-m", "flytune.cli", *(names.get(word, word) for word in line.split())]
    text = f"exec {shlex.join(command)} {_STREAMS[streams]}"
    gone = Path(tempfile.mkdtemp(dir=folder))
    if streams == "folder gone":
        text = f"rmdir {gone}; {text}"
    told, writing = os.pipe()
    if streams == "reader gone":
        os.close(told)
    with tempfile.TemporaryFile() as said:
        done = subprocess.Popen(
            ["bash", "-c", text],
            cwd=gone,
            stdout=writing,
            stderr=said,
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1" if at_once else ""},
        )
        os.close(writing)
        out = b"" if streams == "reader gone" else Path(f"/proc/self/fd/{told}").read_bytes()
        code = done.wait()
        said.seek(0)
        error = said.read().decode(errors="replace")
    is_lost = streams.startswith(("full", "closed"))
    if "Traceback" in error or "Exception ignored" in error or code not in (0, 1, 2, 3):
        raise Wrong(f"exit code {code}: {error[-1000:]}")
    is_told = bool(error.strip()) or "stderr" in streams or streams == "reader gone"
    if (is_lost and code == 0) or (code and not is_told and not out):
        raise Wrong(f"exit code {code}, {len(out)} bytes of output, said: {error[-300:]!r}")
    if code:
        raise RecipeError(f"exit code {code}: {error[-300:]}")
