"""Fixtures of all tests, and settings by which each test has its own folders and none contacts a hub."""

import gc
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

# Set before any library reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["DS_ACCELERATOR"] = "cpu"
# Without it, gs:// addresses would wait for the metadata server of a Google machine.
os.environ["NO_GCE_CHECK"] = "true"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing.util

import pytest
from hypothesis import HealthCheck, settings

from tests import numerical
from tests.release import KEPT

# Where ATen is limited to fewer instructions, oneDNN is too: torch's attention in bfloat16 asks oneDNN what
# the CPU has, and then calls kernels that ATen refuses.
for name, value in numerical.CPUS.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), {}).items():
    if name.startswith("ONEDNN_"):
        os.environ.setdefault(name, value)

if os.environ["OMP_NUM_THREADS"] != "1":
    import torch

    # Processes that are forked from one that has used threads of OpenMP wait for ever for them: only they use
    # several.
    torch.set_num_threads(1)

# No verdict depends on the clock or on chance: a drawn example may take as long as the machine needs, and
# each run has the same examples. `make fuzz` draws others.
settings.register_profile(
    "flytune", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("flytune")

# Flyte, torchrun and datasets leave folders in the temporary directory: they get one that is deleted after
# the tests.
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _IS_WORKER:
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="flytune-tests-")
    os.environ["FLYTUNE_OUT"] = os.path.join(os.environ["TMPDIR"], "artifacts")
    os.environ["HF_HOME"] = os.path.join(os.environ["TMPDIR"], "huggingface")


def pytest_unconfigure(config):
    if not _IS_WORKER:
        multiprocessing.util._run_finalizers()  # its folder in there must exist until it has run
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config, items):
    """Mark the cases that run before a release alone; a case of tests/release.py that is not there is an
    error."""
    seen = {}
    for item in items:
        name = item.path.relative_to(Path(__file__).parent).as_posix()
        if name in numerical.FILES:
            item.add_marker("numerical")
        if (kept := KEPT.get(name, {}).get(item.originalname)) is not None:
            case = item.callspec.id if hasattr(item, "callspec") else ""
            seen.setdefault((name, item.originalname), set()).add(case)
            if case not in kept:
                item.add_marker("release")
    missing = [
        f"{name}::{test}[{case}]"
        for (name, test), cases in seen.items()
        for case in KEPT[name][test]
        if case not in cases
    ]
    if missing and not any("::" in arg for arg in config.args):
        raise pytest.UsageError(f"tests/release.py: no such cases: {', '.join(missing)}")
    if seed := os.environ.get(
        "ORDER"
    ):  # make test ORDER=7: files, and the tests of each, in an order drawn from it
        draw = random.Random(seed)
        places = {item.path: draw.random() for item in items}
        items.sort(key=lambda item: (places[item.path], draw.random()))


@pytest.hookimpl(tryfirst=True)  # before fixtures of any scope
def pytest_runtest_setup(item):
    """Give fsspec its own file systems back: Flyte 2's SDK replaces them for the process when a test imports
    it."""
    if (replaced := sys.modules.get("obstore.fsspec")) is not None:
        from fsspec.registry import _registry

        for name in [name for name, kind in _registry.items() if issubclass(kind, replaced.FsspecStore)]:
            del _registry[name]


@pytest.fixture(scope="module", autouse=True)
def frozen():
    """Exclude objects that exist before a test file from garbage collection, which saves half a second a
    collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch):
    """Ignore this machine's calibration, so that plans are the same everywhere."""
    from flytune.planning import calibration

    monkeypatch.setattr(calibration, "CALIBRATION_FILE", Path(os.environ["TMPDIR"]) / "no-calibration.yaml")


@pytest.fixture(scope="session")
def hub_cache(tmp_path_factory):
    """A Hugging Face cache with the config.json of each hub model that shipped recipes name."""
    from flytune.models import config_json

    cache = tmp_path_factory.mktemp("hub")
    for name, entry in config_json.shipped().items():
        if entry["revision"]:
            folder = cache / f"models--{name.replace('/', '--')}" / "snapshots" / entry["revision"]
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(entry["config"]))
    return cache


@pytest.fixture
def hub(hub_cache, monkeypatch):
    """Make huggingface_hub use that cache, offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub_cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    """A folder with a tiny base model, 64 rows and their prepared data, in which tests may only write
    checkpoints."""
    from tests.support import objective_runs
    from tests.support.tiny import write_pairs

    folder = objective_runs.prepare(tmp_path_factory.mktemp("inputs"), "sft", write_pairs)
    before = sorted(folder.rglob("*"))
    _INPUTS.append(folder)
    yield folder
    assert sorted(folder.rglob("*")) == before, "a test has changed the inputs of others"


_INPUTS = []


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A tiny base model, which no test may change."""
    from tests.support.tiny import tiny_base

    return tiny_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def dataset(base, tmp_path_factory):
    """Data that is prepared for it, which no test may change."""
    from tests.support.stages import write_dataset

    return write_dataset(tmp_path_factory.mktemp("dataset"), base)


@pytest.fixture(scope="module", autouse=True)
def no_checkpoints():
    """Delete the checkpoints in the inputs after each file of tests."""
    yield
    for folder in _INPUTS:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)


@pytest.fixture
def untrained(monkeypatch):
    """Mark this process as one that has not trained, so that evaluation loads models in it and not in
    subprocesses."""
    from flytune.models import clean_process

    for name, value in {"has_trained": False, "pool": None}.items():
        monkeypatch.setattr(clean_process._State, name, value)


@pytest.fixture
def bucket():
    """An S3 bucket on this machine."""
    from tests.support.s3 import counted_bucket

    with counted_bucket():
        yield "s3://models"


@pytest.fixture(scope="module")
def laptop(tmp_path_factory):
    """A checkout in which `pyflyte run --remote` is called."""
    from tests.support.laptop import checkout

    return checkout(tmp_path_factory.mktemp("laptop") / "checkout")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The mock flyteadmin, the variables of its storage, and a home with its configuration."""
    from tests.support.flyteadmin import flyteadmin

    home = tmp_path_factory.mktemp("home")
    with flyteadmin(home) as (admin, storage):
        yield admin, storage, home
