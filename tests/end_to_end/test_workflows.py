"""Tests of the shipped workflows as a cluster runs them: fast-registered, in pods that have only what their
spec gives them.

The images' stand-ins have no project, no HOME and a read-only root, and only one registry has them.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

import msgpack
import pandas
import pytest
from flytekit.configuration.file import get_config_file

from flytune import cli
from flytune.cluster.executions import STORE
from flytune.recipe import Recipe
from flytune.records import Metrics, Plan, TrainingResult
from flytune.records.contents import verify
from flytune.selftest import Matrix, table
from flytune.sweeps.results import Sweep
from tests.support.execution import Run
from tests.support.flyteadmin import BUCKET, flyteadmin
from tests.support.image import Image
from tests.support.laptop import checkout, start
from tests.support.preferences import write_preferences
from tests.support.propeller import IMAGES, PodFailed
from tests.support.sweeps import check_table
from tests.support.tiny import cluster_recipe, tiny_base, write_pairs

pytestmark = pytest.mark.slow
STORED = f"s3://{BUCKET}/inputs"
PARTS = ["plan_only", "prepare_only", "evaluate_only", "resume", "export_only"]
IN = dict.fromkeys(PARTS, "parts") | {"rollback": "refresh"}
IN |= dict.fromkeys([f"finetune_on_{kind}" for kind in ("file", "folder", "dataset")], "upstream")
"""Modules of the workflows that have another name than theirs."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A function that starts a workflow with its inputs and returns its run; it has the admin, and recipes of
    stored inputs."""
    home, inputs = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("inputs")
    folder = tmp_path_factory.mktemp("images")
    images = {
        IMAGES["light"]: Image(folder / "light", "requirements-light.lock"),
        IMAGES["train"]: Image(folder / "train", "requirements.lock"),
    }
    base = tiny_base(inputs)
    files = [write_pairs(inputs / "pairs.jsonl", 64), write_preferences(inputs / "dpo.jsonl", 48)]
    with flyteadmin(home / "flyte") as (admin, storage):
        for file in [*base.iterdir(), *files]:
            admin.store(f"inputs/{file.relative_to(inputs)}", file.read_bytes())
        laptop = checkout(tmp_path_factory.mktemp("laptop") / "checkout")

        def run(name, **inputs):
            place = tmp_path_factory.mktemp(name)
            execution = start(laptop, home / "flyte", admin, IN.get(name, name), name, **inputs)
            return Run(admin, execution, place / "run", storage, images)

        def recipe(**changes):
            stored = {
                "model.name_or_path": f"{STORED}/tiny",
                "data.path": f"{STORED}/pairs.jsonl",
                "training.max_steps": 2,
            }
            return cluster_recipe(base, files[0], stored | changes)

        run.admin, run.recipe, run.inputs, run.config = (
            admin,
            recipe,
            inputs,
            home / "flyte" / ".flyte" / "config.yaml",
        )
        yield run


def address(literals):
    """Return the address of a workflow's only output, a folder."""
    return literals["o0"].scalar.blob.uri


@pytest.fixture
def fetch(cluster, monkeypatch, capsys):
    """A function that runs `flytune fetch` for a run; it returns the folder, or the error. This machine has
    no credentials."""
    monkeypatch.setenv("FLYTECTL_CONFIG", str(cluster.config))
    get_config_file.cache_clear()

    def fetch(run, folder, *options, node=None):
        execution = f"flyte://v1/flytesnacks/development/{run.name}/{node}/o" if node else run.name
        failed = cli.main(["fetch", execution, str(folder), *options])
        told = capsys.readouterr()
        assert failed or "Error" not in told.err
        return told.err if failed else folder

    yield fetch
    get_config_file.cache_clear()


def check_files(cluster, stored, folder):
    """Check that each file of a fetched folder is the one that the workflow has stored, and that none is
    missing.

    `stored` is the run whose workflow returns the folder, or else the outputs of the node that has stored it.
    """
    outputs = stored if isinstance(stored, dict) else stored.outputs()
    prefix = address(outputs).removeprefix(f"s3://{BUCKET}/")
    stored = {
        key.removeprefix(f"{prefix}/"): cluster.admin.stored(key) for key in cluster.admin.keys(f"{prefix}/")
    }
    assert {
        str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    } == stored
    assert "artifact.json" in stored
    return folder


