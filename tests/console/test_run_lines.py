"""Lines of a run's plan, data, checkpoints and results."""

import pytest

from flytune.console import run_lines
from flytune.records import Manifest, SplitCounts
from tests.support.plans import plan_of


def test_the_plan_in_a_line():
    made = plan_of(hardware={"shape": "cpu-1"}).model_copy(
        update={"recipe": "x", "world_size": 2, "steps": 1000, "hours": []}
    )
    line = run_lines.plan_line(made, "lora", "ddp")
    assert line.startswith(
        f"x: plan: lora, sharding ddp, on {made.shape}: {made.global_batch_size} samples a step ("
    )
    assert " accumulated x 2 processes), 1,000 steps; " in line
    assert line.endswith(made.headline)
    timed = made.model_copy(update={"steps": None, "hours": [1.0, 2.0, 3.0], "price_per_hour": 4.0})
    assert run_lines.plan_line(timed, "lora", "ddp").endswith(
        "processes); " + timed.headline + ", about 2 hours and $8.00"
    )


def split(samples, blocks=None):
    return SplitCounts(samples=samples, tokens=9, trained_tokens=9, blocks=blocks, shards=[])


def manifest(**changes):
    counts = dict.fromkeys(["truncated", "dropped_too_long", "dropped_untrained"], 0)
    rest = {"source": "x", "format": "text", "rows": 60, "max_length": 8, "longest": 8, "histogram": []}
    rest |= {"tokenizer_sha256": "0", "content_sha256": "0", "train": split(52), "heldout": split(8)}
    return Manifest.model_validate(counts | rest | changes)


def test_the_data_in_a_line():
    assert run_lines.data_line("x", manifest()) == "x: data: 52 samples to train on, 8 held out, of 60 rows"
    line = run_lines.data_line(
        "x", manifest(train=split(1200, blocks=1), bad=1, duplicates=3, dropped_too_long=2, truncated=4)
    )
    assert line == (
        "x: data: 1,200 samples to train on in 1 packed block, 8 held out, of 60 rows; 1 bad, 3 duplicate, "
        "2 too long and left out, 4 cut off at data.max_length"
    )


@pytest.mark.parametrize(
    ("save_steps", "kept", "said"),
    [
        (
            None,
            2,
            "none, so a run that is ended starts again at step 0 (checkpoints.save_steps: auto writes some)",
        ),
        (1, 1, "every 1 step, the last one is kept, in s3://b/x"),
        (20, 2, "every 20 steps, the last 2 are kept, in s3://b/x"),
        (0.25, 2, "every 0.25 of all steps, the last 2 are kept, in s3://b/x"),
        ("auto", 2, "as often as loses least time, the last 2 are kept, in s3://b/x"),
        ("epoch", 2, "after each epoch, the last 2 are kept, in s3://b/x"),
    ],
)
def test_checkpoints_in_a_line(save_steps, kept, said):
    assert run_lines.checkpoints_line("x", save_steps, kept, "s3://b/x") == f"x: checkpoints: {said}"


def test_results_by_their_addresses():
    assert run_lines.result_lines("x: artifact", "s3://b/x/") == [
        "x: artifact: s3://b/x/",
        "report: s3://b/x/report.html",
    ]
