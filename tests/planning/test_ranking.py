"""The ranking of all ways, the smallest change that fits, and what the command line shows of them."""

import io
import json
import math

import pytest
from rich.console import Console

from flytune.cli import main
from flytune.errors import DoesNotFit
from flytune.hardware import load_shapes, shape_named
from flytune.planning import candidates, planner, table
from flytune.planning import ranking as planning_ranking
from tests.support.plans import GEOMETRY, LLAMA_8B, SMALL, TRAINING, ranked, recipe_of
from tests.support.recipes import RECIPES
from training_estimates import config_sizes


@pytest.mark.parametrize("by", ["price", "time"])
def test_the_first_is_the_best_of_everything_that_fits(by):
    ranking = ranked(by)
    recipe = recipe_of(training=TRAINING, sharding="fsdp")
    best, looked_at = math.inf, 0
    # Counted anew, without the search: every sharding, offload, checkpointing, shape and micro batch.
    for name, sharding in planning_ranking.SHARDINGS.items():
        for offload in sharding.offloads:
            for checkpointing in (True, False):
                change = {
                    "sharding": {"name": name, "offload": offload},
                    "training": TRAINING | {"activation_checkpointing": checkpointing},
                }
                other = recipe_of(**change)
                if candidates.impossible(other, GEOMETRY):
                    continue
                for shape in candidates.wished(recipe, load_shapes()):
                    fits = candidates.each(other, shape, GEOMETRY)
                    looked_at += 1 if isinstance(fits, str) else len(fits)
                    for fit in fits:
                        if not isinstance(fit, str) and fit.share <= 0.9 and fit.tokens_per_second:
                            best = min(
                                best, fit.price_per_token if by == "price" else 1 / fit.tokens_per_second
                            )
    first = ranking.fits[0]
    assert (first.price_per_token if by == "price" else 1 / first.tokens_per_second) == best
    assert ranking.looked_at == looked_at > 300


def test_what_is_tight_comes_behind_all_that_fits_well():
    tight = [fit.is_tight for fit in ranked().fits]
    assert tight == sorted(tight)


def test_a_ranking_keeps_two_ways_of_a_shape_and_follows_the_wishes():
    ranking = ranked(hardware={"accelerator": "A100-80GB"})
    names = [fit.shape.name for fit in ranking.fits]
    assert set(names) <= {"a100-80gb-1", "a100-80gb-8", "a100-80gb-8x2"}
    assert max(names.count(name) for name in names) == planning_ranking.A_SHAPE
    assert ranking.ways > len(names)


def test_a_shape_whose_speed_is_not_known_comes_last():
    unknown = shape_named("a100-80gb-1").model_copy(
        update={"name": "new", "accelerator": "B300", "price_per_hour": 0.01}
    )
    ranking = planner.rank(
        recipe_of(training=TRAINING), "price", [*load_shapes(), unknown], config_sizes.geometry(SMALL, "a/b")
    )
    assert ranking.fits[-1].shape.name == "new"
    assert ranking.fits[-1].price_per_token == math.inf


def test_what_is_changed_is_said_as_it_is_written():
    recipe = recipe_of(sharding="fsdp")
    training = {"learning_rate": 1e-4, "global_batch_size": 8, "activation_checkpointing": False}
    other = recipe_of(sharding={"name": "zero3", "offload": "cpu"}, training=training)
    assert (
        planning_ranking.changes(recipe, other)
        == "sharding: {name: zero3, offload: cpu}, training.activation_checkpointing: false"
    )
    assert planning_ranking.changes(recipe, recipe) == ""


