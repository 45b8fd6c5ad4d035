"""Digests of the code that replacements rely on; `python -m tests.patches.digests` writes those of the
installed libraries."""

import ast
import hashlib
import inspect
import json
import textwrap
from importlib import import_module
from pathlib import Path

from flytune.patches.record import ProcessPatch
from tests.support.patches import RECORDS

FILE = Path(__file__).with_suffix(".json")


def of(place):
    """Return the digest of a function, class or module by its code, without comments, docstrings and
    formatting."""
    module, _, path = place.partition(":")
    found = import_module(module)
    for part in filter(None, path.split(".")):
        found = getattr(found, part)
    replaced = next(
        (record for record in RECORDS.values() if record.name == place and isinstance(record, ProcessPatch)),
        None,
    )
    if replaced is not None:  # an earlier test may have replaced it
        found = replaced.original()
    found = getattr(found, "callback", found)  # of a command of click
    tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
    for node in ast.walk(tree):
        if hasattr(node, "type_params"):  # Python 3.11 has none
            del node.type_params
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0] = ast.Pass()
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def places():
    """Return all places that records name, once each."""
    return sorted({place for record in RECORDS.values() for place in record.upstream})


def stored():
    """Return the digests at which the replacements were written."""
    return json.loads(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    FILE.write_text(json.dumps({place: of(place) for place in places()}, indent=2) + "\n", encoding="utf-8")
