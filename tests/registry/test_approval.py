"""Approval of one artifact by its hash: what is asked, how an answer is compared with what is there, and
where it is kept."""

import hashlib
import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flytune import cli
from flytune.errors import AcceptedError, ExportError
from flytune.recipe import Recipe
from flytune.records.approval import APPROVAL, PAGE
from flytune.records.contents import CONTENTS, seal, verify
from flytune.registry import approval, history
from flytune.storage import Storage
from tests.support.approvals import write_artifact
from tests.support.decisions import decision


def hash_of(address):
    return hashlib.sha256(Storage(address, "").read(CONTENTS)).hexdigest()


@pytest.fixture
def asked(tmp_path):
    """An artifact with a question beside it, and the address that it is to be published to."""
    address, store = write_artifact(tmp_path / "made"), tmp_path / "store"
    question = approval.ask(address, Recipe.from_yaml(tmp_path / "made/recipe.yaml"), publish_to=str(store))
    return address, store, question


def test_a_yes_publishes_the_artifact_of_the_question_with_the_answer_beside_it(asked):
    address, store, question = asked
    before = hash_of(address)
    assert (question.artifact_sha256, question.name) == (before, f"approve-{before[:12]}")
    settled = approval.settle(address, before, "Yes, Ada: reads well")
    assert settled.is_approved
    (published,) = store.iterdir()
    assert str(published) in settled.text
    assert hash_of(str(published)) == hash_of(address) == before, "what was approved is what was published"
    verify(published)
    for place in (address, str(published)):
        found = approval.recorded(place)
        (answer,) = found.answers
        assert (answer.answer, answer.words, answer.artifact_sha256) == (
            "yes",
            "Yes, Ada: reads well",
            before,
        )
    # The attempt of a pod that broke off settles it again: once in the record.
    approval.settle(address, before, "Yes, Ada: reads well")
    assert len(approval.recorded(address).answers) == 1
    assert approval.settle(address, before, question.timeout).is_approved, "a no comes too late"


@pytest.mark.parametrize(
    "words", ["no, Ada: answers 3 and 7 are rude", "looks good", "", "no: no answer within 72 hours"]
)
def test_anything_else_leaves_it_stored_and_says_why_and_how_to_publish_it_after_all(asked, words):
    address, store, question = asked
    settled = approval.settle(address, question.artifact_sha256, words)
    assert not settled.is_approved
    assert not store.exists()
    told = f"not approved at {datetime.now(UTC):%Y}"
    for text in (settled.text, (Path(address) / PAGE).read_text()):
        assert told in text
    assert f"stored at {address}, and neither published nor accepted" in settled.text
    command = f"flytune approve {address} --sha256 {question.artifact_sha256}"
    assert settled.text.endswith(command)
    assert cli.main(command.split()[1:]) == 0
    assert [answer.answer for answer in approval.recorded(address).answers] == ["no", "yes"]
    assert len(list(store.iterdir())) == 1


def swap_weights(address):
    (Path(address) / "model.safetensors").write_bytes(b"evil")


def swap_list(address):
    swap_weights(address)
    (Path(address) / CONTENTS).unlink()
    seal(Path(address), "artifact")


def swap_artifact_and_question(address):
    """Put another artifact of the same recipe there, about which a run has asked too."""
    shutil.rmtree(address)
    write_artifact(Path(address), b"evil")
    approval.ask(
        address, Recipe.from_yaml(Path(address) / "recipe.yaml"), publish_to=f"{Path(address).parent}/store"
    )


@pytest.mark.parametrize("swap", [swap_weights, swap_list, swap_artifact_and_question])
def test_an_artifact_that_was_swapped_after_the_question_is_not_approved(asked, swap):
    address, store, question = asked
    swap(address)
    for by_command in (False, True):
        if by_command:
            assert cli.main(["approve", address, "--sha256", question.artifact_sha256]) == 1
        else:
            with pytest.raises(ExportError, match="the answer is about|its content is not|by artifact.json"):
                approval.settle(address, question.artifact_sha256, "yes")
    assert not store.exists()
    assert approval.recorded(address).answers == []


