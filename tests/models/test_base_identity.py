"""Identity of a base model: each byte of a small one, both ends of each tensor of a large one."""

import json
import shutil

import pytest

from flytune.errors import RecipeError
from flytune.models import base_identity
from flytune.recipe import Model


def write(folder, tensors):
    """Write a safetensors file by hand: its header's length, its header, and the tensors' bytes."""
    folder.mkdir(exist_ok=True)
    header, content = {"__metadata__": {"format": "pt"}}, b""
    for name, data in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [len(content), len(content) + len(data)],
        }
        content += data
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + content)
    (folder / "config.json").write_text("{}")
    return folder


def identity(folder):
    return base_identity.identity_of(Model(name_or_path=str(folder)))


def changed(data, place):
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("whole", [base_identity.WHOLE, 0])
def test_a_change_of_weights_or_config_is_another_base(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(base_identity, "WHOLE", whole)
    tensors = {"a": bytes(10), "b": bytes(100_000)}
    known = identity(write(tmp_path / "base", tensors))
    assert identity(shutil.copytree(tmp_path / "base", tmp_path / "copy")) == known, "a folder may move"
    for name, data in tensors.items():
        for place in (0, len(data) - 1):
            assert identity(write(tmp_path / "base", tensors | {name: changed(data, place)})) != known
    in_the_middle = identity(write(tmp_path / "base", tensors | {"b": changed(tensors["b"], 50_000)}))
    assert (in_the_middle == known) is (whole == 0), "what docs/checkpoints.md says of large models"
    assert identity(write(tmp_path / "base", {"a": tensors["a"], "c": tensors["b"]})) != known
    write(tmp_path / "base", tensors)
    assert identity(tmp_path / "base") == known
    (tmp_path / "base/config.json").write_text('{"rope_theta": 1}')
    assert identity(tmp_path / "base") != known


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, (3).to_bytes(8, "little") + b"[1]", (2).to_bytes(8, "little") + b"{!"]
)
def test_a_damaged_header_of_a_large_base_is_named(content, tmp_path, monkeypatch):
    monkeypatch.setattr(base_identity, "WHOLE", -1)
    write(tmp_path / "base", {})
    (tmp_path / "base/model.safetensors").write_bytes(content)
    with pytest.raises(RecipeError, match=r"model.name_or_path: .*model.safetensors: "):
        identity(tmp_path / "base")
