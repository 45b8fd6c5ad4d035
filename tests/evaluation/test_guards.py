from pathlib import Path

import pytest

from flytune.errors import RecipeError
from flytune.evaluation import guards
from flytune.records import TaskScore
from flytune.report import model_card
from flytune.report import page as report_page
from tests.support.reports import Tags, metrics, run_of
from tests.support.stages import recipe_for


def score(base, tuned, task="choose", metric="acc,none", **changes) -> TaskScore:
    values = {"task": task, "metric": metric, "higher_is_better": True, "base": base, "tuned": tuned}
    return TaskScore(**values | {"base_stderr": 0.02, "tuned_stderr": 0.03, "documents": 1319} | changes)


def recipe(*guarded):
    return recipe_for(
        Path("models/base"),
        "full",
        **{"evaluation.tasks": ["choose", "mmlu"], "evaluation.must_not_fall": list(guarded)},
    )


def broken(guard, *scores):
    return guards.broken(recipe(guard), metrics().model_copy(update={"tasks": list(scores)}))


@pytest.mark.parametrize(
    ("margin", "base", "tuned", "holds"),
    [
        (0.0, 0.4, 0.4, True),
        (0.0, 0.4, 0.5, True),
        (0.0, 0.4, 0.399, False),
        (0.1, 0.4, 0.3, True),
        (0.1, 0.4, 0.2999, False),
    ],
)
def test_the_margin_is_held_against_the_difference(margin, base, tuned, holds):
    assert (broken({"task": "choose", "margin": margin}, score(base, tuned)) == []) is holds
    lower = score(tuned, base, higher_is_better=False)
    assert (broken({"task": "choose", "margin": margin}, lower) == []) is holds


def test_the_sentence_says_what_fell_how_far_and_how_sure():
    (sentence,) = broken({"task": "choose", "margin": 0.01}, score(0.412, 0.371))
    assert sentence == (
        "choose acc,none fell from 0.412 to 0.371, by 0.041 (standard errors 0.02 and 0.03, 1,319 "
        "documents); evaluation.must_not_fall allows 0.01"
    )
    (sentence,) = broken({"task": "choose"}, score(2.0, 2.5, higher_is_better=False, base_stderr=None))
    assert "rose from 2 to 2.5, by 0.5 (standard errors unknown and 0.03" in sentence


def test_a_metric_is_named_with_its_filter_or_without():
    strict, loose = (
        score(0.5, 0.5, metric="exact_match,strict"),
        score(0.5, 0.4, metric="exact_match,flexible"),
    )
    assert broken({"task": "choose"}, strict, loose) == []
    assert broken({"task": "choose", "metric": "exact_match"}, strict, loose) == []
    assert len(broken({"task": "choose", "metric": "exact_match,flexible"}, strict, loose)) == 1


def test_one_task_of_a_group_can_be_guarded():
    assert (
        broken({"task": "mmlu_astronomy"}, score(0.5, 0.4, "mmlu"), score(0.3, 0.3, "mmlu_astronomy")) == []
    )


def test_what_was_not_measured_does_not_hold():
    (sentence,) = broken({"task": "choose", "metric": "f1"}, score(0.5, 0.6))
    assert sentence == (
        "evaluation.must_not_fall: choose f1 was not measured, so nothing shows that it did not fall; "
        "measured: acc,none"
    )
    (sentence,) = broken({"task": "choose"})
    assert "choose was not measured" in sentence
    assert "none of that task" in sentence


def test_a_guard_without_tasks_is_a_mistake_of_the_recipe():
    with pytest.raises(
        RecipeError, match="must_not_fall needs the scores of evaluation.tasks, which has no tasks"
    ):
        recipe_for(Path("models/base"), "full", **{"evaluation.must_not_fall": [{"task": "gsm8k"}]})


def pages(*scores, guard=None):
    """The report and the card have the sentence."""
    asked = recipe(*([guard] if guard else []))
    measured = metrics().model_copy(update={"tasks": list(scores)})
    broken, made = guards.broken(asked, measured), run_of(asked, measured=measured)
    return report_page.render(*made, broken=broken), model_card.render(*made, broken=broken)


def test_report_and_card_show_the_tasks():
    scores = (
        score(0.412, 0.471, num_fewshot=5),
        score(12.5, 11.25, metric="perplexity,none", higher_is_better=False),
    )
    page, text = pages(*scores)
    tags = Tags(page)
    assert tags.open == []
    assert "0.412" in tags.text
    assert "acc,none, higher is better; 1,319 documents, 5-shot" in tags.text
    assert "Scores of base and tuned model: choose acc,none 0.412 and 0.471" in page
    assert "choose perplexity" not in page, "a perplexity has no place on an axis of shares"
    assert "−1.25" in tags.text
    assert "| choose, acc,none, 5-shot | 0.412 ± 0.0200 | 0.471 ± 0.0300 | 1,319 |" in text
    assert "perplexity,none, 0-shot (lower is better)" in text


def test_a_broken_guard_is_in_both():
    for text in pages(score(0.5, 0.4), guard={"task": "choose"}):
        assert "choose acc,none fell from 0.5 to 0.4" in text


def test_without_tasks_nothing_is_said():
    page, text = pages()
    assert 'id="tasks"' not in page
    assert "lm-evaluation-harness" not in text
