"""Tests of the parser of Flyte's failure messages, on messages from Flyte's sources."""

import pytest

from flytune.failures.messages import parse_message
from tests.support.flyte_errors import CASES


@pytest.mark.parametrize("case", CASES)
def test_a_message_yields_cause_and_advice(case):
    message, sentence, advice = CASES[case]
    text = parse_message(message)
    assert sentence in text.sentence
    assert advice in text.advice
    assert text.advice
    first = text.own.splitlines()[0]
    for wrapping in (
        "Trace:",
        "Traceback",
        "currentAttempt",
        "Message:",
        "[User]",
        "Grace period",
        "unready status",
    ):
        assert wrapping not in first
