"""Memory of a process that trains on a CPU: what is freed goes back, and a real run takes what is planned."""

import multiprocessing
import platform
from concurrent.futures import ProcessPoolExecutor

import pytest

from flytune import data
from flytune.hardware import shape_named
from flytune.models import host_memory, loading
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.records.plan import STEP
from flytune.training import loop
from flytune.training.measurements import Peaks
from tests.support import ranks
from tests.support.tiny import tiny_base, tiny_recipe, write_rows
from training_estimates import activations

MIB = 2**20
BLOCKS, BLOCK = 100, 3 * MIB


def free_every_second_tensor():
    """Return the bytes of the process before and after."""
    import torch

    loading.import_libraries()
    # By default glibc's threshold rises to the size of what is freed.
    large = torch.ones(30 * MIB, dtype=torch.uint8)
    del large
    tensors = [torch.ones(BLOCK, dtype=torch.uint8) for _ in range(2 * BLOCKS)]
    before = Peaks().read()[0]
    del tensors[::2]
    return before, Peaks().read()[0]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc than glibc's")
def test_freed_tensors_leave_the_process():
    before, after = ranks.run(1, free_every_second_tensor)
    assert before - after > 0.9 * BLOCKS * BLOCK


@pytest.mark.parametrize(
    ("has_mallopt", "environment", "said"),
    [
        (True, {}, [(-3, host_memory.MAPPED), (-1, host_memory.TRIMMED)]),
        (True, {"MALLOC_ARENA_MAX": "2"}, []),
        (False, {}, []),
    ],
)
def test_only_a_glibc_that_nobody_has_set_is_set(has_mallopt, environment, said, monkeypatch):
    """A stand-in for the C library; musl and macOS have no mallopt."""
    heard = []
    library = type(
        "Library", (), {"mallopt": staticmethod(lambda *option: heard.append(option))} if has_mallopt else {}
    )
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: library)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    host_memory.return_freed_blocks()
    assert heard == said


def wide_base(folder):
    """The tiny model with as large a vocabulary as the loss has in one tile."""
    from transformers import AutoModelForCausalLM

    base = tiny_base(folder)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(activations.LOSS_VOCABULARY)
    model.save_pretrained(base)
    return base


def fit(recipe, folder):
    plan = planner.make(recipe)
    return loop.fit(recipe, plan, shape_named(plan.shape), folder / "dataset", folder / "trained")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sharding"), [("full", "none"), ("lora", "none"), ("qlora", "device_map")]
)
def test_a_run_on_a_cpu_takes_what_is_planned(method, sharding, tmp_path):
    base = wide_base(tmp_path)
    text = " ".join(["Split the path into a pair: head and tail."] * 40)
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": f"{number} {text}"} for number in range(40)])
    changes = {"method": method, "sharding": sharding, "data.max_length": 256}
    changes |= {
        "training.max_steps": 2,
        "training.per_device_train_batch_size": 4,
        "evaluation.max_samples": 2,
    }
    recipe = Recipe.model_validate(tiny_recipe(base, rows, changes))
    data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), tmp_path / "dataset")
    # A fork would begin with the memory of all tests before this one.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        peaks = fresh.submit(fit, recipe, tmp_path).result().peaks
    assert peaks[STEP] < 1.2 * planner.make(recipe).memory.peak_bytes
