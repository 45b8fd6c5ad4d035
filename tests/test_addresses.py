"""One check of addresses for credentials, and one redaction; wherever an address enters, the secret comes out
nowhere."""

import json
import logging
import pickle

import pytest
import yaml

from flytune import addresses, cli
from flytune.adapters import combining
from flytune.artifacts import catalog, fetch
from flytune.errors import ExportError, FlytuneError, RecipeError, StorageError
from flytune.hardware import load_cluster
from flytune.recipe import Recipe
from flytune.registry import history
from flytune.storage import Storage
from tests.support.tiny import tiny_recipe

SECRET = "Wq7Rt5"
WITH_SECRET = {
    "user and password": "s3://key:{}@bucket/x",
    "password with a slash": "https://user:{}/a/b@host/x",
    "password with digits and a slash": "ftp://user:1234/{}@host/x",
    "password with an at": "https://user:p@{}@host/x",
    "encoded password": "https://user:%40{}%2F@host/x",
    "encoded colon": "https://user%3A{}@host/x",
    "encoded address": "https%3A%2F%2Fuser%3A{}%40host%2Fx",
    "no password": "https://{}@host/x",
    "no user": "https://:{}@host/x",
    "chained": "simplecache::s3://key:{}@bucket/x",
    "the hub": "hf://user:{}@owner/name",
    "Azure's account key": "abfs://container:{}@account.dfs.core.windows.net/x",
    "sas": "https://a.blob.core.windows.net/c/x?sas={}",
    "sig": "https://a.blob.core.windows.net/c?sv=2020-01-01&sp=r&sig={}",
    "S3's signature": "https://b.s3.amazonaws.com/k?X-Amz-Credential=a&X-Amz-Signature={}",
    "S3's token": "https://b.s3.amazonaws.com/k?X-Amz-Security-Token={}",
    "Google's signature": "https://storage.googleapis.com/b/k?X-Goog-Signature={}",
    "CloudFront": "https://x.cloudfront.net/k?Key-Pair-Id=a&Signature={}",
    "token": "https://host/x?token={}",
    "second parameter": "gs://b/x?a=1&access_token={}",
    "api key": "https://host:8443/x?api-key={}",
    "encoded parameter": "https://host/x%3Ftoken%3D{}",
    "fragment": "https://host/x#access_token={}",
    "semicolon": "https://host/x;token={}",
    "a database": "postgresql://user:{}@host/db",
    "a connection string": "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={}==;EndpointSuffix=x",
    "Slack": "https://hooks.slack.com/services/T0/B0/{}",
    "Hugging Face": "hf_{}abcdefghijklmnopqrst",
    "GitHub": "ghp_{}abcdefghijklmnopqrst",
    "a token in a path": "https://host/hf_{}abcdefghijklmnop/x",
}
WITHOUT = [
    "hf://owner/name@v1",
    "hf://owner/name@0123456789abcdef0123456789abcdef01234567",
    "s3://bucket/key@v1",
    "s3://bucket/token/secret/key.json",
    "http://minio:9000/bucket@v1/x",
    "https://host/a@b",
    "abfs://container@account.dfs.core.windows.net/x",
    "sftp://user@host/x",
    "https://flyte.example.com/console/projects/a/domains/b/executions/c?duration=all",
    "flyte://v1/a/b/c/n0/o",
    "memory://x/y?versionId=abc",
    "see https://a.b/c and mail me@x.org: ok",
    '{"url": "https://a.b/c", "mail": "me@x.org"}',
    "owner/name",
    "/data/with space/a@b",
    "What is a token? Write token=1.",
]


def all_addresses():
    return pytest.mark.parametrize(
        "address", [text.format(SECRET) for text in WITH_SECRET.values()], ids=WITH_SECRET
    )


@all_addresses()
def test_a_credential_is_found_and_hidden(address):
    assert addresses.problem(address, is_address=True)
    hidden = addresses.redact(f"OSError: {address}: 403 Forbidden")
    assert SECRET not in hidden
    assert hidden.startswith("OSError: ")
    assert addresses.redact(hidden) == hidden
    with pytest.raises(ExportError, match="an address with credentials") as error:
        addresses.check(address, "here", ExportError)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("text", WITHOUT)
def test_other_addresses_are_left_as_they_are(text):
    assert addresses.problem(text) is None
    assert addresses.redact(text) == text


def test_a_control_character_is_no_part_of_an_address():
    for text in ("s3://b/x\n", "a\x00b", "a\x1b[2J"):
        with pytest.raises(ExportError, match="control character"):
            addresses.check(text, "here", ExportError)


