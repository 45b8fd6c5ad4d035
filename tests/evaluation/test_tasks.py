"""Contract of every kind of evaluation tasks: the specification of the next one, which needs an example
here."""

import typing

import pytest

from flytune import cli
from flytune.cluster import uploads
from flytune.errors import RecipeError
from flytune.evaluation import tasks
from flytune.evaluation.task_kind import JobResult
from flytune.recipe import EvaluationTask
from tests.support.harness import asking
from tests.support.stages import write_dataset, write_trained

EXAMPLES = {"harness": {"name": "choose", "limit": 3}}
"""A task of each kind, which the folder `own` (tests/support/harness.py) may have the data of."""
SECTIONS = {section.module: section for section in typing.get_args(EvaluationTask) or (EvaluationTask,)}


@pytest.fixture(scope="module", params=sorted(SECTIONS))
def recipe(request, base, own):
    return asking(base, own, [EXAMPLES[request.param]])


@pytest.fixture(scope="module")
def trained(recipe, base, tmp_path_factory):
    return write_trained(
        tmp_path_factory.mktemp("trained"), recipe, write_dataset(tmp_path_factory.mktemp("data"), base)
    )


def test_a_section_has_its_kind(recipe):
    (task,) = recipe.evaluation.tasks
    (kind,) = tasks.kinds(recipe)
    assert kind.section is type(task) is SECTIONS[task.module]
    assert kind.tasks(recipe) == [task]
    if len(SECTIONS) > 1 and task.module != "harness":
        assert type(task).model_fields["kind"].is_required(), "recipes of two kinds have two keys"


def test_an_unknown_task_is_refused_by_its_name_in_the_plan_too(recipe, tmp_path, monkeypatch, capsys):
    (task,) = recipe.evaluation.tasks
    unknown = task.model_copy(update={"name": "no such task"})
    evaluation = recipe.evaluation.model_copy(update={"tasks": [unknown]})
    asked = recipe.model_copy(update={"evaluation": evaluation})
    with pytest.raises(RecipeError, match="evaluation.tasks: no such task"):
        tasks.jobs(asked)
    monkeypatch.setattr(uploads, "missing", lambda recipe: [])  # files that the example names
    (tmp_path / "recipe.yaml").write_text(asked.to_yaml(), encoding="utf-8")
    assert cli.main(["plan", str(tmp_path / "recipe.yaml")]) == 1
    assert "evaluation.tasks: no such task" in capsys.readouterr().err


def test_scores_of_parts_are_those_of_the_whole(recipe, trained, tmp_path):
    scores = []
    for shards in (1, 2):
        evaluation = recipe.evaluation.model_copy(update={"task_shards": shards})
        parted = recipe.model_copy(update={"evaluation": evaluation})
        tasks.download(parted, None)
        results = [tasks.run(parted, trained, job) for job in tasks.jobs(parted)]
        assert len(results) == shards
        assert all(result.base.keys() == result.tuned.keys() != set() for result in results)
        # Through JSON, as from pod to pod.
        stored = [JobResult.model_validate_json(result.model_dump_json()) for result in results]
        scores.append(tasks.combine(parted, stored, tmp_path / str(shards)))
    assert scores[0] == scores[1] != []
    assert {score.task for score in scores[0]} == {task.name for task in recipe.evaluation.tasks}
