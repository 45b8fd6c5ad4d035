"""Tests of finetune and its parts: local runs on the tiny model, and the registered workflows."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from flytekit import FlyteContextManager
from flytekit.core.data_persistence import FileAccessProvider

from flytune.artifacts import notify
from flytune.data import order
from flytune.errors import TrainingError
from flytune.recipe import Recipe
from flytune.records import Manifest, Metrics, TrainingResult
from flytune.training.checkpoints import find
from tests.support.registration import SETTINGS
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs
from tests.support.waiting import until
from workflows import parts
from workflows.finetune import finetune

SECRET = "T0PS3CRET"


@pytest.fixture
def posted(monkeypatch):
    """List of texts that were posted to the webhook."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            """Write no log."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(notify.WEBHOOK, f"http://127.0.0.1:{server.server_port}/{SECRET}")
    yield got
    server.shutdown()
    server.server_close()


@pytest.fixture
def recipe(tmp_path, posted, local_cache):
    changes = {
        "checkpoints.save_steps": 1,
        "training.max_steps": 4,
        "notify": {"webhook": True, "on": ["failed", "succeeded"]},
    }
    base, rows = tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64)
    provider = FileAccessProvider(str(tmp_path / "local"), str(tmp_path / "raw"))
    with FlyteContextManager.with_context(FlyteContextManager.current_context().with_file_access(provider)):
        yield Recipe.model_validate(tiny_recipe(base, rows, changes))


def folder_of(directory):
    return Path(directory.path)


def test_planning_and_preparing_separately(recipe):
    assert parts.plan_only(recipe=recipe).shape == "cpu-1"
    dataset = folder_of(parts.prepare_only(recipe=recipe))
    manifest = Manifest.read(dataset / "manifest.json")
    assert manifest.rows == 64
    # The second time from the cache, unless a byte has changed.
    assert folder_of(parts.prepare_only(recipe=recipe)) == dataset
    rows = Path(recipe.data.path)
    rows.write_text(rows.read_text().replace("Question 1:", "Question one:"))
    assert folder_of(parts.prepare_only(recipe=recipe)) != dataset
    tokenizer = Path(recipe.model.name_or_path) / "tokenizer_config.json"
    rows.write_text(rows.read_text().replace("Question one:", "Question 1:"))
    assert folder_of(parts.prepare_only(recipe=recipe)) == dataset
    tokenizer.write_text(tokenizer.read_text() + "\n")
    assert folder_of(parts.prepare_only(recipe=recipe)) != dataset, "another tokenizer"


def test_resume_is_refused_without_a_checkpoint(recipe, posted):
    with pytest.raises(
        TrainingError, match=r"recipe tiny: there is no complete checkpoint of this recipe and its data"
    ):
        parts.resume(recipe=recipe)
    (message,) = posted
    assert "there is no complete checkpoint of this recipe" in message
    assert "There is no complete checkpoint." in message


def test_a_failed_report_hides_no_error(recipe, monkeypatch, caplog):
    def broken(recipe):
        raise RuntimeError("the report itself")

    monkeypatch.setattr(find, "described", broken)
    with pytest.raises(TrainingError, match="there is no complete checkpoint"):
        parts.resume(recipe=recipe)
    assert "failed, and the failure could not be reported" in caplog.text


@pytest.mark.journey
def test_an_interrupted_run_is_reported_exported_and_resumed(recipe, posted, monkeypatch, caplog):
    epochs_after = order.Stream.epochs_after

    def breaking(stream, step):
        if step == 3:
            raise RuntimeError("the disk caught fire")
        return epochs_after(stream, step)

    with monkeypatch.context() as patch, pytest.raises(Exception, match="the disk caught fire"):
        patch.setattr(order.Stream, "epochs_after", breaking)
        finetune(recipe=recipe)
    until(lambda: not any(thread.name.startswith("storing") for thread in threading.enumerate()))
    assert "the disk caught fire" in posted[0]
    assert "Newest complete checkpoint: step " in posted[0]
    found = find.newest(recipe)
    assert found.checkpoint.step == 2

    artifact = parts.export_only(recipe=recipe)
    training = TrainingResult.read(folder_of(artifact) / "training.json")
    assert (training.resumed_from_step, len(training.steps)) == (2, 2)
    assert len((folder_of(artifact) / "steps.jsonl").read_text().splitlines()) == 2
    assert find.newest(recipe).checkpoint == found.checkpoint, "it stays"
    metrics = Metrics.read(folder_of(artifact) / "metrics.json")
    again = parts.evaluate_only(recipe=recipe, artifact=artifact)
    assert again.tuned == metrics.tuned
    assert again.base == metrics.base

    artifact = parts.resume(recipe=recipe)
    training = TrainingResult.read(folder_of(artifact) / "training.json")
    assert (training.resumed_from_step, training.steps[-1].step) == (2, 4)
    assert find.newest(recipe) is None
    assert len(posted) == 3
    assert all(text.startswith("tiny: done. Held-out perplexity") for text in posted[1:])
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "workflow", [finetune, parts.resume, parts.export_only], ids=lambda workflow: workflow.name
)
def test_the_failure_task_is_registered(workflow):
    from collections import OrderedDict

    from flytekit.tools.translator import get_serializable

    entities = OrderedDict()
    spec = get_serializable(entities, SETTINGS, workflow).to_flyte_idl()
    node = spec.template.failure_node
    assert node.task_node.reference_id.name == "tasks.report.report_failure"
    # Flyte sets `err`: its binding is none, of a union with an error, as in its documentation.
    assert {binding.var for binding in node.inputs} == {"recipe", "err"}
    (report,) = [entity for entity in entities if entity.name == "tasks.report.report_failure"]
    assert set(report.python_interface.inputs) == {"recipe", "err"}


def test_the_parts_are_registered_with_their_tasks():
    from collections import OrderedDict

    from flytekit.tools.translator import get_serializable

    for workflow, tasks in (
        (parts.plan_only, {"make_plan"}),
        (parts.prepare_only, {"make_plan", "prepare_data"}),
        (parts.evaluate_only, {"make_plan", "fetch_base_model", "prepare_data", "combine_tasks"}),
        (
            parts.export_only,
            {"make_plan", "fetch_base_model", "prepare_data", "find_checkpoint", "store_artifact"},
        ),
    ):
        entities = OrderedDict()
        get_serializable(entities, SETTINGS, workflow)
        names = {entity.name.rpartition(".")[2] for entity in entities if entity.name.startswith("tasks.")}
        assert tasks <= names
        others = ("train_", "evaluate_", "map_evaluate_", "map_reference_log_probs_", "report_")
        assert not [name for name in names - tasks if not name.startswith(others)]
