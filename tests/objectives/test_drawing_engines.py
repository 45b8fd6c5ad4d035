"""Drawing by vLLM: weights of each step, answers by them alone, and servers that end, with a stand-in for the
server."""

import json
import os

import pytest

from flytune.objectives import drawing_engines
from flytune.planning import planner
from flytune.records.rollouts import Group
from flytune.rollouts.engines import vllm_process
from tests.support import objective_runs, ranks, rollout_kills, saved_runs, vllm_server
from tests.support.prompts import section, write_prompts

FAST = {"training.learning_rate": 1e-2, "training.warmup_steps": 0}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return objective_runs.prepare(tmp_path_factory.mktemp("vllm"), "grpo", write_prompts)


def recipe_of(inputs, folder, method="lora", sharding="none", gpus=0, **changes):
    """Return the recipe of a run that draws with the stand-in; its ledger is in `folder`."""
    # One for all: it is a part of the recipe.
    engine = {"name": "vllm", "python": str(vllm_server.interpreter(inputs)), "gpus": gpus}
    method = method if method == "full" else {"name": method, "lora_dropout": 0.0}
    usual = {"objective": section(engine=engine, temperature=0.8), "method": method, **FAST}
    return saved_runs.recipe_for(inputs, sharding, folder / "kept", **usual | changes)


def groups_of(folder):
    files = sorted((folder / "kept").rglob("rollouts/*.jsonl"))
    return [Group.parse(line) for file in files for line in file.read_text().splitlines()]


def fit_with_fault(fault, *arguments):
    """Run with a fault of the server."""
    os.environ[vllm_server.FAULT] = fault
    return saved_runs.fit(*arguments)


def fit_and_note(notes, *arguments):
    """Run, and let the server note what it is asked."""
    os.environ[vllm_server.NOTES] = str(notes)
    return saved_runs.fit(*arguments)


def fit_as_on_a_gpu(notes, *arguments):
    drawing_engines._shares_gpu = lambda trainer, section: True
    return fit_and_note(notes, *arguments)


def fit_beside_gpus_that_draw(notes, *arguments):
    """Run on CPUs as if the GPUs that the recipe has for servers were beside them."""
    make = planner.make

    def planned(recipe):
        engine = recipe.objective.engine.model_copy(update={"gpus": 0})
        objective = recipe.objective.model_copy(update={"engine": engine})
        return make(recipe.model_copy(update={"objective": objective}))

    planner.make = planned
    return fit_and_note(notes, *arguments)


