"""Tests that no token of a run is in its files or logs."""

import pytest

from tests.support.faults import planted
from tests.support.pyflyte import pyflyte
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs

PLANTED = {
    "HF_TOKEN": "hf_PLANTEDhubTOKENvalue",
    "WANDB_API_KEY": "PLANTEDwandbKEYvalue0123456789abcdef0000",
    # Nothing listens there: the error must not contain the token either.
    "FLYTUNE_WEBHOOK": "http://127.0.0.1:1/services/PLANTEDwebhookPATHvalue",
}
ENVIRONMENT = PLANTED | {f"_FSEC_{name}": value for name, value in PLANTED.items()}
MARK = b"PLANTED"


def found(folder):
    """Return the files with a planted value in their content or names."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 20
    return [path for path in files if MARK.decode() in path.name or MARK in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("breaks", [False, True], ids=["done", "failed"])
def test_no_token_is_in_what_a_run_writes(breaks, tmp_path):
    changes = {
        "method": "lora",
        "checkpoints.save_steps": 1,
        "publish.address": str(tmp_path / "store"),
        "notify": {"webhook": True, "on": ["failed", "succeeded"]},
    }
    recipe = tiny_recipe(tiny_base(tmp_path), write_pairs(tmp_path / "pairs.jsonl", 64), changes)
    # Its loss is NaN after a checkpoint.
    done = pyflyte(recipe, tmp_path, ENVIRONMENT | (planted("nan 0 2") if breaks else {}))
    assert (done.returncode != 0) is breaks, done.stderr[-3000:]
    assert "FLYTUNE_WEBHOOK was not reached: URLError; no message was sent" in done.stderr
    if breaks:
        assert "tiny: failed;" in done.stderr
        assert "step 3: the loss is nan" in done.stderr
    assert MARK.decode() not in done.stdout + done.stderr
    assert not found(tmp_path)
    (tmp_path / "leak").write_text(PLANTED["HF_TOKEN"])
    assert found(tmp_path) == [tmp_path / "leak"], "the search finds what is there"
