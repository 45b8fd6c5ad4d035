"""Tests of the parser of Flyte's failure messages, on messages from Flyte's sources."""

import pytest

from flytune.failures.messages import parse_message
from tests.support.flyte_errors import CASES, OURS


@pytest.mark.parametrize("case", CASES)
def test_a_message_yields_cause_and_advice(case):
    message, sentence, advice = CASES[case]
    text = parse_message(message)
    assert sentence in text.sentence
    assert advice in text.advice
    assert text.advice
    first = text.own.splitlines()[0]
    for wrapping in ("Trace:", "Traceback", "currentAttempt", "Message:", "[User]", "Grace period", "unready status"):
        assert wrapping not in first


@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "[4/4] currentAttempt done. Last Error: USER::{}",
        "[primary] terminated with exit code (1). Reason [Error]. Message: \n!! Begin User Error Captured by Flyte !!\n{}",
        "Encountered error while executing workflow 'w':\n  Error encountered while executing 'tasks.train.other':\n  {}",
    ],
)
def test_the_text_of_our_own_tasks_is_found(around):
    assert parse_message(around.format(OURS)) == OURS


def test_the_task_of_a_local_run_is_named():
    text = parse_message(
        "Error encountered while executing 'tasks.prepare.prepare_data':\n  bad data: rows.jsonl:3\nwhat to do: mend it"
    )
    assert (text.task, text.sentence, text.advice) == ("prepare_data", "bad data: rows.jsonl:3", "mend it")


def test_the_middle_that_propeller_cuts_has_no_sentence_of_ours():
    whole = str(OURS._replace(details="Traceback\n" + "  in some_function\n" * 500))
    cut = whole[:1024] + whole[-1024:]
    text = parse_message(cut)
    assert text._replace(details="") == OURS._replace(details="")
    assert text.details.startswith("Traceback")
