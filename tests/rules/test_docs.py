"""Links, paths, commands and recipes that the Markdown files name exist."""

import re
import subprocess
from urllib.parse import unquote, urlsplit

import pytest

from tests.support import markdown
from tests.support.paths import ROOT
from tests.support.sources import tracked

ALL = markdown.pages()
PAGES = [
    page
    for page in ALL
    if (page.parent == ROOT and page.name != "CHANGELOG.md") or ROOT / "docs" in page.parents
]
"""Pages of today. CHANGELOG.md also names what earlier releases had."""
FOLDERS = "benchmarks|chat_templates|deepspeed_configs|demo|docs|flyte2|flytune|images|recipes|tasks|tests|"
FOLDERS += "training_estimates|workflows"
PATH = re.compile(rf"(?<![\w./:@$-])((?:{FOLDERS})/[\w./*-]*[\w*/])(?:: (\w+)(?![\w.(]))?")
EXAMPLES = {"recipes/x.yaml", "docs/source/accelerate/fsdp.md"}
"""Paths that a page only supposes, or that are in another repository."""


def name(page):
    return page.relative_to(ROOT).as_posix()


def defines(code, member):
    return re.search(rf"^\s*(?:def|class) {member}\b|^{member}\b.*=", code, re.MULTILINE)


def test_pages_were_found():
    assert {name(page) for page in PAGES} >= {
        "README.md",
        "CONTRIBUTING.md",
        "docs/design.md",
        "docs/footguns.md",
    }
    assert ROOT / "CHANGELOG.md" in ALL


def dead_links(page):
    for target, _, _ in markdown.links(page.read_text(encoding="utf-8")):
        url = urlsplit(target)
        if url.scheme or url.netloc:
            # No test uses the network: only the form of an external address is checked.
            if url.scheme not in ("http", "https") or not re.fullmatch(
                r"[\w-]+(\.[\w-]+)+(:\d+)?", url.netloc
            ):
                yield f"{target}: not an address"
            continue
        file = (page.parent / unquote(url.path)).resolve() if url.path else page
        if not file.exists():
            yield f"{target}: no such file"
        elif url.fragment and (
            file.suffix != ".md" or url.fragment not in markdown.anchors(file.read_text(encoding="utf-8"))
        ):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("page", ALL, ids=name)
def test_links_are_alive(page):
    assert list(dead_links(page)) == []


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        (
            "[a](other.md) [b](other.md#the-end-of-it) [c](#here-and-there-1) [d](https://flyte.org/a_(b)) "
            "[e](folder)",
            [],
        ),
        ("[a](gone.md)", ["gone.md: no such file"]),
        ("![a picture](gone.png)", ["gone.png: no such file"]),
        ("[![a badge](gone.svg)](other.md)", ["gone.svg: no such file"]),
        ('<img src="gone.svg" alt="a picture">', ["gone.svg: no such file"]),
        ("[a](other.md#middle)", ["other.md#middle: no such heading"]),
        ("[a](#nowhere)", ["#nowhere: no such heading"]),
        ("[a](https://flyte)", ["https://flyte: not an address"]),
        ("[a](htps://flyte.org)", ["htps://flyte.org: not an address"]),
        ("`[a](gone.md)`\n```\n[a](gone.md)\n```", []),
    ],
)
def test_dead_links_are_found(tmp_path, text, dead):
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.md").write_text("# The `end` of it\n```\n# Middle\n```\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Here, and there\n## Here and there\n{text}\n")
    assert list(dead_links(page)) == dead


@pytest.mark.parametrize("page", ALL, ids=name)
def test_images_have_an_alternative_text(page):
    images = [
        (target, text)
        for target, is_image, text in markdown.links(page.read_text(encoding="utf-8"))
        if is_image
    ]
    assert [target for target, text in images if len(text) < 10] == []