def test_the_change_that_fits_does_fit_and_lays_out_before_it_changes_what_is_learned():
    llama_70b = config_sizes.geometry(
        LLAMA_8B | {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672}, "a/b"
    )
    shapes = [shape_named("a100-80gb-8")]

    def said(**changes):
        return planning_ranking.change_that_fits(recipe_of(**changes), shapes, llama_70b)

    # 70B in full fit neither on eight GPUs nor in 972 GiB of host memory; on the node's disk they do.
    assert (
        said(sharding="fsdp")
        == "it would fit with sharding: {name: zero3, offload: nvme} (on a100-80gb-8, $27.45 an hour)"
    )
    # On one GPU no layout helps: another method does.
    alone = planning_ranking.change_that_fits(
        recipe_of(sharding="none"), [shape_named("a100-80gb-1")], llama_70b
    )
    assert alone.startswith("it would fit with method: qlora")
    nothing = planning_ranking.change_that_fits(recipe_of(sharding="none"), [shape_named("l4-1")], llama_70b)
    assert (
        nothing
        == "no change of method, optimizer, sharding, length or shape makes it fit; add a larger shape to "
        "shapes.yaml"
    )


def test_samples_that_are_too_long_are_shortened_before_the_method_changes():
    recipe = recipe_of(
        model={"name_or_path": "a/b"},
        sharding="none",
        method="qlora",
        data={"path": "x.jsonl", "max_length": 65536},
    )
    said = planning_ranking.change_that_fits(recipe, [shape_named("l4-1")], GEOMETRY)
    assert said == "it would fit with data.max_length: 8192 (on l4-1, $0.81 an hour)"
    twice = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": 16384})})
    assert isinstance(candidates.best_fit(twice, shape_named("l4-1"), GEOMETRY), str)


LENGTH = {"path": "x.jsonl", "max_length": 2048}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        # No sharding has bitsandbytes' states of 8 bits: without `optim` the whole length fits on eight GPUs.
        (
            {"data": {**LENGTH, "max_length": 8192}, "training": TRAINING | {"optim": "paged_adamw_8bit"}},
            "sharding: fsdp, training.optim: auto (on a100-80gb-8, ",
        ),
        ({"hardware": {"shape": "a100-80gb-1"}}, "training.optim: paged_adamw_8bit (on a100-80gb-1, "),
        (
            {"training": TRAINING | {"optim": "lion_32bit"}, "hardware": {"shape": "a100-80gb-1"}},
            "training.optim: paged_lion_32bit (on a100-80gb-1, ",
        ),
        (
            {
                "data": {**LENGTH, "max_length": 8192},
                "training": TRAINING | {"optim": "adamw_8bit"},
                "hardware": {"shape": "a100-80gb-1"},
            },
            "training.master_dtype: bfloat16 (on a100-80gb-1, ",
        ),
        (
            {
                "training": TRAINING | {"master_dtype": "bfloat16", "optim": "adamw_8bit"},
                "hardware": {"shape": "a10g-1"},
            },
            "hardware.shape: a100-80gb-1 (",
        ),
        ({"hardware": {"accelerator": "L4"}}, "sharding: fsdp, hardware.shape: a10g-8 ("),
        (
            {"method": "lora", "hardware": {"spot": True}, "training": TRAINING | {"global_batch_size": 7}},
            "hardware.shape: l4-1 (",
        ),
        (
            {
                "sharding": "ddp",
                "method": "lora",
                "hardware": {"shape": "h100-8"},
                "training": TRAINING | {"global_batch_size": 20},
            },
            "training.global_batch_size: 16 (on h100-8, ",
        ),
        ({"sharding": "ddp", "hardware": {"shape": "h100-8"}}, "sharding: fsdp (on h100-8, "),
        (
            {
                "method": "lora",
                "data": {**LENGTH, "max_length": 8192},
                "training": TRAINING | {"activation_checkpointing": False},
                "hardware": {"shape": "a10g-1"},
            },
            "training.activation_checkpointing: true",
        ),
    ],
)
def test_the_advice_is_what_is_closest_to_what_was_asked(changes, said):
    recipe = recipe_of(
        **({"method": "full", "sharding": "none", "data": LENGTH, "training": TRAINING} | changes)
    )
    found = planning_ranking.change_that_fits(recipe, load_shapes(), GEOMETRY)
    assert found.startswith(f"it would fit with {said}"), found


def test_an_adapter_is_advised_without_what_only_a_whole_model_has():
    training = TRAINING | {"master_dtype": "bfloat16", "optim": "adamw_8bit"}
    recipe = recipe_of(method="full", sharding="none", data=LENGTH, training=training)
    found = planning_ranking.change_that_fits(recipe, [shape_named("l4-1")], GEOMETRY)
    assert found.startswith("it would fit with method: lora, training.master_dtype: float32 (on l4-1, ")


