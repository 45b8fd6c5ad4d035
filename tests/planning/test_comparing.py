"""Two recipes side by side, the picture of a plan, and what the command line makes of both."""

import json
import re
from xml.etree import ElementTree

import pytest

from flytune.cli import main
from flytune.hardware import shape_named
from flytune.hardware.shapes import GIB
from flytune.planning import comparing, planner
from flytune.report import charts
from tests.support.plans import GEOMETRY, recipe_of

BASE = {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}


def recipe(length=2048, **changes):
    training = {"learning_rate": 1e-4, "global_batch_size": 16}
    data = {"dataset_name": "a/b", "max_length": length}
    return recipe_of(**({"model": BASE, "method": "qlora", "data": data, "training": training} | changes))


def planned(one, shape="l4-1"):
    return planner.make(one, [shape_named(shape)], GEOMETRY, 1000)


def test_components_parts_and_prices_add_up_to_their_sums():
    before, after = planned(recipe()), planned(recipe(8192, method="lora", sharding="fsdp"), "a100-80gb-8")
    for changes in (comparing.memory(before, after), comparing.time(before, after)):
        *parts, whole = changes
        assert sum(part.before for part in parts) == pytest.approx(whole.before)
        assert sum(part.after for part in parts) == pytest.approx(whole.after)
        assert [abs(part.more) for part in parts] == sorted((abs(part.more) for part in parts), reverse=True)
    assert comparing.memory(before, after)[-1].after * GIB == pytest.approx(after.memory.peak_bytes)
    found = {change.name: change for change in comparing.price(before, after)}
    parts = [change for name, change in found.items() if name.startswith("billion tokens: ")]
    assert sum(change.after for change in parts) == pytest.approx(found["billion tokens"].after)
    assert found["the run"].before == pytest.approx(before.price[1])
    # A component that only one of them has.
    assert {change.name: change.before for change in comparing.memory(before, after)}["gathered units"] == 0


def test_the_fields_that_differ_are_named_with_both_values():
    one, other = recipe(), recipe(4096, method={"name": "qlora", "r": 64}, name="other")
    assert comparing.fields(one, other) == ["data.max_length: 2048 -> 4096", "method.r: 16 -> 64"]
    assert comparing.fields(one, one) == []


def test_a_plan_without_a_speed_is_compared_in_memory_and_price_alone():
    before, after = (
        planned(recipe()),
        planned(recipe()).model_copy(update={"step_seconds": {}, "tokens_per_second": [], "hours": []}),
    )
    assert comparing.time(before, after) == []
    assert [change.name for change in comparing.price(before, after)] == ["an hour"]


def written(folder, name, one):
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(one.model_dump(exclude_defaults=True)))
    return str(path)


def test_the_command_shows_both(tmp_path, capsys):
    paths = [written(tmp_path, name, recipe(length)) for name, length in (("a", 2048), ("b", 4096))]
    asked = ["plan", "--compare", *paths, "--shape", "l4-1", "--samples", "1000"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "data.max_length: 2048 -> 4096" in shown
    assert "planned micro batch x accumulation: " in shown
    assert re.search(r"before .* after .* change (.*\n)*.*peak \(GiB\)", shown)
    assert "the run ($)" in shown
    assert main([*asked, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["version"] == 1
    assert [plan["shape"] for plan in content["plans"]] == ["l4-1", "l4-1"]
    assert content["memory"][-1]["name"] == "peak"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan"], "which recipe? Name its file, or two after --compare"),
        (["plan", "RECIPE", "--compare", "RECIPE", "RECIPE"], "takes two recipes and nothing else to plan"),
        (["plan", "RECIPE", "--solve", "r", "--svg", "new.svg"], "a picture is of one plan"),
        (["plan", "RECIPE", "--svg", "RECIPE"], "exists already; give a new one"),
    ],
)
def test_what_does_not_go_together_is_refused(words, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, "a", recipe())
    assert main([path if word == "RECIPE" else word for word in words]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new.svg").exists()


def test_the_picture_is_a_file_of_its_own_with_every_phase_and_component(tmp_path, capsys):
    assert (
        main(["plan", written(tmp_path, "a", recipe()), "--svg", str(tmp_path / "a.svg"), "--shape", "l4-1"])
        == 0
    )
    content = (tmp_path / "a.svg").read_text()
    plan = planned(recipe())
    assert content == charts.planned_memory(plan)
    assert ElementTree.fromstring(content).tag == "{http://www.w3.org/2000/svg}svg"
    texts = {text.text for text in ElementTree.fromstring(content).iter("{http://www.w3.org/2000/svg}text")}
    assert {*plan.memory.phases, *(name for name in plan.memory.components)} <= texts
    used = set(re.findall(r"var\((--\w+)\)", content))
    assert used <= set(re.findall(r"(--\w+): #", content))
    # No two components of a plan have one colour.
    components = planned(recipe(method="lora", sharding="fsdp"), "a100-80gb-8").memory.components
    assert len(components) > 8
    assert len({charts.color(number) for number in range(len(components))}) == len(components)
