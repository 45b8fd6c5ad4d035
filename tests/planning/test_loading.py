"""Tests of the forecast of the time to load a base model."""

import io

import pytest
from rich.console import Console

from flytune.hardware import Cluster, shape_named
from flytune.planning import base_sizes, planner, requirements, table
from flytune.planning.candidates import best_fit
from flytune.recipe import Recipe
from tests.support.paths import ROOT
from tests.support.plans import GEOMETRY, LLAMA_8B, TRAINING, recipe_of
from training_estimates import config_sizes

SIZE = 2.0 * GEOMETRY.parameters
TEAM = {"name": "team", "persistent_volume_claim": "team", "mount_path": "/mnt/team"}


def seconds(shape="h100-8x8", sharding="fsdp", method="lora", name="owner/name", changes=None, **cluster):
    """Return the seconds of each part, and the source."""
    recipe = recipe_of(sharding=sharding, method=method, model={"name_or_path": name}, training=TRAINING)
    row = shape_named(shape)
    fit = best_fit(recipe, row, GEOMETRY)
    made = requirements.loading_forecast(
        fit, row.model_copy(update=changes or {}), fit.workload, Cluster.model_validate(cluster)
    )
    assert made.bytes == SIZE
    return list(made.parts.values()), made.source


def test_a_model_of_the_hub_is_downloaded_by_each_node_and_read_from_its_disk():
    (store, disk), source = seconds(store_read_gbs=2.0, changes={"disk_read_gbs": 4.0})
    assert source == "the cluster's storage"
    assert store == pytest.approx(SIZE / 2e9)
    assert disk == pytest.approx(SIZE / 8 / 4e9), "FSDP reads slices"
    (_, all_of_it), _ = seconds(sharding="ddp", changes={"disk_read_gbs": 4.0})
    assert all_of_it == pytest.approx(SIZE / 4e9)
    (limited, _), _ = seconds(store_read_gbs=100.0, changes={"network": "tcp"})
    assert limited == pytest.approx(SIZE / 12.5e9)
    (_, slow), _ = seconds(sharding="ddp", changes={"nvme": False})
    assert slow == pytest.approx(SIZE / 0.25e9)


@pytest.mark.parametrize(
    ("rates", "sharding", "expected"),
    [
        ({"read_gbs": 2.0}, "fsdp", SIZE / 8 / 2e9),
        ({"read_gbs": 2.0}, "ddp", SIZE / 2e9),
        ({"read_gbs": 2.0, "total_read_gbs": 4.0}, "fsdp", SIZE / 4e9),
        ({"read_gbs": 2.0, "total_read_gbs": 4.0}, "ddp", 8 * SIZE / 4e9),
        ({"read_gbs": 2.0, "total_read_gbs": 40.0}, "fsdp", SIZE / 8 / 2e9),
        ({}, "fsdp", SIZE / (811 / 3000) / 1e9),
    ],
)
def test_a_volume_is_read_at_the_rate_of_a_node_or_of_all(rates, sharding, expected):
    for name, more in (("/mnt/team/llama", {}), ("owner/name", {"model_cache": "/mnt/team/hub"})):
        (taken,), source = seconds(name=name, sharding=sharding, volumes=[TEAM | rates], **more)
        assert source == "volume team"
        assert taken == pytest.approx(expected)


def test_what_is_not_surely_in_the_model_cache_is_downloaded():
    assert (
        seconds(volumes=[TEAM | {"read_only": True}], model_cache="/mnt/team/hub")[1]
        == "the cluster's storage"
    )
    assert (
        seconds(name="s3://b/model", volumes=[TEAM], model_cache="/mnt/team/hub")[1]
        == "the cluster's storage"
    )


def test_the_published_times_of_405b():
    recipe = Recipe.from_yaml(ROOT / "recipes/llama-3.1-405b-full-fsdp-cpu.yaml")
    row = shape_named("h100-8x8")
    fit = best_fit(recipe, row, base_sizes.read_geometry(recipe.model))
    shared = requirements.loading_forecast(
        fit, row, fit.workload, Cluster(volumes=[TEAM], model_cache="/mnt/team/hub")
    )
    assert shared.seconds / 60 == pytest.approx(50, rel=0.01)
    # The published run's first rank reads all from its own disk; here each node reads an eighth.
    _, disk = requirements.loading_forecast(fit, row, fit.workload, Cluster()).parts.values()
    assert 8 * disk / 60 == pytest.approx(3, rel=0.01)


def test_time_and_price_are_shown_with_those_of_the_run():
    recipe = recipe_of(
        method="lora", sharding="fsdp", hardware={"shape": "h100-8"}, training=TRAINING | {"max_steps": 100}
    )
    plan = planner.make(recipe, geometry=GEOMETRY)
    assert plan.loading_price == pytest.approx(plan.loading.seconds / 3600 * 55.04)
    shown = io.StringIO()
    table.show(plan, Console(file=shown, width=400))
    for said in ("forecast of one step", "tokens per second on all GPUs (likely", "; a billion tokens take "):
        assert said in shown.getvalue()
    (line,) = [line for line in shown.getvalue().splitlines() if line.startswith("loading ")]
    assert line.startswith(
        "loading 16.1 GB of weights on a cluster takes 36 seconds and costs $0.55 in each attempt: "
    )
    assert "32 seconds from the cluster's storage (0.5 GB/s a node, assumed)" in line
    total = plan.hours[1] + plan.loading.seconds / 3600
    assert f"with it, the run takes {table._duration(total)}" in line
    model = {"name_or_path": "a/b", "dtype": "float32"}
    on_cpu = recipe_of(
        method="lora", sharding="none", model=model, hardware={"shape": "cpu-1"}, training=TRAINING
    )
    small = config_sizes.geometry(
        LLAMA_8B | {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}, "a/b"
    )
    assert planner.make(on_cpu, geometry=small).loading is None


def test_a_model_on_a_volume_takes_no_scratch_disk(monkeypatch):
    recipe = recipe_of(method="lora", sharding="fsdp", training=TRAINING)
    row = shape_named("h100-8")
    (disk,) = [need for need in best_fit(recipe, row, GEOMETRY).needs if need.resource == "disk"]
    assert disk.phases["load"] == {"base model": SIZE}
    cluster = Cluster(volumes=[TEAM], model_cache="/mnt/team/hub")
    monkeypatch.setattr(requirements, "load_cluster", lambda: cluster)
    (disk,) = [need for need in best_fit(recipe, row, GEOMETRY).needs if need.resource == "disk"]
    assert disk.phases["load"] == {}
