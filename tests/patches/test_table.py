"""Records of replaced names: complete, of the installed libraries, and unchanged upstream."""

import importlib.util
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from flytune import patches
from flytune.patches import __main__ as command
from flytune.patches import table
from flytune.patches.record import ObjectPatch
from tests.patches import digests
from tests.support.patches import RECORDS
from tests.support.paths import ROOT

# flytekit reads click's version.
pytestmark = pytest.mark.filterwarnings("ignore:The '__version__' attribute is deprecated:DeprecationWarning")


def test_there_is_a_record_for_each_name_once():
    assert len(RECORDS) > 35
    names = [record.name for record in RECORDS.values()]
    assert len(set(names)) == len(names)
    assert {path.stem for path in (ROOT / "flytune/patches").glob("*.py")} == {
        *patches.__all__,
        "__init__",
        "__main__",
        "record",
        "table",
    }


@pytest.fixture
def process():
    """accelerate's state of this process, to which it adds what a record names."""
    from accelerate import PartialState

    was_empty = not PartialState._shared_state
    PartialState()
    yield
    if was_empty:
        PartialState._reset_state()


@pytest.mark.parametrize("key", RECORDS)
@pytest.mark.usefixtures("process")
def test_the_name_is_there(key):
    record = RECORDS[key]
    if record.name.startswith("sys:modules["):
        # A module that is replaced before it is imported, as it cannot be.
        assert importlib.util.find_spec(record.name.partition("[")[2].removesuffix("]"))
        return
    value = record.current()
    if isinstance(record, ObjectPatch):
        assert callable(value)


@pytest.mark.parametrize("place", digests.places())
def test_what_a_replacement_relies_on_has_not_changed(place):
    users = [f"{key} ({record.version})" for key, record in RECORDS.items() if place in record.upstream]
    assert digests.of(place) == digests.stored().get(place), (
        f"{place} is not the code that {', '.join(users)} in flytune/patches/ was written for: read it, "
        "correct the replacement or remove it, give the record the new version, then run python -m "
        "tests.patches.digests"
    )


def test_no_digest_is_left_over():
    assert sorted(digests.stored()) == digests.places()


@pytest.mark.parametrize("key", RECORDS)
def test_the_version_is_one_that_the_project_allows(key):
    library = key.partition(".")[0]
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [
        *content["dependencies"],
        *(one for extra in content["optional-dependencies"].values() for one in extra),
    ]
    ranges = [
        one.specifier for one in map(Requirement, listed) if one.name.replace("-", "_").lower() == library
    ]
    # huggingface_hub comes with transformers.
    assert ranges or f"{library.replace('_', '-')}==" in (ROOT / "requirements.lock").read_text(
        encoding="utf-8"
    )
    assert all(RECORDS[key].version in one for one in ranges)
    installed = metadata.version(library).partition("+")[0]
    # A newer release with the same code needs no new record; a record of a newer one than is installed is a
    # mistake.
    assert _numbers(RECORDS[key].version) <= _numbers(installed)


def _numbers(version):
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize("key", RECORDS)
def test_texts_are_parts_of_a_table(key):
    record = RECORDS[key]
    for text in (record.reason, record.remove_when):
        assert text
        assert "|" not in text
        assert not text.endswith(".")
    assert record.upstream


def test_the_page_has_the_table():
    page = (ROOT / "docs/patches.md").read_text(encoding="utf-8")
    assert page.partition(command.MARK)[2] == f"\n{table.markdown()}", (
        "run python -m flytune.patches docs/patches.md"
    )


def test_the_command_prints_the_table_or_writes_it_into_a_page(tmp_path, capsys):
    command.main([])
    assert capsys.readouterr().out == table.markdown()
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n{command.MARK}old\n")
    command.main([str(page)])
    assert page.read_text() == f"# Title\n{command.MARK}\n{table.markdown()}"
    page.write_text("# Title\n")
    with pytest.raises(SystemExit, match="has no line"):
        command.main([str(page)])