def test_hours_and_price_follow_from_the_samples():
    hardware = {"shape": "a100-80gb-8"}
    plan = planner.make(
        recipe_of(sharding="fsdp", training=TRAINING, hardware=hardware), geometry=GEOMETRY, samples=64 * 1000
    )
    assert plan.steps == 1000
    assert plan.hours[1] == pytest.approx(1000 * sum(plan.step_seconds.values()) / 3600)
    assert plan.price[1] == pytest.approx(plan.hours[1] * 27.45)
    assert plan.hours[0] < plan.hours[1] < plan.hours[2]
    unknown = planner.make(
        recipe_of(sharding="fsdp", training=TRAINING, hardware=hardware), geometry=GEOMETRY
    )
    assert (unknown.steps, unknown.hours) == (None, [])


def test_the_terminal_shows_the_ranking_and_the_runner_up():
    recipe = recipe_of(training=TRAINING, sharding="fsdp")
    ranking = ranked()
    plans = [planner.plan_of(fit, 6400) for fit in ranking.fits]
    shown = io.StringIO()
    table.show_ranking(recipe, ranking, plans, "price", Console(file=shown, width=160))
    text = shown.getvalue()
    assert f"For the first write hardware.shape: {plans[0].shape}" in text
    assert "On the runner-up among shapes, " in text
    assert f"{ranking.looked_at:,} candidates" in text


def test_the_command_line_ranks(capsys, hub):
    path = str(next(path for path in RECIPES if path.stem == "qwen2.5-7b-full-zero3"))
    assert main(["plan", path, "--shape", "auto", "--samples", "10000", "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["ways"]
    prices = [way["plan"]["price_per_hour"] * way["plan"]["hours"][1] for way in ways]
    assert prices == sorted(prices)
    assert main(["plan", path, "--shape", "auto", "--by", "time"]) == 0
    assert "fastest first" in capsys.readouterr().out
    assert main(["plan", path, "--shape", "l4-1"]) == 1
    assert "l4-1: zero3 partitions over processes, and the shape has one" in capsys.readouterr().err
    assert main(["plan", path, "--samples", "0"]) == 1
    assert "--samples 0: must be 1 to 1e+12" in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_that_fits_is_told_of_the_ranking_too():
    huge = config_sizes.geometry(LLAMA_8B | {"hidden_size": 65536, "num_hidden_layers": 400}, "a/b")
    with pytest.raises(DoesNotFit, match="no shape can hold it"):
        ranked(geometry=huge)


@pytest.mark.parametrize(("length", "tight"), [(2048, False), (5120, True)])
def test_a_tight_plan_is_taken_only_where_none_fits_well(length, tight):
    recipe = recipe_of(
        sharding="ddp", method="lora", data={"path": "x", "max_length": length}, training=TRAINING
    )
    fits = [
        fit
        for fit in candidates.each(recipe, shape_named("a10g-8"), GEOMETRY)
        if isinstance(fit, candidates.Fit)
    ]
    found = candidates.best_fit(recipe, shape_named("a10g-8"), GEOMETRY)
    assert found.is_tight is tight
    larger = [fit for fit in fits if fit.workload.micro_batch > found.workload.micro_batch]
    assert all(fit.share > (1 if tight else 0.9) for fit in larger)


def test_who_asked_for_a_cpu_is_advised_another_row_of_cpus():
    tight = shape_named("cpu-1").model_copy(update={"name": "cpu-tight", "memory_gib": 2})
    shapes, small = [tight, shape_named("cpu-1"), shape_named("t4-1")], config_sizes.geometry(SMALL, "a/b")
    recipe = recipe_of(method="lora", sharding="none", hardware={"shape": "cpu-tight"})
    assert isinstance(candidates.best_fit(recipe, tight, small), str)
    said = planning_ranking.change_that_fits(recipe, shapes, small)
    assert said == "it would fit with hardware.shape: cpu-1 ($0.00 an hour)"
