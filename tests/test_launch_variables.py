"""Variables of launchers in the environment of a run (in a whole run:
end_to_end/test_from_recipe_to_answers.py)."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flytune import process_setup
from flytune.errors import LaunchError
from flytune.hardware import load_shapes
from flytune.pods import spec
from tests.support.paths import ROOT

KEPT = {
    "NCCL_DEBUG": "WARN",
    "CUDA_VISIBLE_DEVICES": "0",
    "SLURM_NTASKS": "2",
    "ACCELERATE_LOG_LEVEL": "info",
}
READ = re.compile(r"""(?:environ(?:\.get)?[\[(]|_from_env\(|_int_from_env\(\[(?:"\w+", )*)\s*["'](\w+)["']""")
SOURCES = {
    "accelerate": ("state.py", "parallelism_config.py", "accelerator.py"),
    "transformers": ("training_args.py", "distributed/utils.py", "distributed/fsdp.py"),
    "torch": ("distributed/rendezvous.py",),
    "deepspeed": ("comm/comm.py",),
}
OTHERS = {
    "CUDA_VISIBLE_DEVICES",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "USE_LIBUV",
}
OTHERS |= {"PYTORCH_ENABLE_MPS_FALLBACK"}
"""Variables that those files read and that choose none of it."""


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(KEPT))
    return os.environ


def left(environment):
    return {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}


def read_by(library):
    folder = Path(importlib.util.find_spec(library).origin).parent
    text = "".join((folder / name).read_text(encoding="utf-8") for name in SOURCES[library])
    return set(READ.findall(text)) - OTHERS


@pytest.mark.parametrize("library", SOURCES)
def test_what_the_libraries_choose_by_is_left_out_and_named(library, environment, caplog):
    names = read_by(library)
    assert names
    environment |= dict.fromkeys(names, "0")
    process_setup.clear(in_pod=False)
    assert left(environment) == KEPT
    (line,) = caplog.messages
    assert [name for name in names if name not in line] == []


def test_a_pod_keeps_what_the_training_operator_sets(environment, caplog):
    environment |= {"PET_RDZV_ENDPOINT": "host:1", "RANK": "1", "FSDP_VERSION": "1"}
    process_setup.clear(in_pod=True)
    assert left(environment) == KEPT | {"PET_RDZV_ENDPOINT": "host:1"}
    for shape in load_shapes():
        environment |= (own := spec._environment(shape))
        process_setup.clear(in_pod=True)
        assert own.items() <= environment.items()


@pytest.mark.parametrize("name", process_setup._RANKS)
def test_a_command_that_another_launcher_has_started_twice_is_refused(name, environment):
    environment[name] = "1"
    with pytest.raises(
        LaunchError, match=f"^{name}=1: another launcher .* start it once, without the other one"
    ):
        process_setup.clear(in_pod=False)


def test_deepspeed_gets_the_device_of_the_shape(environment, caplog):
    environment["DS_ACCELERATOR"] = "cpu"
    process_setup.use_accelerator("cpu")
    assert (environment["DS_ACCELERATOR"], caplog.messages) == ("cpu", [])
    process_setup.use_accelerator("cuda")
    assert "DS_ACCELERATOR" not in environment
    assert "DS_ACCELERATOR=cpu" in caplog.text


def test_ranks_keep_theirs_and_pyflyte_says_a_refusal_in_a_line():
    code = (
        "import multiprocessing, os; from flytune import process_setup as launch\n"
        "def seen(): launch.clear(in_pod=False); print(os.environ['RANK'], flush=True)\n"
        "os.environ['RANK'] = '1'; child = multiprocessing.get_context('fork').Process(target=seen)\n"
        "child.start(); child.join(); import tasks"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (1, "1\n")
    assert done.stderr.startswith("LaunchError: RANK=1: ")
    assert len(done.stderr.splitlines()) == 1