def test_every_image_is_shown():
    shown = {
        (page.parent / target).resolve()
        for page in ALL
        for target, *_ in markdown.links(page.read_text(encoding="utf-8"))
    }
    assert set((ROOT / "docs/images").iterdir()) - shown == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_and_modules_in_code_exist(page):
    missing = []
    for text in markdown.code(page.read_text(encoding="utf-8")):
        for path, member in PATH.findall(text):
            files = sorted(ROOT.glob(path))
            if not files and path not in EXAMPLES:
                missing.append(f"{path}: no such file")
            elif (
                member and path.endswith(".py") and not defines(files[0].read_text(encoding="utf-8"), member)
            ):
                missing.append(f"{path}: does not define {member}")
        for module in re.findall(rf"python -m ((?:{FOLDERS})[\w.]*)", text):
            path = ROOT / module.replace(".", "/")
            if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
                missing.append(f"python -m {module}: no such module")
    assert missing == []


def test_contributing_leads_to_each_change_through_three_files_at_most():
    section = (
        (ROOT / "CONTRIBUTING.md")
        .read_text(encoding="utf-8")
        .partition("## Where is")[2]
        .partition("\n## ")[0]
    )
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 10
    for row in rows:
        assert (
            1 <= len({path for path, _ in PATH.findall(row)} | set(re.findall(r"`(\w+\.yaml)`", row))) <= 3
        ), row


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_recipes_exist(page):
    for recipe in re.findall(r"\brecipes/[\w.-]+\.yaml", page.read_text(encoding="utf-8")):
        assert recipe in EXAMPLES or (ROOT / recipe).is_file(), recipe


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets


def test_the_readme_lists_every_folder():
    block = re.search(
        r"## Folders\n+```\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )[1]
    folders = {path.split("/")[0] for path in tracked() if "/" in path and not path.startswith(".")}
    packages = {path.parent.name for path in (ROOT / "flytune").glob("*/__init__.py")}
    listed = set(re.findall(r"(?<![\w/])(\w+)/(?!\w)", block))
    assert listed == folders | packages
    assert len(block.splitlines()) <= 22


def test_every_footgun_has_its_test():
    page = (ROOT / "docs" / "footguns.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py): (test_\w+)`", page)
    rows = [line for line in page.splitlines() if line.startswith("|")][2:]
    assert len(named) == len(rows) > 8
    for file, test in named:
        path = ROOT / "tests" / file.removeprefix("tests/")
        assert f"def {test}(" in path.read_text(encoding="utf-8"), f"{file}: {test}"


def test_no_file_names_a_machine():
    # Split, so that this file does not name one.
    home = "/" + "root/"
    done = subprocess.run(["git", "grep", "-lIF", home, "--", "."], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == ""


@pytest.mark.slow
def test_the_recipes_of_the_pages_are_right():
    """Read each block of YAML that is a section of a recipe as one; the harness knows what docs/evaluate.md
    asks."""
    import yaml

    from flytune.evaluation import tasks as evaluation_tasks
    from flytune.recipe import Recipe

    complete = Recipe.from_yaml(ROOT / "recipes" / "demo-qlora.yaml").model_dump(exclude_defaults=True)
    found = 0
    for page in ("evaluate.md", "publish.md"):
        for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL):
            sections = yaml.safe_load(block)
            recipe = Recipe.model_validate(complete | sections)
            found += 1
            if "evaluation" in sections:
                assert evaluation_tasks.jobs(recipe)
    assert found == 4


def test_the_changelog_starts_with_this_version():
    from flytune import __version__

    versions = re.findall(
        r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert versions[0][0] == __version__
    assert [date for _, date in versions] == sorted((date for _, date in versions), reverse=True)


def test_issue_templates_are_read():
    import yaml

    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert {form.stem for form in forms} == {"bug", "feature"}
    for form in forms:
        content = yaml.safe_load(form.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(content)
        assert all({"type", "attributes"} <= set(field) for field in content["body"])
    bug = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text(encoding="utf-8")
    assert "flytune doctor" in bug