@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_answers_are_drawn_by_the_weights_of_their_step(inputs, tmp_path, method):
    recipe, notes = recipe_of(inputs, tmp_path, method), tmp_path / "notes"
    result = ranks.run(1, fit_and_note, notes, recipe, inputs, tmp_path / "out")
    assert [step.importance_mean for step in result.steps] == [pytest.approx(1, abs=1e-3)] * 4
    assert [step.importance_cut for step in result.steps] == [0] * 4
    groups = groups_of(tmp_path)
    for answer in [answer for group in groups for answer in group.completions]:
        assert answer.trained_log_probs == [pytest.approx(value, abs=1e-3) for value in answer.log_probs]
    asked = vllm_server.noted(notes)
    drawn = [content for path, content in asked if path == "/v1/completions"]
    assert len({content["seed"] for content in drawn}) == len(drawn) == 4 * recipe.training.global_batch_size
    names = list(dict.fromkeys(content["model"] for content in drawn))
    if method == "full":
        assert names == ["base"]
        assert [path for path, _ in asked].count("/collective_rpc") == 3, "it was started with the first ones"
    else:
        assert [name.rpartition("-")[2] for name in names] == ["1", "2", "3", "4"]
        unloaded = [content["lora_name"] for path, content in asked if path == "/v1/unload_lora_adapter"]
        assert unloaded == names[:3]
    folders = [content.get("lora_path") for _, content in asked if content and "lora_path" in content]
    assert not any(os.path.exists(folder) for folder in folders)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_scaled_rotary_embedding_draws_as_it_is_trained(inputs, tmp_path, method):
    scaling = {"model.rope_scaling": {"rope_type": "linear", "factor": 8.0}, "training.max_steps": 2}
    recipe = recipe_of(inputs, tmp_path, method, **scaling)
    result = ranks.run(1, saved_runs.fit, recipe, inputs, tmp_path / "out")
    assert [step.importance_mean for step in result.steps] == [pytest.approx(1, abs=1e-4)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_stale_weights_draw_nothing_that_is_trained(inputs, tmp_path, method):
    said = "draws by other weights than the trained ones: the mean log-probability .*bound 0.001"
    with pytest.raises(ranks.RankFailed, match=said):
        ranks.run(1, fit_with_fault, "stale", recipe_of(inputs, tmp_path, method), inputs, tmp_path / "out")
    assert {group.step for group in groups_of(tmp_path)} == {1}, "the answers of step 2 are not recorded"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("start", "vLLM did not start: exit code 1; its log ends with: ValueError: no memory for the cache"),
        ("loading", "vLLM has ended: exit code 7"),
        ("drawing", "vLLM has ended: exit code 9"),
    ],
)
def test_a_server_that_ends_is_named_and_the_next_attempt_draws_the_same(inputs, tmp_path, fault, said):
    recipe, calm = (recipe_of(inputs, tmp_path / name) for name in ("killed", "calm"))
    with pytest.raises(ranks.RankFailed, match=said):
        ranks.run(1, fit_with_fault, fault, recipe, inputs, tmp_path / "out-1")
    notes = tmp_path / "notes"
    resumed = ranks.run(1, fit_and_note, notes, recipe, inputs, tmp_path / "out-2")
    never = ranks.run(1, saved_runs.fit, calm, inputs, tmp_path / "out-3")
    assert [(step.loss, step.grad_norm) for step in resumed.steps] == [
        (step.loss, step.grad_norm) for step in never.steps
    ]
    # Its fifth answer, of step 2, has ended it; step 1 is trained, and not drawn again.
    steps = 3 if fault == "drawing" else 4
    drawn = [path for path, _ in vllm_server.noted(notes)].count("/v1/completions")
    assert drawn == steps * recipe.training.global_batch_size


@pytest.mark.slow
def test_answers_that_are_recorded_are_not_drawn_again(inputs, tmp_path):
    recipe, calm = (recipe_of(inputs, tmp_path / name) for name in ("killed", "calm"))
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(1, rollout_kills.fit_and_die, recipe, inputs, tmp_path / "out-1", "update", 3)
    resumed = ranks.run(1, rollout_kills.fit_without_drawing, recipe, inputs, tmp_path / "out-2", 3)
    never = ranks.run(1, saved_runs.fit, calm, inputs, tmp_path / "out-3")
    assert resumed.resumed_from_step == 2
    assert [(step.loss, step.grad_norm, step.importance_mean) for step in resumed.steps] == [
        (step.loss, step.grad_norm, step.importance_mean) for step in never.steps
    ]
    assert groups_of(tmp_path / "killed") == groups_of(tmp_path / "calm")


@pytest.mark.slow
@pytest.mark.parametrize(("fit", "servers"), [(fit_and_note, 1), (fit_as_on_a_gpu, 2)])
@pytest.mark.parametrize(("method", "sharding"), [("lora", "ddp"), ("full", "fsdp")])
def test_two_processes_draw_what_one_does_with_a_server_for_all_or_one_on_each_gpu(
    inputs, tmp_path, method, sharding, fit, servers
):
    drawn = []
    for processes, name, count in ((1, "none", 1), (2, sharding, servers)):
        recipe = recipe_of(inputs, tmp_path / name, method, name)
        notes = tmp_path / f"notes-{name}"
        ranks.run(processes, fit, notes, recipe, inputs, tmp_path / f"out-{name}")
        asked = vllm_server.noted(notes)
        assert [path for path, _ in asked].count("/v1/models") == count
        drawn.append(groups_of(tmp_path / name))
        loads = "/v1/load_lora_adapter" if method == "lora" else "/collective_rpc"
        folders = [
            content.get("lora_path") or content["kwargs"]["weights_path"]
            for path, content in asked
            if path == loads
        ]
        # The servers of a node read one copy of the weights.
        assert len(folders) == count * len(set(folders)) > 0
        assert not any(os.path.exists(folder) for folder in folders)
    alone, together = (
        [(group.step, group.prompt, [answer.tokens for answer in group.completions]) for group in groups]
        for groups in drawn
    )
    assert together == alone


