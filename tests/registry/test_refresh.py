"""Runs on fresh data: what is decided, what becomes of a challenger, and the workflow with each of its
branches."""

import shutil
from collections import OrderedDict
from datetime import UTC, datetime, timedelta

import pytest
from flytekit.tools.translator import get_serializable

from flytune.artifacts.build import CONTENTS, published_name
from flytune.errors import AcceptedError, DataError, RecipeError
from flytune.recipe import Recipe
from flytune.recipe.sections import Publish
from flytune.registry import history
from flytune.registry import refresh as registry_refresh
from tests.support.decisions import comparison, decision
from tests.support.plans import recipe_of
from tests.support.registration import SETTINGS
from tests.support.reports import metrics
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

KICKOFF = datetime(2026, 3, 2, 2, tzinfo=UTC)
DAY = timedelta(days=1)


@pytest.fixture
def place(tmp_path):
    """Provide chats of one day, a held-out file, and a recipe that uses them."""
    base = tiny_base(tmp_path)
    rows = write_pairs(tmp_path / "pairs.jsonl", 120).read_text().splitlines(keepends=True)
    (tmp_path / "heldout.jsonl").write_text("".join(rows[:24]))
    (tmp_path / "2026-03-01.jsonl").write_text("".join(rows[24:72]))
    (tmp_path / "rest.jsonl").write_text("".join(rows[72:]))
    changes = {
        "data.heldout_path": str(tmp_path / "heldout.jsonl"),
        "method": {"name": "lora", "lora_dropout": 0.0},
    }
    changes |= {
        "publish.address": str(tmp_path / "store"),
        "training.learning_rate": 3e-3,
        "training.max_steps": 8,
    }
    changes |= {"evaluation.max_samples": 24, "evaluation.sample_answers": 0}
    recipe = tiny_recipe(base, tmp_path / "%Y-%m-%d.jsonl", changes)
    del recipe["data"]["heldout_fraction"]
    return tmp_path, Recipe.model_validate(recipe)


def test_a_kickoff_that_no_schedule_had_is_an_error_and_no_skip(place):
    # What a pod of Flyte 2's open backend has as its run's start: its window would have no data, and the run
    # end green.
    with pytest.raises(
        RecipeError, match="kickoff: 1970-01-01: the platform has not said when the run began"
    ):
        decide(place, kickoff=datetime(1970, 1, 1, tzinfo=UTC))


def decide(place, recipe=None, kickoff=KICKOFF, days=1):
    return registry_refresh.decide(recipe or place[1], kickoff, str(place[0] / "accepted"), days)


def test_fresh_data_is_trained_on_and_the_same_again_is_not(place):
    folder, recipe = place
    address = str(folder / "accepted")
    decided = decide(place, days=2)
    assert decided.trains
    assert decided.champion == ""
    assert [source.path for source in decided.recipe.data.sources] == [str(folder / "2026-03-01.jsonl")]
    assert decided.reason == (
        "new data; no model is accepted yet: starts from the base model; nothing at "
        f"{folder}/2026-02-28.jsonl"
    )
    for outcome, number in (("refused", 1), ("accepted", 2)):
        made = decision(
            "a", outcome, fingerprint=decided.fingerprint, recipe=registry_refresh.identity(recipe)
        )
        history.record(address, made, expected=None)
        again = decide(place)
        assert (again.trains, again.reason) == (False, f"the data is that of decision {number} ({outcome})")
    # Going back makes no data fresh; another recipe, or another byte, does.
    history.record(
        address,
        decision("b", fingerprint=decided.fingerprint, recipe=registry_refresh.identity(recipe)),
        expected="a",
    )
    history.rollback(address, "x")
    assert not decide(place).trains
    assert decide(
        place, recipe.model_copy(update={"training": recipe.training.model_copy(update={"seed": 7})})
    ).trains
    with (folder / "2026-03-01.jsonl").open("a") as file:
        file.write('{"instruction": "x", "output": "y"}\n')
    assert decide(place).trains


def test_a_window_without_data_trains_nothing(place):
    decided = decide(place, kickoff=KICKOFF + DAY)
    assert (decided.trains, decided.reason) == (
        False,
        f"no data in the window; nothing at {place[0]}/2026-03-02.jsonl",
    )


