"""Unit tests of answers, which run in another process than the answer: what crosses, and what an answer
cannot decide."""

import pytest

from flytune.recipe import Grpo
from flytune.rewards import Judged, RewardProcess

RIGHT = {
    "a value": (
        "def f(x): return x + 1",
        "assert f(1) == 2",
    ),
    "values of all kinds": (
        "def f(): return (1, [2.5, float('inf')], {'a': {1, 2}}, b'x', None, 1j, range(3))",
        "assert f() == (1, [2.5, float('inf')], {'a': {1, 2}}, b'x', None, 1j, range(3))",
    ),
    "a large number": (
        "def f(): return 10**5000",
        "assert f() == 10**5000",
    ),
    "arguments by any name": (
        "class S:\n    def find(self, target, kind, one, *, self_=0): return [target, kind, one, self_]",
        "assert S().find(target=1, kind=2, one=3, self_=4) == [1, 2, 3, 4]",
    ),
    "a list that is changed": (
        "def f(a): a.sort()",
        "x = [3, 1]\nf(x)\nassert x == [1, 3]",
    ),
    "an object with state": (
        "class S:\n    def __init__(self): self.all = []\n    def push(self, x): self.all.append(x)\n"
        "    def __len__(self): return len(self.all)",
        "s = S()\n"
        "s.push(2)\n"
        "assert len(s) == 1 and s.all == [2] and isinstance(s, S) and not isinstance(2, S)",
    ),
    "operators": (
        "class V:\n    def __init__(self, x): self.x = x\n"
        "    def __add__(self, o): return V(self.x + o.x)\n    def __mul__(self, k): return V(self.x * k)\n"
        "    def __eq__(self, o): return self.x == o.x",
        "assert V(1) + V(2) == V(3)\nassert (V(2) * 3).x == 6",
    ),
    "a function of the tests": (
        "def f(g, xs): return [g(x) for x in xs]",
        "assert f(lambda x: x * 2, [1, 2]) == [2, 4]",
    ),
    "objects of the tests": (
        "def back(h):\n    last = None\n    while h: h.next, last, h = last, h, h.next\n    return last",
        "class N:\n    def __init__(self, v, n=None): self.v, self.next = v, n\nh = back(N(1, N(2)))\n"
        "assert h.v == 2 and h.next.v == 1 and h.next.next is None",
    ),
    "an error": (
        "def f(x): return 1 / x",
        "try:\n    f(0)\n    assert False\nexcept ZeroDivisionError as e: assert 'zero' in str(e)",
    ),
    "a generator": (
        "def f(n):\n    for i in range(n): yield i",
        "assert list(f(3)) == [0, 1, 2] and next(f(1)) == 0",
    ),
    "imports of the answer": (
        "import math\nfrom collections import Counter\ndef f(x): return Counter(x)",
        "assert Counter('aab') == f('aab') and math.isclose(1, 1)",
    ),
    "numpy": (
        "import numpy\ndef f(): return numpy.arange(3)",
        "assert list(f()) == [0, 1, 2] and f().sum() == 3",
    ),
    "a name of Python's that is tested": (
        "def sum(a, b): return a + b",
        "assert sum(1, 2) == 3",
    ),
    "a function that tests are given": (
        "def f(x): return x > 1",
        "def check(f):\n    assert f(2) is True\n    assert not f(1)\ncheck(f)",
    ),
}
EQUAL = (
    "class E:\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\n"
    "    def __contains__(self, o): return True\n    def __gt__(self, o): return True\n"
    "def f(x): return E()\n"
)
"""An answer that is equal to all, larger than all, and differs from all by 0."""
WRONG = {
    "a wrong value": (
        "def f(x): return x",
        "assert f(1) == 2",
    ),
    "a value equal to all": (
        "class E:\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\n"
        "    def __contains__(self, o): return True\n    def __gt__(self, o): return True\n"
        "def f(x): return E()\n",
        "assert f(1) == 2",
    ),
    "a difference of 0 from all": (
        "class E:\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\n"
        "    def __contains__(self, o): return True\n    def __gt__(self, o): return True\n"
        "def f(x): return E()\n",
        "assert abs(f(1) - 2) < 1e-6",
    ),
    "a value larger than all": (
        "class E:\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\n"
        "    def __contains__(self, o): return True\n    def __gt__(self, o): return True\n"
        "def f(x): return E()\n",
        "assert f(1) > 2",
    ),
    "a value that holds all": (
        "class E:\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\n"
        "    def __contains__(self, o): return True\n    def __gt__(self, o): return True\n"
        "def f(x): return E()\n",
        "assert 2 in f(1)",
    ),
    "a value equal to all, in a list": (
        "class E:\n    def __eq__(self, o): return True\n    def __sub__(self, o): return 0\n"
        "    def __contains__(self, o): return True\n    def __gt__(self, o): return True\n"
        "def f(x): return E()\n",
        "assert [f(1)] == [2]",
    ),
    "Python's own value equal to all": (
        "from unittest.mock import ANY\ndef f(x): return ANY",
        "assert f(1) == 2",
    ),
    "another abs": (
        "def abs(x): return 0\ndef f(x): return 0",
        "assert abs(f(1) - 3) < 1e-6",
    ),
    "frames and what they hold": (
        "import gc, os, sys\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for one in [*frame.f_locals.values(), *gc.get_objects()]:\n"
        "            for at in range(3, 64):\n"
        "                try: os.write(at, one if isinstance(one, bytes) else b'1')\n"
        "                except OSError: pass\n        frame = frame.f_back",
        "assert f(1) == 2",
    ),
    "a trace that leaves lines out": (
        "import sys\nsys.settrace(lambda *a: None)\nAssertionError = None\ndef f(x): return 3",
        "assert f(1) == 2",
    ),
    "globals of a function of the tests": (
        "def f(g): g.__globals__['passed'] = True",
        "passed = False\ndef g(): 1\ntry: f(g)\nexcept AttributeError: pass\nassert passed",
    ),
    "a method of the tests that is replaced": (
        "def f(one): one.check = lambda x: True\n",
        "class T:\n"
        "    def check(self, x): return x == 2\n"
        "t = T()\n"
        "try: f(t)\n"
        "except AttributeError: pass\n"
        "assert t.check(3)",
    ),
    "the end of its process": (
        "import os\nos._exit(0)",
        "assert True",
    ),
    "an exit when it is called": (
        "def f(): raise SystemExit",
        "f()\n",
    ),
    "messages that are none": (
        "import os\n"
        "for at in range(3, 64):\n"
        "    try: os.write(at, b'[]\\n{}\\n')\n"
        "    except OSError: pass\n"
        "def f(): return 1",
        "assert f() == 1",
    ),
}


def value(completion, tests):
    section = Grpo.model_validate({"name": "grpo", "rewards": ["unit_tests"], "reward_seconds": 20})
    with RewardProcess(section) as process:
        return process.values([Judged("p", completion, {"tests": tests}, "row 1")])[0][0]


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers_pass(name):
    assert value(*RIGHT[name]) == 1


@pytest.mark.parametrize("name", WRONG)
def test_no_answer_decides_its_own_verdict(name):
    assert value(*WRONG[name]) == 0
