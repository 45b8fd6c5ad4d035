import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from flytekit import workflow
from flytekit.types.directory import FlyteDirectory

from flytune import yaml_core
from flytune.errors import DataError, RecipeError
from flytune.evaluation import tasks as evaluation_tasks
from flytune.evaluation.harness import run
from flytune.evaluation.harness import tasks as harness_tasks
from flytune.evaluation.task_kind import Job, JobResult
from flytune.recipe import Recipe
from flytune.records import Metrics
from flytune.stages.harness import HarnessData
from tasks.harness import EVALUATE_TASKS, combine_tasks
from tasks.runtime.orchestrator import FLYTE
from tests.support.harness import DOCUMENTS, asking
from tests.support.paths import ROOT
from tests.support.reports import metrics
from tests.support.stages import recipe_for, write_dataset, write_trained
from workflows.routing import map_on


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    """The trained folder of each method."""
    dataset = write_dataset(tmp_path_factory.mktemp("dataset"), base)
    return {
        method: write_trained(tmp_path_factory.mktemp(method), recipe_for(base, method), dataset)
        for method in ("full", "lora")
    }


def scored(recipe, trained, out):
    # Through JSON, as from pod to pod.
    found = [
        evaluation_tasks.run(recipe, trained, job).model_dump_json() for job in evaluation_tasks.jobs(recipe)
    ]
    results = [JobResult.model_validate_json(result) for result in found]
    return evaluation_tasks.combine(recipe, results, out)


