"""Simulated user's laptop: a checkout, from which pyflyte talks to a control plane."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support.paths import ROOT

SECRET = "hush-7f3a"
SECRETS = [".env", ".env.local", "deploy/.env", "deploy/key.pem", ".netrc"]
REST = [".venv/lib/x.py", ".demo/data.jsonl", ".checkpoints/x/y"]
TWO_NODES = {"name": "cpu-1x2", "accelerator": "cpu", "nodes": 2, "processes": 1, "cpu": 1, "memory_gib": 6}
VOLUME = {"name": "team", "persistent_volume_claim": "team", "mount_path": "/mnt/team"}
WHERE = ["-p", "flytesnacks", "-d", "development"]


def checkout(folder, root=ROOT):
    """Copy the project in `root`; add a shape of two nodes without GPUs, a volume, secrets in files and in the remote's URL."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (root / name).is_file():  # else a link, or deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    with (folder / "shapes.yaml").open("a") as shapes:
        shapes.write(yaml.safe_dump([TWO_NODES | {"disk_gib": 20, "shared_memory_gib": 1, "price_per_hour": 0.0}]))
    with (folder / "cluster.yaml").open("a") as cluster:
        cluster.write(yaml.safe_dump({"volumes": [VOLUME]}))
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    url = f"https://someone:{SECRET}@github.com/someone/flytune.git"
    subprocess.run(["git", "remote", "add", "origin", url], cwd=folder, check=True)
    for name in [*SECRETS, *REST]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"TOKEN={SECRET}\n")
    return folder


def pyflyte(laptop, home, *arguments, **variables):
    """Run pyflyte in the checkout `laptop`, with the configuration below `home` and secrets among the environment variables."""
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "TMPDIR": str(home),
        "PYTHONPATH": ":".join([str(laptop), *variables.pop("paths", [])]),
        "HF_TOKEN": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }
    command = ["pyflyte", *arguments]
    return subprocess.run(command, cwd=laptop, env=environment | variables, capture_output=True, text=True, timeout=900)


def submit(laptop, home, admin, recipe, **variables):
    """Submit a recipe as the README does; return the execution's name."""
    known = set(admin.executions)
    (home / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    what = ["workflows/finetune.py", "finetune", "--recipe", str(home / "recipe.yaml")]
    done = pyflyte(laptop, home, "run", "--remote", "--copy", "all", *WHERE, *what, **variables)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (name,) = set(admin.executions) - known
    return name
