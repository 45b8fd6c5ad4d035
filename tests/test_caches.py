"""Caches of libraries in pods and on laptops, and a HOME that cannot be written (in images:
end_to_end/test_image_run.py)."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flytune import caches, cli
from flytune.errors import FlytuneError
from tests.support.paths import ROOT
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

NOWHERE = "/dev/null/home"
"""A HOME that root cannot make either."""
TELL = (
    "import tempfile; print(tempfile.gettempdir())\n"
    "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)\n"
    "import datasets; print(datasets.config.HF_DATASETS_CACHE)\n"
    "import matplotlib; print(matplotlib.get_cachedir(), matplotlib.get_configdir(), sep=chr(10))\n"
    "import torch; print(torch.hub.get_dir())\n"
    "from torch.utils.cpp_extension import _get_build_directory as built; print(built('x', False))\n"
    "from torch._inductor.runtime import cache_dir_utils as c; print(c.cache_dir(), c.triton_cache_dir(0), "
    "sep=chr(10))\n"
    "from pathlib import Path; print(Path.home())\n"
)


def ran(code, folder, **variables):
    """Return the lines printed by code in a process with few variables, and its log."""
    own = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(folder),
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=own | variables,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("home", [NOWHERE, ""], ids=["unwritable", "writable"])
def test_in_a_pod_each_library_has_its_cache_on_the_scratch_disk(home, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "scratch").mkdir()
    pod = {"HOME": home or str(tmp_path / "home"), "FLYTE_INTERNAL_EXECUTION_ID": "e"}
    (scratch, *found, at_home), logged = ran("import tasks\n" + TELL, tmp_path / "scratch", **pod)
    assert [path for path in found if not path.startswith(f"{scratch}/caches/")] == []
    assert at_home == (f"{scratch}/caches/home" if home else pod["HOME"])
    assert logged.count(f"caches are in {scratch}/caches") == 1
    assert (f"HOME={NOWHERE} cannot be written" in logged) == bool(home)
    assert not list((tmp_path / "home").iterdir())


def test_what_is_set_stays_and_a_rank_has_its_parent_s(tmp_path, monkeypatch, caplog):
    for name in [*caches._COMPILED, *caches._MODELS]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert caches.set_up(in_pod=True)
    assert os.environ["HF_HOME"] == "/models"
    assert Path(os.environ["TRITON_HOME"]).is_dir()
    caches.set_up(in_pod=True)
    assert len(caplog.messages) == 1


def test_a_laptop_keeps_its_caches_where_they_are(tmp_path):
    (tmp_path / "home").mkdir()
    found, logged = ran("import tasks, os; print(*sorted(os.environ))", tmp_path, HOME=str(tmp_path / "home"))
    assert not set(found) & {*caches._COMPILED, *caches._MODELS}
    assert logged == ""


@pytest.mark.parametrize(("before", "after"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_that_wait_leave_their_cores_to_others(before, after, tmp_path):
    (found,), _ = ran(
        "import tasks, os; print(os.environ['OMP_WAIT_POLICY'])", tmp_path, HOME=str(tmp_path), **before
    )
    assert found == after


@pytest.mark.slow
def test_a_laptop_without_a_home_runs_and_says_what_it_lacks(tmp_path):
    code = "import tasks, os, deepspeed; print(*sorted(os.environ))"
    found, logged = ran(code, tmp_path, HOME=NOWHERE)
    assert set(found) >= set(caches._COMPILED)
    assert "HF_HOME" not in found, "a temporary folder is not a place for models"
    assert f"HOME={NOWHERE} cannot be written; caches are in {tmp_path}/flytune-caches-" in logged


@pytest.mark.slow
@pytest.mark.parametrize("home", [NOWHERE, "home"], ids=["no home", "a home"])
def test_a_cached_task_runs_on_a_laptop_and_its_cache_is_closed(home, tmp_path):
    base, rows = tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 16)
    code = (
        "from flytune.recipe.recipe import DataRequest, Recipe; from tasks.prepare import prepare_data\n"
        f"recipe = Recipe.model_validate({tiny_recipe(base, rows)!r})\n"
        "request = DataRequest(model=recipe.model, data=recipe.data, fingerprint='x')\n"
        f"print(prepare_data(request=request, scratch_folder={str(tmp_path / 'keep')!r}).path)"
    )
    (tmp_path / "home").mkdir()
    (folder,), _ = ran(code, tmp_path, HOME=home if home == NOWHERE else str(tmp_path / home))
    assert folder
    # An open database has a journal beside it.
    cache = tmp_path / "home" / ".flyte" / "local-cache"
    assert sorted(path.name for path in cache.glob("cache.db*")) == ([] if home == NOWHERE else ["cache.db"])


def test_a_folder_for_models_that_cannot_be_made_is_our_error(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{NOWHERE}/hub")
    with pytest.raises(
        FlytuneError, match=f"^{NOWHERE}/hub/artifacts: cannot be written: Not a directory; set HF_HOME"
    ):
        caches.hub_folder("artifacts")


def test_the_command_line_says_so_in_one_line(monkeypatch, capsys, tmp_path):
    def refused(options):
        raise PermissionError(13, "Permission denied", str(where))

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cli.main(["schema"]) == 0
    command = SimpleNamespace(run=refused, add_arguments=lambda parser: parser.add_argument("recipe"))
    monkeypatch.setattr(cli, "import_module", lambda name: command)
    where = tmp_path / "home" / ".cache" / "huggingface"
    assert cli.main(["plan", "recipe.yaml"]) == 1
    assert capsys.readouterr().err.startswith(
        f"FlytuneError: {where}: cannot be written: Permission denied; set HF_HOME"
    )
    where = tmp_path / "another"
    assert cli.main(["plan", "recipe.yaml"]) == 1
    assert capsys.readouterr().err.startswith(
        f"RecipeError: {where}: Permission denied; name a path that can be read"
    )
