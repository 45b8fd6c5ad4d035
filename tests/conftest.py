"""Every test gets folders of its own, and none reaches a hub."""

import os
import shutil
import tempfile
from pathlib import Path

# Before any library reads them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import multiprocessing.util

import pytest

# Flyte, torchrun and datasets leave folders in the temporary directory: they get one that goes when the tests are over.
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _IS_WORKER:
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="flytune-tests-")
    os.environ["HF_HOME"] = os.path.join(os.environ["TMPDIR"], "huggingface")


def pytest_unconfigure(config):
    if not _IS_WORKER:
        multiprocessing.util._run_finalizers()  # has a folder in there, which it would look for at the very end
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


@pytest.fixture(autouse=True)
def uncalibrated(monkeypatch):
    """Plans as they are told, whatever this machine was calibrated to."""
    from flytune import calibration

    monkeypatch.setattr(calibration, "CALIBRATION_FILE", Path(os.environ["TMPDIR"]) / "no-calibration.yaml")


CONFIGS = Path(__file__).parent / "configs"


@pytest.fixture(scope="session")
def hub_cache(tmp_path_factory):
    """A Hugging Face cache that holds the config.json of each model in tests/configs, at every revision recipes name."""
    from flytune.recipe import Recipe

    cache = tmp_path_factory.mktemp("hub")
    recipes = [Recipe.from_yaml(path) for path in (Path(__file__).parent.parent / "recipes").glob("*.yaml")]
    for model in (recipe.model for recipe in recipes):
        kept = CONFIGS / f"{model.name_or_path.replace('/', '--')}.json"
        if kept.is_file():
            folder = cache / f"models--{model.name_or_path.replace('/', '--')}" / "snapshots" / model.revision
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(kept, folder / "config.json")
    return cache


@pytest.fixture
def hub(hub_cache, monkeypatch):
    """Makes huggingface_hub look into that cache, offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub_cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def bucket(monkeypatch):
    """An S3 bucket on this machine."""
    import boto3
    import s3fs
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for name, value in {**settings, "DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    s3fs.S3FileSystem.clear_instance_cache()
    boto3.client("s3").create_bucket(Bucket="models")
    yield "s3://models"
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()
