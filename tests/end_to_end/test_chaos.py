"""Tests of the chaos test: a short run, its faults, and the differences that it must detect."""

import copy
import http.client
import json
import os
import random
import subprocess
import sys
from collections import Counter

import pytest

from tests.chaos import checking
from tests.chaos.bucket import Bucket
from tests.chaos.faults import CHANGES, KILLS, LIVES, ON_DISK, ON_S3, Bag
from tests.support.paths import ROOT

UNDISTURBED = {
    "steps": [[1, 6.0, 1.0], [2, 5.0, 1.0]],
    "weights": {"model.safetensors": "abc"},
    "heldout_loss": 5.5,
    "refused": "",
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found["steps"].append([2, 5.0, 1.0]), r"steps \[1, 2, 2\], not \[1, 2\]"),
        (lambda found: found["steps"].pop(), r"steps \[1\], not \[1, 2\]"),
        (
            lambda found: found["steps"][1].__setitem__(1, 5.0000001),
            r"step 2: \[5.0000001, 1.0\], undisturbed \[5.0, 1.0\]",
        ),
        (
            lambda found: found["weights"].update({"model.safetensors": "abd"}),
            "model.safetensors: other weights",
        ),
        (lambda found: found["weights"].clear(), "model.safetensors: other weights"),
        (lambda found: found.update(heldout_loss=5.4), "held-out loss 5.4, undisturbed 5.5"),
        (lambda found: found.update(refused="a tensor is empty"), "the gate refuses it: a tensor is empty"),
    ],
)
def test_differences_are_reported(change, said):
    assert checking.differences(UNDISTURBED, UNDISTURBED) == []
    found = copy.deepcopy(UNDISTURBED)
    change(found)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError("; ".join(checking.differences(found, UNDISTURBED)))


@pytest.mark.parametrize(
    ("on_s3", "kinds"), [(True, KILLS | LIVES | CHANGES | ON_S3), (False, KILLS | LIVES | CHANGES | ON_DISK)]
)
def test_kinds_of_faults_are_equally_frequent_and_the_same_for_a_seed(on_s3, kinds):
    draws = [
        [bag.next(on_s3) for _ in range(2 * len(kinds))]
        for bag in (Bag(random.Random("1")), Bag(random.Random("1")))
    ]
    assert draws[0] == draws[1]
    assert Counter(fault.kind for fault in draws[0]) == dict.fromkeys(kinds, 2)


def test_the_bucket_fails_by_its_mode_and_recovers(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    bucket = Bucket()
    host = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")

    def ask(method, body=None):
        connection = http.client.HTTPConnection(host, timeout=600)
        try:
            connection.request(method, "/runs/a", body, {"x-amz-acl": "public-read"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    try:
        assert ask("PUT", b"whole")[0] == 200
        for mode, status, code in (("errors", 503, b"SlowDown"), ("full", 403, b"QuotaExceeded")):
            bucket.set_mode(mode)
            answer = ask("PUT", b"other")
            assert answer[0] == status
            assert code in answer[1]
        assert ask("GET") == (200, b"whole"), "a full store can be read"
        bucket.set_mode("cut")
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask("PUT", b"other" * 1000)
        bucket.set_mode("normal")
        assert ask("GET") == (200, b"whole")
        assert bucket.uploads >= 4
    finally:
        bucket.close()


@pytest.mark.slow
def test_a_run_with_ten_faults_equals_the_undisturbed_one():
    command = [sys.executable, "-m", "tests.chaos", "--faults", "10", "--pairs", "full/ddp", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (report,) = json.loads(done.stdout[done.stdout.index("[") :])
    assert report["problems"] == []
    assert sum(report["faults"].values()) == 10
    assert report["pods"] > 5