@pytest.mark.slow
@pytest.mark.parametrize(("method", "sharding", "gpus"), [("lora", "ddp", 1), ("full", "fsdp", 3)])
def test_servers_on_gpus_of_their_own_draw_for_all_processes_what_one_draws(
    inputs, tmp_path, method, sharding, gpus
):
    asked, drawn = [], []
    for fit, processes, own in ((fit_and_note, 1, 0), (fit_beside_gpus_that_draw, 2, gpus)):
        folder, notes = tmp_path / str(processes), tmp_path / f"notes-{processes}"
        recipe = recipe_of(inputs, folder, method, sharding if own else "none", own)
        ranks.run(processes, fit, notes, recipe, inputs, tmp_path / f"out-{processes}")
        asked.append(vllm_server.noted(notes))
        drawn.append(
            [
                (group.step, group.prompt, [answer.tokens for answer in group.completions])
                for group in groups_of(folder)
            ]
        )
    assert drawn[0] == drawn[1]
    paths = [path for path, _ in asked[1]]
    # Behind those of the two processes that train.
    assert sorted(content["gpu"] for path, content in asked[1] if path == "start") == [
        str(2 + number) for number in range(gpus)
    ]
    assert paths.count("/v1/completions") == [path for path, _ in asked[0]].count("/v1/completions")
    loads = paths.count("/v1/load_lora_adapter" if method == "lora" else "/collective_rpc")
    assert loads == gpus * (4 if method == "lora" else 3)
    assert "/sleep?level=1" not in paths


def test_servers_draw_equally_many_answers_that_follow_each_other():
    for processes, servers, answers in ((2, 1, 8), (2, 2, 8), (2, 3, 8), (7, 1, 3), (1, 7, 16), (3, 5, 4)):
        drawn = []
        for place in range(processes):
            parts = drawing_engines.parts_of(answers, place, processes, servers)
            numbers = [number for number, part in enumerate(parts) for _ in range(answers)[part]]
            assert len(numbers) == answers
            drawn += numbers
        assert drawn == sorted(drawn)
        counts = [drawn.count(number) for number in range(servers)]
        assert max(counts) - min(counts) <= 1


def test_a_server_sees_the_gpu_of_its_process_alone(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert vllm_process._visible_gpu(1) == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    assert vllm_process._visible_gpu(1) == "GPU-b"


@pytest.mark.slow
def test_a_server_on_the_gpu_that_trains_sleeps_while_it_trains(inputs, tmp_path):
    notes = tmp_path / "notes"
    recipe = recipe_of(inputs, tmp_path, **{"training.max_steps": 2})
    ranks.run(1, fit_as_on_a_gpu, notes, recipe, inputs, tmp_path / "out")
    paths = [path for path, _ in vllm_server.noted(notes)]
    kept = ["/v1/completions", "/sleep?level=1", "/wake_up", "/v1/load_lora_adapter"]
    changes = [path for path, before in zip(paths, [None, *paths], strict=False) if path != before]
    assert [path for path in changes if path in kept] == [
        "/v1/load_lora_adapter",
        "/v1/completions",
        "/sleep?level=1",
        "/wake_up",
        "/v1/load_lora_adapter",
        "/v1/completions",
        "/sleep?level=1",
    ]


def test_recorded_answers_of_the_model_itself_have_no_other_log_probabilities(tmp_path):
    group = Group.parse(
        '{"step": 1, "prompt": [1], "completions": [{"tokens": [3], "text": "a", "log_probs": [-1.0], '
        '"rewards": [1.0], "truncated": false}]}'
    )
    assert "trained_log_probs" not in json.loads(group.model_dump_json())["completions"][0]
