"""What the pages say is there, is there."""

import re
import subprocess

import pytest

from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_pages_were_found():
    assert {page.name for page in PAGES} >= {"README.md", "design.md", "adding-a-strategy.md", "footguns.md", "measured.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_recipes_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for recipe in re.findall(r"\brecipes/[\w.-]+\.yaml", text):
        assert recipe == "recipes/x.yaml" or (ROOT / recipe).is_file(), recipe


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets


def test_the_tree_in_the_readme_is_the_tree():
    tree = re.search(r"## The tree\n+```\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)
    names = re.findall(r"^(?:  )?([\w-]+(?:/|\.\w+))(?=\s|$)", tree, re.MULTILINE)
    assert len(names) > 12
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "flytune" / name).exists(), name


def test_every_footgun_has_its_test():
    named = re.findall(r"`([\w/]+\.py): (test_\w+)`", (ROOT / "docs" / "footguns.md").read_text())
    rows = [line for line in (ROOT / "docs" / "footguns.md").read_text().splitlines() if line.startswith("|")][2:]
    assert len(named) == len(rows) > 8
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), f"{file}: {name}"


def test_no_file_names_a_machine():
    # Split, so that this file does not name one.
    home = "/" + "root/"
    done = subprocess.run(["git", "grep", "-lIF", home, "--", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == ""


def test_the_recipes_of_the_pages_are_right():
    """Each block of YAML that is a section of a recipe, read as one; what docs/evaluate.md asks, the harness knows."""
    import yaml

    from flytune.evaluation.harness import run
    from flytune.recipe.recipe import Recipe

    whole = Recipe.from_yaml(ROOT / "recipes" / "demo-qlora.yaml").model_dump(exclude_defaults=True)
    found = 0
    for name in ("evaluate.md", "publish.md"):
        for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL):
            sections = yaml.safe_load(block)
            recipe = Recipe.model_validate(whole | sections)
            found += 1
            if "evaluation" in sections:
                assert run.jobs(recipe)
    assert found == 3
