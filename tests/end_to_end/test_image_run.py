"""Tests of a complete run in the images' stand-ins: project not installed, HOME missing, root read-only."""

import pytest

from flytune import __version__
from flytune.records import TrainingResult
from flytune.training.checkpoints.ledger import Checkpoint
from tests.support.execution import Run
from tests.support.flyteadmin import BUCKET, flyteadmin
from tests.support.image import Image
from tests.support.laptop import checkout, submit
from tests.support.propeller import IMAGES, PodFailed
from tests.support.tiny import cluster_recipe, tiny_base, write_pairs


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    return {
        IMAGES["light"]: Image(folder / "light", "requirements-light.lock"),
        IMAGES["train"]: Image(folder / "train", "requirements.lock"),
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The admin, the variables of its storage, a laptop and a home that know it, and a recipe whose inputs it
    stores."""
    home, inputs = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("inputs")
    base, pairs = tiny_base(inputs), write_pairs(inputs / "pairs.jsonl", 64)
    stored = {
        "model.name_or_path": f"s3://{BUCKET}/inputs/tiny",
        "data.path": f"s3://{BUCKET}/inputs/pairs.jsonl",
    }
    with flyteadmin(home / "flyte") as (admin, storage):
        for file in [*base.iterdir(), pairs]:
            admin.store(f"inputs/{file.relative_to(inputs)}", file.read_bytes())
        laptop = checkout(tmp_path_factory.mktemp("laptop") / "checkout")

        def run(folder, images, **changes):
            asked = cluster_recipe(base, pairs, stored | changes)
            return Run(admin, submit(laptop, home / "flyte", admin, asked), folder / "run", storage, images)

        yield admin, run


def logs(folder):
    """Return the logs of all pods by task and number."""
    return {f"{log.parts[-3]}/{log.parts[-2]}": log.read_text() for log in folder.glob("*/*/log")}


@pytest.mark.slow
def test_a_run_from_recipe_to_artifact(images, cluster, tmp_path):
    """Run pods with the images' read-only code, as after `pyflyte register --copy none`."""
    admin, submitted = cluster
    for image in images.values():
        image.takes_code = False
    run = submitted(
        tmp_path, images, **{"sharding": "zero2", "hardware.shape": "cpu-2", "checkpoints": {"save_steps": 1}}
    )
    trained = admin.fetch(run.until("train")["o0"].scalar.blob.uri, tmp_path / "trained")
    assert TrainingResult.read(trained / "training.json").world_size == 2
    manifests = [
        admin.stored(key) for key in admin.keys("flytune-checkpoints/") if key.endswith("/manifest.json")
    ]
    assert {Checkpoint.model_validate_json(manifest).flytune for manifest in manifests} == {__version__}

    # Run again, like a retry of an attempt that was killed after its last step.
    again = Run(admin, run.name, tmp_path / "again", run.environment, images)
    again.values.update(run.values)
    again.taken.update(run.taken)
    (node,) = [node for node, task in run.taken.items() if task == "train_cpu_2"]
    del again.values[node]
    resumed = admin.fetch(again.until("train")["o0"].scalar.blob.uri, tmp_path / "resumed")
    assert TrainingResult.read(resumed / "training.json").resumed_from_step == 3

    stored = admin.fetch(again.until("store_artifact")["o0"].scalar.blob.uri, tmp_path / "artifact")
    assert (stored / "report.html").is_file()
    said = logs(tmp_path / "run") | logs(tmp_path / "again")
    ran = {task.partition("/")[0] for task in said}
    assert ran >= {"make_plan", "prepare_data", "train_cpu_2", "evaluate_model_cpu_2", "store_artifact"}
    for pod, text in said.items():
        assert text.count("HOME=/home/flytune cannot be written; caches are in ") == 1, pod
        assert "Traceback" not in text, pod
        assert "Unclosed" not in text, pod


@pytest.mark.slow
def test_a_row_with_gpus_fails_on_a_node_without_gpus_before_anything_is_loaded(images, cluster, tmp_path):
    """The check runs with this machine's torch, which has no CUDA or no GPU."""
    import torch

    _, submitted = cluster
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    for image in images.values():
        image.takes_code = False
    run = submitted(tmp_path, images, **{"hardware.shape": "l4-1"})
    with pytest.raises(
        PodFailed, match="shape l4-1: its row promises 1 x L4 with 22.0 GiB and bfloat16, but"
    ) as found:
        run.until("train")
    assert "nothing was loaded" in str(found.value)
    assert "Loading weights" not in logs(tmp_path / "run")["train_l4_1/0"]


@pytest.fixture
def fast_registered(images, cluster, tmp_path):
    """A run whose images have other code than the laptop that has submitted it."""
    _, submitted = cluster
    for image in images.values():
        image.takes_code = True
        for file in ("tasks/train.py", "tasks/plan.py"):
            (image.app / file).write_text("raise RuntimeError('the code of the image')\n")
    return submitted(tmp_path, images, **{"training.max_steps": 2})


@pytest.mark.journey
def test_code_of_fast_registration(fast_registered, tmp_path):
    """The code is unpacked over the image's in /app, and trains."""
    trained = fast_registered.admin.fetch(
        fast_registered.until("train")["o0"].scalar.blob.uri, tmp_path / "trained"
    )
    assert len(TrainingResult.read(trained / "training.json").steps) == 2
    assert not [pod for pod, text in logs(tmp_path / "run").items() if "Unclosed" in text]
