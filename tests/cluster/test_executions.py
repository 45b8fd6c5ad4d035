"""`flytune fetch EXECUTION`: the artifact is found in flyteadmin (tests/support) and read by addresses that
it signs."""

import hashlib
import json
from contextlib import contextmanager

import msgpack
import pytest
from flyteidl.admin import execution_pb2
from flyteidl.core import literals_pb2
from flytekit.configuration.file import get_config_file

from flytune import cli
from flytune.cluster import executions
from flytune.cluster.executions import STORE, Execution
from flytune.cluster.failed_runs import REPORT
from flytune.errors import ExportError
from flytune.records import Contents, StoredFile
from flytune.records.contents import CONTENTS, seal, verify
from flytune.selftest import Matrix
from flytune.sweeps import Outcome, results
from tasks.report import report_failure
from tasks.store import store_artifact
from tests.support.flyteadmin import ABORTED, BUCKET, FAILED, SUCCEEDED, flyteadmin
from tests.support.plans import recipe_of
from tests.support.sweeps import drawn

FILES = {"gate/probe.safetensors": b"\x00" * 100_000, "recipe.yaml": b"name: tiny\n", "empty.txt": b""}


def folder_at(address):
    blob = literals_pb2.Blob(uri=address)
    blob.metadata.type.dimensionality = 1
    return {"o0": literals_pb2.Literal(scalar=literals_pb2.Scalar(blob=blob))}


def packed(record):
    value = record if isinstance(record, dict) else record.model_dump()
    return literals_pb2.Literal(
        scalar=literals_pb2.Scalar(binary={"value": msgpack.packb(value), "tag": "msgpack"})
    )


def text(value):
    return literals_pb2.Literal(scalar=literals_pb2.Scalar(primitive={"string_value": value}))


OTHERS = [
    (name, SUCCEEDED)
    for name in ("grid", "grid-before", "old", "answers", "tested", "planned", "skipped", "both", "around")
]
OTHERS += [("halfway", 2), ("halted", FAILED), ("broken", FAILED), ("reported", FAILED), ("stopped", ABORTED)]
CELL = {
    "method": "full",
    "sharding": "ddp",
    "offload": "none",
    "rows": "chats",
    "state": "equal",
    "words": "equal 1e-08",
}
MATRIX = Matrix(machine="2 ranks", global_batch_size=8, cells=[CELL], seconds=1.0)
POINTS = [("tiny-1", "one", ""), ("tiny-2", "two", ""), ("tiny-3", "", "train: bad loss")]


def write_sweep(folder):
    outcomes = [
        Outcome(name=name, values=[number], artifact=key and f"s3://{BUCKET}/raw/{key}", reason=reason)
        for number, (name, key, reason) in enumerate(POINTS)
    ]
    points = drawn(changes=[{"training.seed": number} for number, _ in enumerate(POINTS)])
    results.write(
        results.Sweep(recipe="tiny", fields=["training.seed"], outcomes=outcomes, best=None), points, folder
    )


@contextmanager
def stored_instead(admin, key, change):
    """Change a file of the storage for the block."""
    kept = admin.stored(key)
    admin.store(key, change(kept))
    try:
        yield
    finally:
        admin.store(key, kept)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with flyteadmin(home) as (admin, _):
        for key in ("one", "two", "three"):
            files = FILES | {"name": key.encode()}
            listed = [
                StoredFile(file=name, size=len(body), sha256=hashlib.sha256(body).hexdigest())
                for name, body in files.items()
            ]
            for name, body in files.items():
                admin.store(f"raw/{key}/{name}", body)
            admin.store(f"raw/{key}/{CONTENTS}", Contents(files=listed).model_dump_json().encode())
        folder = home / "folders"
        write_sweep(folder / "grid")
        (folder / "answers").mkdir()
        (folder / "answers" / "answers.jsonl").write_text('{"answer": "4"}\n')
        seal(folder / "answers", "answers")
        for file in folder.rglob("*"):
            if file.is_file():
                admin.store(f"raw/{file.relative_to(folder)}", file.read_bytes())
        # A sweep of an earlier version.
        admin.store("raw/grid-before/sweep.json", admin.stored("raw/grid/sweep.json"))
        admin.store("raw/old/answers.jsonl", b"")
        yield admin, home


