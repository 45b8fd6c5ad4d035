"""`flytune doctor --remote` and `flytune fetch` where the configuration names Flyte 2, against a stand-in of
it."""

import fsspec
import msgpack
import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from flyteidl2.common.identifier_pb2 import ActionIdentifier, RunIdentifier
from flyteidl2.core.execution_pb2 import ExecutionError
from flyteidl2.core.literals_pb2 import Literal
from flyteidl2.task.common_pb2 import Inputs, NamedLiteral, Outputs
from flyteidl2.task.task_definition_pb2 import TaskSpec

from flyte2.runtime.orchestrator import Flyte2
from flytune.cli import main
from flytune.cluster import flyte2_sdk, runs_of_flyte2
from flytune.cluster.executions import Execution
from flytune.doctor import flyte2
from flytune.errors import ExportError
from flytune.hardware import SecretKey
from tests.support.flyte2_actions import BUCKET, FAILED, PREFIX, RUNNING, SUCCEEDED, Action
from tests.support.flyte2_plane import DOMAIN, ORG, PROJECT, configured, plane2
from tests.support.recipes import content

URL = f"https://host/v2/domain/{DOMAIN}/project/{PROJECT}/runs/{{}}"


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    with plane2(tmp_path_factory.mktemp("plane")) as found:
        yield found


