"""The history of accepted models, on a file system and on S3."""

import json
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flytune.cli import main
from flytune.errors import AcceptedError
from flytune.records.figures import ACCURACY
from flytune.registry import Decision, history
from flytune.storage import Storage
from tests.support.decisions import comparison, decision


@pytest.fixture(params=["folder", "s3"])
def address(request, tmp_path):
    # moto keeps what earlier tests stored.
    return (
        f"{request.getfixturevalue('bucket')}/{tmp_path.name}"
        if request.param == "s3"
        else str(tmp_path / "chat")
    )


def test_what_is_accepted_follows_from_the_history(address):
    assert history.decisions_at(address) == []
    assert history.current([]) is None
    first = history.record(address, decision("a", duel=comparison(-0.3)), expected=None)
    refused = history.record(address, decision("b", "refused"), expected="a")
    second = history.record(address, decision("c"), expected="a")
    assert [first.number, refused.number, second.number] == [1, 2, 3]
    decisions = history.decisions_at(address)
    assert decisions == [first, refused, second]
    assert history.current(decisions[:2]) == first
    assert history.current(decisions) == second == pointer(address)


def pointer(address):
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(address)
    filesystem.invalidate_cache()
    return Decision.model_validate_json(filesystem.cat_file(f"{root}/accepted.json"))


def test_rollback_goes_one_back_each_time_as_a_new_entry(address):
    for artifact, before in (("a", None), ("b", "a"), ("c", "b")):
        history.record(address, decision(artifact), expected=before)
    back = history.rollback(address, "answers got rude")
    assert (back.number, back.outcome, back.artifact) == (4, "rolled back", "b")
    assert back.reason == "answers got rude (instead of c)"
    assert pointer(address).artifact == "b"
    history.record(address, decision("d"), expected="b")
    assert [history.rollback(address, "x").artifact for _ in range(2)] == ["b", "a"]
    with pytest.raises(AcceptedError, match="only a was ever accepted, so there is nothing to go back to"):
        history.rollback(address, "x")
    assert len(history.decisions_at(address)) == 7


def test_a_decision_whose_answer_was_lost_is_recorded_once(address):
    first = history.record(address, decision("a"), expected=None)
    again = decision("a").model_copy(update={"time": datetime.now(UTC)})
    assert history.record(address, again, expected=None) == first == pointer(address)
    assert history.decisions_at(address) == [first]


def test_a_decision_made_against_another_model_is_not_recorded(address):
    history.record(address, decision("a"), expected=None)
    with pytest.raises(
        AcceptedError, match="a is accepted by now, and not no model, which this decision was made against"
    ):
        history.record(address, decision("b"), expected=None)
    with pytest.raises(AcceptedError, match="a is accepted by now, and not z"):
        history.record(address, decision("b"), expected="z")
    # A refusal changes nothing, whichever model it was compared with.
    history.record(address, decision("b", "refused"), expected="z")
    assert [entry.artifact for entry in history.decisions_at(address)] == ["a", "b"]


def test_of_writers_at_the_same_time_one_wins_and_the_others_know(address):
    history.record(address, decision("a"), expected=None)
    told, start = [], threading.Barrier(6)

    def write(number):
        start.wait()
        try:
            outcome = "refused" if number % 2 else "accepted"
            told.append(history.record(address, decision(f"m{number}", outcome), expected="a"))
        except AcceptedError as error:
            told.append(str(error))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    recorded = sorted(
        (entry for entry in told if isinstance(entry, Decision)), key=lambda entry: entry.number
    )
    assert history.decisions_at(address)[1:] == recorded
    assert [entry.outcome for entry in recorded].count("accepted") == 1
    assert [entry.outcome for entry in recorded].count("refused") == 3
    assert [text for text in told if isinstance(text, str)] == [
        text for text in told if "is accepted by now" in str(text)
    ]
    assert pointer(address) == history.current(recorded)


def test_a_number_is_taken_once_and_its_content_never_changes(address):
    storage = Storage(address)
    assert storage.create("history/000001.json", b"one")
    assert not storage.create("history/000001.json", b"two")
    assert storage.read("history/000001.json") == b"one"
    with pytest.raises(AcceptedError, match="history: invalid entry"):
        history.decisions_at(address)


def test_nothing_half_written_is_left_on_a_file_system(tmp_path):
    history.record(str(tmp_path), decision("a"), expected=None)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"accepted.json", "history/000001.json"}


def test_an_address_that_cannot_be_used_says_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(AcceptedError, match="file/x: history cannot be read: NotADirectoryError"):
        history.record(str(tmp_path / "file" / "x"), decision("a"), expected=None)
    with pytest.raises(AcceptedError, match="nosuch://x: cannot be opened"):
        history.decisions_at("nosuch://x")


def test_a_comparison_is_won_only_beyond_doubt():
    assert comparison(-0.2).is_won
    assert not comparison(-0.01).is_won
    assert comparison(-0.2).describe() == (
        "held-out loss 1.8000, compared with 2.0000 of its base model (lower is better); the interval of the "
        "difference -0.2000 (-0.2500 to -0.1500) is below zero, over 40 samples"
    )
    assert (
        "of the accepted model (lower is better); the interval of the difference -0.0100 (-0.0600 to "
        "+0.0400) is on both sides of zero" in comparison(-0.01, against="a").describe()
    )
    assert "is above zero" in comparison(0.2).describe()


def test_the_command_shows_the_history_and_goes_back(tmp_path, capsys):
    address = str(tmp_path)
    assert main(["accepted", address]) == 0
    assert capsys.readouterr().out == f"{address}: no decisions yet\n"
    history.record(address, decision("s3://bucket/chat-1", duel=comparison(-0.3)), expected=None)
    history.record(
        address,
        decision("s3://bucket/chat-2", "refused", duel=comparison(0.1), reason="not better"),
        expected=None,
    )
    history.record(address, decision("s3://bucket/chat-3"), expected="s3://bucket/chat-1")
    assert main(["accepted", address, "--json"]) == 0
    assert [entry["number"] for entry in json.loads(capsys.readouterr().out)] == [1, 2, 3]
    assert main(["accepted", address, "--rollback", "--reason", "slow"]) == 0
    said = capsys.readouterr().out
    assert "chat-1" in said
    assert "-0.3000" in said
    assert [entry.outcome for entry in history.decisions_at(address)] == [
        "accepted",
        "refused",
        "accepted",
        "rolled back",
    ]
    assert Path(address, "accepted.json").read_text().count("chat-1")
    assert main(["accepted", address, "--rollback"]) == 1
    assert "nothing to go back to" in capsys.readouterr().err


def test_a_figure_of_which_more_is_better_is_won_above_zero():
    assert comparison(0.2, figure=ACCURACY).is_won
    assert not comparison(-0.2, figure=ACCURACY).is_won
    assert "(higher is better)" in comparison(0.2, figure=ACCURACY).describe()
    assert "figure" not in comparison(0.2).model_dump(), "the loss, as in earlier histories"


def test_credentials_of_old_decisions_are_not_shown(tmp_path, capsys):
    secret = "s3://key:T0PS3CRET@bucket/model"
    history.record(
        str(tmp_path), decision(secret, reason=f"better than {secret}", duel=comparison(-0.3)), expected=None
    )
    for words in ([], ["--json"]):
        assert main(["accepted", *words, str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert "T0PS3CRET" not in shown
        assert "@bucket/model" in shown
    found = json.loads(shown)
    assert (found[0]["reason"], found[0]["number"]) == ("better than s3://[hidden]@bucket/model", 1)
    assert found[0]["duel"]["samples"] == 40
