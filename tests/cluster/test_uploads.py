"""Uploads of the laptop's files at submission, once each; the addresses that the recipe has instead; what is
refused before.

tests/support/flyteadmin.py stands for the control plane; pyflyte and flytekit's FlyteRemote are the real
ones.
"""

import json
import re
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from flytekit import FlyteContextManager
from flytekit.configuration import Config
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import Literal
from flytekit.remote import FlyteRemote

import workflows  # noqa: F401 (uploads with it)
from flytune import data
from flytune.cluster import signed_uploads, uploads
from flytune.data.sources import read_chat_template
from flytune.errors import RecipeError, StorageError
from flytune.evaluation.harness import tasks
from flytune.hardware import Cluster
from flytune.models.base import local_name
from flytune.models.remote import fetch_model
from flytune.recipe import Recipe
from flytune.stages.plan import plan_run
from flytune.stages.refresh import decide_refresh
from tests.support.laptop import WHERE, pyflyte
from tests.support.recipes import content
from tests.support.tiny import cluster_recipe, write_pairs
from workflows.schedules import scheduled

IN_POD = SimpleNamespace(is_local=lambda: False)


@pytest.fixture
def remote(cluster, monkeypatch, tmp_path):
    """A submission's control plane, in this process, which reads its storage as pods do; works in an empty
    folder."""
    for name, value in cluster[1].items():
        monkeypatch.setenv(name, value)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    config = Config.auto(str(cluster[2] / ".flyte" / "config.yaml"))
    return FlyteRemote(config, "flytesnacks", "development", data_upload_location="flyte://data")