def test_the_same_in_a_bucket_whose_weights_the_storage_copies(bucket, tmp_path):
    local, store = write_artifact(tmp_path / "made"), f"{bucket}/store"
    address = f"{bucket}/made"
    for file in Path(local).iterdir():
        Storage(address, "").copy(file, file.name)
    question = approval.ask(address, Recipe.from_yaml(tmp_path / "made/recipe.yaml"), publish_to=store)
    assert approval.link(address) in approval.text(question, address, "yes or no")
    Storage(address, "").write("model.safetensors", b"evil...")
    with pytest.raises(ExportError, match=r"model\.safetensors is not what was asked about"):
        approval.settle(address, question.artifact_sha256, "yes")
    assert Storage(store, "").files() == {}
    Storage(address, "").write("model.safetensors", b"weights")
    approval.settle(address, question.artifact_sha256, "yes, Ada")
    (name,) = Storage(store, "").names()
    published = Storage(store, "")
    assert published.read(f"{name}/model.safetensors") == b"weights"
    assert b"yes, Ada" in published.read(f"{name}/{APPROVAL}")


def test_what_was_not_asked_about_is_not_approved(tmp_path, capsys):
    address = write_artifact(tmp_path / "made")
    assert cli.main(["approve", address]) == 1
    assert "nobody was asked about it" in capsys.readouterr().err


def challenger(tmp_path, words, champion=""):
    """Settle the question of a refresh; return the history's address."""
    address, accepted = write_artifact(tmp_path / "made", name="tiny"), str(tmp_path / "accepted")
    recipe = Recipe.from_yaml(Path(address) / "recipe.yaml")
    wanted = decision(address)
    question = approval.ask(
        address,
        recipe,
        publish_to=str(tmp_path / "store"),
        accepted=accepted,
        champion=champion,
        decision=wanted,
    )
    approval.settle(address, question.artifact_sha256, words, "ada")
    return accepted, question


def test_a_refresh_accepts_what_was_approved_and_the_history_says_who_when_and_which(tmp_path):
    accepted, question = challenger(tmp_path, "yes: kinder")
    (entry,) = history.decisions_at(accepted)
    (published,) = (tmp_path / "store").iterdir()
    assert (entry.outcome, entry.artifact) == ("accepted", str(published))
    assert (entry.approval.by, entry.approval.words) == ("ada", "yes: kinder")
    assert entry.approval.artifact_sha256 == question.artifact_sha256
    assert f"{entry.approval.time:%Y-%m-%d %H:%M}" in entry.reason


def test_a_refresh_refuses_what_was_not_approved(tmp_path):
    accepted, _ = challenger(tmp_path, "no: rude")
    (entry,) = history.decisions_at(accepted)
    assert (entry.outcome, entry.approval.answer) == ("refused", "no")
    assert "'no: rude'" in entry.reason
    assert not (tmp_path / "store").exists()


def test_the_question_of_a_refresh_shows_what_changed_against_the_accepted_model(tmp_path):
    champion = write_artifact(tmp_path / "before", description="kind", name="tiny")
    with pytest.raises(AcceptedError, match="no model is accepted by now"):
        challenger(tmp_path, "yes", champion)
    page = (tmp_path / "made" / PAGE).read_text()
    assert "description: &#x27;kind&#x27; before, None now" in page
    assert page.index("Approval") < page.index("losses")


@pytest.fixture
def terminal(monkeypatch):
    """A terminal as the standard input; the returned function types into it."""
    keyboard, screen = os.openpty()
    with os.fdopen(screen, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield lambda text: os.write(keyboard, text.encode())
    os.close(keyboard)


def test_the_terminal_asks_until_it_gets_a_yes_or_a_no_and_takes_silence_for_a_no(asked, terminal, capsys):
    address, _, question = asked
    terminal("maybe\nyes, it is kind\n")
    assert approval.answer_here(question, address) == "yes, it is kind"
    assert approval.link(address) in capsys.readouterr().out
    quick = question.model_copy(update={"hours": 1e-6})
    assert approval.answer_here(quick, address) == "no: no answer within 1e-06 hours"


def test_without_a_terminal_the_command_is_printed(asked, monkeypatch, capsys):
    address, _, question = asked
    with open(os.devnull) as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        assert approval.answer_here(question, address) is None
    assert f"flytune approve {address} --sha256 {question.artifact_sha256}" in capsys.readouterr().out
