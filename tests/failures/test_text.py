"""Texts of failures: our sentences first and whole, the traceback last and shortened in its middle, no
secrets."""

import pytest

from flytune.failures import FailureText, shortened, without_secrets

TRACE = (
    "Traceback (most recent call last):\n"
    + "".join(f"  File {number}\n" for number in range(900))
    + "KeyError: 'last'"
)
TEXT = FailureText(
    "out of GPU memory: at step 3",
    "a smaller micro batch",
    "train_l4_1",
    ("final", "log: kubectl logs"),
    TRACE,
)


def test_our_sentences_come_first_and_the_traceback_last():
    assert str(TEXT).splitlines()[:6] == [
        "train_l4_1 failed: out of GPU memory: at step 3",
        "what to do: a smaller micro batch",
        "final",
        "log: kubectl logs",
        "",
        "Traceback (most recent call last):",
    ]


@pytest.mark.parametrize(
    "around",
    [
        "{}",
        "[4/4] currentAttempt done. Last Error: USER::{}",
        "[primary] terminated with exit code (1). Reason [Error]. Message: \n"
        "!! Begin User Error Captured by Flyte !!\n"
        "{}",
        "Encountered error while executing workflow 'w':\n"
        "  Error encountered while executing 'tasks.train.other':\n"
        "  {}",
    ],
)
def test_a_text_is_recognized_in_a_message_of_flyte(around):
    whole = str(TEXT)
    # Propeller cuts the middle.
    for text in (whole, whole[:1024] + whole[-1024:]):
        assert TEXT.is_in(around.format(text))
        assert not TEXT._replace(sentence="out of GPU memory: at step 4").is_in(around.format(text))


@pytest.mark.parametrize("limit", [1, 300, 3000])
def test_a_limit_takes_from_the_middle_of_the_traceback_alone(limit):
    text = TEXT.within(limit)
    assert text.startswith(TEXT.own)
    assert len(text) <= max(limit, len(TEXT.own))
    if limit == 3000:
        assert "\n\nTraceback (most recent call last):\n  File 0\n" in text
        assert " characters left out ...]" in text
        assert text.endswith("KeyError: 'last'")


def test_sentences_that_no_message_could_hold_are_shortened_too():
    text = TEXT._replace(sentence="a" * 50_000).within(3000)
    assert len(text) <= 12_000
    assert text.startswith("train_l4_1 failed: aaa")
    assert text.endswith("log: kubectl logs")


@pytest.mark.parametrize("length", [99, 100, 101, 5000])
def test_a_shortened_text_is_within_its_limit(length):
    text = shortened("x" * length, 100)
    assert len(text) <= 100
    assert (text == "x" * length) == (length <= 100)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:hunter2@host/x", "https://[hidden]@host/x"),
        (
            "GET https://b.s3.amazonaws.com/k?X-Amz-Date=1&X-Amz-Signature=0a1b&x=2",
            "X-Amz-Date=1&X-Amz-Signature=[hidden]&x=2",
        ),
        ("https://a.blob.core.windows.net/c?sv=1&sig=0a%2B1", "?sv=1&sig=[hidden]"),
        ("https://hooks.slack.com/services/T0/B0/xyz", "https://hooks.slack.com/[hidden]"),
        ("Authorization: Bearer eyJ0.eyJ1.x-y", "Authorization: Bearer [hidden]"),
        ("token hf_abcdefghijklmnopqrst is invalid", "token [hidden] is invalid"),
        ("key AKIAIOSFODNN7EXAMPLE is unknown", "key [hidden] is unknown"),
        ("{'aws_secret_access_key': 'wJalrXUt'}", "{'aws_secret_access_key': '[hidden]'}"),
        ("the key is s3cret-value!", "the key is [hidden]!"),
        ("s3://bucket/key=1/x and KeyError: 'hf_model'", "s3://bucket/key=1/x and KeyError: 'hf_model'"),
    ],
)
def test_secrets_are_not_shown(text, shown, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cret-value")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token")
    assert shown in without_secrets(text)
    assert shown in TEXT._replace(sentence=text).within(3000)
    assert shown in TEXT._replace(details=text).within(3000)
    assert without_secrets("cannot read /var/run/token") == "cannot read /var/run/token"
