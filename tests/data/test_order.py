"""The order of samples: the same whoever computes them, and once through all of them in every epoch."""

import json
import logging

import pytest

from flytune import data
from flytune.data import order as data_order
from flytune.hardware import shape_named
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe, Training
from flytune.training import loop, step_log
from tests.support import ranks
from tests.support.process_kills import kill_once_saved
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

SAME = 1e-5
ROWS, BATCH = 21, 8
# Of seed 42 and ten rows: a run that goes on under another version of anything must find its place again.
FIRST, SECOND = [0, 1, 4, 2, 6, 8, 5, 9, 7, 3], [7, 3, 4, 2, 5, 9, 6, 8, 0, 1]


class Rows:
    """Stands for a stored data set whose rows hold their own numbers."""

    def __init__(self, lengths, packed=False):
        import pyarrow

        self.data = pyarrow.table({"input_ids": [[0] * length for length in lengths]})
        self.column_names = ["input_ids", "labels", *(["seq_lengths"] if packed else [])]

    def __len__(self):
        return self.data.num_rows

    def __getitems__(self, numbers):
        return list(numbers)


def stream(rows, packed=False, **fields):
    fields = {"learning_rate": 1e-4, "global_batch_size": BATCH} | fields
    return data_order.Stream(
        Rows([1] * rows if isinstance(rows, int) else rows, packed), Training.model_validate(fields)
    )


def everything(made):
    return [made[place] for place in range(len(made))]


def test_the_order_never_changes():
    assert data_order.permutation(42, 0, 10).tolist() == FIRST
    assert data_order.permutation(42, 1, 10).tolist() == SECOND
    assert data_order.permutation(43, 0, 10).tolist() not in (FIRST, SECOND)
    assert sorted(data_order.permutation(7, 3, 1000)) == list(range(1000))


def test_every_epoch_holds_every_row_once():
    made = stream(ROWS, num_train_epochs=3)
    rows = everything(made)
    assert len(rows) == made.steps * BATCH == 64
    epochs = [rows[start : start + ROWS] for start in range(0, 63, ROWS)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert rows[63:] == data_order.permutation(42, 3, ROWS)[:1].tolist(), (
        "the last step is filled up from the next epoch"
    )
    assert made.__getitems__([62, 20, 21]) == [rows[62], rows[20], rows[21]], "back over a border"


@pytest.mark.parametrize(
    ("rows", "fields", "steps"),
    [
        (24, {}, 3),
        (25, {}, 4),
        (21, {"num_train_epochs": 3}, 8),
        (80, {"num_train_epochs": 0.1}, 1),
        (240, {"num_train_epochs": 0.7}, 21),
        (3, {"num_train_epochs": 2}, 1),
        (24, {"num_train_epochs": 9, "max_steps": 2}, 2),
    ],
)
def test_steps_follow_from_epochs_and_the_global_batch(rows, fields, steps):
    made = stream(rows, **fields)
    assert (made.steps, len(made)) == (steps, steps * BATCH)
    assert made.epochs_after(steps) == steps * BATCH / rows


@pytest.mark.parametrize(
    ("rows", "left_out", "ends"),
    [(16, (), [2, 4, 6]), (21, (), [3, 6]), (5, (), [1, 2, 3, 4, 5, 6]), (21, (1,), [2, 5])],
)
def test_an_epoch_ends_with_the_step_that_trains_its_last_row(rows, left_out, ends):
    made = stream(rows, num_train_epochs=9)
    made.left_out = left_out
    assert [step for step in range(1, 7) if made.ends_epoch(step)] == ends


def test_a_batch_of_more_than_there_is_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        stream(3)
    assert "training.global_batch_size: 8, but there are 3 samples: a step repeats some" in caplog.text


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 1), (1, 8), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_a_step_trains_the_same_rows_however_it_is_cut(world_size, micro_batch):
    from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
    from torch.utils.data import BatchSampler, SequentialSampler

    made, skipped, accumulation = stream(ROWS, num_train_epochs=3), 5, BATCH // (world_size * micro_batch)
    trained = [[] for _ in range(made.steps)]
    for rank in range(world_size):
        batches = BatchSampler(SequentialSampler(made), micro_batch, drop_last=False)
        share = BatchSamplerShard(batches, world_size, rank)
        for number, places in enumerate(share):
            trained[number // accumulation] += made.__getitems__(places)
        rest = list(SkipBatchSampler(share, skipped * accumulation))
        assert rest == list(share)[skipped * accumulation :]
    rows = everything(made)
    assert [sorted(step) for step in trained] == [
        sorted(rows[at : at + BATCH]) for at in range(0, len(rows), BATCH)
    ]


def test_the_longest_rows_come_first_when_asked_and_the_others_stay():
    lengths = [(7 * row) % 50 + 1 for row in range(ROWS)]
    plain, probing = (
        everything(stream(lengths, num_train_epochs=2)),
        everything(stream(lengths, num_train_epochs=2, probe_longest=True)),
    )
    longest = sorted(range(ROWS), key=lambda row: -lengths[row])[:BATCH]
    assert probing[:BATCH] == longest
    assert sorted(probing[:ROWS]) == list(range(ROWS)), "none twice"
    assert probing[ROWS:] == plain[ROWS:], "the second epoch is what it was"
    moved = [place for place in range(BATCH, ROWS) if plain[place] != probing[place]]
    assert {plain[place] for place in moved} == set(longest) - set(plain[:BATCH])
    assert moved


def test_the_longest_rows_of_few(caplog):
    made = everything(stream([1, 3, 2], probe_longest=True))
    assert made[:3] == [1, 2, 0]


def test_blocks_are_all_as_long_and_keep_their_order():
    lengths = list(range(1, ROWS + 1))
    assert everything(stream(lengths, packed=True, probe_longest=True)) == everything(stream(lengths))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ordering")
    rows = write_pairs(folder / "pairs.jsonl", ROWS)
    write_pairs(folder / "heldout.jsonl", 4)
    recipe = recipe_for(folder, "none", base=tiny_base(folder), rows=rows)
    data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), folder / "dataset")
    return folder


