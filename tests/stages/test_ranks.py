"""Ranks of several nodes: those of one job meet."""

import os
import socket
import subprocess
import sys

from tests.support.paths import ROOT

NODE = """
import os
from flytune.stages import ranks
try:
    print("rank 0 returned", ranks.start(os.getcwd, nodes=2, processes=1, forks=False, inputs={}))
except ranks.NoResult:
    print("the other node has the result")
"""


def test_nodes_that_know_the_endpoint_alone_are_one_job():
    # What the training operator gives Flyte 2's pods: nobody sets PET_RDZV_ID, and the endpoint names job and
    # attempt.
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"PET_RDZV_ENDPOINT": f"localhost:{port}", "PET_RDZV_BACKEND": "c10d", "PET_NNODES": "2:2"}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", NODE],
            cwd=ROOT,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = sorted(node.communicate(timeout=300)[0].strip() for node in nodes)
    assert said == [f"rank 0 returned {ROOT}", "the other node has the result"]