def test_it_goes_on_from_the_accepted_model_of_its_method(place):
    folder, recipe = place
    address = str(folder / "accepted")
    history.record(address, decision("/m/1"), expected=None)
    decided = decide(place)
    assert (decided.recipe.method.adapter, decided.champion) == ("/m/1", "/m/1")
    assert "starts from /m/1" in decided.reason
    history.record(address, decision("/m/2", method="full"), expected="/m/1")
    decided = decide(place)
    assert (decided.recipe.method.adapter, decided.champion) == (None, "/m/2")
    assert "/m/2 is of method full: starts from the base model" in decided.reason
    full = Recipe.model_validate(recipe.model_dump() | {"method": "full"})
    assert decide(place, full).recipe.model.name_or_path == "/m/2"
    # The person has changed to another base, or to another commit of it.
    base = full.model.name_or_path
    history.record(
        address, decision("/m/3", method="full").model_copy(update={"base": base}), expected="/m/2"
    )
    assert decide(place, full).recipe.model.name_or_path == "/m/3"
    for change in ({"name_or_path": f"{base}/"}, {"revision": "1" * 40}):
        changed = full.model_copy(update={"model": full.model.model_copy(update=change)})
        decided = decide(place, changed)
        assert decided.recipe.model == changed.model
        assert f"/m/3 was trained from {base}: starts from the base model" in decided.reason


def test_an_accepted_adapter_of_another_base_is_refused_before_training(place):
    folder, recipe = place
    base = recipe.model.name_or_path
    history.record(
        str(folder / "accepted"), decision("/m/1").model_copy(update={"base": base}), expected=None
    )
    assert decide(place).recipe.method.adapter == "/m/1"
    other = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name_or_path": f"{base}/"})})
    with pytest.raises(RecipeError, match=r"the accepted adapter \(/m/1\) was trained on .*; keep accepted"):
        decide(place, other)


def test_without_a_frozen_set_nothing_is_compared(place):
    recipe = place[1].model_copy(update={"data": place[1].data.model_copy(update={"heldout_path": None})})
    with pytest.raises(
        RecipeError, match=r"recipe tiny: data\.heldout_path is missing: champion and challenger"
    ):
        decide(place, recipe)


def test_a_challenger_is_accepted_only_beyond_doubt(place):
    address = str(place[0] / "accepted")

    def record(artifact, champion, difference):
        decision = registry_refresh.decision_on(place[1], "f", artifact, comparison(difference), [])
        return history.record(address, decision, expected=champion or None)

    assert record("a", "", -0.3).outcome == "accepted"
    for number, difference in enumerate((0.3, 0.0, -0.01), 2):
        refused = record(f"m{number}", "a", difference)
        assert (refused.outcome, refused.number, refused.duel.difference) == ("refused", number, difference)
        assert history.current(history.decisions_at(address)).artifact == "a"
    assert record("b", "a", -0.1).outcome == "accepted"
    with pytest.raises(AcceptedError, match="b is accepted by now, and not a"):
        record("c", "a", -0.3)


def test_a_broken_guard_refuses_a_challenger_that_won(place):
    address = str(place[0] / "guarded")
    decided = registry_refresh.decision_on(place[1], "f", "a", comparison(-0.3), ["mmlu acc fell"])
    decision = history.record(address, decided, expected=None)
    assert decision.outcome == "refused"
    assert decision.reason.endswith("; mmlu acc fell")
    assert history.current(history.decisions_at(address)) is None


def test_an_adapter_s_base_is_pinned():
    sections = {"data": {"path": "a", "heldout_path": "b"}, "model": {"name_or_path": "owner/name"}}
    recipe = recipe_of(method="lora", **sections)
    with pytest.raises(
        RecipeError, match="model.revision is not a commit: an accepted adapter is right only"
    ):
        registry_refresh.check(recipe)
    registry_refresh.check(
        recipe.model_copy(update={"model": recipe.model.model_copy(update={"revision": "0" * 40})})
    )


def test_an_artifact_stays_where_it_was_published(place, tmp_path, monkeypatch):
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / CONTENTS).write_text('{"files": []}')
    made = str(tmp_path / "made")
    assert registry_refresh.final_address(made, place[1], metrics()) == made, "publishing has failed"
    name = published_name(tmp_path / "made", place[1])
    (tmp_path / "store" / name).mkdir(parents=True)
    assert registry_refresh.final_address(made, place[1], metrics()) == made, "publishing broke off"
    (tmp_path / "store" / name / CONTENTS).write_text("{}")
    assert registry_refresh.final_address(made, place[1], metrics()) == f"{tmp_path}/store/{name}"

    def refuse(*_):
        raise PermissionError(403, "Forbidden")

    with monkeypatch.context() as refusing:
        refusing.setattr("fsspec.implementations.local.LocalFileSystem.exists", refuse)
        assert registry_refresh.final_address(made, place[1], metrics()) == made, (
            "publishing was refused, and so is looking"
        )
    unpublished = place[1].model_copy(update={"publish": Publish()})
    assert registry_refresh.final_address("s3://b/raw/x", unpublished, metrics()) == "s3://b/raw/x"
    with pytest.raises(AcceptedError, match=r"gone: artifact\.json cannot be read"):
        registry_refresh.final_address(str(tmp_path / "gone"), place[1], metrics())


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    from flytekit.core import local_cache

    monkeypatch.setattr(local_cache, "CACHE_LOCATION", str(tmp_path / "cache"))
    monkeypatch.setattr(local_cache.LocalTaskCache, "_initialized", False)