def scores_of_the_harness(model, tokenizer, own, tasks, **arguments):
    """Return the scores of lm-evaluation-harness, run directly."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(own), include_defaults=False)
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4)
    return simple_evaluate(lm, tasks=tasks, task_manager=manager, log_samples=False, **arguments)["results"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_scores_are_those_of_the_harness_itself(method, base, own, trained, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from flytune.models import loading

    tasks = ["choose", "answer", "text"]
    recipe = asking(base, own, [{"name": name, "num_fewshot": 2, "limit": 7} for name in tasks], method)
    scores = scored(recipe, trained[method], tmp_path)
    monkeypatch.chdir(own)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tuned = loading.exported_model(recipe, trained[method])
    arguments = {"num_fewshot": 2, "limit": 7}
    for side, model in (("base", AutoModelForCausalLM.from_pretrained(base)), ("tuned", tuned)):
        expected = scores_of_the_harness(model, tokenizer, own, tasks, **arguments)
        for score in scores:
            name, _, filtered = score.metric.partition(",")
            assert getattr(score, side) == pytest.approx(expected[score.task][score.metric], abs=1e-6)
            error = expected[score.task][f"{name}_stderr,{filtered}"]
            assert getattr(score, f"{side}_stderr") == (
                None if error == "N/A" else pytest.approx(error, abs=1e-6)
            )
    assert [(score.task, score.documents, score.num_fewshot) for score in scores] == [
        (name, 7, 2) for name in tasks
    ]
    assert [score.higher_is_better for score in scores] == [True, True, False]
    text = scores[-1]
    assert text.base != text.tuned, "both sides came from one model"


@pytest.mark.slow
def test_combined_parts_equal_one_part(base, own, trained, tmp_path):
    tasks = [{"name": "both", "num_fewshot": 3}, "answer"]
    whole, parts = (
        scored(asking(base, own, tasks, "lora", task_shards=shards), trained["lora"], tmp_path / str(shards))
        for shards in (1, 4)
    )
    assert parts == whole
    counts = dict.fromkeys(("choose", "choose_more", "answer"), DOCUMENTS) | {"both": 2 * DOCUMENTS}
    assert {score.task: score.documents for score in whole} == counts
    assert all(score.base_stderr is not None for score in whole)


def test_a_part_has_the_examples_of_the_complete_task(base, own):
    class Lm:
        pass

    recipe = asking(base, own, [{"name": "choose", "num_fewshot": 4}])
    (task,) = recipe.evaluation.tasks
    first, again = (
        [
            request.args[0]
            for request in harness_tasks.requests(
                harness_tasks.load(recipe, task)["tasks"], task, Lm(), False
            )
        ]
        for _ in range(2)
    )
    assert first == again
    assert len(set(first)) == DOCUMENTS, "each document has examples of its own"
    assert first[0].count("Q:") == 5


def test_the_harness_s_own_files_are_kept(base, own, trained, tmp_path):
    scores = scored(asking(base, own, ["both"]), trained["full"], tmp_path)
    for side in ("base", "tuned"):
        told = json.loads((tmp_path / f"{side}.json").read_text())
        assert {
            "results",
            "groups",
            "group_subtasks",
            "configs",
            "versions",
            "n-shot",
            "higher_is_better",
            "n-samples",
        } <= set(told)
        assert told["results"]["both"]["acc,none"] == getattr(scores[-1], side)
        assert told["n-samples"]["choose"] == {"original": DOCUMENTS, "effective": DOCUMENTS}
        assert told["lm_eval_version"]


def test_tasks_as_chats_go_through_the_tokenizer_s_template(base, own, trained):
    plain, chats = (
        evaluation_tasks.run(
            (recipe := asking(base, own, [{"name": "choose", "limit": 3}], apply_chat_template=asked)),
            trained["full"],
            evaluation_tasks.jobs(recipe)[0],
        )
        for asked in (False, True)
    )
    assert plain.base.keys() == chats.base.keys()
    assert plain.base != chats.base


def test_more_parts_than_documents_are_no_harm(base, own, trained, tmp_path):
    recipe = asking(base, own, [{"name": "choose", "limit": 2}], task_shards=3)
    (score,) = scored(recipe, trained["full"], tmp_path)
    assert score.documents == 2


def test_a_job_is_a_task_or_group_and_a_part(base, own):
    recipe = asking(base, own, ["both", "answer"], task_shards=2)
    found = [(job.task.name, job.shard, job.shards) for job in evaluation_tasks.jobs(recipe)]
    assert found == [("both", 0, 2), ("both", 1, 2), ("answer", 0, 2), ("answer", 1, 2)]
    assert evaluation_tasks.jobs(recipe_for(base, "full")) == []


def refused(base, own, tasks) -> str:
    with pytest.raises(RecipeError) as caught:
        evaluation_tasks.jobs(asking(base, own, tasks))
    return str(caught.value)


@pytest.mark.slow
def test_mistakes_are_reported_all_at_once(base, own, tmp_path):
    text = refused(base, own, ["chose", "code", "both", "choose"])
    assert text.startswith("recipe tiny: 3 mistakes")
    assert re.search(r"tasks: chose: unknown to the harness; did you mean .*choose", text)
    assert "tasks: code runs code that the model writes" in text
    assert "tasks: choose is named twice, by both and by choose" in text
    assert "not read: bad.yaml (" in refused(base, own, ["bad"])
    assert "evaluation.include_path:" in refused(base, tmp_path / "none", ["choose"])
    told = harness_tasks._unknown("choose", {}, asking(base, tmp_path, ["choose"]).evaluation)
    assert "has no YAML file here; a pod has the files that `pyflyte run` uploads" in told


@pytest.mark.slow
def test_the_harness_s_own_tasks_are_known_without_a_network(base, own):
    names = ["hellaswag", "mmlu", "choose"]
    assert [job.task.name for job in evaluation_tasks.jobs(asking(base, own, names))] == names
    assert "did you mean hellaswag" in refused(base, own, ["helaswag"])
    assert "humaneval runs code" in refused(base, own, ["humaneval"])
    assert "mmlu_astronomy is named twice, by mmlu and by mmlu_astronomy" in refused(
        base, own, ["mmlu", "mmlu_astronomy"]
    )


def test_missing_data_is_reported(base, own, trained):
    recipe = asking(base, own, ["lost"])
    with pytest.raises(
        RecipeError,
        match=r"evaluation\.tasks: lost: cannot be loaded: FileNotFoundError: lost\.yaml: data_files: "
        r"no\.jsonl",
    ):
        evaluation_tasks.run(recipe, trained["full"], evaluation_tasks.jobs(recipe)[0])


def test_without_the_harness_the_extra_is_named(base, own, monkeypatch):
    harness_tasks._indexed.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'flytune[harness]'" in refused(base, own, ["choose"])


def test_nothing_is_printed(base, own, trained, tmp_path, capfd):
    scored(asking(base, own, ["choose", "answer"]), trained["full"], tmp_path)
    told = capfd.readouterr()
    assert told.out == ""
    # transformers' bar, as in every task that loads a model.
    assert set(re.findall(r"[A-Z][a-z ]+(?=:)", told.err)) <= {"Loading weights"}


@workflow
def evaluated(
    recipe: Recipe,
    shape: str,
    trained: FlyteDirectory,
    metrics: Metrics,
    base: FlyteDirectory,
    jobs: list[Job],
    data: FlyteDirectory,
) -> Metrics:
    answers = map_on(
        "ask",
        shape,
        EVALUATE_TASKS,
        {"job": jobs},
        recipe=recipe,
        trained=trained,
        base=base,
        harness_data=data,
    )
    found: Metrics = combine_tasks(recipe=recipe, metrics=metrics, answers=answers, harness_data=data)
    return found


def inputs(recipe, trained, tmp_path):
    (tmp_path / "base.json").write_text("{}")
    folders = {"trained": FlyteDirectory(str(trained["full"])), "base": FlyteDirectory(str(tmp_path))}
    asked = HarnessData(FLYTE)
    jobs = asked.jobs(recipe)
    data = FlyteDirectory(str(asked.complete()))
    return {"recipe": recipe, "shape": "cpu-2", "metrics": metrics(), "jobs": jobs, "data": data, **folders}


def test_a_workflow_maps_the_parts_over_pods_of_the_shape(base, own, trained, tmp_path, untrained):
    recipe = asking(base, own, ["choose"], task_shards=2)
    found = evaluated(**inputs(recipe, trained, tmp_path))
    assert [(score.task, score.documents) for score in found.tasks] == [("choose", DOCUMENTS)]
    assert found.base == metrics().base


def test_without_tasks_no_pod_answers(base, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_tasks, "run", lambda *_: pytest.fail("a pod was asked for"))
    found = evaluated(**inputs(recipe_for(base, "full"), trained, tmp_path))
    assert found.tasks == []


def test_the_mapped_tasks_are_registered_with_their_pods():
    from collections import OrderedDict

    from flytekit.tools.translator import get_serializable

    from tests.support.registration import SETTINGS

    entities = OrderedDict()
    spec = get_serializable(entities, SETTINGS, evaluated)
    branch = next(node.branch_node for node in spec.template.nodes if node.branch_node)
    cases = [branch.if_else.case, *branch.if_else.other]
    assert len(cases) == len(EVALUATE_TASKS)
    assert all(case.then_node.array_node for case in cases)
    mapped = [entity for entity in entities if "map_evaluate_tasks" in getattr(entity, "name", "")]
    assert len(mapped) == len(EVALUATE_TASKS)
    command = entities[mapped[0]].template.k8s_pod.pod_spec["containers"][0]["args"]
    assert command[0] == "pyflyte-map-execute"


HUB = """
import sys
from pathlib import Path
from flytune.evaluation import tasks as evaluation_tasks
from flytune.recipe.recipe import Recipe
recipe, where, folder = Recipe.from_yaml(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
if where == "cpu":
    evaluation_tasks.download(recipe, folder)
else:
    (job,) = evaluation_tasks.jobs(recipe)
    result = evaluation_tasks.run(recipe, Path(sys.argv[4]), job, folder)
    (score,) = evaluation_tasks.combine(recipe, [result], folder.parent / "out", folder)
    print(score.documents)
"""


@pytest.mark.slow
def test_data_of_the_hub_reaches_pods_that_see_none(hub, base, trained, tmp_path):
    task = {
        "task": "pairs",
        "dataset_path": "owner/pairs",
        "test_split": "train",
        "output_type": "multiple_choice",
    }
    task |= {"doc_to_text": "{{instruction}}", "doc_to_choice": ["{{output}}", "none"], "doc_to_target": 0}
    task |= {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "pairs.yaml").write_text(yaml.safe_dump(task))
    (tmp_path / "recipe.yaml").write_text(
        asking(base, tmp_path / "tasks", [{"name": "pairs", "limit": 5}]).to_yaml()
    )

    def ran(where, folder, **settings):
        home = {"HF_HOME": str(tmp_path / where), "HF_HUB_DISABLE_TELEMETRY": "1", "DS_ACCELERATOR": "cpu"}
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            HUB,
            tmp_path / "recipe.yaml",
            where,
            folder,
            trained["full"],
        ]
        environment = os.environ | home | settings
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.split()

    ran("cpu", tmp_path / "kept", HF_ENDPOINT=hub, HF_HUB_OFFLINE="0")
    (tmp_path / "kept").rename(tmp_path / "fetched")
    assert ran("gpu", tmp_path / "fetched", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1") == ["5"]


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("loglikelihood", (float("-inf"), False)),
        ("loglikelihood", (-1.5, True)),
        ("loglikelihood_rolling", float("-inf")),
        ("loglikelihood_rolling", -2.5),
        ("generate_until", "text"),
        ("generate_until", "NaN"),
    ],
)
def test_an_answer_comes_back_as_it_was(base, own, kind, answer):
    (job,) = evaluation_tasks.jobs(asking(base, own, ["choose"]))
    result = JobResult(job=job, base={"a": [answer]}, tuned={})
    assert run._plain(JobResult.model_validate_json(result.model_dump_json()).base["a"][0], kind) == answer


@pytest.mark.parametrize(
    "guard",
    [{"task": "choose"}, {"task": "choose", "metric": "acc"}, {"task": "choose", "metric": "acc,none"}],
)
def test_a_guard_of_what_is_measured(base, own, guard):
    evaluation_tasks.download(asking(base, own, ["both"], must_not_fall=[guard]), None)


@pytest.mark.parametrize("guard", [{"task": "chose"}, {"task": "choose", "metric": "accuracy"}])
def test_a_guard_of_what_is_not_measured_is_refused_before_training(base, own, guard):
    recipe = asking(base, own, ["both"], must_not_fall=[guard])
    with pytest.raises(
        RecipeError,
        match=rf"must_not_fall: {' '.join(guard.values())}: not measured by evaluation.tasks, which "
        r"measures: .*choose \(acc",
    ):
        evaluation_tasks.download(recipe, None)


def test_data_that_is_not_there_is_refused_before_training(base, own, tmp_path):
    task = yaml.safe_load((own / "choose.yaml").read_text())
    task |= {
        "task": "gone",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "none.jsonl")}},
    }
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "gone.yaml").write_text(yaml.safe_dump(task))
    recipe = asking(base, folder, ["gone"])
    assert len(evaluation_tasks.jobs(recipe)) == 1
    with pytest.raises(RecipeError, match=r"evaluation\.tasks: gone: cannot be loaded: .*none\.jsonl"):
        evaluation_tasks.download(recipe, None)


def test_chats_without_a_template_are_refused_before_training(base, own, tmp_path):
    bare = shutil.copytree(base, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    recipe = asking(bare, own, ["both"], apply_chat_template=True)
    with pytest.raises(DataError, match=r"data\.chat_template: the tokenizer of .*bare has no chat template"):
        evaluation_tasks.download(recipe, None)
    evaluation_tasks.download(asking(base, own, ["both"], apply_chat_template=True), None)


@pytest.mark.slow
def test_tasks_of_one_s_own_are_read_by_yaml_1_2_and_the_harness_s_own_as_it_does(base, own, tmp_path):
    from lm_eval.tasks import _yaml_loader

    task = yaml.safe_load((own / "choose.yaml").read_text())
    task |= {"task": "agree", "doc_to_choice": "CHOICES", "doc_to_target": 1}
    task["dataset_kwargs"]["data_files"]["test"] = str(own / "rows.jsonl")
    (tmp_path / "agree.yaml").write_text(yaml.safe_dump(task).replace("CHOICES", "[no, yes]"))
    recipe = asking(base, tmp_path, ["agree"])
    loaded = harness_tasks.load(recipe, recipe.evaluation.tasks[0])["tasks"]["agree"]
    assert loaded.get_config("doc_to_choice") == ["no", "yes"]
    package = Path(_yaml_loader.__file__).parent
    assert not issubclass(
        _yaml_loader._make_loader(package / "mmlu", resolve_funcs=True), yaml_core.CoreLoader
    )
    (tmp_path / "agree.yaml").write_text("task: agree\ntask: agree\n")
    harness_tasks._indexed.cache_clear()
    with pytest.raises(RecipeError, match=r"agree\.yaml \(task is there twice, in lines 1 and 2; keep one\)"):
        harness_tasks.check(recipe)
