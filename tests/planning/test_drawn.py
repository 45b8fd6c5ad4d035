"""Plans for prepared data: the longest row decides memory, the order of training the time."""

import dataclasses
import json
import re

import numpy
import pytest

from flytune import data
from flytune.cli import main
from flytune.errors import DataError, RecipeError
from flytune.hardware import shape_named
from flytune.planning import drawn, planner
from flytune.recipe import Training
from flytune.sharding import SHARDINGS
from tests.support.plans import GEOMETRY, recipe_of
from tests.support.stages import write_dataset
from tests.support.tiny import tiny_base


def recipe(length=4096, sharding="none", shape="l4-1", **training):
    training = {"learning_rate": 1e-4, "global_batch_size": 16, **training}
    return recipe_of(
        method="qlora" if sharding in ("none", "ddp") else "lora",
        sharding=sharding,
        training=training,
        data={"path": "x.jsonl", "max_length": length},
        hardware={"shape": shape},
    )


def fit_of(one):
    return planner.fit(one, [shape_named(one.hardware.shape)], GEOMETRY)


@pytest.mark.parametrize(("sharding", "probe"), [("none", True), ("ddp", False), ("fsdp", True)])
def test_micro_batches_are_those_that_training_draws(sharding, probe):
    shape = "l4-1" if sharding == "none" else "a10g-8"
    one = recipe(1024, sharding, shape, global_batch_size=32, num_train_epochs=2, probe_longest=probe)
    fit, sizes = fit_of(one), numpy.random.default_rng(1).integers(5, 900, 101)
    work = fit.workload
    ranks, micro, times = work.degrees.data_parallel, work.micro_batch, work.accumulation
    stream = data.Stream(drawn._Rows(sizes), one.training)
    widest, slow = 0, []
    for step in range(stream.steps):
        # As accelerate's BatchSamplerShard deals consecutive micro batches out.
        rows = [stream.row_at(step * 32 + at) for at in range(32)]
        widths = [max(sizes[row] for row in rows[at : at + micro]) for at in range(0, 32, micro)]
        mine = [widths[rank::ranks] for rank in range(ranks)]
        assert all(len(each) == times for each in mine)
        widest = max(widest, *widths)
        if sharding == "fsdp":
            slow.append(sum(max(each[at] for each in mine) for at in range(times)) / times)
        else:
            slow.append(max(map(sum, mine)) / times)
    found = drawn.padded(sizes, one.training, fit)
    assert found.largest == widest == sizes.max()
    assert found.mean == pytest.approx(numpy.mean(slow))
    assert SHARDINGS[sharding](one).layout.shards_parameters == (sharding == "fsdp")


def test_one_row_at_a_time_is_not_padded():
    fit = fit_of(recipe(1024))
    alone = dataclasses.replace(
        fit, workload=dataclasses.replace(fit.workload, micro_batch=1, accumulation=16)
    )
    sizes = numpy.arange(1, 161)
    training = Training.model_validate(
        {"learning_rate": 1e-4, "global_batch_size": 16, "num_train_epochs": 1}
    )
    assert drawn.padded(sizes, training, alone).mean == pytest.approx(sizes.mean())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    base = tiny_base(tmp_path_factory.mktemp("base"))
    return write_dataset(tmp_path_factory.mktemp("dataset"), base)


def test_memory_is_that_of_the_longest_row_and_hours_those_of_the_order(prepared):
    one = recipe(4096, global_batch_size=8)
    plan = drawn.make(one, GEOMETRY, prepared)
    longest = drawn.lengths(prepared, one).longest
    rows = [len(row) for split in ("train", "heldout") for row in data.load(prepared, split)["input_ids"]]
    assert longest == max(rows) < 400
    short = planner.make(recipe(longest, global_batch_size=8), [shape_named("l4-1")], GEOMETRY, 32)
    assert plan.memory == short.memory
    assert plan.steps == short.steps
    assert plan.key == one.key() != short.key
    # Padded to less than the longest row in most steps.
    assert 0.1 * short.hours[1] < plan.hours[1] <= short.hours[1]
    assert plan.price[1] == pytest.approx(plan.intervals["price"].value)
    assert re.search(r"the longest of 44 rows has \d+ tokens \(data.max_length 4,096\)", plan.reasons[0])


def test_data_of_another_recipe_is_refused(prepared):
    with pytest.raises(DataError, match="more than data.max_length 4; prepare it for this recipe"):
        drawn.lengths(prepared, recipe(4))
    packed = recipe().model_copy(update={"data": recipe().data.model_copy(update={"packing": True})})
    with pytest.raises(RecipeError, match="packed rows all have data.max_length tokens"):
        drawn.lengths(prepared, packed)
    pairs = recipe_of(objective="dpo", method="qlora")
    with pytest.raises(
        RecipeError, match="it was prepared for answers, and the recipe's objective trains pairs"
    ):
        drawn.lengths(prepared, pairs)


def test_the_command_takes_the_folder(prepared, tmp_path, capsys):
    base = {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}
    one = recipe(4096, global_batch_size=8).model_dump(exclude_defaults=True)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(one | {"model": base, "data": {"dataset_name": "a/b", "max_length": 4096}}))
    assert main(["plan", str(path), "--data", str(prepared)]) == 0
    assert "the longest of 44 rows has" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", str(path), "--data", str(prepared), "--solve", "r"]) == 1
    assert "leave out --solve" in capsys.readouterr().err
    assert main(["plan", str(path), "--data", str(tmp_path)]) == 1
    assert "so the preparation never finished" in capsys.readouterr().err
    assert main(["plan", str(path), "--data", str(tmp_path / "none")]) == 1
    assert "none: no such folder; name one with prepared data" in " ".join(capsys.readouterr().err.split())
