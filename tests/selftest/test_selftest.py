"""The proof of equality over every pair that a CPU can run, and that it can fail."""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from flytune.cli import main
from flytune.errors import ExportError, RecipeError, TrainingError
from flytune.hardware import load_shapes
from flytune.recipe import Recipe
from flytune.selftest import Matrix, Trials, matrix, table, tiny_model
from flytune.selftest import processes as selftest_processes
from flytune.selftest import shapes as selftest_shapes
from flytune.selftest.matrix import Cell, Distance
from flytune.selftest.runs import OBJECTIVE_ROWS, STEPS, FinishedRun, Pair
from flytune.sharding import SHARDINGS, pair_problem
from tests.support import ranks
from tests.support.paths import ROOT
from tests.support.stages import training_result
from training_estimates.degrees import Degrees

# One of each family: `make selftest` runs all.
COMPARED = {
    ("full", "none"),
    ("full", "ddp"),
    ("lora", "none"),
    ("lora", "zero2"),
    ("lora", "zero3"),
    ("lora", "fsdp"),
    ("qlora", "ddp"),
}
OFFERED = [
    pair
    for pair in [*matrix.all_pairs(), *matrix.FURTHER]
    if (pair.rows not in OBJECTIVE_ROWS or (pair.method, pair.sharding) in COMPARED)
    and pair.method not in SHARDINGS[pair.sharding].refuses
    and pair.offload in SHARDINGS[pair.sharding].offloads
    and not (pair.rows == "grpo" and pair.sharding == "zero3")
    # The student draws its answers beside its teacher under these alone.
    and not (pair.rows == "on-policy" and (pair.sharding not in ("none", "ddp") or pair.method == "qlora"))
]


@pytest.fixture(scope="session")
def trials(tmp_path_factory):
    """One for each worker; plain training of a method runs once in it."""
    return Trials(tmp_path_factory.mktemp("selftest") / "trials")


@pytest.mark.slow
@pytest.mark.parametrize("pair", OFFERED, ids=str)
def test_every_pair_computes_what_plain_training_does(pair, trials):
    cell = matrix.try_pair(trials, pair)
    if cell.state == "lacking":
        pytest.skip(f"{cell.words}: {cell.reason}")
    assert cell.state == "equal", cell.reason
    assert len(cell.distances) >= (1 if pair.offload != "none" else 2)
    assert not [distance.exceeded for distance in cell.distances if distance.exceeded]


def test_every_combination_is_a_cell():
    pairs = matrix.all_pairs()
    dense = 3 * (3 + len(OBJECTIVE_ROWS)) * len(SHARDINGS) + len(matrix.PACKED) + len(matrix.DIVIDED)
    others = len(matrix.GROUPED) + len(matrix.IMAGES) + len(matrix.EXPERTS)
    assert len(pairs) == len(set(pairs)) == dense + others
    further = [str(pair) for pair in matrix.FURTHER]
    assert matrix.pairs_named(",".join(further)) == matrix.FURTHER
    assert not {*further} & {str(pair) for pair in pairs}


def test_an_objective_is_refused_where_its_reference_is_not_built(trials):
    cell = matrix.try_pair(trials, Pair("full", "zero3", rows="kto"))
    assert (cell.state, cell.words) == ("refused", "refused")
    assert (
        "objective: kto with method full and sharding zero3: each process would hold a second model"
        in cell.reason
    )


@pytest.mark.slow
def test_answers_are_drawn_once_and_trained_under_every_sharding(trials):
    pairs = [Pair("full", "none", rows="grpo"), Pair("full", "ddp", rows="grpo")]
    trials.reference(pairs[0])
    (ledger,) = trials.folder.glob("checkpoints/selftest-full-grpo/rollouts")
    recorded = {file.name: file.stat().st_mtime_ns for file in ledger.iterdir()}
    assert len(recorded) == STEPS
    for pair in pairs:
        assert matrix.try_pair(trials, pair).state == "equal"
    assert {file.name: file.stat().st_mtime_ns for file in ledger.iterdir()} == recorded
    steps = trials.reference(pairs[0]).result.steps
    assert all(step.grad_norm > 0.1 for step in steps), "the rewards of each prompt differ"


