"""The network of a row decides how fast its nodes talk, and nothing on one node."""

from dataclasses import replace
from typing import get_args

import pytest

from flytune.hardware import accelerator_named, load_shapes, shape_named
from flytune.hardware.shapes import NETWORKS, NetworkName
from flytune.planning import workloads
from flytune.planning.candidates import each
from tests.support.plans import GEOMETRY, recipe_of, workload_of
from training_estimates import model_states
from training_estimates.communication import link_rate

FULL = {"sharding": "fsdp", "method": "full", "training": {"learning_rate": 1e-4, "global_batch_size": 64}}
OVER_TCP = {"network": "tcp", "network_devices": 0}


def test_every_name_has_a_row():
    assert set(NETWORKS) == set(get_args(NetworkName))


@pytest.mark.parametrize("name", ["a100-80gb-8x2", "h100-8x8"])
def test_tcp_is_slower_than_the_fabric_of_the_accelerator(name):
    shape = shape_named(name)
    over_fabric, over_tcp = (
        workload_of(recipe_of(**FULL), shape=row) for row in (shape, shape.model_copy(update=OVER_TCP))
    )
    gpu = accelerator_named(shape.accelerator)
    assert link_rate(over_fabric, gpu) == 0.8e9 * gpu.network_gbs
    assert link_rate(over_tcp, gpu) == 0.8e9 * 12.5
    slow, fast = (workloads.time_of(work, shape, model_states.of(work)) for work in (over_tcp, over_fabric))
    assert slow.communication > fast.communication
    assert slow.tokens_per_second < fast.tokens_per_second


@pytest.mark.parametrize(
    "shape", [row for row in load_shapes() if row.nodes == 1 and row.is_gpu], ids=lambda row: row.name
)
def test_on_one_node_the_network_changes_nothing(shape):
    recipe = recipe_of(
        **(FULL if shape.processes > 1 else {"method": "lora"}),
        model={"name_or_path": "a/b", "dtype": "float32"},
    )
    others = [
        shape.model_copy(update={"network": network, "network_devices": 4})
        for network in ("efa", "infiniband")
    ]
    first, *rest = (
        [(fit.needs, fit.time) for fit in each(recipe, row, GEOMETRY)] for row in (shape, *others)
    )
    assert first
    assert all(found == first for found in rest)


def test_an_accelerator_with_a_slower_network_is_no_faster_over_tcp():
    t4 = accelerator_named("T4")
    work = workload_of(recipe_of(**FULL), shape=shape_named("t4-8x3"))
    assert link_rate(work, t4) == link_rate(replace(work, network_gbs=1e9), t4)