@pytest.fixture
def pod(monkeypatch, tmp_path):
    """A Hugging Face cache with nothing in it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


def submitted(remote, recipe):
    """The recipe that a pod is given."""
    recipe = Recipe.model_validate(recipe)
    literal = TypeEngine.to_literal(remote.context, recipe, Recipe, TypeEngine.to_literal_type(Recipe))
    return TypeEngine.to_python_value(FlyteContextManager.current_context(), literal, Recipe)


TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
}
TASK |= {"doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
TASK |= {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}


def write_tasks(folder, **data_files):
    """A folder of tasks; by name, what each says of its data."""
    folder.mkdir(parents=True)
    for name, file in data_files.items():
        task = TASK | {"task": name, "dataset_kwargs": {"data_files": {"test": str(file)}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def write_questions(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"{path.name} {n}?", "choices": ["a", "b"], "answer": n % 2} for n in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_each_local_path_of_a_recipe_becomes_an_address_with_its_content(
    remote, base, pod, cluster, tmp_path
):
    admin = cluster[0]
    work = tmp_path / "work"
    for name in ("a.jsonl", "parts/1 (x).jsonl", "parts/2.jsonl", "heldout.jsonl"):
        write_pairs(work / name, 8)
    (work / "parts" / "README.txt").write_text("no data")
    (work / "chat.jinja").write_text("{{ messages }}é")
    write_tasks(work / "tasks" / "more", inside="rows.jsonl", beside="../../questions/b.jsonl")
    write_tasks(
        work / "tasks2", absolute=write_questions(tmp_path / "far" / "c.jsonl"), below="questions/b.jsonl"
    )
    for file in ("tasks/more/rows.jsonl", "questions/b.jsonl"):
        write_questions(work / file)
    (work / "tasks2" / "tasks").symlink_to(work / "tasks")
    (work / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "report.html"):
        (work / "adapter" / name).write_text(name)
    recipe = cluster_recipe(
        base, "unused", {"method": {"name": "lora", "adapter": "adapter"}, "evaluation.include_path": "tasks"}
    )
    recipe["evaluation"]["tasks"] = ["inside", "beside"]
    sources = [
        {"path": "./a.jsonl", "weight": 0.5},
        {"path": f"file://{work}/parts"},
        {"path": "s3://else/where.jsonl"},
    ]
    recipe["data"] = {
        "sources": sources,
        "heldout_path": "heldout.jsonl",
        "chat_template": "chat.jinja",
        "max_length": 128,
    }
    found = submitted(remote, recipe)
    assert Recipe.model_validate(recipe).data.sources[0].path == "./a.jsonl"
    named = [
        found.model.name_or_path,
        *(source.path for source in found.data.sources),
        found.data.heldout_path,
    ]
    named += [found.data.chat_template, found.method.adapter, found.evaluation.include_path]
    root = r"s3://flyte/flytesnacks/development/[0-9a-f]{32}"
    assert named.pop(3) == "s3://else/where.jsonl"
    for address, last in zip(
        named, ["tiny", "a.jsonl", "parts", "heldout.jsonl", "chat.jinja", "adapter", "tasks"], strict=True
    ):
        assert re.fullmatch(f"{root}/{re.escape(last)}", address), address
    # As pods read them.
    assert data.sources.locate(found.data.sources[0].path, "data.path").files
    labels = data.sources.locate(found.data.sources[1].path, "data.path").labels
    assert [label.rpartition("/")[2] for label in labels] == ["1__x_.jsonl", "2.jsonl"]
    assert read_chat_template(found.data.chat_template) == "{{ messages }}é"
    assert admin.stored(found.data.sources[0].path) == (work / "a.jsonl").read_bytes()
    assert sorted(
        key.rpartition("/")[2] for key in admin.keys(found.method.adapter.removeprefix("s3://flyte/"))
    ) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    model = fetch_model(found.model.name_or_path, weights=True, code=False)
    assert (model / "model.safetensors").read_bytes() == (base / "model.safetensors").read_bytes()
    assert local_name(found.model) == str(model)
    for asked, path in ((["inside", "beside"], "tasks"), (["absolute", "below"], "tasks2")):
        evaluation = recipe["evaluation"] | {"tasks": asked, "include_path": path}
        at = submitted(remote, recipe | {"evaluation": evaluation})
        for task in at.evaluation.tasks:
            (loaded,) = tasks.load(at, task)["tasks"].values()
            given = loaded.get_config("dataset_kwargs")["data_files"]["test"]
            assert given.startswith(str(tmp_path / "cache")), (
                "fetched with its task, not read where the laptop has it"
            )
            assert len(loaded.eval_docs) == 4


def test_content_is_uploaded_once_and_what_has_changed_alone_again(remote, base, cluster, tmp_path, capfd):
    admin, rows = cluster[0], write_pairs(tmp_path / "work" / "rows.jsonl", 16)
    recipe = cluster_recipe(base, rows)
    first = submitted(remote, recipe)
    said = capfd.readouterr().err
    assert f"data.path: {rows}: {first.data.path} (uploaded, " in said
    assert "\r" not in said, "no frames of a bar without a terminal"
    before = list(admin.uploads)
    assert submitted(remote, recipe) == first
    assert f"data.path: {rows}: {first.data.path} (there already)" in capfd.readouterr().err
    assert admin.uploads == before
    rows.write_bytes(rows.read_bytes().replace(b"Question 1:", b"Question I:"))
    again = submitted(remote, recipe)
    assert admin.uploads[len(before) :] == [again.data.path]
    assert again.model == first.model
    assert again.data.path != first.data.path
    assert data.fingerprint(again.data) != data.fingerprint(first.data)


def test_values_in_pods_and_on_this_machine_keep_their_paths(base, tmp_path):
    recipe = Recipe.model_validate(cluster_recipe(base, tmp_path / "nothing.jsonl"))
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(context, recipe, Recipe, TypeEngine.to_literal_type(Recipe))
    assert TypeEngine.to_python_value(context, literal, Recipe) == recipe


MISSING = {
    "model.name_or_path": ("./none", "no such folder"),
    "data.path": ("none.jsonl", "no such file or folder"),
    "data.chat_template": ("none.jinja", "no such file"),
    "data.heldout_path": ("~/none-here", "no such file or folder"),
    "method.adapter": ("none", "no adapter_config.json and no adapter_model"),
    "evaluation.include_path": ("none", "no such folder"),
}
UNFIT = {
    "model.name_or_path": ("empty", "no config.json there; it holds nothing"),
    "data.path": ("%Y-%m-%d.jsonl", "a file for each day is looked for by pods, at an address (s3://"),
    "evaluation.include_path": ("tasks", "lost.yaml: data_files: no.jsonl: no such file in tasks/"),
}


@pytest.mark.parametrize("wrong", [MISSING, UNFIT])
def test_all_that_pods_would_lack_is_told_at_once_before_anything_is_sent(
    wrong, remote, base, cluster, tmp_path
):
    (tmp_path / "work" / "empty").mkdir()
    write_tasks(tmp_path / "work" / "tasks", lost="no.jsonl")
    before, given = list(cluster[0].uploads), {field: path for field, (path, _) in wrong.items()}
    given = {"method": {"name": "lora"}, "data.heldout_fraction": 0.02, "evaluation.tasks": ["lost"]} | given
    with pytest.raises(RecipeError) as caught:
        submitted(remote, cluster_recipe(base, "unused", given))
    first, *problems = str(caught.value).splitlines()
    assert first == f"local files that pods would not have: {len(wrong)} mistakes"
    for problem, (field, (path, said)) in zip(problems, wrong.items(), strict=True):
        assert problem.startswith(f"  {field}: {path}: {said}")
    assert cluster[0].uploads == before


def test_what_is_too_large_is_refused_and_the_variable_raises_the_limit(
    remote, base, cluster, tmp_path, monkeypatch
):
    rows, before = write_pairs(tmp_path / "rows.jsonl", 8), list(cluster[0].uploads)
    monkeypatch.setenv(uploads.LIMIT_VARIABLE, "0.0001")
    with pytest.raises(
        RecipeError,
        match=rf"GiB to upload, and the limit is 0\.0001 GiB: .*or set {uploads.LIMIT_VARIABLE}=1$",
    ):
        submitted(remote, cluster_recipe(base, rows))
    monkeypatch.setenv(uploads.LIMIT_VARIABLE, "many")
    with pytest.raises(RecipeError, match="FLYTUNE_UPLOAD_GIB=many: give a positive number of GiB"):
        submitted(remote, cluster_recipe(base, rows))
    monkeypatch.setenv(uploads.LIMIT_VARIABLE, "1")
    with (
        monkeypatch.context() as patch,
        pytest.raises(RecipeError, match=r"tiny/model\.safetensors: .* 0\.001 GiB at most; copy"),
    ):
        patch.setattr(uploads, "LARGEST_FILE_GIB", 0.001)
        submitted(remote, cluster_recipe(base, rows))
    assert cluster[0].uploads == before
    assert submitted(remote, cluster_recipe(base, rows)).data.path.startswith("s3://")


def test_a_storage_that_refuses_is_told_without_the_signed_address(remote, cluster, tmp_path, monkeypatch):
    rows, storage = write_pairs(tmp_path / "rows.jsonl", 9), cluster[1]["AWS_ENDPOINT_URL"]
    monkeypatch.setattr(
        cluster[0]._s3, "generate_presigned_url", lambda *_, **__: f"{storage}/no-bucket/x?signature=hush"
    )
    with pytest.raises(StorageError) as caught:
        submitted(remote, cluster_recipe(Path("owner/name"), rows))
    assert (
        str(caught.value)
        == f"data.path: {rows}: rows.jsonl was not uploaded: the cluster's storage answers 404"
    )


def test_folders_on_volumes_stay_and_others_are_refused_with_what_is_missing(remote, monkeypatch, tmp_path):
    volume = {
        "name": "models",
        "persistent_volume_claim": "models",
        "mount_path": "/mnt/models",
        "read_only": True,
    }
    for module in (uploads, signed_uploads):
        monkeypatch.setattr(module, "load_cluster", lambda: Cluster(volumes=[volume]))
    rows = write_pairs(tmp_path / "rows.jsonl", 8)
    found = submitted(remote, cluster_recipe(Path("/mnt/models/llama"), rows))
    assert found.model.name_or_path == "/mnt/models/llama"
    changes = {"checkpoints.folder": "/mnt/models/runs", "publish.address": "/srv/artifacts"}
    with pytest.raises(RecipeError, match=r"local files that pods would not have: 3 mistakes") as caught:
        submitted(remote, cluster_recipe(Path("/mnt/modelsx/llama"), rows, changes))
    for told in (
        "checkpoints.folder: /mnt/models/runs: volume models of cluster.yaml is read-only",
        "publish.address: /srv/artifacts: no volume of cluster.yaml is mounted there in the light tasks' "
        "pods",
        "/mnt/modelsx/llama: no such folder",
    ):
        assert told in str(caught.value)


def test_a_launch_plan_s_recipe_names_addresses_alone(tmp_path):
    recipe = content(data={"path": "s3://b/%Y-%m-%d.jsonl", "heldout_path": "held.jsonl"})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(
        RecipeError,
        match=r"data\.heldout_path: held\.jsonl: a path of this machine, which no pod has; name an",
    ):
        scheduled("mine", tmp_path / "recipe.yaml", "0 2 * * *", "s3://b/accepted", days=1)


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        (
            {"data.path": "rows.jsonl", "model.name_or_path": "./none"},
            ["model.name_or_path: ./none", "data.path: rows.jsonl"],
        ),
        (
            {"data.heldout_path": "days/*.jsonl", "data.chat_template": "a.jinja"},
            ["data.chat_template: a.jinja", "data.heldout_path: days/*.jsonl"],
        ),
        ({"method": {"name": "lora", "adapter": "none"}}, ["method.adapter: none"]),
        ({"evaluation.tasks": ["a"], "evaluation.include_path": "none"}, ["evaluation.include_path: none"]),
        ({"evaluation.tasks": ["a"], "evaluation.include_path": "recipes/tasks"}, []),
        ({"data.chat_template": "chatml", "data.path": "s3://b/rows.jsonl"}, []),
    ],
)
def test_paths_that_a_pod_lacks_are_refused_at_once_with_what_uploads_them(
    changes, absent, base, tmp_path, monkeypatch
):
    recipe = Recipe.model_validate(cluster_recipe(base, write_pairs(tmp_path / "pairs.jsonl", 8), changes))
    monkeypatch.chdir(tmp_path)
    if not absent:
        return uploads.refuse_absent(recipe)
    with pytest.raises(RecipeError) as caught:
        plan_run(IN_POD, recipe, None)
    first, *problems = str(caught.value).splitlines()
    assert (
        "`pyflyte run` uploads the files of a recipe, and a run from the console or of a schedule uploads "
        "none" in first
    )
    assert len(problems) == len(absent)
    for problem, start in zip(problems, absent, strict=True):
        assert problem.strip().startswith(start)
        assert (
            "no such file or folder in the pod; write an address (s3://...), or a path on a volume of"
            in problem
        )


def test_a_refresh_of_local_days_is_refused_and_not_skipped_for_ever():
    recipe = Recipe.model_validate(
        content(data={"path": "days/%Y-%m-%d.jsonl", "heldout_path": "s3://b/held.jsonl"})
    )
    with pytest.raises(
        RecipeError, match=r"data\.path: days/%Y-%m-%d\.jsonl: no such file or folder in the pod"
    ):
        decide_refresh(IN_POD, recipe, datetime(2026, 3, 2), "s3://b/accepted", days=1)


def run(laptop, cluster, *arguments):
    """`pyflyte run --remote`, and the inputs of the execution, if it made one."""
    admin, _, home = cluster
    before = set(admin.executions)
    done = pyflyte(laptop, home, "run", "--remote", "--copy", "all", *WHERE, *map(str, arguments))
    made = [admin.executions[name].inputs.literals for name in set(admin.executions) - before]
    return done, dict(made[0]) if made else None


def python_value(literal, kind):
    return TypeEngine.to_python_value(
        FlyteContextManager.current_context(), Literal.from_flyte_idl(literal), kind
    )


@pytest.mark.slow
def test_a_sweep_is_submitted_with_its_files_from_yaml_1_2(laptop, cluster, base):
    write_pairs(laptop / "a.jsonl", 8)
    write_pairs(laptop / "b.jsonl", 9)
    text = yaml.safe_dump(cluster_recipe(base, "a.jsonl")) + "notify: {on: [failed]}\n"
    (laptop / "mine.yaml").write_text(text.replace("learning_rate: 0.001", "learning_rate: 1e-3"))
    (laptop / "grid.yaml").write_text(
        "training.learning_rate: [1e-4, 2e-4]\ndata.path: [a.jsonl, b.jsonl]\ndescription: [on, off]\n"
    )
    done, sent = run(
        laptop, cluster, "workflows/sweep.py", "sweep", "--recipe", "mine.yaml", "--grid", "grid.yaml"
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    recipe, grid = python_value(sent["recipe"], Recipe), python_value(sent["grid"], dict)
    assert recipe.notify.on == ["failed"]
    assert recipe.data.path.startswith("s3://flyte/")
    assert (grid["training.learning_rate"], grid["description"]) == ([1e-4, 2e-4], ["on", "off"])
    assert grid["data.path"][0] == recipe.data.path
    assert cluster[0].stored(grid["data.path"][1]) == (laptop / "b.jsonl").read_bytes()


@pytest.mark.slow
def test_an_artifact_s_folder_and_prompts_are_uploaded_as_they_are(laptop, cluster, tmp_path):
    admin = cluster[0]
    files = {
        "artifact.json": "{}",
        "gate/probe.safetensors": "x",
        "other/probe.safetensors": "y",
        "empty": "",
    }
    for name, text in files.items():
        (tmp_path / "artifact" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "artifact" / name).write_text(text)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "prompts.jsonl").chmod(0o400)
    given = {
        "artifact": f"{tmp_path}/artifact",
        "prompts": f"{tmp_path}/prompts.jsonl",
        "adapters": {"mine": f"{tmp_path}/artifact"},
    }
    (tmp_path / "inputs.yaml").write_text(yaml.safe_dump(given) + "shape: cpu-1\nscratch_folder: off\n")
    done, sent = run(
        laptop, cluster, "workflows/infer.py", "infer", "--inputs-file", tmp_path / "inputs.yaml"
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    address = sent["artifact"].scalar.blob.uri
    assert {name: admin.stored(f"{address}/{name}").decode() for name in files} == files
    assert sent["adapters"].map.literals["mine"].scalar.blob.uri == address
    assert admin.stored(sent["prompts"].scalar.blob.uri) == (tmp_path / "prompts.jsonl").read_bytes()
    assert sent["scratch_folder"].scalar.primitive.string_value == "off"


@pytest.mark.slow
def test_a_missing_file_ends_pyflyte_in_our_words_and_nothing_is_submitted(laptop, cluster, base):
    before = list(cluster[0].uploads)
    (laptop / "bad.yaml").write_text(yaml.safe_dump(cluster_recipe(base, "gone.jsonl")))
    done, sent = run(laptop, cluster, "workflows/parts.py", "plan_only", "--recipe", "bad.yaml")
    said = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert (done.returncode, sent, cluster[0].uploads) == (1, None, before)
    assert "data.path: gone.jsonl: no such file or folder" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("path", ["../data", "file://{here}/../data", "x/../../data"])
def test_files_keep_their_names_however_their_folder_is_written(path, tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "work" / "x").mkdir(parents=True)
    write_pairs(tmp_path / "data" / "a.jsonl", 3)
    monkeypatch.chdir(tmp_path / "work")
    (found,) = uploads.found({"data": {"path": path.format(here=tmp_path / "work")}})
    assert list(found.files) == ["a.jsonl"]
