"""The lines of a training run."""

import pytest

from flytune.console import step_lines
from flytune.console.step_lines import StepLines, format_step
from flytune.records import Step


def step(number, **changes):
    parts = dict.fromkeys(
        ("data_seconds", "forward_seconds", "backward_seconds", "update_seconds", "eval_seconds"), 0.0
    )
    values = {
        "step": number,
        "epoch": 0.1,
        "loss": 3.9149,
        "learning_rate": 9.9e-4,
        "grad_norm": 1.65,
        "seconds": 7.7,
    }
    values |= {"tokens": 1000, "tokens_per_second": 186.2, "memory_bytes": int(6.5 * 2**30)}
    return Step(**(parts | values | changes))


def test_a_step_is_a_line_for_people():
    assert (
        format_step(step(3), 16, 100.2)
        == "step 3/16  loss 3.91  grad 1.65  lr 9.9e-4  186 tok/s  6.5 GiB  eta 1:40"
    )


@pytest.mark.parametrize(
    ("changes", "seconds", "said"),
    [
        ({"grad_norm": None}, 0, "step 3/16  loss 3.91  lr 9.9e-4  186 tok/s  6.5 GiB  eta 0:00"),
        (
            {"learning_rate": 0.0, "tokens_per_second": 123456.7},
            59.6,
            "lr 0  123,457 tok/s  6.5 GiB  eta 1:00",
        ),
        (
            {"learning_rate": 1e-3, "loss": 0.00123},
            7300,
            "loss 0.00123  grad 1.65  lr 1.0e-3  186 tok/s  6.5 GiB  eta 2:01:40",
        ),
        ({"grad_norm": 1234.5}, 9, "grad 1234.50  lr 9.9e-4  186 tok/s  6.5 GiB  eta 0:09"),
    ],
)
def test_every_number_is_as_long_as_it_must_be(changes, seconds, said):
    assert format_step(step(3, **changes), 16, seconds).endswith(said)


def test_what_is_left_is_counted_from_this_attempts_steps(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(step_lines.time, "monotonic", lambda: now[0])
    lines = StepLines(10, 16, 100)
    now[0] += 40
    lines.step(step(12, eval_loss=3.5))
    lines.end([step(12, memory_bytes=7 * 2**30), step(14)])
    lines.export(14, 14, 3.5, ", the lowest")
    lines.score(3.4321, 8, "nats per token")
    assert capsys.readouterr().out.splitlines() == [
        "step 12/16  loss 3.91  grad 1.65  lr 9.9e-4  186 tok/s  6.5 GiB  eta 1:20",
        "step 12/16  eval_loss 3.50 nats per token of 100 held-out samples",
        "trained 4 steps in 0:40  loss 3.91  2,000 tokens  7.0 GiB; steps 1 to 10 are of earlier attempts",
        "exports step 14 of 14: eval_loss 3.50, the lowest",
        "gate loss 3.43, nats per token, of the first 8 held-out samples: the export must have the same",
    ]