@all_addresses()
def test_a_recipe_with_one_is_refused_in_every_field(address, tmp_path):
    for field in (
        "model.name_or_path",
        "data.path",
        "publish.address",
        "checkpoints.folder",
        "tracking.project",
        "description",
    ):
        content = tiny_recipe(tmp_path, tmp_path / "x.jsonl", {field: f"{address}"})
        with pytest.raises(RecipeError) as error:
            Recipe.model_validate(content)
        assert f"{field}: an address with credentials" in str(error.value)
        assert SECRET not in str(error.value)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(RecipeError) as error:
        Recipe.from_yaml(tmp_path / "recipe.yaml")
    assert SECRET not in str(error.value)


@all_addresses()
def test_cluster_yaml_with_one_is_refused(address, tmp_path):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({"model_cache": address, "a": {"b": [address]}}))
    with pytest.raises(RecipeError, match=r"a\.b\[0\]: an address with credentials") as error:
        load_cluster(tmp_path / "cluster.yaml")
    assert SECRET not in str(error.value)


COMMANDS = {
    "plan": ["plan", "{}"],
    "merge": ["merge", "{}", "--out", "x"],
    "merge's base": ["merge", "x", "--out", "y", "--base", "{}"],
    "gguf": ["gguf", "{}", "--out", "x"],
    "combine": ["combine", "x", "{}", "{}"],
    "adapters": ["adapters", "{}"],
    "fetch": ["fetch", "{}", "x"],
    "accepted": ["accepted", "{}"],
    "reproduce": ["reproduce", "{}"],
    "reproduce's other": ["reproduce", "x", "--with", "{}"],
    "calibrate": ["calibrate", "{}"],
    "xray": ["xray", "{}"],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@all_addresses()
def test_no_command_takes_one(command, address, capsys):
    assert cli.main([word.format(address) for word in command]) == 1
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    assert "credentials" in said.err


@all_addresses()
def test_no_address_of_the_library_takes_one(address, tmp_path):
    for use in (
        lambda: Storage(address, "checkpoints.folder"),
        lambda: fetch.local_folder(address),
        lambda: fetch.fetch(address, tmp_path / "out"),
        lambda: catalog.list_artifacts(address),
        lambda: history.decisions_at(address),
        lambda: combining.combine([address, address], tmp_path / "out"),
    ):
        with pytest.raises(FlytuneError) as error:
            use()
        assert "credentials" in str(error.value)
        assert SECRET not in str(error.value) + repr(error.value)


@all_addresses()
def test_no_error_of_ours_has_one_wherever_it_came_from(address):
    """Messages of other libraries are taken into ours: of fsspec, botocore, requests, huggingface_hub."""
    for made in (ExportError(f"cannot be read: {address}"), StorageError(f"x {address}", goes_on=True)):
        again = pickle.loads(pickle.dumps(made))
        assert SECRET not in f"{made}{made!r}{again}{again!r}"
    assert StorageError("x", goes_on=True).goes_on
    assert SECRET not in addresses.reason(OSError(f"403 for {address}"))


def test_a_value_of_the_environment_is_hidden(monkeypatch):
    monkeypatch.setenv("MY_API_TOKEN", "unlikely-looking")
    assert str(ExportError("a unlikely-looking b")) == "a [hidden] b"


def test_an_old_record_with_one_is_listed_without_it(tmp_path, capsys):
    """Before 0.2.0 addresses of combined adapters were written as they were given."""
    folder, address = tmp_path / "both", f"s3://key:{SECRET}@bucket/a"
    folder.mkdir()
    (folder / "recipe.yaml").write_text("name: both\nmodel: {name_or_path: x}\nmethod: lora\n")
    (folder / "combination.json").write_text(json.dumps({"sources": [{"address": address}]}))
    (entry,) = catalog.list_artifacts(str(tmp_path))
    assert entry.made_from == ["s3://[hidden]@bucket/a"]
    assert cli.main(["adapters", str(tmp_path)]) == 0
    assert SECRET not in capsys.readouterr().out


def test_a_storage_that_fails_does_not_log_one(caplog, monkeypatch):
    from flytune import storage as module

    monkeypatch.setattr(module, "WAITS", (0,))
    storage = Storage("memory://readers/x", "")

    class Away(Exception):
        pass

    Away.__module__ = "botocore.exceptions"

    def fail(*_, **__):
        raise Away(f"Could not connect to https://user:{SECRET}@host/x?X-Amz-Signature={SECRET}")

    monkeypatch.setattr(storage.filesystem, "open", fail, raising=False)
    with caplog.at_level(logging.DEBUG), pytest.raises(StorageError) as error:
        storage.read("a")
    assert SECRET not in caplog.text + str(error.value)


def test_a_token_of_thousands_of_characters_is_hidden_as_a_password():
    token = "e" * 4000
    assert token not in addresses.redact(f"{'word' * 20_000} https://oauth2:{token}@host/x")
