"""Bytes of weights that pass through the pod that stores an artifact: `python -m benchmarks.storing`.

The storage is moto's S3 server on this machine, which counts them. Beside it, the same artifact downloaded
and uploaded.
"""

import argparse
import logging
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from flytekit import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider
from safetensors.numpy import save_file

from flytune.artifacts import build
from flytune.export.folder import MANIFEST, make_manifest
from flytune.stages.orchestrator import Folder
from flytune.stages.stored import local_without, store
from flytune.storage import Storage
from tasks.runtime.orchestrator import FLYTE
from tests.support.reports import metrics
from tests.support.s3 import counted_bucket
from tests.support.stages import plan_for, recipe_for, write_dataset, write_trained
from tests.support.tiny import tiny_base

ADDRESS = "s3://models/raw/trained"


def write_large(folder: Path, files: int, mib: int) -> tuple:
    """Write a trained model whose weights are replaced by files of random numbers; return the inputs of
    build.store."""
    base = tiny_base(folder)
    recipe, dataset = recipe_for(base, "full"), write_dataset(folder / "dataset", base)
    trained = write_trained(folder / "trained", recipe, dataset, steps=1)
    for old in (trained / "model").glob("*.safetensors*"):
        old.unlink()
    for number in range(files):
        numbers = np.random.default_rng(number).random(mib << 17)
        save_file(
            {f"{number}": numbers}, trained / "model" / f"model-{number + 1:05}-of-{files:05}.safetensors"
        )
    make_manifest(recipe, trained / "model", None).write(trained / MANIFEST)
    return recipe, plan_for(recipe), dataset, trained


def main():
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two files of 4 MiB instead of four of 256 MiB")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    files, mib = (2, 4) if parser.parse_args().quick else (4, 256)
    with tempfile.TemporaryDirectory() as name, counted_bucket() as server:
        folder = Path(name)
        recipe, plan, dataset, trained = write_large(folder, files, mib)
        weights = sum(path.stat().st_size for path in trained.rglob("model-*.safetensors"))
        Storage("s3://models").filesystem.put(f"{trained}/", "models/raw/trained/", recursive=True)
        context = FlyteContextManager.current_context()
        access = FileAccessProvider(str(folder / "flyte"), "s3://models/raw/out")
        with FlyteContextManager.with_context(context.with_file_access(access)):
            rows = [("downloaded and uploaded", *measured(server, lambda: all_through(folder / "all")))]
            rows += [
                (
                    "copied by the store",
                    *measured(server, lambda: by_store(recipe, plan, dataset, folder / "few")),
                )
            ]
    print(f"{files} files, {weights / 1e6:.0f} MB of weights")  # noqa: T201
    print("| weights | MB through the pod | seconds |\n|---|---|---|")  # noqa: T201
    for row in rows:
        print("| {} | {:.3f} | {:.1f} |".format(*row))  # noqa: T201


def measured(server, store):
    """Return the megabytes of weights that crossed the network during `store`, and its seconds."""
    server.traffic.clear()
    began = time.perf_counter()
    store()
    return server.bytes_of(".safetensors") / 1e6, time.perf_counter() - began


def all_through(folder: Path) -> None:
    """Download the trained model and upload it."""
    Storage("s3://models").filesystem.get("models/raw/trained", str(folder), recursive=True)
    store(FLYTE, folder)
    shutil.rmtree(folder)


def by_store(recipe, plan, dataset, folder: Path) -> None:
    """Store the artifact as the task does."""
    small, model = local_without(FLYTE, build.WEIGHTS, Folder(ADDRESS, folder / "unused"))
    made = build.store(recipe, plan, dataset, small, metrics(), folder / "artifact", None, model)
    stored = store(FLYTE, made, build.weight_files(made, model), model)
    contents = build.Contents.read(made / build.CONTENTS)
    sizes = Storage(stored.address, "").sizes("")
    assert {file.file: file.size for file in contents.files} == {
        k: v for k, v in sizes.items() if k != build.CONTENTS
    }


if __name__ == "__main__":
    main()