@pytest.fixture
def admin(served, monkeypatch):
    """Provide executions by name; this shell lacks the pods' credentials for the storage."""
    admin, home = served
    monkeypatch.setenv("FLYTECTL_CONFIG", str(home / ".flyte" / "config.yaml"))
    get_config_file.cache_clear()
    for name, phase in (("fine", 4), ("swept", 4), ("young", 2), ("nested", 4), ("other", 4), *OTHERS):
        admin.executions[name] = execution_pb2.ExecutionCreateRequest(
            project="flytesnacks", domain="development", name=name
        )
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
    # As sweep, infer, selftest, plan_only, refresh and sft_then_dpo return: the last with an artifact of its
    # first run.
    for name in ("grid", "grid-before", "old", "answers"):
        admin.outputs[name] = folder_at(f"s3://{BUCKET}/raw/{name}")
    admin.outputs |= {
        "tested": {"o0": packed(MATRIX)},
        "planned": {"o0": packed({"a": 1})},
        "skipped": {"o0": text("skipped: no data")},
    }
    admin.outputs["both"] = two
    # Of sft_then_dpo, while the second run trains or after it has failed.
    for name in ("halfway", "halted"):
        admin.note(name, "n8", STORE, one)
    admin.note("both", "n8", STORE, one)
    admin.note("both", "n9", STORE, two)
    # The folder of another team's workflow around finetune has no list.
    admin.outputs["around"] = folder_at(f"s3://{BUCKET}/raw/old")
    admin.note("around", "n8", STORE, three)
    yield admin
    get_config_file.cache_clear()


