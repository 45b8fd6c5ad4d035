"""Tests of the step timer on a GPU, where the host runs ahead of the device (`make test-gpu`)."""

import time

import pytest
import torch

from flytune.training import measurements
from tests.support import ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def measure():
    matrix = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    clock = measurements.Clock(on_gpu=True)
    clock.enter("forward")
    for _ in range(20):
        matrix @ matrix
    clock.enter("data")
    launched = time.perf_counter() - start
    parts = clock.read()
    return parts, launched, time.perf_counter() - start


def test_a_part_is_the_gpus_time_and_not_the_hosts():
    # A process of its own: one that has used CUDA cannot be forked.
    parts, launched, seconds = ranks.run(1, measure)
    assert launched < parts["forward"] <= seconds
    assert parts["data"] < 0.1 * parts["forward"]
    assert sum(parts.values()) <= seconds
