"""The process that computes rewards: values, errors with their row, and what it may not do."""

import pytest

from flytune.errors import RewardError
from flytune.recipe import Grpo
from flytune.rewards import Judged, RewardProcess

CODE = """
def length(completion, prompt, answer, **columns):
    return len(completion) / 10

def numpys(completion, **columns):
    import numpy
    return numpy.float32(2)

def raises(completion, **columns):
    raise ValueError("no such thing")

def nan(completion, **columns):
    return float("nan") if completion else 0

def huge(completion, **columns):
    return 1e200

def none(completion, **columns):
    return None

def hangs(completion, **columns):
    while True:
        pass

def memory(completion, **columns):
    return len(bytearray(10**10))

def leaves(completion, **columns):
    import os
    os._exit(0)

def connects(completion, **columns):
    import socket
    socket.create_connection(("127.0.0.1", 9), 1)

def writes(completion, **columns):
    open("/tmp/of-a-reward", "w").write("a")

def reads(completion, **columns):
    return len(open("/proc/self/environ").read())

def starts(completion, **columns):
    import subprocess
    subprocess.run(["true"])

def starts_below(completion, **columns):
    import _posixsubprocess
    pipes = [-1] * 6
    _posixsubprocess.fork_exec([b"true"], [b"/bin/true"], True, (), None, None, *pipes, 3, 4, False, False)

def forges(completion, **columns):
    import os
    for file in range(3, 64):
        try:
            os.write(file, b"1\\n")
        except OSError:
            pass

def answers_more(completion, **columns):
    import os
    for file in range(3, 64):
        try:
            os.write(file, 9 * b'{"value": 1.0}\\n')
        except OSError:
            pass

class Number(float):
    def __float__(self):
        return float("nan")

def infinite(completion, **columns):
    return Number(1)

state = []
def remembers(completion, **columns):
    state.append(1)
    return len(state)
"""
FORGED = """
import os
for file in range(3, 64):
    try:
        os.write(file, b'{"value": 1.0}\\n')
    except OSError:
        pass
"""


def values(rewards, items, seconds=1.0):
    section = Grpo.model_validate({"name": "grpo", "rewards": rewards, "reward_seconds": seconds})
    with RewardProcess(section) as process:
        return process.values([Judged("p", completion, fields, "row 3") for completion, fields in items])


def own(name):
    return [{"name": name, "code": CODE}]


def test_values_of_several_rewards_and_their_sum():
    section = Grpo.model_validate(
        {"name": "grpo", "rewards": ["exact_answer", {"name": "length", "code": CODE, "weight": 0.5}]}
    )
    with RewardProcess(section) as process:
        found = process.values(
            [Judged("p", "so 7", {"answer": "7"}, ""), Judged("p", "", {"answer": "7"}, "")]
        )
        assert process.values([]) == []
    assert found == [[1.0, 0.4], [0.0, 0.0]]
    assert section.total(found[0]) == 1.2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "raises ValueError: no such thing"),
        ("nan", "returns nan; it must return a finite number"),
        ("huge", "returns 1e\\+200; its size must be 1e\\+09 at most"),
        ("none", "returns NoneType None"),
        ("hangs", "takes more than 0.2 s"),
        ("memory", "MiB of memory"),
        ("leaves", "ends its process"),
        ("connects", "may not use socket"),
        ("writes", "may write no file"),
        ("reads", "may read no file"),
        ("starts", "may not use"),
        ("starts_below", "object is not callable"),
        ("forges", "writes into the answers of its process"),
        ("answers_more", "writes into the answers of its process"),
        ("infinite", "returns nan"),
        ("missing", "it has no function missing"),
    ],
)
def test_a_reward_that_fails_or_does_what_none_may_is_one_error_with_the_row(name, said):
    with pytest.raises(RewardError, match=f"reward {name}: .*{said}.*; row 3, completion 'abc'"):
        values(own(name), [("abc", {"answer": 1}), ("abcd", {"answer": 1})], seconds=0.2)


def test_numbers_of_numpy_are_numbers_and_nothing_is_left_for_the_next_batch():
    assert values(own("numpys"), [("a", {})], seconds=20) == [[2.0]]
    section = Grpo.model_validate({"name": "grpo", "rewards": own("remembers")})
    with RewardProcess(section) as process:
        assert [process.values([Judged("p", "a", {}, "")]) for _ in range(2)] == [[[1.0]], [[1.0]]]


def test_the_process_has_no_secret_of_the_one_that_started_it(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "secret")
    code = "def f(completion, **columns):\n    import os\n    return 'A_TOKEN' in os.environ"
    assert values([{"name": "f", "code": code}], [("a", {})]) == [[0.0]]


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("```python\ndef f(x):\n    return x + 1\n```", 1.0),
        ("def f(x): return x", 0.0),
        ("def f(", 0.0),
        ("while True: pass", 0.0),
        ("import os; os._exit(0)", 0.0),
        ("raise SystemExit", 0.0),
        (FORGED, 0.0),
        ("open('/tmp/of-a-reward', 'w')\ndef f(x): return x + 1", 0.0),
    ],
)
def test_code_passes_its_tests_or_gets_nothing(completion, value):
    assert values(["unit_tests"], [(completion, {"tests": ["assert f(1) == 2"]})], seconds=0.3) == [[value]]


def test_a_missing_column_is_named():
    with pytest.raises(RewardError, match="the row has no column answer; it has result: write column: NAME"):
        values(["exact_answer"], [("abc", {"result": "7"})])


def test_a_column_may_be_a_part_of_an_object():
    path = {"name": "exact_answer", "column": "extra_info.answer"}
    rows = [
        ("4", {"extra_info": {"answer": "4"}}),
        ("4", {"extra_info": {"answer": "5"}}),
        ("4", {"extra_info.answer": "4"}),
    ]
    assert values([path], rows) == [[1.0], [0.0], [1.0]]
    with pytest.raises(RewardError, match=r"the row has no column extra_info\.answer"):
        values([path], [("4", {"extra_info": {"other": "4"}})])
