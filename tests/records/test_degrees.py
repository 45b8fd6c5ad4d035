"""Degrees of parallelism: the arithmetic, and that all who share batches and rows follow the data-parallel
degree."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytune.hardware import load_shapes
from flytune.planning import planner
from flytune.records import Plan
from flytune.sharding import SHARDINGS
from flytune.training.attempt_notes import Notes
from flytune.training.eval_loss import live_loss
from tests.support.plans import GEOMETRY, recipe_of
from training_estimates.degrees import Degrees

WORLDS = st.integers(1, 64)


@given(WORLDS, st.integers(1, 8), st.integers(1, 8))
def test_a_batch_is_of_its_parts(world, micro_batch, accumulation):
    degrees = Degrees(world)
    batch = degrees.batch(micro_batch, accumulation)
    assert degrees.near(batch) == []
    assert degrees.samples(batch) == micro_batch * accumulation
    assert degrees.accumulation(batch, micro_batch) == accumulation


@given(WORLDS, st.integers(1, 500))
def test_the_nearest_batches_can_be_shared(world, batch):
    near = Degrees(world).near(batch)
    assert (near == []) == (batch % world == 0)
    assert all(size > 0 and size % world == 0 and abs(size - batch) < world for size in near)
    assert len(near) == (0 if batch % world == 0 else 2 if batch > world else 1)


@given(WORLDS, st.integers(0, 200))
def test_each_row_is_computed_once_and_the_first_process_has_most(world, rows):
    degrees, every = Degrees(world), list(range(rows))
    shares = [every[degrees.rows(process)] for process in range(world)]
    assert sorted(row for share in shares for row in share) == every
    assert {len(share) for share in shares} <= {len(shares[0]), len(shares[0]) - 1}
    assert shares == [every[degrees.part(process)] for process in range(world)]


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_shardings_degrees_cover_a_shape(name):
    sharding = SHARDINGS[name](recipe_of(sharding=name))
    for shape in load_shapes():
        if sharding.misfit(shape) is None:
            degrees = sharding.degrees(shape)
            assert (degrees.gpus, degrees.nodes) == (shape.world_size, shape.nodes)
            assert degrees.processes * degrees.gpus_per_process == shape.processes


@pytest.fixture
def halved(monkeypatch):
    """Make pairs of processes that train the same samples, as a degree of another kind would."""
    monkeypatch.setattr(Degrees, "data_parallel", property(lambda degrees: max(1, degrees.world // 2)))


PLANNED = {
    "sharding": "fsdp",
    "hardware": {"shape": "a100-80gb-8"},
    "training": {"learning_rate": 1e-4, "global_batch_size": 12},
}


@pytest.mark.usefixtures("halved")
def test_a_plan_divides_its_batch_by_the_data_parallel_degree():
    plan = planner.make(recipe_of(**PLANNED), geometry=GEOMETRY)
    assert plan.world_size == 8
    assert plan.per_device_train_batch_size * plan.gradient_accumulation_steps * 4 == 12
    assert any("3 samples a process" in reason for reason in plan.reasons)
    # A smaller micro batch of an earlier attempt is of the same batch.
    applied = Notes(per_device_train_batch_size=1).applied(plan)
    assert (applied.per_device_train_batch_size, applied.gradient_accumulation_steps) == (1, 3)


def test_a_batch_that_eight_processes_cannot_share_fits_four(halved, monkeypatch):
    assert isinstance(planner.make(recipe_of(**PLANNED), geometry=GEOMETRY), Plan)
    monkeypatch.undo()
    with pytest.raises(Exception, match="12 is not a multiple of its 8 processes; 8 or 16 would be"):
        planner.make(recipe_of(**PLANNED), geometry=GEOMETRY)


def test_gpus_that_share_samples_read_as_many_tokens_in_all(monkeypatch):
    recipe = recipe_of(**PLANNED | {"training": PLANNED["training"] | {"global_batch_size": 16}})
    alone = planner.make(recipe, geometry=GEOMETRY)
    monkeypatch.setattr(Degrees, "data_parallel", property(lambda degrees: degrees.world // 2))
    shared = planner.make(recipe, geometry=GEOMETRY)

    def tokens_of_a_step(plan):
        return plan.tokens_per_second[1] * sum(plan.step_seconds.values())

    assert tokens_of_a_step(shared) == pytest.approx(tokens_of_a_step(alone), rel=1e-6)


def scored(rows, degrees, process):
    seen = []

    class Objective:
        def measure(self, trainer, own):
            import torch

            seen.extend(own)
            return torch.ones(len(own)), torch.ones(len(own))

    trainer = SimpleNamespace(
        args=SimpleNamespace(process_index=process, device="cpu"),
        accelerator=SimpleNamespace(reduce=lambda tensor, reduction: tensor),
    )
    live_loss(trainer, degrees, [{"row": row} for row in range(rows)], Objective())
    return [row["row"] for row in seen]


@pytest.mark.usefixtures("halved")
def test_held_out_rows_are_shared_by_the_data_parallel_degree():
    assert [scored(5, Degrees(4), process) for process in range(4)] == [
        [0, 2, 4],
        [0, 2, 4],
        [1, 3, 0],
        [1, 3, 0],
    ]
    assert Degrees(4).copies == 2


def test_plans_of_earlier_versions_have_degrees():
    plan = planner.make(
        recipe_of(
            **PLANNED
            | {
                "sharding": "ddp",
                "method": "lora",
                "training": {"learning_rate": 1e-4, "global_batch_size": 16},
            }
        ),
        geometry=GEOMETRY,
    )
    assert "degrees" not in plan.model_dump()
    assert Plan.model_validate_json(plan.model_dump_json()).degrees == Degrees(8)


HALVES = [(8, 1, 4), (6, 1, 3), (5, 2, 2), (3, 1, 1), (2, 3, 1), (1, 8, None)]


@pytest.mark.parametrize(("size", "accumulation", "half"), HALVES)
def test_half_of_a_micro_batch_makes_the_same_global_batch(size, accumulation, half):
    plan = Plan.model_construct(per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)
    smaller = plan.halved()
    assert (smaller and smaller.per_device_train_batch_size) == half
    assert (
        smaller is None
        or smaller.per_device_train_batch_size * smaller.gradient_accumulation_steps == size * accumulation
    )
