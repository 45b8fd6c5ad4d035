"""benchmarks/README.md lists all benchmarks, and `python -m benchmarks` runs what it lists."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from tests.support.paths import ROOT

# Run by benchmarks, in other processes.
PARTS = {"plain_script", "preparers", "__main__"}


def mains():
    """List the modules that have a function `main`."""
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        names = {
            node.name
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef)
        }
        if "main" in names:
            yield path.stem


def test_the_table_and_the_modules_agree():
    assert sorted(benchmark.name for benchmark in bench.listed()) == sorted(set(mains()) - PARTS)
    assert {benchmark.option for benchmark in bench.listed()} == {
        "--quick",
        "--measurements",
        "--write",
        "--python",
    }


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", bench.listed(), ids=lambda benchmark: benchmark.name)
def test_each_has_the_option_that_the_table_names(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [benchmark.name, "--help"])
    with pytest.raises(SystemExit, match="^0$"):
        import_module(f"benchmarks.{benchmark.name}").main()
    assert benchmark.option in capsys.readouterr().out


class Ran:
    def __init__(self, monkeypatch, failing=""):
        self.commands = []
        self.failing = failing
        monkeypatch.setattr(bench.subprocess, "run", self._run)

    def _run(self, command):
        self.commands.append(command[2:])
        return subprocess.CompletedProcess(
            command, int(bool(self.failing) and command[2].endswith(self.failing))
        )


def test_all_are_run(monkeypatch):
    ran = Ran(monkeypatch)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--quick"])
    bench.main()
    quick = [
        [f"benchmarks.{name}", *(["--quick"] if option == "--quick" else [])]
        for name, option in bench.listed()
    ]
    assert ran.commands == quick


def test_measurements_are_handed_on_and_a_failure_is_the_exit_code(monkeypatch):
    ran = Ran(monkeypatch, failing="loading")
    monkeypatch.setattr("sys.argv", ["benchmarks", "--measurements", "m.csv"])
    with pytest.raises(SystemExit, match="failed: loading"):
        bench.main()
    assert [command[0].removeprefix("benchmarks.") for command in ran.commands] == [
        name for name, _ in bench.listed()
    ]
    assert ["benchmarks.throughput", "--measurements", str(Path("m.csv"))] in ran.commands
