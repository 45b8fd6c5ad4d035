"""Validation does no input or output: no field that a person or a record has is opened, asked or looked up by
it."""

import os
import sys
import typing
from contextlib import suppress

import fsspec
import pytest
from pydantic import BaseModel, ValidationError

import flytune.cli.reproduce
import tasks.report
import workflows.sweep
from flytune.errors import FlytuneError
from flytune.hardware.accelerators import Accelerators
from flytune.hardware.cluster import Cluster
from flytune.hardware.shapes import Shapes
from flytune.recipe import Recipe
from flytune.schema import Strict
from tests.support.recipes import content

ADDRESSES = ("http://127.0.0.1:9/audited.json", "s3://audited/audited.json", "memory://audited/a.json")
EVENTS = (
    "open",
    "os.listdir",
    "os.scandir",
    "glob.glob",
    "os.chdir",
    "os.rename",
    "os.remove",
    "os.mkdir",
    "ctypes.dlopen",
)
CALLS = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "urllib.",
    "http.",
    "ftplib.",
    "sqlite3.",
)
seen, watched = [], []


def _note(event, arguments):
    if watched and (
        event.startswith(CALLS)
        or (event in EVENTS and any("audited" in str(argument) for argument in arguments))
    ):
        seen.append((event, arguments))


sys.addaudithook(_note)


@pytest.fixture
def events(monkeypatch, tmp_path):
    """Yield what was opened, asked or looked up while a test runs."""
    (tmp_path / "audited.json").write_text("{}")
    for module, name in ((os, "stat"), (os, "lstat"), (fsspec.core, "url_to_fs"), (fsspec, "open")):
        original = getattr(module, name)

        def noting(*arguments, original=original, name=name, **settings):
            if any("audited" in str(argument) for argument in arguments):
                seen.append((name, arguments))
            return original(*arguments, **settings)

        monkeypatch.setattr(module, name, noting)
    watched.append(True)
    yield seen
    watched.clear()
    seen.clear()


def subclasses(kind):
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


def sections(annotation):
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [section for part in typing.get_args(annotation) for section in sections(part)]


def variants(model, value, depth=0):
    """Yield contents of a model, each with the value in one field, alone or in a list or mapping."""
    for name, field in model.model_fields.items():
        yield from ({name: one} for one in (value, [value], {"a": value}, {value: 1}))
        for section in sections(field.annotation) if depth < 3 else ():
            for inner in variants(section, value, depth + 1):
                yield from ({name: one} for one in (inner, [inner], {"a": inner}))


def merged(base, change):
    if not (isinstance(base, dict) and isinstance(change, dict)):
        return change
    return base | {key: merged(base.get(key), value) for key, value in change.items()}


def validate(model, value):
    with suppress(FlytuneError, ValidationError):
        model.model_validate(value)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Recipe, Cluster, Shapes, Accelerators], ids=lambda model: model.__name__)
def test_no_field_that_a_person_writes_is_read_by_validation(model, events, tmp_path):
    base = content(sharding={"name": "zero3"}, method={"name": "lora"}) if model is Recipe else {}
    for value in (str(tmp_path / "audited.json"), *ADDRESSES):
        for change in variants(model, value):
            validate(model, merged(base, change))
            assert events == [], change


def test_no_field_of_a_record_is_read_by_validation(events, tmp_path):
    assert {flytune.cli.reproduce, tasks.report, workflows.sweep}  # all records are loaded
    models = [
        subclasse
        for subclasse in subclasses(Strict)
        if subclasse is not Recipe and subclasse.__module__.startswith(("flytune", "tasks"))
    ]
    assert len(models) > 60
    for model in models:
        for name in model.model_fields:
            for value in (str(tmp_path / "audited.json"), *ADDRESSES):
                validate(model, {name: value})
                validate(model, {name: [value]})
                assert events == [], (model, name)
