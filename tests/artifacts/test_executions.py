"""`flytune fetch EXECUTION`: the artifact is found in flyteadmin (tests/support) and read by addresses that it signs."""

import hashlib

import pytest
from flyteidl.admin import execution_pb2
from flyteidl.core import literals_pb2
from flytekit.configuration.file import get_config_file

from flytune import cli
from flytune.artifacts import executions
from flytune.artifacts.executions import STORE, Execution
from flytune.records import Contents, StoredFile
from flytune.records.contents import CONTENTS
from tasks.store import store_artifact
from tests.support.flyteadmin import BUCKET, flyteadmin

FILES = {"gate/probe.safetensors": b"\x00" * 100_000, "recipe.yaml": b"name: tiny\n", "empty.txt": b""}


def folder_at(address):
    blob = literals_pb2.Blob(uri=address)
    blob.metadata.type.dimensionality = 1
    return {"o0": literals_pb2.Literal(scalar=literals_pb2.Scalar(blob=blob))}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with flyteadmin(home) as (admin, _):
        for key in ("one", "two", "three"):
            files = FILES | {"name": key.encode()}
            listed = [
                StoredFile(file=name, size=len(body), sha256=hashlib.sha256(body).hexdigest()) for name, body in files.items()
            ]
            for name, body in files.items():
                admin.store(f"raw/{key}/{name}", body)
            admin.store(f"raw/{key}/{CONTENTS}", Contents(files=listed).model_dump_json().encode())
        yield admin, home


@pytest.fixture
def admin(served, monkeypatch):
    """Provide executions by name; this shell lacks the pods' credentials for the storage."""
    admin, home = served
    monkeypatch.setenv("FLYTECTL_CONFIG", str(home / ".flyte" / "config.yaml"))
    get_config_file.cache_clear()
    for name, phase in (("fine", 4), ("swept", 4), ("young", 2), ("nested", 4), ("other", 4)):
        admin.executions[name] = execution_pb2.ExecutionCreateRequest(project="flytesnacks", domain="development", name=name)
        admin.phases[name] = phase
        for number in range(5):  # more than a page
            admin.note(name, f"n{number}", f"tasks.x.t{number}", {})
    one, two, three = (folder_at(f"s3://{BUCKET}/raw/{key}") for key in ("one", "two", "three"))
    admin.note("fine", "n8", STORE, one)
    admin.note("swept", "n8", STORE, one)
    admin.note("swept", "n9", STORE, two)
    # As refresh has it: a branch, the workflow in it, and a launched execution.
    admin.note("nested", "n7", "", {})
    admin.note("nested", "n7-0-n1", "", {}, parent="n7")
    admin.note("nested", "n7-0-n1-0-n8", "tasks.train.train_cpu_1", one, parent="n7-0-n1")
    admin.note("nested", "n7-0-n1-0-n9", "", {}, parent="n7-0-n1", launched="other")
    admin.note("other", "n8", STORE, three)
    yield admin
    get_config_file.cache_clear()


ADDRESSES = {
    "fine": "one",
    "http://localhost:8088/console/projects/flytesnacks/domains/development/executions/fine": "one",
    "https://flyte.example/console/projects/flytesnacks/domains/development/executions/fine/nodes?duration=all": "one",
    "flyte://v1/flytesnacks/development/fine": "one",
    "flyte://v1/flytesnacks/development/fine/n8/o": "one",
    "flyte://v1/flytesnacks/development/swept/n9/0/o/o0": "two",
    "nested": "three",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_execution_s_artifact_is_fetched_whole(address, admin, tmp_path, capsys):
    assert cli.main(["fetch", address, str(tmp_path / "out")]) == 0, capsys.readouterr().err
    made = {
        str(file.relative_to(tmp_path / "out")): file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()
    }
    assert set(made) == {*FILES, "name", CONTENTS}
    assert {name: made[name] for name in FILES} == FILES
    assert made["name"].decode() == ADDRESSES[address]
    assert f"s3://{BUCKET}/raw/{ADDRESSES[address]}, all files verified against artifact.json" in capsys.readouterr().out


def test_the_task_that_stores_is_known_by_its_name():
    assert store_artifact.name == STORE


MISTAKES = {
    "gone": "gone in flytesnacks-development: 127.0.0.1:PORT has no such execution; give --project and --domain",
    "young": "young in flytesnacks-development: the execution is RUNNING, and no artifact is stored",
    "swept": "swept in flytesnacks-development: it has stored 2 artifacts; give the node of one:\n"
    "  flyte://v1/flytesnacks/development/swept/n8/o\n  flyte://v1/flytesnacks/development/swept/n9/o",
    "flyte://v1/flytesnacks/development/fine/n2/o": "fine in flytesnacks-development, node n2: it has no folder as its output "
    "(the execution is SUCCEEDED)",
}


@pytest.mark.parametrize("address", MISTAKES)
def test_what_cannot_be_fetched_says_why(address, admin, tmp_path, capsys):
    assert cli.main(["fetch", address, str(tmp_path / "out")]) == 1
    told = capsys.readouterr().err.strip()
    wanted = MISTAKES[address]
    start, _, end = wanted.partition("PORT")
    assert told.startswith(f"ExportError: {start}")
    assert told.endswith(end)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_what_artifact_json_says_is_refused(admin, tmp_path, capsys):
    kept = admin.stored("raw/one/recipe.yaml")
    admin.store("raw/one/recipe.yaml", b"name: tampered\n")
    try:
        assert cli.main(["fetch", "fine", str(tmp_path / "out")]) == 1
    finally:
        admin.store("raw/one/recipe.yaml", kept)
    assert f"s3://{BUCKET}/raw/one/recipe.yaml: not what artifact.json says" in capsys.readouterr().err
    assert not (tmp_path / "out" / CONTENTS).exists()


def test_project_and_domain_are_given_for_an_id_and_addresses_have_their_own():
    assert executions.parse("f1a2-b", "p", "d") == Execution("p", "d", "f1a2-b")
    assert executions.parse("flyte://v1/a/b/c/n3-0-n4/2/o/o0", "p", "d") == Execution("a", "b", "c", "n3-0-n4")
    for address in ("s3://bucket/artifact", "hf://owner/name", "./folder", "a/b", "https://host/artifact.zip"):
        assert executions.parse(address, "p", "d") is None, address


def test_without_a_cluster_it_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("FLYTECTL_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    get_config_file.cache_clear()
    assert cli.main(["fetch", "fine", str(tmp_path / "out")]) == 1
    assert "no cluster is configured: start Flyte's sandbox" in capsys.readouterr().err