def stored_artifacts(cluster, run):
    """Return the outputs of the nodes of a run that have stored an artifact, by the nodes' ids."""
    return {node: made for node, (task, made, *_) in cluster.admin.nodes[run.name].items() if task == STORE}


def test_a_finetune_its_parts_and_answers_of_its_model(cluster, fetch, tmp_path):
    recipe = cluster.recipe(**{"method": "lora", "checkpoints.save_steps": 1})
    first = cluster("finetune", recipe=recipe)
    first.until("train")

    def files_of(name, **inputs):
        run = cluster(name, **inputs)
        run.outputs()
        return check_files(cluster, run, fetch(run, tmp_path / name))

    assert (
        TrainingResult.read(files_of("export_only", recipe=recipe) / "training.json").resumed_from_step == 2
    )
    files_of("resume", recipe=recipe)
    artifact = address(first.outputs())
    assert (
        check_files(cluster, first, fetch(first, tmp_path / "artifact"))
        .joinpath("adapter_model.safetensors")
        .is_file()
    )

    assert files_of("prepare_only", recipe=recipe).joinpath("manifest.json").is_file()
    for name, kind, given in (("plan_only", Plan, {}), ("evaluate_only", Metrics, {"artifact": artifact})):
        run = cluster(name, recipe=recipe, **given)
        returned = msgpack.unpackb(run.outputs()["o0"].scalar.binary.value)
        record = kind.read(fetch(run, tmp_path / name) / f"{kind.__name__.lower()}.json")
        assert record == kind.model_validate(returned)

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Add {number} and 1."}) + "\n" for number in range(4)))
    asked = cluster("infer", artifact=artifact, prompts=prompts, shape="cpu-1", shards=2)
    asked.outputs()
    answers = check_files(cluster, asked, fetch(asked, tmp_path / "answers")) / "answers.jsonl"
    assert len(answers.read_text().splitlines()) == 4
    assert asked.pods("answer_prompts_cpu_1-1") == [0]


def test_a_sweep_in_which_one_point_fails_in_each_stage(cluster, changes, fetch, tmp_path):
    cluster.admin.store("inputs/broken.jsonl", Path(changes[-1]["data.path"]).read_bytes())
    changes = [*changes[:-1], {"data.path": f"{STORED}/broken.jsonl"}]
    swept = cluster("sweep", recipe=cluster.recipe(), changes=json.dumps(changes), min_success_ratio=0.4)
    swept.outputs()
    found = Sweep.read(check_files(cluster, swept, fetch(swept, tmp_path / "sweep")) / "sweep.json")
    check_table(found, "broken.jsonl")
    point = fetch(swept, tmp_path / "point", "--point", "tiny-4")
    verify(point)
    assert Recipe.from_yaml(point / "recipe.yaml").training.learning_rate == 1e-9
    assert "tiny-2 has no artifact: train: " in fetch(swept, tmp_path / "none", "--point", "tiny-2")
    pods = [pod.name for pod in swept.folder.iterdir()]
    assert sum(pod.startswith("train_cpu_1-") for pod in pods) == 3, (
        "points that could not be prepared ask for no GPU"
    )
    assert sum(pod.startswith("evaluate_model_cpu_1-") for pod in pods) == 2
    assert sum(pod.startswith("store_artifact-") for pod in pods) == 2


def test_preferences_after_supervised_tuning(cluster, fetch, tmp_path):
    common = {"method": "lora"}
    second = cluster.recipe(name="tiny-dpo", objective="dpo", **common | {"data.path": f"{STORED}/dpo.jsonl"})
    run = cluster("sft_then_dpo", recipe=cluster.recipe(**common), preference=second)
    run.until("pass_guards")
    ((node, first),) = stored_artifacts(cluster, run).items()
    told = fetch(run, tmp_path / "early")
    assert "returns nothing yet; it has stored 1 artifact; give the node of one" in told
    assert f"flyte://v1/flytesnacks/development/{run.name}/{node}/o" in told
    run.outputs()
    check_files(cluster, first, fetch(run, tmp_path / "first", node=node))
    artifact = check_files(cluster, run, fetch(run, tmp_path / "out"))
    assert Metrics.read(artifact / "metrics.json").figures[0].name == "preference_loss"
    assert len([name for name in run.taken.values() if name.startswith("train_")]) == 2


