"""The shape of the cheapest run, and the sharding that a recipe leaves to the plan, over small tables of
shapes."""

import pytest

from flytune.errors import DoesNotFit, RecipeError
from flytune.hardware import Shape, this_machine
from flytune.planning import choosing, planner, solving
from flytune.recipe import Recipe
from flytune.sharding import SHARDINGS
from tests.support.plans import GEOMETRY, recipe_of

SAMPLES = 64_000
GPU = {"cpu": 8, "memory_gib": 200, "shared_memory_gib": 16, "disk_gib": 500}
L4 = Shape(name="l4", accelerator="L4", processes=1, gpu_memory_gib=22, price_per_hour=1.0, **GPU)
H100 = Shape(name="h100", accelerator="H100", processes=1, gpu_memory_gib=79.6, price_per_hour=3.0, **GPU)
EIGHT = Shape(name="eight", accelerator="H100", processes=8, gpu_memory_gib=79.6, price_per_hour=12.0, **GPU)
CPU = Shape(
    name="cpu",
    accelerator="cpu",
    processes=1,
    cpu=2,
    memory_gib=64,
    shared_memory_gib=1,
    disk_gib=50,
    price_per_hour=1,
)
CPUS = CPU.model_copy(update={"name": "cpus", "processes": 2, "memory_gib": 128, "price_per_hour": 0.5})


def recipe(sharding=None, **hardware):
    changes = {
        "method": "lora",
        "training": {"learning_rate": 1e-4, "global_batch_size": 64},
        "hardware": hardware,
    }
    content = recipe_of(**changes, sharding=sharding or "none").model_dump(exclude_defaults=True)
    if sharding is None:
        del content["sharding"]
    return Recipe.model_validate(content)


def made(recipe, *shapes, samples=SAMPLES):
    return planner.decide(recipe, shapes, GEOMETRY, samples)


def price(shape):
    """Return the price of a run on a named shape: 1,000 steps of 64 samples, each with the seconds of its
    plan."""
    plan = made(recipe("none", shape=shape.name), shape)[1]
    return sum(plan.step_seconds.values()) * 1000 / 3600 * shape.price_per_hour


def test_auto_is_the_cheapest_run_and_not_the_cheapest_hour():
    assert L4.price_per_hour < H100.price_per_hour
    assert price(H100) < price(L4)
    plan = made(recipe("none"), L4, H100)[1]
    assert plan.shape == "h100"
    assert "shape h100: of those that fit, the cheapest run" in plan.reasons
    assert plan.price[1] == pytest.approx(price(H100))
    # Ten times the price an hour: now the slower one is cheaper.
    dear = H100.model_copy(update={"price_per_hour": 30.0})
    assert price(dear) == pytest.approx(10 * price(H100))
    assert price(L4) < price(dear)
    assert made(recipe("none"), L4, dear)[1].shape == "l4"


def test_auto_keeps_the_limits_of_the_run():
    dear = H100.model_copy(update={"price_per_hour": 30.0})
    hours = {shape.name: made(recipe("none", shape=shape.name), shape)[1].hours for shape in (L4, dear)}
    # Between the likely most of the faster one and the least of the slower one.
    assert hours["h100"][2] < hours["l4"][0]
    limit = (hours["h100"][2] + hours["l4"][0]) / 2
    plan = made(recipe("none", max_hours=limit), L4, dear)[1]
    assert plan.shape == "h100"
    assert plan.reasons[0].endswith(f"the cheapest run within hardware.max_hours {limit:g}")
    assert made(recipe("none", max_hours=2 * hours["l4"][2]), L4, dear)[1].shape == "l4"
    plan = made(recipe("none", max_hours=hours["h100"][0] / 2), L4, dear)[1]
    assert plan.shape == "h100"
    assert "none of those that fit keeps hardware.max_hours" in plan.reasons[0]
    plan = made(recipe("none", max_hours=limit), L4, dear, samples=None)[1]
    assert plan.shape == "l4"
    assert "could not be compared, as the number of samples is not known" in plan.reasons[0]


def test_without_a_time_auto_is_the_cheapest_hour_and_says_so():
    unknown = L4.model_copy(
        update={"name": "unknown", "accelerator": "a GPU of one's own", "price_per_hour": 0.1}
    )
    assert made(recipe("none"), unknown, L4)[1].shape == "l4"
    plan = made(recipe(), CPU, CPUS)[1]
    assert plan.shape == "cpus"
    assert plan.reasons[0] == "shape cpus: no speed of those that fit is known, and it costs least an hour"
    # GPUs, if there are any.
    assert made(recipe(), CPU, CPUS, L4)[1].shape == "l4"


def test_one_process_is_not_sharded():
    completed, plan = made(recipe(), L4)
    assert completed.sharding.name == "none"
    assert plan.key == completed.key()
    assert (
        "sharding none, which the recipe leaves to the plan: one process has nothing to share" in plan.reasons
    )
    assert completed == recipe("none")


def test_several_processes_get_the_fastest_sharding_that_fits():
    seconds = {}
    for name, sharding in SHARDINGS.items():
        for offload in sharding.offloads:
            try:
                plan = made(recipe({"name": name, "offload": offload}), EIGHT)[1]
            except (RecipeError, DoesNotFit):
                continue
            if plan.verdict == "fits":
                seconds[name, offload] = sum(plan.step_seconds.values())
    completed, plan = made(recipe(), EIGHT)
    assert (completed.sharding.name, completed.sharding.offload) == min(seconds, key=seconds.get)
    assert any("the fastest by its estimate" in line for line in plan.reasons)
    assert made(recipe(), CPUS)[0].sharding.name == "ddp"
    # 12 dollars for eight are half of the price of each alone.
    assert made(recipe(), H100, EIGHT)[1].shape == "eight"


def test_what_no_sharding_makes_fit_is_refused_with_the_nearest():
    small = L4.model_copy(update={"gpu_memory_gib": 2.0, "memory_gib": 20})
    with pytest.raises(DoesNotFit, match=r"l4: with sharding .* missing: needs"):
        made(recipe(), small)


def test_the_largest_value_is_that_of_the_best_sharding():
    alone = solving.solve(recipe(), "data.max_length", GEOMETRY, shapes=[L4])
    each = []
    for way in choosing.layouts(recipe(), GEOMETRY):
        try:
            each.append(solving.solve(way, "data.max_length", GEOMETRY, shapes=[L4]).value)
        except DoesNotFit:
            continue
    assert alone.value == max(each)


@pytest.mark.parametrize("field", [{"offload": "cpu"}, {"config": {"zero_optimization": {"stage": 2}}}])
def test_auto_takes_no_options_of_a_sharding(field):
    with pytest.raises(
        RecipeError,
        match="with auto the plan chooses the sharding, its offload and replicas; name the sharding too",
    ):
        recipe({"name": "auto"} | field)


def test_a_wish_that_this_machine_does_not_have_is_refused_with_what_it_has(monkeypatch):
    here = CPU.model_copy(update={"name": this_machine.NAME, "price_per_hour": 0.0})
    plan = made(recipe(), here)[1]
    assert plan.reasons[0].startswith(
        "shape this-machine: this machine (2 CPUs, 64 GiB of memory, no GPUs of one kind)"
    )
    with pytest.raises(
        RecipeError, match=r"this machine has 2 CPUs, 64 GiB .*, and not accelerator H100; change hardware"
    ):
        made(recipe(accelerator="H100"), here)
