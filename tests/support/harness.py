"""Custom tasks of lm-evaluation-harness, and a base model for them."""

import json

import pytest
import yaml

from flytune.recipe import Recipe
from tests.support.stages import recipe_for

DOCUMENTS = 11


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder of tasks with their data: multiple choice, generation, a group of two, and some that fail."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": f"What is {n} and {n + 1}?",
            "choices": [str(2 * n), str(2 * n + 1), str(3 * n)],
            "answer": n % 3,
        }
        for n in range(DOCUMENTS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
        "test_split": "test",
    }
    asked = common | {"doc_to_text": "Q: {{question}}\nA:", "fewshot_split": "test"}
    choice = asked | {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
    }
    choice |= {"metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]}
    answer = asked | {"output_type": "generate_until", "doc_to_target": "{{choices[answer]}}"}
    answer |= {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 4}}
    answer |= {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}
    text = common | {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
    }
    text |= {"metric_list": [{"metric": "bits_per_byte"}]}
    aggregated = {"metric": "acc", "aggregation": "mean", "weight_by_size": True}
    files = {
        "choose": choice | {"task": "choose"},
        "choose_more": choice | {"task": "choose_more", "num_fewshot": 1},
        "answer": answer | {"task": "answer"},
        "text": text | {"task": "text"},
        "both": {"group": "both", "task": ["choose", "choose_more"], "aggregate_metric_list": [aggregated]},
        "code": answer | {"task": "code", "unsafe_code": True},
        "lost": choice | {"task": "lost", "dataset_kwargs": {"data_files": "no.jsonl"}},
    }
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    (folder / "bad.yaml").write_text("task: [\n")
    return folder


def asking(base, own, tasks, method="full", **changes) -> Recipe:
    changes = {f"evaluation.{key}": value for key, value in changes.items()}
    changes |= {"evaluation.tasks": tasks, "evaluation.include_path": str(own)}
    return recipe_for(base, method, **changes)