def recipe_for(folder, sharding, base=None, rows=None, **changes):
    usual = {"sharding": sharding, "training.global_batch_size": BATCH, "training.max_steps": None}
    usual |= {
        "training.num_train_epochs": 2,
        "data.contract": "warn",
        "data.heldout_path": str(folder / "heldout.jsonl"),
    }
    usual |= {
        "checkpoints.folder": str(folder / "checkpoints"),
        "hardware.shape": "auto",
        "hardware.accelerator": "cpu",
    }
    recipe = tiny_recipe(base or folder / "tiny", rows or folder / "pairs.jsonl", usual | changes)
    return Recipe.model_validate(recipe)


def plan_for(recipe, world_size, micro_batch):
    shape = shape_named("cpu-1").model_copy(update={"name": f"cpu-{world_size}", "processes": world_size})
    plan = planner.make(recipe, [shape])
    accumulation = BATCH // world_size // micro_batch
    cut = {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}
    return plan.model_copy(update=cut), shape


def fit(recipe, plan, shape, inputs, out, die_at=None):
    """One run, each rank of which writes down what it trains; with `die_at`, all are killed when that step
    was logged."""
    import torch

    torch.set_num_threads(1)
    begin, record, trained = step_log.Recorder.begin, step_log.Recorder.record, []

    def begin_and_watch(self, trainer):
        begin(self, trainer)
        fetch = trainer.get_batch_samples

        def watched(*arguments):
            batches, items = fetch(*arguments)
            rows = [
                row[row != 0].tolist()
                for batch in batches
                for row in batch["input_ids"] * batch["attention_mask"]
            ]
            trained.append(rows)
            (out.parent / f"{out.name}-{trainer.args.process_index}.json").write_text(json.dumps(trained))
            return batches, items

        trainer.get_batch_samples = watched

    def record_and_die(self, step, epoch, logs):
        record(self, step, epoch, logs)
        if step == die_at:
            kill_once_saved(recipe, 2)

    step_log.Recorder.begin, step_log.Recorder.record = begin_and_watch, record_and_die
    return loop.fit(recipe, plan, shape, inputs / "dataset", out)


