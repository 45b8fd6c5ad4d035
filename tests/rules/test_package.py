"""Rules of the wheel: its packages and data files by the configuration of setuptools, without a build."""

import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from tests.support.paths import ROOT

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
PACKAGES = set(find_packages(str(ROOT), **SETUPTOOLS["packages"]["find"]))
TOPS = ("flytune", "tasks", "workflows", "images")


def files(top):
    """Return the files below a folder, without those that Python and tools cache."""
    return [path for path in (ROOT / top).rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def test_only_the_product_is_packaged():
    assert {package.partition(".")[0] for package in PACKAGES} == set(TOPS)


@pytest.mark.parametrize("top", TOPS)
def test_every_module_is_in_a_package(top):
    folders = {path.parent.relative_to(ROOT) for path in files(top) if path.suffix == ".py"}
    assert {".".join(folder.parts) for folder in folders} == {name for name in PACKAGES if name.partition(".")[0] == top}


def test_every_data_file_of_a_package_is_in_the_wheel():
    # The scripts in images/ are read only where an image is built, which takes a checkout.
    found = {path for top in ("flytune", "tasks", "workflows") for path in files(top) if path.suffix not in (".py", ".pyi")}
    packaged = set()
    for package, patterns in SETUPTOOLS["package-data"].items():
        assert package in PACKAGES
        for pattern in patterns:
            matches = set(Path(ROOT, *package.split(".")).glob(pattern))
            assert matches, f"{package}: {pattern} matches no file"
            packaged |= matches
    assert {path.name for path in packaged} >= {"base_models.json", "report.html.jinja"}
    assert found == packaged
