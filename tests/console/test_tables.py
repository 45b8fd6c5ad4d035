"""All tables of the command line, on narrow and wide terminals and without one: no word is broken, and
nothing is lost."""

import argparse
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from flytune.adapters import merging as adapter_merge
from flytune.artifacts import catalog, fetch
from flytune.cli import accepted as accepted_command
from flytune.cli import adapters, merge
from flytune.console import tables
from flytune.planning import planner
from flytune.planning import table as planning_table
from flytune.planning.calibration import Factor
from flytune.records import Comparison
from flytune.registry import history
from flytune.selftest import Matrix
from flytune.selftest import table as selftest_table
from flytune.selftest.matrix import Cell
from flytune.sweeps import Outcome, results
from tests.support.decisions import comparison, decision
from tests.support.paths import ROOT
from tests.support.plans import GEOMETRY, plan_of, ranked, recipe_of
from tests.support.sweeps import drawn, score

ADDRESS = "s3://company-flyte-userdata-us-east-1/published/support-assistant/support-assistant-qwen3-8b-lora-20261122-3f2a9c81d0b4"
LONG = "support-assistant-qwen3-8b-instruct-lora-with-a-name-of-sixty-three"


def show_accepted(console, monkeypatch):
    lost = "PermissionError: [Errno 13] Permission denied: the artifact cannot be read by this account"
    decisions = [
        decision(f"{ADDRESS}{number}", outcome, number=number, reason=lost, **given)
        for number, (outcome, given) in enumerate(
            [("accepted", {"duel": comparison(-0.3)}), ("refused", {}), ("rolled back", {})], 1
        )
    ]
    monkeypatch.setattr(history, "decisions_at", lambda address: decisions)
    accepted_command.run(argparse.Namespace(rollback=False, address=ADDRESS, json=False))


def show_adapters(console, monkeypatch):
    entry = {
        "name": LONG,
        "address": f"{ADDRESS}/{LONG}",
        "base": "Qwen/Qwen3-8B-Instruct",
        "revision": "f" * 40,
    }
    entry |= {
        "method": "qlora",
        "data": ADDRESS,
        "rows": 1_234_567,
        "data_sha256": "a" * 64,
        "size": 12_345_678_901,
    }
    entry |= {"figures": score(1.7).figures, "stored": datetime.now(UTC)}
    made = {
        "name": "combined",
        "address": ADDRESS,
        "made_from": [ADDRESS, ADDRESS],
        "problems": ["recipe.yaml: [Errno 13]"],
    }
    monkeypatch.setattr(
        catalog, "list_artifacts", lambda address: [catalog.Entry(**entry), catalog.Entry(**made)]
    )
    adapters.run(argparse.Namespace(address=ADDRESS, json=False))


def show_merge(console, monkeypatch):
    sides = [
        adapter_merge.Candidate(onto=onto, divergence=1.234e-5, worst=0.0123, agreement=0.9987)
        for onto in adapter_merge.Candidate.model_fields["onto"].annotation.__args__
    ]
    namespace = argparse.Namespace(
        base=ADDRESS, dtype="bfloat16", tokens=1234, of_vectors=False, candidates=sides
    )
    monkeypatch.setattr(fetch, "local_folder", lambda *_: Path("x"))
    monkeypatch.setattr(adapter_merge, "merge", lambda *_: namespace)
    merge.run(
        argparse.Namespace(
            artifact=ADDRESS, out=ADDRESS, json=False, dtype="auto", trust_remote_code=False, base=ADDRESS
        )
    )


def show_plan(console, monkeypatch):
    planning_table.show(plan_of(name=LONG[:63], data={"path": "x", "packing": True}), console)


def show_gpu_plan(console, monkeypatch):
    hardware = {"shape": "a100-80gb-8"}
    recipe = recipe_of(name=LONG[:63], sharding="fsdp", hardware=hardware)
    planning_table.show(planner.make(recipe, geometry=GEOMETRY, samples=64_000), console)


def show_ranking(console, monkeypatch):
    recipe, ranking = recipe_of(name=LONG[:63], sharding="fsdp"), ranked()
    planning_table.show_ranking(
        recipe, ranking, [planner.plan_of(fit, 6400) for fit in ranking.fits], "price", console
    )


