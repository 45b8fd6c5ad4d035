"""Rewards that a recipe carries as code, and code in answers: what they may read, write and start, and what
they return."""

import math
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from flytune.errors import FlytuneError
from flytune.recipe import Grpo
from flytune.rewards import Judged, RewardProcess
from tests.fuzz.isolation import OF_FILE, Wrong
from tests.fuzz.kinds import Samples, kind

_WRITES = (
    "open('MARK', 'w').write('a')",
    "import os; os.mkdir('MARK')",
    "import os; os.close(os.open('MARK', os.O_CREAT | os.O_WRONLY))",
    "import pathlib; pathlib.Path('MARK').touch()",
    "import subprocess; subprocess.run(['touch', 'MARK'])",
    "import os; os.system('touch MARK')",
    "from multiprocessing import util; util.spawnv_passfds(b'/usr/bin/touch', [b'touch', b'MARK'], [])",
)
_FORGES = (
    r"""exec('import os\nfor one in range(3, 99):\n try: os.write(one, b\'{"value": 7.0}\\n\')\n"""
    r""" except OSError: pass')""",
)
_READS = (
    "assert open('SECRET').read()",
    "import pathlib; assert pathlib.Path('SECRET').read_text()",
    "import os; assert os.listdir(os.path.dirname('SECRET'))",
    "import os; at = os.path.dirname(os.__file__); os.chdir(at); "
    "assert os.open(os.path.relpath('SECRET', at), 0, dir_fd=os.open(at, 0))",
)
_EQUALS = "f = type('', (), {'__call__': lambda *_: f, '__eq__': lambda *_: True, '__sub__': lambda *_: 0})()"
"""An answer that is equal to all, and differs from all by 0."""
_EXPECTING = (
    "assert f(1) == 2",
    "assert abs(f(1) - 2) < 1e-6",
    "assert f(1) == [2, 3]",
    "assert sorted([f(1)]) == [2]",
)
_RETURNS = (
    "1",
    "True",
    "0.5",
    "None",
    "'1'",
    "float('nan')",
    "float('inf')",
    "[]",
    "1 / 0",
    "10**400",
    "completion",
)


def _drawn() -> st.SearchStrategy[tuple[bool, str, str]]:
    lines = st.sampled_from([*_WRITES, *_WRITES, *_READS, *_FORGES, "pass"])
    equal = st.tuples(st.just(True), st.just(_EQUALS), st.sampled_from(_EXPECTING))
    return st.one_of(*[st.tuples(st.booleans(), lines, st.sampled_from(_RETURNS))] * 5, equal)


@kind("reward", lambda samples: _drawn(), share=0.2)
def check_reward(samples: Samples, given: tuple[bool, str, str], folder: Path) -> None:
    """A reward writes no file, reads none but Python's own, and has a finite number as its value."""
    in_answer, line, returned = given
    (folder / "secret").write_text(OF_FILE, encoding="utf-8")
    line = line.replace("MARK", str(folder / "mark")).replace("SECRET", str(folder / "secret"))
    rewards: list[Any] = [
        {"name": "own", "code": f"def own(completion, **columns):\n    {line}\n    return {returned}\n"}
    ]
    completion = f"```python\n{line}\n```"
    section = {"name": "grpo", "rewards": ["unit_tests"] if in_answer else rewards, "reward_seconds": 2}
    refused: FlytuneError | None = None
    found: list[list[float]] = []
    try:
        with RewardProcess(Grpo.model_validate(section)) as process:
            found = process.values(
                [Judged("a", completion, {"tests": returned if line == _EQUALS else "assert True"}, "row 1")]
            )
    except FlytuneError as error:
        refused = error
    if (folder / "mark").exists():
        raise Wrong("a reward has written a file, or started a program that has")
    if refused is not None:
        raise refused
    if not all(math.isfinite(value) for value in found[0]):
        raise Wrong("the value of a reward is not a finite number")
    if in_answer and found[0][0] not in (0, 1):
        raise Wrong("a program that is judged has written its own value")
    if found[0][0] and line == _EQUALS:
        raise Wrong("an answer has said itself what it is equal to")
    if found[0][0] and "SECRET" in str(given[1]):
        raise Wrong("a reward has read a file of the machine")