def test_a_refresh_and_its_rollback(cluster, fetch, tmp_path):
    rows = (cluster.inputs / "pairs.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("heldout", rows[:24]), ("2026-03-01", rows[24:])):
        cluster.admin.store(f"inputs/{name}.jsonl", "".join(part).encode())
    changes = {"data.path": f"{STORED}/%Y-%m-%d.jsonl", "data.heldout_path": f"{STORED}/heldout.jsonl"}
    changes |= {
        "method": {"name": "lora", "lora_dropout": 0.0},
        "training.max_steps": 12,
        "training.learning_rate": 1e-2,
    }
    recipe = cluster.recipe(**changes, evaluation={"max_samples": 24, "sample_answers": 0})
    del recipe["data"]["heldout_fraction"]
    accepted = f"s3://{BUCKET}/accepted/tiny"
    days = {"recipe": recipe, "accepted": accepted, "days": 1}

    def refresh(day):
        run = cluster("refresh", kickoff=f"2026-03-{day:02}T02:00:00", **days)
        return run, text(run.outputs())

    trained, said = refresh(2)
    assert said.startswith("accepted: held-out loss ")
    (challenger,) = stored_artifacts(cluster, trained).values()
    check_files(cluster, challenger, fetch(trained, tmp_path / "challenger"))
    skipped, said = refresh(2)
    assert said == "skipped: the data is that of decision 1 (accepted)"
    assert f"has stored no files; it says: {said}" in fetch(skipped, tmp_path / "none")
    assert refresh(3)[1].startswith("skipped: no data in the window")
    with pytest.raises(PodFailed, match="was ever accepted, so there is nothing to go back to"):
        cluster("rollback", accepted=accepted, reason="rude").outputs()


def text(literals):
    return literals["o0"].scalar.primitive.string_value


def test_a_selftest(cluster, fetch, tmp_path):
    run = cluster("selftest", shape="cpu-2", pairs="full/ddp,full/none")
    matrix = Matrix.model_validate(msgpack.unpackb(run.outputs()["o0"].scalar.binary.value))
    folder = fetch(run, tmp_path / "out")
    assert Matrix.read(folder / "matrix.json") == matrix
    assert (folder / "matrix.txt").read_text() == table.text(matrix)
    assert [(cell.sharding, cell.state) for cell in matrix.cells] == [("ddp", "equal"), ("none", "equal")]


def test_a_finetune_on_data_of_another_workflow(cluster, fetch, tmp_path):
    """A structured dataset is trained on; a file and a folder are named in the recipe, whose run is the
    same."""
    pandas.read_json(cluster.inputs / "pairs.jsonl", lines=True).to_parquet(tmp_path / "pairs.parquet")
    (tmp_path / "rows" / "inner").mkdir(parents=True)
    for name in ("a", "inner/b"):
        shutil.copy(cluster.inputs / "pairs.jsonl", tmp_path / "rows" / f"{name}.jsonl")
    for name, given in (("file", cluster.inputs / "pairs.jsonl"), ("folder", tmp_path / "rows")):
        run = cluster(f"finetune_on_{name}", recipe=cluster.recipe(), data=given)
        named = Recipe.model_validate(
            msgpack.unpackb(run.until(f"name_{name}")["o0"].scalar.binary.value)
        ).data.path
        assert [
            cluster.admin.stored(key) for key in cluster.admin.keys(named.removeprefix(f"s3://{BUCKET}/"))
        ].count((cluster.inputs / "pairs.jsonl").read_bytes()) == (1 if name == "file" else 2)
    run = cluster("finetune_on_dataset", recipe=cluster.recipe(), data=tmp_path / "pairs.parquet")
    run.outputs()
    assert check_files(cluster, run, fetch(run, tmp_path / "out")).joinpath("report.html").is_file()


def test_the_report_of_a_failed_run_is_fetched(cluster, fetch, tmp_path):
    run = cluster("finetune", recipe=cluster.recipe(sharding="device_map"))
    with pytest.raises(PodFailed, match="device_map"):
        run.outputs()
    assert "the execution is FAILED, and no artifact is stored; --failed fetches the report" in fetch(
        run, tmp_path / "none"
    )
    folder = fetch(run, tmp_path / "out", "--failed")
    assert {file.name for file in folder.iterdir()} == {
        "failure.txt",
        "fn0-report_failure.html",
        "n0-make_plan.html",
    }
    told = (folder / "failure.txt").read_text()
    assert told.startswith(
        f"{run.name} in flytesnacks-development: FAILED\n"
        "tiny: make_plan failed: refused: recipe tiny: 1 mistake"
    )
    for line in (
        "method full with sharding device_map",
        "what to do: ",
        "No checkpoints are written",
        "log: the console's page of",
    ):
        assert line in told


def approved(cluster, answer, **changes):
    """Run a finetune that waits for a person; return the run, its outputs or its error, and what it has
    published.

    `answer` is called with the signal and the address of the artifact, at the moment of the question.
    """
    store = f"store/{len(cluster.admin.executions)}"
    publish = {"address": f"s3://{BUCKET}/{store}", "approval": {"hours": 72}}
    run = cluster("finetune", recipe=cluster.recipe(method="lora", publish=publish, **changes))

    def answered(signal):
        assert cluster.admin.keys(store) == []
        ((address,),) = [
            re.findall(r"artifact [0-9a-f]{64}, at (\S+)", log) for log in logs(run, "ask_person")
        ]
        assert signal == f"approve-{hash_of(cluster, address)[:12]}", (
            "the question is about this artifact alone"
        )
        return answer(signal, address)

    run.answer = answered
    try:
        made = address(run.outputs())
    except PodFailed as error:
        made = str(error)
    return run, made, cluster.admin.keys(store)


def logs(run, task):
    return [pod.read_text() for pod in sorted((run.folder / task).rglob("log"))]


def hash_of(cluster, artifact):
    key = artifact.removeprefix(f"s3://{BUCKET}/")
    return hashlib.sha256(cluster.admin.stored(f"{key}/artifact.json")).hexdigest()


def test_a_person_s_yes_publishes_one_artifact(cluster):
    _, made, published = approved(cluster, lambda signal, artifact: "yes, Ada: reads well")
    assert [name.rpartition("/")[2] for name in published if "approval" in name] == ["approval.jsonl"]
    (record,) = [cluster.admin.stored(name).decode() for name in published if name.endswith("approval.jsonl")]
    assert "yes, Ada: reads well" in record
    assert hash_of(cluster, made) in record
    assert any(name.endswith("adapter_model.safetensors") for name in published)


def test_a_no_leaves_the_model_where_it_is_and_the_run_succeeds(cluster):
    run, made, published = approved(cluster, lambda signal, artifact: "no, Ada: rude")
    assert published == []
    (told,) = logs(run, "take_answer")
    assert f"flytune approve {made} --sha256 {hash_of(cluster, made)}" in told


def test_silence_is_a_no_and_the_failed_run_s_last_line_says_where_the_model_is(cluster):
    stored = []

    def silent(signal, artifact):
        stored.append(artifact)

    run, made, published = approved(cluster, silent)
    assert made == "task execution timeout [259200s] expired"
    assert published == []
    (report,) = logs(run, "report_failure")
    last = (
        f"to publish or accept it after all: flytune approve {stored[0]} --sha256 "
        f"{hash_of(cluster, stored[0])}"
    )
    assert last in report
    assert "'no: no answer within 72 hours'" in report


def test_another_artifact_at_the_address_is_not_approved(cluster):
    def swapped(signal, artifact):
        cluster.admin.store(f"{artifact.removeprefix(f's3://{BUCKET}/')}/artifact.json", b'{"files": []}')
        return "yes, Ada"

    _, made, published = approved(cluster, swapped)
    assert "and the answer is about" in made
    assert published == []
