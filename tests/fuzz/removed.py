"""Plugin of pytest that removes a protection before the tests run, the one that the variable NAME names."""

import os

NAME = "FLYTUNE_REMOVED_PROTECTION"


def pytest_collection_finish() -> None:
    """Remove it; the modules that have its name are imported by now."""
    from tests.fuzz.removals import REMOVALS

    (removal,) = [removal for removal in REMOVALS if removal.name == os.environ[NAME]]
    removal.remove()