def show_calibration(console, monkeypatch):
    sizes = {"first step": 71_234_567_890, "step": 61_234_567_890}
    one = {
        "recipe": LONG,
        "shape": "a100-80gb-8x16-spot",
        "full_length": False,
        "planned_bytes": sizes,
        "measured_bytes": sizes,
    }
    one |= {"planned_step_seconds": 1.0, "measured_step_seconds": 1.1, "planned_tokens_per_second": 9e5}
    comparison = Comparison(**one, measured_tokens_per_second=8e5, calibration=None)
    planning_table.show_calibration([comparison], [Factor(name="x", memory=1.1, speed=0.9, runs=3)], console)


def show_selftest(console, monkeypatch):
    cells = [
        Cell(
            method=method,
            sharding=sharding,
            offload="none",
            rows="chats",
            state="equal",
            words="equal (1.2e-07)",
        )
        for sharding in ("ddp", "zero2", "device_map")
        for method in ("full", "lora", "qlora")
    ]
    refused = Cell(
        method="lora",
        sharding="fsdp",
        offload="cpu",
        rows="chats",
        state="refused",
        words="refused",
        reason=LONG,
    )
    matrix = Matrix(
        machine="2 x NVIDIA A100-SXM4-80GB, driver 550",
        global_batch_size=4,
        cells=[*cells, refused],
        seconds=1.0,
    )
    selftest_table.show(matrix, console)


def show_sweep(console, monkeypatch):
    changes = [
        {
            "data.path": f"{ADDRESS}{n}",
            "training.learning_rate": 1e-4 * n,
            "method.target_modules": ["[q]", "v_proj"],
        }
        for n in (1, 2)
    ]
    points = drawn(changes=changes, recipe=recipe_of(name=LONG[:60], method="lora"))
    first, second = (point.recipe.name for point in points.points)
    done = {first: Outcome(name=first, values=list(changes[0].values()), scored=score(2.0))}
    results.show(results.compare(points, done, {second: "OutOfMemory: of a GPU"}), console)


SHOWN = [value for name, value in sorted(globals().items()) if name.startswith("show_")]


def words(table):
    """Return the words of all cells, headers and footers."""
    texts = [str(column.header) for column in table.columns] + [str(table.title or "")]
    texts += [str(cell) for column in table.columns for cell in column.cells]
    texts += [str(column.footer) for column in table.columns] if table.show_footer else []
    return [word for text in texts for word in Text.from_markup(text).plain.split()]


@pytest.mark.parametrize("columns", [60, 80, 100, 200, None])
@pytest.mark.parametrize("show", SHOWN, ids=lambda show: show.__name__)
def test_every_word_is_shown_whole_and_no_line_of_a_table_is_wider_than_the_console(
    show, columns, monkeypatch, capsys
):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    seen, upstream = [], tables.show

    def noting(table, console, **options):
        seen.append(words(table))
        upstream(table, console, **options)

    monkeypatch.setattr(tables, "show", noting)
    show(tables.console(), monkeypatch)
    said = capsys.readouterr().out
    assert seen
    lines = said.splitlines()
    assert [
        line
        for line in lines
        if re.match(r"^[┏┃┡│├└╇ ]*[┃│┏└]", line) and len(line) > (columns or tables.WIDE)
    ] == []
    assert "…" not in said
    shown = re.sub(r"[┃│]", " ", said).split()
    of_lines = {*shown, *(word.removesuffix(":").removesuffix(",") for word in shown)}
    for table in seen:
        assert [word for word in table if word not in of_lines] == []


def test_without_a_terminal_a_row_is_a_line(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    show_accepted(None, monkeypatch)
    assert [line.count("│") for line in capsys.readouterr().out.splitlines() if ADDRESS in line][:3] == [
        8,
        8,
        8,
    ]


def test_where_all_fits_the_table_is_left_as_it_is(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    table = Table("a", "b")
    table.add_row("one two", "three")
    tables.show(table, tables.console())
    assert "│ one two │ three │" in capsys.readouterr().out


def test_every_table_is_shown_by_it():
    """Every module that makes a table prints it with `tables.show`, and is in this file."""
    makers = [path for path in (ROOT / "flytune").rglob("*.py") if re.search(r"\bTable\(", path.read_text())]
    places = {path.relative_to(ROOT / "flytune").with_suffix("").as_posix() for path in makers}
    commands = {"cli/accepted", "cli/adapters", "cli/merge", "cli/reproduce"}
    assert places == {*commands, "planning/comparing", "planning/table", "selftest/table", "sweeps/results"}
    for path in makers:
        assert not re.search(r"\.print\((table|_memory|_resources)\b", path.read_text()), path.name