def choices(trials, exported=None):
    """Return the experts of each token of the training data in each layer, and the least distance to another
    expert."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from flytune import data

    model = AutoModelForCausalLM.from_pretrained(trials.base("experts"), dtype=torch.float32)
    model = PeftModel.from_pretrained(model, exported) if exported else model
    rows = [row["input_ids"] for row in data.load(trials.folder / "chats", "train")]
    with torch.no_grad():
        found = [
            model(input_ids=torch.tensor([row]), output_router_logits=True).router_logits for row in rows
        ]
    logits = torch.stack([torch.cat(layer) for layer in zip(*found, strict=True)])
    top = logits.topk(3)
    nearest = float((top.values[..., 1] - top.values[..., 2]).min())
    return rows, top.indices[..., :2].sort(-1).values.tolist(), nearest


def test_processes_use_other_experts_and_no_choice_is_a_close_one(trials):
    rows, layers, nearest = ranks.run(1, choices, trials)
    named = [sorted(tiny_model.experts_of(token)) for row in rows for token in row]
    assert layers == [named] * 2
    assert nearest > 1
    reached = [{expert for token in row for expert in tiny_model.experts_of(token)} for row in rows]
    everyone = set(range(tiny_model.EXPERTS))
    assert all(len(one) > 4 for one in reached)
    assert sum(one != everyone for one in reached) > 5, "a process with one row has experts without a token"


def one_expert_of_one_process_stays(real, trainer):
    factor = next(one for name, one in trainer.model.named_parameters() if "1.mlp.experts.lora_B" in name)

    def without_one(gradient):
        gradient = gradient.clone()
        gradient.view(len(gradient), -1, tiny_model.EXPERTS)[:, :, 3] = 0
        return gradient

    if trainer.args.process_index == 1:
        factor.register_hook(without_one)
    return real(trainer)


@pytest.mark.slow
def test_a_gradient_that_one_expert_of_one_process_lacks_is_found(trials, monkeypatch):
    plain = trials.reference(Pair("lora", "none", model="experts"))
    assert ranks.run(1, choices, trials, plain.exported)[2] > 1, "nor is it one after training"
    broken(monkeypatch, "check", one_expert_of_one_process_stays)
    cell = matrix.try_pair(trials, Pair("lora", "ddp", model="experts"))
    assert cell.state == "differs"
    assert re.search(r"4x1x2: .*weights .\..e-0[123]", cell.reason), cell.reason


def test_layouts_cut_one_global_batch(trials):
    assert trials.global_batch_size == 8
    pair = Pair("full", "none")
    for processes, expected in ((1, ["8x1x1", "2x4x1", "1x8x1"]), (2, ["4x1x2", "2x2x2", "1x4x2"])):
        assert [str(layout) for layout in trials.layouts(pair, Degrees(processes))] == expected
    packed = trials.layouts(pair._replace(rows="packed"), Degrees(2))
    assert {layout.degrees.batch(layout.micro_batch, layout.accumulation) for layout in packed} == {
        trials.blocks
    }
    assert trials.blocks < 8


def test_the_run_is_one_that_shows_mistakes(trials):
    from flytune import data

    result = trials.reference(Pair("full", "none")).result
    assert [step.learning_rate for step in result.steps][:3] == [0.0, 5e-4, 1e-3], "warm-up"
    assert all(
        step.grad_norm > trials.recipe(Pair("full", "none")).training.max_grad_norm for step in result.steps
    ), "clipped"
    assert result.steps[-1].epoch > 1.0
    assert len(result.steps) == STEPS
    trained = [
        sum(label != -100 for label in row["labels"]) for row in data.load(trials.folder / "chats", "train")
    ]
    lengths = {len(row["labels"]) for row in data.load(trials.folder / "chats", "train")}
    assert max(trained) > 10 * min(trained)
    assert len(lengths) > 10


def broken(monkeypatch, method, change, sharding="ddp"):
    """Makes a sharding do something else at the start of training: ranks are forks, so they do it too."""
    real = getattr(SHARDINGS[sharding], method)
    monkeypatch.setattr(
        SHARDINGS[sharding], method, lambda bound, *given: change(partial(real, bound), *given)
    )


def no_token_average(real, shape):
    return real(shape) | {"average_tokens_across_devices": False}


def no_weight_decay(real, trainer):
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.0
    return real(trainer)


def one_rank_fails(real, trainer):
    if trainer.args.process_index == 1:
        raise ValueError("this rank is tired")
    return real(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        (
            "arguments",
            no_token_average,
            r"full/ddp differs from plain training of full; 4x1x2: loss .*e-0[23], grad_norm",
        ),
        (
            "check",
            no_weight_decay,
            r"full/ddp differs from plain training of full; 4x1x2: .*weights .\..e-03",
        ),
    ],
)
def test_a_sharding_that_computes_something_else_differs(method, change, said, trials, monkeypatch):
    trials.reference(Pair("full", "none"))
    broken(monkeypatch, method, change)
    cell = matrix.try_pair(trials, Pair("full", "ddp"))
    assert (cell.state, cell.words) == ("differs", "DIFFERS")
    assert re.search(said, cell.reason), cell.reason


def groups_add_up_no_gradients(real, device_type):
    return real(device_type)["shards"]


@pytest.mark.slow
def test_groups_that_train_apart_differ(trials, monkeypatch):
    pair = Pair("lora", "fsdp", parallel="2x2")
    trials.reference(pair)
    broken(monkeypatch, "_mesh", groups_add_up_no_gradients, "fsdp")
    cell = matrix.try_pair(trials, pair)
    assert (cell.state, cell.words) == ("differs", "DIFFERS")
    assert re.search(r"2x1x4: .*weights .\..e-0[12]", cell.reason), cell.reason


def test_the_command_fails_and_shows_the_traceback_of_the_rank_that_failed_first(monkeypatch, capsys):
    broken(monkeypatch, "check", one_rank_fails)
    assert main(["selftest", "--pairs", "full/ddp"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED" in shown
    assert "full/ddp at 4x1x2:" in shown
    assert "ValueError: this rank is tired" in shown


@pytest.mark.journey
def test_the_command_fills_a_matrix(capsys, tmp_path):
    pairs = "full/none,full/ddp/cpu,lora/device_map"
    assert main(["selftest", "--pairs", pairs, "--json", "--keep", str(tmp_path / "kept")]) == 0
    filled = Matrix.model_validate_json(capsys.readouterr().out)
    assert [cell.state for cell in filled.cells] == ["equal", "refused", "refused"]
    assert filled.cells[1].reason == pair_problem(Recipe.model_validate(minimal(Pair("full", "ddp", "cpu"))))
    assert (tmp_path / "kept" / "runs" / "full-none-1x8x1" / "model" / "model.safetensors").is_file()
    assert main(["selftest", "--keep", str(tmp_path / "kept")]) == 1
    assert "kept: exists already" in capsys.readouterr().err.replace("\n", "")


def minimal(pair):
    training = {"learning_rate": 1e-3, "global_batch_size": 8}
    recipe = {"name": "r", "model": {"name_or_path": "a"}, "data": {"path": "b"}, "training": training}
    sharding = {"name": pair.sharding, "offload": pair.offload, "replicas": pair.replicas}
    return recipe | {"method": pair.method, "sharding": sharding}


def test_a_pair_that_is_none_is_refused(capsys):
    with pytest.raises(
        RecipeError,
        match=r"pairs: full/zero9: no such pair; write method/sharding .* with a sharding of none, ddp",
    ):
        matrix.pairs_named("full/zero2,full/zero9")
    assert main(["selftest", "--pairs", "full"]) == 1
    assert "pairs: full: no such pair" in capsys.readouterr().err
    assert matrix.pairs_named("") == matrix.all_pairs()


def shapes(accelerator, processes, nvme=False):
    row = next(shape for shape in load_shapes() if shape.name == "cpu-1").model_copy(
        update={"accelerator": accelerator, "processes": processes, "nvme": nvme, "gpu_memory_gib": 80.0}
    )
    return [row, row.model_copy(update={"processes": 1})]


IN_GROUPS = Pair("full", "fsdp", parallel="2x2")


@pytest.mark.parametrize(
    ("pair", "here", "words"),
    [
        (Pair("full", "zero3", "nvme"), shapes("cpu", 2), "needs NVMe"),
        (Pair("full", "zero3", "nvme"), shapes("H100", 1), "needs GPUs and NVMe"),
        (Pair("full", "zero2"), shapes("H100", 1), "needs GPUs"),
        (IN_GROUPS, shapes("H100", 2), "needs 4 GPUs"),
    ],
    ids=["cpu", "one-gpu-without-nvme", "one-gpu", "two-gpus"],
)
def test_what_a_machine_lacks_is_named(pair, here, words):
    recipe = Recipe.model_validate(minimal(pair))
    assert selftest_shapes.shape_for(recipe, here) is None
    assert selftest_shapes.lacks(recipe, here) == words


def test_a_machine_with_gpus_runs_what_a_cpu_cannot():
    recipe = Recipe.model_validate(minimal(Pair("full", "zero3", "nvme")))
    here = shapes("H100", 8, nvme=True)
    assert selftest_shapes.shape_for(recipe, here) == here[0]
    assert selftest_shapes.shape_for(Recipe.model_validate(minimal(Pair("full", "none"))), here) == here[1]
    assert selftest_shapes.shape_for(Recipe.model_validate(minimal(IN_GROUPS)), here) == here[0]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [(1, [(1, 2), (1, 1), (1, 4)]), (2, [(2, 1), (1, 1), (2, 2)]), (4, [(4, 1), (1, 1)])],
)
def test_a_cpu_has_four_ranks_for_groups_and_two_for_all_else(nodes, expected, monkeypatch):
    monkeypatch.setattr(selftest_shapes, "_devices", lambda: ([], False))
    here = selftest_shapes.shapes(nodes)
    assert [(shape.nodes, shape.processes) for shape in here] == expected
    for pair, shape in ((IN_GROUPS, here[2 if nodes < 4 else 0]), (Pair("full", "fsdp"), here[0])):
        assert selftest_shapes.shape_for(Recipe.model_validate(minimal(pair)), here) == shape


def test_distances(tmp_path):
    import numpy
    from safetensors.numpy import save_file

    def run(name, losses, grad_norm, tensors):
        (tmp_path / name).mkdir()
        save_file(
            {key: numpy.array(value) for key, value in tensors.items()}, tmp_path / name / "x.safetensors"
        )
        made = training_result(len(losses))
        steps = [
            step.model_copy(update={"loss": loss, "grad_norm": grad_norm})
            for step, loss in zip(made.steps, losses, strict=True)
        ]
        return FinishedRun(made.model_copy(update={"steps": steps}), tmp_path / name)

    base = run("base", [1.0], 1.0, {"a": [0.0, 0.0], "b": [1.0]}).exported
    plain = run("plain", [4.0, 2.0], 1.0, {"a": [3.0, 0.0], "b": [5.0]})
    other = run("other", [4.0, 2.5], None, {"a": [3.0, 0.0], "b": [5.5]})
    assert matrix.loss_distance(other, plain) == 0.25
    assert matrix.loss_distance(other, plain, scale=5.0) == 0.1
    assert numpy.isnan(matrix.grad_norm_distance(other, plain))
    assert matrix.weight_distance(other, plain, base) == 0.5 / 5
    assert matrix.weight_distance(plain, plain, base) == 0.0
    adapter = {"x.lora_A.weight": [7.0], "x.lora_B.weight": [2.0]}
    mine, theirs = (
        run("mine", [1.0], 1.0, adapter | {"x.lora_A.weight": [8.0]}),
        run("theirs", [1.0], 1.0, adapter),
    )
    assert matrix.weight_distance(mine, theirs, base) == 0.5
    with pytest.raises(ExportError, match=r"exported different tensors: \['a', 'b', 'x.lora_A.weight'\]"):
        matrix.weight_distance(mine, plain, base)


def test_a_distance_that_is_no_number_is_beyond():
    distance = Distance(layout="1x1x1", loss=0.0, grad_norm=float("nan"), weights=1e-3, seconds=1.0)
    assert distance.exceeded == ["grad_norm nan", "weights 1.0e-03"]


def test_the_table_shows_each_state_and_every_reason_once():
    distance = Distance(layout="4x1x2", loss=3e-7, grad_norm=2e-6, weights=1e-6, seconds=1.0)
    cells = [
        Cell.of(Pair("full", "zero2"), state="equal", words="equal 3e-07", distances=[distance]),
        Cell.of(Pair("lora", "zero2"), state="differs", words="DIFFERS", reason="lora/zero2 is not so"),
        Cell.of(Pair("qlora", "zero2"), state="refused", words="refused", reason="qlora with zero2: [no]"),
        Cell.of(Pair("full", "zero3", "cpu"), state="lacking", words="needs GPUs", reason="no GPU here"),
        Cell.of(Pair("full", "zero2", "cpu"), state="refused", words="refused", reason="no such offload"),
        Cell.of(Pair("lora", "zero2", "cpu"), state="refused", words="refused", reason="no such offload"),
    ]
    filled = Matrix(machine="a test", global_batch_size=8, cells=cells, seconds=1.0)
    shown = table.text(filled)
    for words in (
        "zero3, offload cpu",
        "equal 3e-07",
        "lora/zero2 is not so",
        "[no]",
        "needs GPUs",
        "at most 3.0e-07; tolerance",
    ):
        assert words in shown
    assert shown.count("no such offload") == 1
    assert not filled.is_good
    assert "<pre" in table.html(filled)


def rank_one_raises(nap):
    if os.environ.get("RANK") == "1":
        raise ValueError("rank one gives up")
    time.sleep(nap)


def rank_one_dies(nap):
    if os.environ.get("RANK") == "1":
        os.write(2, b"rank one says goodbye")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(nap)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (rank_one_raises, "rank 1: Traceback.*ValueError: rank one gives up"),
        (rank_one_dies, r"rank 1: ended by signal 9 \(SIGKILL\); last output:.*rank one says goodbye"),
    ],
)
def test_one_rank_that_fails_ends_the_others_at_once(function, said, tmp_path):
    # Otherwise the failing rank would be reported after the naps.
    with pytest.raises(selftest_processes.RankFailed, match=f"(?s){said}"):
        selftest_processes.run(3, function, 3600, log=tmp_path / "log")


def test_ranks_that_never_answer_are_named(monkeypatch):
    monkeypatch.setattr(selftest_processes, "TIMEOUT", 1)
    with pytest.raises(selftest_processes.RankFailed, match="rank 0, 1: no answer in 1 s"):
        selftest_processes.run(2, time.sleep, 60)


def test_every_row_has_a_selftest_task():
    from tasks.selftest import SELFTEST
    from tests.support.registration import limits, proto

    assert SELFTEST.keys() == {shape.name for shape in load_shapes()}
    from google.protobuf.json_format import MessageToDict

    template = proto(SELFTEST["t4-8"])
    assert template.id.name == "tasks.selftest.selftest_t4_8"
    asked = limits(MessageToDict(template.k8s_pod.pod_spec))
    assert asked.get("gpu", asked.get("nvidia.com/gpu")) == "8"
    job = MessageToDict(proto(SELFTEST["t4-8x3"]).custom)
    assert job["workerReplicas"]["replicas"] == 3
    assert job["elasticConfig"]["nprocPerNode"] == 1, "that process starts the node's ranks"


def test_a_selftest_task_fails_with_the_table(monkeypatch):
    from tasks.selftest import SELFTEST

    broken(monkeypatch, "check", one_rank_fails)
    with pytest.raises(
        TrainingError,
        match=r"(?s)not every pair computes what plain training does; .*FAILED.*this rank is tired",
    ):
        SELFTEST["cpu-2"](pairs="full/ddp")


@pytest.mark.slow
def test_the_workflow_returns_the_matrix(tmp_path):
    (tmp_path / "tmp").mkdir()
    environment = os.environ | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / "tmp")}
    command = [Path(sys.executable).with_name("pyflyte"), "run", "workflows/selftest.py", "selftest"]
    command += ["--shape", "cpu-2", "--pairs", "lora/none,lora/zero2"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("state='equal'") == 2