@pytest.fixture
def home(plane, tmp_path, monkeypatch):
    """A home whose configuration names the plane, and its storage in the environment."""
    import s3fs

    configured(plane, tmp_path)
    for name in ("UCTL_CONFIG", "FLYTECTL_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), **plane.storage}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    s3fs.S3FileSystem.clear_instance_cache()
    yield tmp_path
    plane.manners.clear()
    plane.token = ""


def ended(plane, run, phase, literal=None, task="flytune.finetune", name="a0", message=""):
    """Make a run of the plane, or another action of it, that has ended."""
    id = ActionIdentifier(run=RunIdentifier(org=ORG, project=PROJECT, domain=DOMAIN, name=run), name=name)
    spec = TaskSpec()
    spec.task_template.id.name = task
    action = Action(id, "" if name == "a0" else "a0", spec, "none", "none", phase=phase, attempt=1)
    action.error = ExecutionError(code="RunFailed", message=message)
    if literal is not None:
        action.outputs = f"s3://{BUCKET}/outputs/{run}"
        content = Outputs(literals=[NamedLiteral(name="o0", value=literal)])
        plane.store(f"{action.outputs}/outputs.pb", content.SerializeToString())
    plane.executor.actions[run, name] = action


def begun(plane, run, phase, **changes):
    """Make a run that has stored an artifact, and has not succeeded; return the artifact's address."""
    raw = f"s3://{BUCKET}/4f/{PREFIX}/{PROJECT}/{DOMAIN}/{run}/b1/1/c0ffee"
    ended(plane, run, phase, message="the driver's")
    ended(plane, run, SUCCEEDED, folder(raw), task="flytune_store.store_artifact", name="b1")
    literal = Literal()
    literal.scalar.binary.value = msgpack.packb(content(**changes))
    inputs = Inputs(literals=[NamedLiteral(name="recipe", value=literal)])
    plane.executor.actions[run, "a0"].inputs = f"s3://{BUCKET}/inputs/{run}"
    plane.store(f"s3://{BUCKET}/inputs/{run}/inputs.pb", inputs.SerializeToString())
    return raw


def folder(address):
    literal = Literal()
    literal.scalar.blob.uri = address
    literal.scalar.blob.metadata.type.dimensionality = 1
    return literal


@pytest.mark.parametrize(
    ("content", "second"),
    [
        ("admin: {endpoint: 'dns:///host'}\ntask: {project: p}\n", True),
        ("admin: {endpoint: 'dns:///host'}\nimage: {builder: local}\n", True),
        ("admin: {endpoint: 'dns:///host'}\nlogger: {level: 0}\n", False),
        ("[not yaml", False),
        ("task: {project: p}\n", False),
    ],
)
def test_the_sections_of_a_configuration_say_which_flyte_it_is(content, second, home):
    file = home / ".flyte" / "config.yaml"
    file.write_text(content)
    assert (flyte2_sdk.config_file() is not None) == second


def test_the_configuration_that_the_sdk_finds_first_decides(home, monkeypatch):
    (home / "first.yaml").write_text("admin: {endpoint: 'dns:///host'}\n")
    monkeypatch.setenv("FLYTECTL_CONFIG", str(home / "first.yaml"))
    # The folder's own comes before the variable.
    assert flyte2_sdk.config_file().as_posix() == ".flyte/config.yaml"
    (home / ".flyte" / "config.yaml").unlink()
    assert flyte2_sdk.config_file() is None


def said(findings):
    return [(finding.level, finding.what, finding.said) for finding in findings]


def test_the_doctor_checks_control_plane_project_and_storage(home, plane):
    before = fsspec.get_filesystem_class("s3")
    found = said(flyte2.findings(flyte2_sdk.config_file(), PROJECT, DOMAIN))
    assert [one[:2] for one in found] == [
        ("OK", name) for name in ("flyte config", "control plane", "project", "storage")
    ]
    assert f"Flyte 2, dns:///{plane.endpoint}" in found[0][2]
    assert found[3][2].startswith(f"accepts uploads: s3://{BUCKET}/")
    # The SDK's own are not left behind.
    assert fsspec.get_filesystem_class("s3") is before


def test_secrets_are_flyte_2_s_own_found_by_their_keys(home, plane, monkeypatch):
    keys = [
        SecretKey(env_var=name, group="flytune", key=key)
        for name, key in (("HF_TOKEN", "hub"), ("WANDB_API_KEY", "wandb"))
    ]
    monkeypatch.setattr(plane, "secrets", {"hub"})
    found = list(flyte2.findings(flyte2_sdk.config_file(), PROJECT, DOMAIN, secrets=keys))[-2:]
    assert [(one.level, one.said) for one in found] == [
        ("OK", "hub (value not shown)"),
        ("FAIL", "Flyte 2 has no secret wandb"),
    ]
    assert "`flyte create secret wandb`" in found[1].do


@pytest.mark.parametrize(
    ("project", "domain", "text"),
    [
        ("other", DOMAIN, "other does not exist"),
        (PROJECT, "production", f"{PROJECT} has no domain production"),
    ],
)
def test_a_project_that_is_not_there_is_told(project, domain, text, home):
    (*_, last) = said(flyte2.findings(flyte2_sdk.config_file(), project, domain))
    assert last == ("FAIL", "project", text)


def test_a_control_plane_with_bad_manners_is_told_with_what_to_do(home, plane):
    def last():
        return list(flyte2.findings(flyte2_sdk.config_file(), PROJECT, DOMAIN))[-1]

    plane.manners["ListProjects"] = ConnectError(Code.PERMISSION_DENIED, "not yours")
    assert (last().what, last().said, last().do) == (
        "control plane",
        "PERMISSION_DENIED: not yours",
        "ask for access to the project",
    )
    plane.manners["ListProjects"] = ConnectError(Code.UNAUTHENTICATED, "token has expired")
    assert last().do.startswith("log in: ")
    plane.manners.clear()
    plane.manners["CreateUploadLocation"] = ConnectError(Code.INTERNAL, "no storage")
    assert last().said == "INTERNAL: no storage"


def test_a_control_plane_that_does_not_answer_in_time_is_told(home, plane, monkeypatch):
    monkeypatch.setattr(flyte2, "_SECONDS", 0.2)
    plane.manners["ListProjects"] = 3
    found = list(flyte2.findings(flyte2_sdk.config_file(), PROJECT, DOMAIN))[-1]
    assert found.said == "did not answer in 0 s"
    assert "flyte get project" in found.do


def test_the_lack_of_a_token_is_told(home, plane):
    # The SDK sends tokens over TLS alone, which the stand-in has not.
    plane.token = "hush"
    found = list(flyte2.findings(flyte2_sdk.config_file(), PROJECT, DOMAIN))[-1]
    assert found.said == "UNAUTHENTICATED: token is missing or has expired"


def test_the_folder_of_a_run_is_found_by_its_name_and_its_address_in_the_console(home, plane):
    ended(plane, "made", SUCCEEDED, folder("s3://flyte/artifact/"))
    run = runs_of_flyte2.parse(URL.format("made") + "?i=a0")
    assert run == Execution(PROJECT, DOMAIN, "made")
    assert runs_of_flyte2.find(flyte2_sdk.config_file(), run).address == "s3://flyte/artifact"


def test_fetch_verifies_what_a_run_has_stored(home, plane, capsys):
    ended(plane, "spoiled", SUCCEEDED, folder(f"s3://{BUCKET}/spoiled"))
    plane.store("spoiled/artifact.json", b"{}")
    assert main(["fetch", URL.format("spoiled"), str(home / "out")]) == 1
    assert "s3://flyte/spoiled/artifact.json" in capsys.readouterr().err


def test_a_run_without_results_is_told_with_its_phase(home, plane):
    ended(plane, "going", RUNNING)
    ended(plane, "bad", FAILED)
    config = flyte2_sdk.config_file()
    for run, text in (
        ("going", "the run is RUNNING, and returns nothing yet"),
        ("bad", "the run is FAILED, and returns nothing; --failed fetches"),
        ("none", "NOT_FOUND: run none action a0 not found; give --project and --domain"),
    ):
        with pytest.raises(ExportError, match=text):
            runs_of_flyte2.find(config, Execution(PROJECT, DOMAIN, run))


def test_the_report_of_a_failed_run_has_the_errors_and_pages_of_its_actions(home, plane):
    ended(plane, "failed", FAILED, message="the driver's")
    ended(plane, "failed", FAILED, task="flytune_train.train", name="b1", message="rank 0: a bug")
    plane.store(f"s3://{BUCKET}/x/metadata/failed/b1/1/report.html", b"<p>steps</p>")
    assert main(["fetch", "failed", str(home / "out"), "--failed"]) == 0
    text = (home / "out" / "failure.txt").read_text()
    assert "train, FAILED, 1 attempt:\nrank 0: a bug" in text
    assert (home / "out" / "train-b1.html").read_text() == "<p>steps</p>"


@pytest.mark.parametrize(
    ("phase", "said"), [(RUNNING, "RUNNING, and returns nothing yet"), (FAILED, "FAILED, and returns")]
)
def test_a_run_that_has_not_succeeded_names_its_artifacts_and_its_checkpoints(
    phase, said, home, plane, capsys
):
    stored = begun(plane, f"begun{phase}", phase, checkpoints={"save_steps": 4})
    assert main(["fetch", f"begun{phase}", str(home / "out")]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert f"stored before: {stored} (flytune fetch {stored} OUT)" in error
    # Where the pods of the run save them.
    base, scope = (
        f"s3://{BUCKET}/{PREFIX}/{PROJECT}/{DOMAIN}/begun{phase}/",
        (ORG, PROJECT, DOMAIN, f"begun{phase}"),
    )
    shared = Flyte2(stored, base, scope, f"begun{phase}", "b1").shared_address("checkpoints")
    assert f"checkpoints: {shared}/{content()['name']}-..., if training has saved" in error


def test_the_report_of_a_failed_run_names_its_artifacts_and_its_own_folder_of_checkpoints(home, plane):
    stored = begun(plane, "late", FAILED, checkpoints={"save_steps": 4, "folder": "s3://own/kept"})
    assert main(["fetch", "late", str(home / "out"), "--failed"]) == 0
    text = (home / "out" / "failure.txt").read_text()
    assert f"stored before: {stored} (" in text
    assert "checkpoints: s3://own/kept/" in text
