"""The site's pages: the index of recipe keys, the names of other tools, and a place for each page."""

import importlib.util
import json
import re

import pytest
import yaml

from flytune.recipe import Recipe, json_schema, peers
from tests.support import markdown
from tests.support.paths import ROOT
from tests.support.recipes import models_of

SPEC = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "pages.py")
pages = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(pages)
INDEX = pages.index_of_keys(json.loads(json_schema()))
CELLS = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in INDEX.splitlines() if line.startswith("| `")]
ROWS = {cells[0].strip("`"): cells for cells in CELLS}


def fields(model, prefix=""):
    """Yield the dotted names of all keys, by pydantic and not by the schema."""
    for name, field in model.model_fields.items():
        models = models_of(field.annotation)
        listed = "list[" in str(field.annotation)
        if listed or not models:
            yield prefix + name
        for one in models:
            yield from fields(one, f"{prefix}{name}{'[]' if listed else ''}.")


def test_every_key_of_a_recipe_is_in_the_index():
    assert set(ROWS) == set(fields(Recipe))
    assert len(ROWS) > 130


@pytest.mark.parametrize(
    ("key", "kind", "default", "page"),
    [
        ("training.hang_minutes", "number", "`10.0`", "failures.md#hangs"),
        ("training.learning_rate", "number", "required", "recipes.md#all-fields"),
        ("checkpoints.export", "`last`, `best`", "`last`", "checkpoints.md"),
        ("evaluation.tasks[].limit", "whole number", "`none`", "evaluate.md"),
    ],
)
def test_a_row_has_type_default_and_page(key, kind, default, page):
    _, there, said, _, link = ROWS[key]
    assert (there, said) == (kind, default)
    assert f"]({page})" in link


@pytest.mark.parametrize("key", ROWS)
def test_the_page_of_a_key_has_the_heading_and_names_the_key(key):
    name, _, heading = pages.explained(key).partition("#")
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert not heading or heading in markdown.anchors(page)
    assert re.search(rf"\b{key.replace('[]', '').rpartition('.')[2]}\b", page)


def test_every_entry_of_the_table_of_pages_is_used():
    used = {key.replace("[]", "") for key in ROWS}
    prefixes = {".".join(key.split(".")[:count]) for key in used for count in range(1, 5)}
    assert set(pages.EXPLAINED) - prefixes == set()


def test_the_names_of_other_tools_are_all_there():
    made = pages.names_of_others(
        yaml.safe_load((ROOT / "flytune/recipe/peers.yaml").read_text(encoding="utf-8"))
    )
    for tool, names in peers.table().items():
        part = made.partition(f"## {tool}\n")[2].partition("\n## ")[0]
        assert [name for name in names if f"`{name}`" not in part] == []
        assert all(f"| `{name}` | `{one.key}` |" in part for name, one in names.items() if one.key)


def test_every_page_has_a_place_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    placed = [
        page if isinstance(page, str) else next(iter(page.values()))
        for group in yaml.safe_load(text.partition("\nnav:\n")[2])
        for page in next(iter(group.values()))
    ]
    assert sorted(placed) == sorted([*pages.pages(), "docs/keys.md", "docs/names.md"])


def test_built_pages_load_no_script_of_a_server(tmp_path):
    page = '<script src="https://example.org/iframe-worker/shim"></script>'
    (tmp_path / "docs").mkdir()
    for name in ("index.html", "docs/use.html"):
        (tmp_path / name).write_text(page)
    pages.finish(tmp_path)
    assert (tmp_path / "index.html").read_text() == '<script src="file_worker.js"></script>'
    assert (tmp_path / "docs/use.html").read_text() == '<script src="../file_worker.js"></script>'
    with pytest.raises(SystemExit, match="no page has"):
        pages.finish(tmp_path)