ADDRESSES = {
    "fine": "one",
    "http://localhost:8088/console/projects/flytesnacks/domains/development/executions/fine": "one",
    "https://flyte.example/console/projects/flytesnacks/domains/development/executions/fine/nodes?x=1": "one",
    "flyte://v1/flytesnacks/development/fine": "one",
    "flyte://v1/flytesnacks/development/fine/n8/o": "one",
    "flyte://v1/flytesnacks/development/swept/n9/0/o/o0": "two",
    "nested": "three",
    "both": "two",
    "flyte://v1/flytesnacks/development/both/n8/o": "one",
    "around": "three",
    "flyte://v1/flytesnacks/development/halfway/n8/o": "one",
    "grid --point tiny-1": "one",
    "grid --point tiny-2": "two",
    "grid-before --point tiny-2": "two",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_execution_s_artifact_is_fetched_whole(address, admin, tmp_path, capsys):
    first, *options = address.split()
    assert cli.main(["fetch", first, str(tmp_path / "out"), *options]) == 0, capsys.readouterr().err
    made = {
        str(file.relative_to(tmp_path / "out")): file.read_bytes()
        for file in (tmp_path / "out").rglob("*")
        if file.is_file()
    }
    assert set(made) == {*FILES, "name", CONTENTS}
    assert {name: made[name] for name in FILES} == FILES
    assert made["name"].decode() == ADDRESSES[address]
    assert (
        f"s3://{BUCKET}/raw/{ADDRESSES[address]}, all files verified against artifact.json"
        in capsys.readouterr().out
    )


def test_the_tasks_that_store_and_report_are_known_by_their_names():
    assert store_artifact.name == STORE
    assert report_failure.name == REPORT


@pytest.mark.parametrize(
    ("name", "files"), [("grid", {"sweep.json", "report.html"}), ("answers", {"answers.jsonl"})]
)
def test_a_sweep_and_answers_are_fetched_file_by_file(name, files, admin, tmp_path, capsys):
    assert cli.main(["fetch", name, str(tmp_path / "out")]) == 0, capsys.readouterr().err
    assert "all files verified against artifact.json" in capsys.readouterr().out
    made = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert set(made) == {*files, CONTENTS}
    assert made == {name_: admin.stored(f"raw/{name}/{name_}") for name_ in made}
    with pytest.raises(ExportError, match="and no artifact"):
        verify(tmp_path / "out")


@pytest.mark.parametrize("file", ["answers.jsonl", CONTENTS])
def test_a_changed_file_of_answers_is_refused(file, admin, tmp_path, capsys):
    with stored_instead(admin, f"raw/answers/{file}", lambda kept: kept.replace(b'"', b"'")):
        assert cli.main(["fetch", "answers", str(tmp_path / "out")]) == 1
    assert "artifact.json" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_changed_table_of_a_sweep_names_no_artifact(admin, tmp_path, capsys):
    with stored_instead(admin, "raw/grid/sweep.json", lambda kept: kept.replace(b"raw/one", b"raw/two")):
        assert cli.main(["fetch", "grid", str(tmp_path / "out"), "--point", "tiny-1"]) == 1
    assert (
        "sweep.json: its content is not what was written, by artifact.json; run the sweep again"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_point_is_found_in_a_sweep_s_folder_on_this_machine(scheme, tmp_path, capsys):
    write_sweep(tmp_path / "grid")
    assert cli.main(["fetch", f"{scheme}{tmp_path}/grid", str(tmp_path / "out"), "--point", "tiny-3"]) == 1
    assert "grid/sweep.json: tiny-3 has no artifact: train: bad loss" in capsys.readouterr().err
    (tmp_path / "grid" / "sweep.json").write_text('{"outcomes": 3}')
    (tmp_path / "grid" / CONTENTS).unlink()
    assert cli.main(["fetch", f"{scheme}{tmp_path}/grid", str(tmp_path / "out"), "--point", "tiny-1"]) == 1
    assert "grid/sweep.json: not the record of a sweep" in capsys.readouterr().err


def test_a_self_test_is_its_matrix_and_a_table(admin, tmp_path, capsys):
    assert cli.main(["fetch", "tested", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    assert (
        "matrix.json, matrix.txt, as tested in flytesnacks-development returned it" in capsys.readouterr().out
    )
    assert Matrix.read(tmp_path / "out" / "matrix.json") == MATRIX
    assert "equal 1e-08" in (tmp_path / "out" / "matrix.txt").read_text()


def test_another_record_is_fetched_by_the_name_of_the_output(admin, tmp_path):
    assert cli.main(["fetch", "planned", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "o0.json").read_text()) == {"a": 1}


def test_the_report_of_a_failure_has_the_checkpoint_the_decks_and_the_artifacts(admin, tmp_path, capsys):
    text = b"tiny: train failed: bad loss &amp; worse\nNewest complete checkpoint: step 4"
    deck = b"<html><div><pre>" + text + b"</pre></div></html>"
    admin.note("reported", "n7", STORE, folder_at(f"s3://{BUCKET}/raw/one"))
    admin.note("reported", "fn0", REPORT, {})
    admin.store("metadata/reported/fn0/0/deck.html", deck)
    assert cli.main(["fetch", "reported", str(tmp_path / "out"), "--failed"]) == 0, capsys.readouterr().err
    assert "failure.txt, fn0-report_failure.html" in capsys.readouterr().out
    assert (tmp_path / "out" / "fn0-report_failure.html").read_bytes() == deck
    assert (tmp_path / "out" / "failure.txt").read_text().splitlines() == [
        "reported in flytesnacks-development: FAILED",
        "tiny: train failed: bad loss & worse",
        "Newest complete checkpoint: step 4",
        "stored before: flyte://v1/flytesnacks/development/reported/n7/o",
    ]


def test_a_failure_without_a_report_has_the_error_of_its_task(admin, tmp_path, capsys):
    said = (
        "[1/1] currentAttempt done. Last Error: USER::compare_points failed: too few points\n"
        "  tiny-1: s3://b/a"
    )
    admin.errors["broken"] = said
    assert cli.main(["fetch", "broken", str(tmp_path / "out"), "--failed"]) == 0, capsys.readouterr().err
    assert (tmp_path / "out" / "failure.txt").read_text() == (
        "broken in flytesnacks-development: FAILED\n"
        f"{said}\n"
        "checkpoints: the execution has no recipe of its own\n"
    )


def test_an_aborted_run_has_the_address_of_its_checkpoints(admin, tmp_path, capsys):
    admin.errors["stopped"] = "too slow"
    admin.executions["stopped"].inputs.literals["recipe"].CopyFrom(
        packed(recipe_of(name="tiny", checkpoints={"save_steps": 2}))
    )
    admin.note(
        "stopped",
        "n1",
        "tasks.prepare.prepare_data",
        folder_at(f"s3://{BUCKET}/team/ab/stopped-n1-0/x/dataset"),
    )
    assert cli.main(["fetch", "stopped", str(tmp_path / "out"), "--failed"]) == 0, capsys.readouterr().err
    assert (tmp_path / "out" / "failure.txt").read_text().splitlines() == [
        "stopped in flytesnacks-development: ABORTED",
        "aborted by somebody: too slow",
        f"checkpoints: s3://{BUCKET}/team/flytune-checkpoints/tiny-..., if training has saved any; the same "
        "recipe resumes from the newest complete one",
    ]


MISTAKES = {
    "gone": "gone in flytesnacks-development: 127.0.0.1:PORT has no such execution; give --project and "
    "--domain",
    "young": "young in flytesnacks-development: the execution is RUNNING, and no artifact is stored",
    "swept": "swept in flytesnacks-development: it has stored 2 artifacts; give the node of one:\n"
    "  flyte://v1/flytesnacks/development/swept/n8/o\n  flyte://v1/flytesnacks/development/swept/n9/o",
    "halfway": "halfway in flytesnacks-development: the execution is RUNNING, and returns nothing yet; it "
    "has stored 1 artifact; give the node of one:\n"
    "  flyte://v1/flytesnacks/development/halfway/n8/o",
    "halted": "halted in flytesnacks-development: the execution is FAILED, and returns nothing; it has "
    "stored 1 artifact; give the node of one, or --failed for the report of the failure:\n"
    "  flyte://v1/flytesnacks/development/halted/n8/o",
    "flyte://v1/flytesnacks/development/fine/n2/o": "fine in flytesnacks-development, node n2: it has "
    "neither a folder nor a record as its output (the execution is SUCCEEDED)",
    "old": f"old in flytesnacks-development: s3://{BUCKET}/raw/old: no artifact.json: a version of Flytune "
    "before 0.2.0 stored the folder, without the list by which its files are verified; copy it with the "
    "storage's own tools, or run the workflow again",
    "skipped": "skipped in flytesnacks-development: the execution is SUCCEEDED, and has stored no files; it "
    "says: skipped: no data",
    "broken": "broken in flytesnacks-development: the execution is FAILED, and no artifact is stored; "
    "--failed fetches the report of the failure",
    "fine --point tiny-1": f"s3://{BUCKET}/raw/one: no sweep.json, so it is no sweep's folder; leave out "
    "--point tiny-1",
    "tested --point tiny-1": "tested in flytesnacks-development: returns records and no sweep; leave out "
    "--point tiny-1",
    "grid --point tiny-9": f"s3://{BUCKET}/raw/grid/sweep.json: no point tiny-9; there are tiny-1, tiny-2, "
    "tiny-3",
    "grid --point tiny-3": f"s3://{BUCKET}/raw/grid/sweep.json: tiny-3 has no artifact: train: bad loss",
    "fine --failed": "fine in flytesnacks-development: the execution is SUCCEEDED, and has not failed; leave "
    "out --failed",
    "s3://bucket/artifact --failed": "--failed: for an execution, without --point; name a point's artifact "
    "by its address",
    "broken --failed --point a": "--failed: for an execution, without --point; name a point's artifact by "
    "its address",
}


@pytest.mark.parametrize("address", MISTAKES)
def test_what_cannot_be_fetched_says_why(address, admin, tmp_path, capsys):
    first, *options = address.split()
    assert cli.main(["fetch", first, str(tmp_path / "out"), *options]) == 1
    told = capsys.readouterr().err.strip()
    wanted = MISTAKES[address]
    start, _, end = wanted.partition("PORT")
    assert told.startswith(f"{'RecipeError' if start.startswith('--') else 'ExportError'}: {start}")
    assert told.endswith(end)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_what_artifact_json_says_is_refused(admin, tmp_path, capsys):
    with stored_instead(admin, "raw/one/recipe.yaml", lambda kept: b"name: tampered\n"):
        assert cli.main(["fetch", "fine", str(tmp_path / "out")]) == 1
    assert f"s3://{BUCKET}/raw/one/recipe.yaml: not what artifact.json says" in capsys.readouterr().err
    assert not (tmp_path / "out" / CONTENTS).exists()


def test_project_and_domain_are_given_for_an_id_and_addresses_have_their_own():
    assert executions.parse("f1a2-b", "p", "d") == Execution("p", "d", "f1a2-b")
    assert executions.parse("flyte://v1/a/b/c/n3-0-n4/2/o/o0", "p", "d") == Execution(
        "a", "b", "c", "n3-0-n4"
    )
    for address in (
        "s3://bucket/artifact",
        "hf://owner/name",
        "./folder",
        "a/b",
        "https://host/artifact.zip",
    ):
        assert executions.parse(address, "p", "d") is None, address


def test_without_a_cluster_it_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("FLYTECTL_CONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    get_config_file.cache_clear()
    assert cli.main(["fetch", "fine", str(tmp_path / "out")]) == 1
    assert "no cluster is configured: start Flyte's sandbox" in capsys.readouterr().err