def run(place, recipe=None, kickoff=KICKOFF):
    from workflows.refresh import refresh

    return refresh(recipe=recipe or place[1], kickoff=kickoff, accepted=str(place[0] / "accepted"), days=1)


def test_the_workflow_skips_where_there_is_nothing_new(place, own_cache):
    said = run(place, kickoff=KICKOFF + DAY)
    assert said == f"skipped: no data in the window; nothing at {place[0]}/2026-03-02.jsonl"
    assert not (place[0] / "accepted").exists()
    assert not (place[0] / "store").exists()


@pytest.mark.journey
@pytest.mark.filterwarnings("ignore")
def test_each_branch_taken_for_real_and_back(place, own_cache):
    from workflows.refresh import rollback

    folder, recipe = place
    address = str(folder / "accepted")
    assert run(place).startswith("accepted: held-out loss ")
    (first,) = history.decisions_at(address)
    assert first.duel.against == "base"
    assert (folder / "store").iterdir().__next__().samefile(first.artifact)
    assert run(place) == "skipped: the data is that of decision 1 (accepted)"

    # Ruined by its learning rate: refused, with its figures.
    shutil.copy(folder / "rest.jsonl", folder / "2026-03-02.jsonl")
    ruined = recipe.model_copy(
        update={"training": recipe.training.model_copy(update={"learning_rate": 0.5, "max_steps": 4})}
    )
    assert run(place, ruined, KICKOFF + DAY).startswith("refused: held-out loss ")
    refused = history.decisions_at(address)[-1]
    assert refused.duel.against == first.artifact
    assert refused.duel.champion == pytest.approx(first.duel.challenger, abs=1e-4), (
        "the same model on the same tokens"
    )
    assert refused.duel.difference_low > 0
    assert history.current(history.decisions_at(address)) == first

    # It starts from the accepted model, not from the refused one; more steps leave no doubt.
    longer = recipe.model_copy(update={"training": recipe.training.model_copy(update={"max_steps": 24})})
    assert run(place, longer, KICKOFF + DAY).startswith("accepted: held-out loss ")
    second = history.current(history.decisions_at(address))
    assert Recipe.from_yaml(f"{second.artifact}/recipe.yaml").method.adapter == first.artifact
    assert second.duel.difference_high < 0
    assert rollback(accepted=address, reason="rude") == first.artifact
    assert history.Decision.read(folder / "accepted" / "accepted.json").artifact == first.artifact


def test_models_of_other_vocabularies_are_not_compared(tmp_path, untrained):
    import json

    from flytune.registry import compare
    from tests.support.stages import recipe_for, seal, write_artifact, write_dataset

    base = tiny_base(tmp_path)
    dataset, recipe = write_dataset(tmp_path / "dataset", base), recipe_for(base, "lora")
    for name in ("champion", "challenger"):
        write_artifact(tmp_path / name, recipe, dataset, steps=2 if name == "champion" else 8)
    better = compare.compare_artifacts(recipe, tmp_path / "challenger", dataset, str(tmp_path / "champion"))
    assert better.difference == pytest.approx(better.challenger - better.champion)
    assert better.is_won
    same = compare.compare_artifacts(recipe, tmp_path / "champion", dataset, str(tmp_path / "champion"))
    assert (same.difference, same.difference_high, same.is_won) == (0, 0, False)
    file = tmp_path / "champion" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    last = max(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    tokenizer["model"]["vocab"]["never-seen"] = tokenizer["model"]["vocab"].pop(last)
    tokenizer["model"]["merges"] = [pair for pair in tokenizer["model"]["merges"] if "".join(pair) != last]
    file.write_text(json.dumps(tokenizer))
    seal(tmp_path / "champion")
    with pytest.raises(DataError, match="its tokenizer has another vocabulary than the challenger's"):
        compare.compare_artifacts(recipe, tmp_path / "challenger", dataset, str(tmp_path / "champion"))


def test_the_workflows_are_serialized_with_every_task_they_may_run():
    from tasks.promote import COMPARE
    from tasks.train import TRAIN
    from workflows.refresh import refresh, rollback

    entities = OrderedDict()
    get_serializable(entities, SETTINGS, refresh)
    names = {entity.name for entity in entities if hasattr(entity, "name")}
    assert {task.name for task in [*COMPARE.values(), *TRAIN.values()]} <= names
    assert {
        "tasks.refresh.decide_refresh",
        "tasks.refresh.skip_refresh",
        "tasks.promote.promote_challenger",
    } <= names
    get_serializable(entities, SETTINGS, rollback)
