"""The JSON of a plan: its schema is the stored one, and plans of all kinds are valid by it."""

import json

import jsonschema
import pytest

from flytune.cli import main
from flytune.hardware import shape_named
from flytune.planning import document, planner, solving
from flytune.planning.calibration import Factor
from tests.support.paths import ROOT
from tests.support.plans import GEOMETRY, TRAINING, recipe_of
from training_estimates.intervals import BANDS

STORED = (ROOT / "docs/plan.schema.json").read_text()
KINDS = [
    ("qlora", "none", "l4-1", None, {}),
    ("full", "fsdp", "h100-8x8", 100_000, {}),
    ("lora", "zero3", "a100-80gb-8", 1_000, {"packing": True}),
    ("qlora", "device_map", "a10g-8", 1_000, {}),
    ("qlora", "none", "l4-1", 0, {"max_length": 512}),
]


def made(method, sharding, shape, samples=None, data=None):
    recipe = recipe_of(
        method=method, sharding=sharding, training=TRAINING, data={"path": "x.jsonl", **(data or {})}
    )
    return planner.make(recipe, [shape_named(shape)], GEOMETRY, samples or None)


@pytest.mark.parametrize(("method", "sharding", "shape", "samples", "data"), KINDS)
def test_a_plan_is_valid_by_the_stored_schema(method, sharding, shape, samples, data):
    plan = made(method, sharding, shape, samples, data)
    content = json.loads(document.as_json(plan))
    jsonschema.validate(content, json.loads(STORED))
    assert content["version"] == 1
    assert content["verdict"] == plan.verdict
    assert sum(content["parts_of_a_billion_tokens"].values()) == pytest.approx(
        content["price_per_billion_tokens"]
    )
    for name in ("allocated_bytes", "reserved_bytes", "tokens_per_second", "step_seconds"):
        one = content["intervals"][name]
        assert 0 < one["low"] <= one["value"] <= one["high"]
        assert one["held_out"] > 0
        assert one["coverage"] >= 0.85
    assert ("price" in content["intervals"]) == bool(samples)


def test_the_schema_is_that_of_the_code_and_refuses_what_is_no_plan(capsys):
    assert main(["schema", "--plan"]) == 0
    assert capsys.readouterr().out == STORED, "run `make schema`"
    content = document.of(made("qlora", "none", "l4-1"))
    for name in ("version", "verdict", "needs", "price"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(
                {key: value for key, value in content.items() if key != name}, json.loads(STORED)
            )
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content | {"version": 2}, json.loads(STORED))
    jsonschema.validate(content | {"new": 1}, json.loads(STORED))


def test_intervals_are_the_estimates_times_the_bands():
    plan = made("lora", "ddp", "a100-80gb-8", 5_000, {"packing": True, "max_length": 4096})
    found, speed, memory = plan.intervals, BANDS["speed, enough tokens"], BANDS["allocated, one shape"]
    assert found["tokens_per_second"].low == pytest.approx(speed.low * plan.tokens_per_second[1])
    assert [found["hours"].low, found["hours"].value, found["hours"].high] == pytest.approx(plan.hours)
    assert [found["price"].low, found["price"].value, found["price"].high] == pytest.approx(plan.price)
    step = found["step_seconds"]
    assert step.value == pytest.approx(sum(plan.step_seconds.values()))
    assert (step.low, step.high) == pytest.approx((step.value / speed.high, step.value / speed.low))
    allocated = found["allocated_bytes"]
    outside = ("CUDA context", "NCCL", "fragmentation", "attention mask")
    most = max(
        sum(size for name, size in plan.memory.phases[phase].items() if name not in outside)
        for phase in plan.memory.phases
    )
    assert allocated.value == pytest.approx(most, rel=1e-6)
    assert allocated.low == pytest.approx(memory.low * allocated.value)
    assert found["reserved_bytes"].high <= plan.memory.available_bytes


def test_a_calibrated_shape_has_the_interval_of_calibrated_runs(monkeypatch):
    before = made("lora", "ddp", "a100-80gb-8", 5_000)
    factor = Factor(name="a100-80gb-8", memory=1.0, speed=1.0, runs=1)
    for module in ("candidates", "workloads", "requirements", "planner"):
        monkeypatch.setattr(f"flytune.planning.{module}.load_factors", lambda: {"a100-80gb-8": factor})
    after = made("lora", "ddp", "a100-80gb-8", 5_000)
    band = BANDS["speed, calibrated"]
    assert after.tokens_per_second[0] == pytest.approx(band.low * after.tokens_per_second[1])
    assert after.intervals["tokens_per_second"].coverage == round(band.coverage, 3)
    assert "after_a_run" in before.intervals
    assert "after_a_run" not in after.intervals


def test_an_answer_has_the_same_document():
    answer = solving.solve(
        recipe_of(method="qlora"), "data.max_length", GEOMETRY, shapes=[shape_named("l4-1")]
    )
    content = json.loads(solving.as_json(answer, planner.plan_of(answer.fit)))
    jsonschema.validate(content["plan"], json.loads(STORED))
