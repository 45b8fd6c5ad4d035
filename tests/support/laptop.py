"""Simulated user's laptop: a checkout, from which pyflyte talks to a control plane."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support import fork_server
from tests.support.paths import ROOT
from tests.support.propeller import REGISTRY
from tests.support.sources import copy, tracked

SECRET = "hush-7f3a"
SECRETS = [".env", ".env.local", "deploy/.env", "deploy/key.pem", ".netrc"]
REST = [
    ".venv/lib/x.py",
    ".demo/data.jsonl",
    ".checkpoints/x/y",
    "own/data.jsonl",
    "own/models/x/model.safetensors",
    "recipes/rows.jsonl",
]
TWO_NODES = {"name": "cpu-1x2", "accelerator": "cpu", "nodes": 2, "processes": 1, "cpu": 1, "memory_gib": 6}
VOLUME = {"name": "team", "persistent_volume_claim": "team", "mount_path": "/mnt/team"}
WHERE = ["-p", "flytesnacks", "-d", "development"]


def checkout(folder, root=ROOT):
    """Copy the project in `root`; add a shape of two nodes without GPUs, a volume, secrets in files and in
    the remote's URL."""
    copy(tracked("-co", "--exclude-standard", root=root), folder, root)
    with (folder / "shapes.yaml").open("a") as shapes:
        shapes.write(
            yaml.safe_dump([TWO_NODES | {"disk_gib": 20, "shared_memory_gib": 1, "price_per_hour": 0.0}])
        )
    with (folder / "cluster.yaml").open("a") as cluster:
        cluster.write(yaml.safe_dump({"volumes": [VOLUME]}))
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    url = f"https://someone:{SECRET}@github.com/someone/flytune.git"
    subprocess.run(["git", "remote", "add", "origin", url], cwd=folder, check=True)
    for name in [*SECRETS, *REST]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"TOKEN={SECRET}\n")
    return folder


def pyflyte(laptop, home, *arguments, forks=False, **variables):
    """Run pyflyte in the checkout `laptop`, with the configuration below `home`, a registry, and secrets in
    variables.

    One that `forks` begins with its libraries (fork_server.py).
    """
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "TMPDIR": str(home),
        "PYTHONPATH": ":".join([str(laptop), *variables.pop("paths", [])]),
        "HF_TOKEN": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        **REGISTRY,
    }
    command = [Path(sys.executable).with_name("pyflyte"), *arguments]
    if forks:
        return fork_server.run(command, laptop, environment | variables)
    return subprocess.run(
        command, cwd=laptop, env=environment | variables, capture_output=True, text=True, timeout=900
    )


def submit(laptop, home, admin, recipe, **variables):
    """Submit a recipe as the README does; return the execution's name."""
    return start(laptop, home, admin, "finetune", "finetune", variables, recipe=recipe)


def start(laptop, home, admin, module, name, variables=None, **inputs):
    """Start a workflow by `pyflyte run --remote`; return the execution's name.

    Args:
        inputs: the workflow's; a dictionary is written to a file of its own.
    """
    known = set(admin.executions)
    arguments = []
    for field, value in inputs.items():
        if isinstance(value, dict):
            value, content = home / f"{field}.yaml", value
            value.write_text(yaml.safe_dump(content))
        arguments += [f"--{field}", str(value)]
    command = ["run", "--remote", "--copy", "all", *WHERE, f"workflows/{module}.py", name, *arguments]
    done = pyflyte(laptop, home, *command, forks=True, **(variables or {}))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (made,) = set(admin.executions) - known
    return made