def trained_rows(out):
    """The rows of each step, of all ranks together."""
    ranks_of_steps = zip(
        *(json.loads(file.read_text()) for file in out.parent.glob(f"{out.name}-*.json")), strict=True
    )
    return [sorted(row for rank in step for row in rank) for step in ranks_of_steps]


def expected_rows(inputs, steps):
    rows = [[token for token in row["input_ids"] if token] for row in data.load(inputs / "dataset", "train")]
    order = [row for epoch in range(3) for row in data_order.permutation(42, epoch, ROWS)]
    return [sorted(rows[row] for row in order[step * BATCH : (step + 1) * BATCH]) for step in range(steps)]


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory):
    """Runs a sharding cut in one way once, when first asked for; its result and folder."""
    done = {}

    def run(cut):
        if cut not in done:
            sharding, world_size, micro_batch = cut.split()
            recipe, out = recipe_for(inputs, sharding), tmp_path_factory.mktemp("undisturbed") / "out"
            cuts = plan_for(recipe, int(world_size), int(micro_batch))
            done[cut] = ranks.run(int(world_size), fit, recipe, *cuts, inputs, out), out
        return done[cut]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["none 1 8", "zero2 2 4", "zero3 2 2", "ddp 2 2", "ddp 4 1", "fsdp 2 1"])
def test_runs_train_the_rows_of_the_order(cut, inputs, undisturbed):
    result, out = undisturbed(cut)
    assert trained_rows(out) == expected_rows(inputs, 6)
    assert [step.epoch for step in result.steps] == pytest.approx(
        [8 / 21 * step for step in range(1, 7)], abs=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "cuts",
    ["ddp 2 2 4 1", "ddp 4 1 2 4", "fsdp 2 1 4 2", pytest.param("fsdp 4 1 2 2", marks=pytest.mark.slow)],
)
def test_a_run_goes_on_at_another_size_with_the_samples_that_are_left(cuts, inputs, undisturbed, tmp_path):
    sharding, *numbers = cuts.split()
    world_size, micro_batch, then_world_size, then_micro_batch = map(int, numbers)
    calm, _ = undisturbed(f"{sharding} {world_size} {micro_batch}")
    saved = {"checkpoints.save_steps": 2, "checkpoints.folder": str(tmp_path / "checkpoints")}
    recipe = recipe_for(inputs, sharding, **saved)
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(
            world_size,
            fit,
            recipe,
            *plan_for(recipe, world_size, micro_batch),
            inputs,
            tmp_path / "killed",
            3,
        )
    # Other hardware is asked for; it is the same run.
    elsewhere = recipe_for(inputs, sharding, **saved, **{"hardware.max_price_per_hour": 1.0})
    plan, shape = plan_for(elsewhere, then_world_size, then_micro_batch)
    resumed = ranks.run(then_world_size, fit, elsewhere, plan, shape, inputs, tmp_path / "resumed")
    assert resumed.resumed_from_step == 2
    assert trained_rows(tmp_path / "resumed") == expected_rows(inputs, 6)[2:]
    assert [step.loss for step in resumed.steps] == pytest.approx(
        [step.loss for step in calm.steps], abs=SAME
    )
    assert resumed.heldout_loss == pytest.approx(calm.heldout_loss, abs=SAME)


def test_zero_says_that_it_goes_on_at_the_same_size_alone(inputs, tmp_path):
    recipe = recipe_for(
        inputs, "zero2", **{"checkpoints.save_steps": 2, "checkpoints.folder": str(tmp_path / "checkpoints")}
    )
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(2, fit, recipe, *plan_for(recipe, 2, 2), inputs, tmp_path / "killed", 3)
    said = (
        "checkpoint of step 2: written by 2 processes, and this run has 4; .* Choose a shape of 2 "
        "processes, or another"
    )
    with pytest.raises(ranks.RankFailed, match=said):
        ranks.run(4, fit, recipe, *plan_for(recipe, 4, 1), inputs, tmp_path / "resumed")
