"""Answers drawn in training as the report shows them."""

from pathlib import Path

from flytune.artifacts import build
from flytune.records.rollouts import Group, Rollout
from flytune.report import drawn_answers, figure_charts
from flytune.report import page as report_page
from tests.support.reports import EVIL, Tags, run_of
from tests.support.stages import recipe_for, training_result

REWARDS = ["exact_answer", {"name": "regular_expression", "pattern": "[0-9]+", "weight": 0.5}]
RECIPE = recipe_for(
    Path("models/base"), "lora", objective={"name": "grpo", "rewards": REWARDS, "group_size": 2}
)


def group(step, rewards=((0.0, 1.0), (1.0, 1.0)), text=EVIL):
    drawn = [
        Rollout(
            tokens=[place],
            text=f"answer {place} of {step}",
            log_probs=[-1.0],
            rewards=list(values),
            truncated=place == 0,
        )
        for place, values in enumerate(rewards)
    ]
    return Group(step=step, prompt=[1], text=text, completions=drawn)


def test_first_middle_and_last_step_stand_side_by_side_best_answers_first():
    found = drawn_answers.moments(
        RECIPE.objective, [group(step) for step in (1, 1, 3, 5, 7, 9) for _ in range(2)]
    )
    assert [moment.step for moment in found] == [1, 5, 9]
    best, worst = found[0].answers
    assert (best.reward, best.parts, best.is_truncated) == (
        1.5,
        "exact_answer 1, regular_expression 1",
        False,
    )
    assert (worst.reward, worst.text, worst.is_truncated) == (0.5, "answer 0 of 1", True)
    (many,) = drawn_answers.moments(RECIPE.objective, [group(2, [(place / 10, 0.0) for place in range(8)])])
    assert [answer.text for answer in many.answers] == [f"answer {place} of 2" for place in (7, 6, 1, 0)]
    assert many.left_out == 4
    assert drawn_answers.moments(RECIPE.objective, []) == []


def test_answers_of_a_student_have_no_reward():
    objective = {"name": "distill", "teacher_model_name_or_path": "models/teacher", "on_policy": 1.0}
    student = recipe_for(Path("models/base"), "lora", objective=objective)
    drawn = [group(step, rewards=[()]) for step in (1, 2)]
    text = " ".join(Tags(report_page.render(*run_of(student), broken=[], rollouts=drawn)).text.split())
    assert "Step 2" in text
    assert "Answer, cut off answer 0 of 1" in text
    assert "Reward" not in text


def test_the_page_has_them_escaped_and_a_chart_of_each_reward():
    training = training_result(4)
    values = {"exact_answer": 0.1, "regular_expression": 0.9}
    training = training.model_copy(
        update={"steps": [step.model_copy(update={"rewards": values}) for step in training.steps]}
    )
    text = report_page.render(*run_of(RECIPE, training=training), broken=[], rollouts=[group(1), group(7)])
    tags = Tags(text)
    assert tags.open == []
    assert tags.all("script") == []
    said = " ".join(tags.text.split())
    assert f"Step 7 {EVIL} Reward 1.50 (exact_answer 1, regular_expression 1) answer 1 of 7" in said
    assert "Reward 0.500 (exact_answer 0, regular_expression 1), cut off answer 0 of 7" in said
    assert "at the last one exact_answer 0.1, regular_expression 0.9" in text
    assert figure_charts.of_rewards(training_result(4)) is None
    assert "drawn in training" not in report_page.render(
        *run_of(recipe_for(Path("models/base"), "lora")), broken=[]
    )


def test_a_damaged_record_costs_the_section_and_not_the_model(tmp_path, caplog):
    file = tmp_path / "rollouts.jsonl"
    assert build._rollouts(RECIPE, file) == []
    file.write_text(group(1).model_dump_json() + "\n")
    assert build._rollouts(RECIPE, file) == [group(1)]
    for damaged in ("{", group(1, [(1.0,)]).model_dump_json()):
        file.write_text(damaged)
        assert build._rollouts(RECIPE, file) == []
        assert "the report has no drawn answers" in caplog.text
        caplog.clear()
