"""GRPO of the demo with answers that the real vLLM draws: adapters and full weights of each step, a reward
that rises, and a run whose server is killed and that goes on."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from demo import sums
from flytune.rollouts import vllm_types
from tests.served import environments
from tests.served.models import Models
from tests.support.paths import ROOT
from tests.support.waiting import until

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_REGISTRY = """
import json
from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS
print(json.dumps(sorted(_TEXT_GENERATION_MODELS)))
"""


def _recipe(models: Models, folder: Path, changes: dict[str, Any]) -> Path:
    """Write the demo's recipe with vLLM as its engine, and return its file."""
    recipe = yaml.safe_load((ROOT / "recipes/demo-grpo.yaml").read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    sums.write(folder / "sums.jsonl")
    recipe["model"]["name_or_path"] = str(models.published)
    recipe["data"]["path"] = str(folder / "sums.jsonl")
    recipe["objective"]["engine"] = {"name": "vllm", "python": str(environments.vllm(models.environment))}
    recipe["checkpoints"] = {"folder": str(folder / "checkpoints"), "save_steps": 1}
    for path, value in changes.items():
        section, _, name = path.rpartition(".")
        place = recipe[section] if section else recipe
        place[name] = value
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def _command(file: Path) -> list[str]:
    return [sys.executable, "-m", "flytune.cli", "run", str(file), "--out", str(file.parent / "out")]


def _run(file: Path) -> dict[str, Any]:
    """Run a recipe, and return the records `training` and `metrics` of its artifact."""
    done = subprocess.run(_command(file), capture_output=True, text=True, env=os.environ | _ENVIRONMENT)
    if done.returncode:
        raise RuntimeError(f"{file}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    (artifact,) = (file.parent / "out").glob("demo-grpo-*")
    return {name: json.loads((artifact / f"{name}.json").read_bytes()) for name in ("training", "metrics")}


def _problem(records: dict[str, Any]) -> str:
    """Return what is wrong with a run; empty for nothing."""
    steps = records["training"]["steps"]
    reward = next(figure for figure in records["metrics"]["figures"] if figure["name"] == "reward")
    base, tuned = (reward[side]["value"] for side in ("base", "tuned"))
    means = [step["importance_mean"] for step in steps]
    if not all(0.99 < mean < 1.01 for mean in means):
        return f"mean importance weights {means}"
    if not tuned > base:
        return f"the held-out reward went from {base:.3f} to {tuned:.3f}"
    return ""


def _learns(changes: dict[str, Any]) -> Callable[[Models, Path], str]:
    return lambda models, folder: _problem(_run(_recipe(models, folder, changes)))


def _is_killed_and_goes_on(models: Models, folder: Path) -> str:
    """Kill vLLM when some steps are recorded; the next run trains them, and draws the others."""
    file = _recipe(models, folder, {"training.max_steps": 6})
    with subprocess.Popen(
        _command(file), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | _ENVIRONMENT
    ) as first:
        ledger = folder / "checkpoints"
        until(lambda: len(list(ledger.rglob("rollouts/*.jsonl"))) >= 2 or first.poll() is not None)
        for server in _servers_below(first.pid):
            os.kill(server, signal.SIGKILL)
        said = first.communicate()[0].decode()
    if "vLLM has ended" not in said or not first.returncode:
        return f"the run did not end with its server: {said[-1000:]}"
    recorded = [path.read_text().splitlines()[0] for path in ledger.rglob("rollouts/*.jsonl")]
    records = _run(file)
    (artifact,) = (folder / "out").glob("demo-grpo-*")
    kept = (artifact / "rollouts.jsonl").read_text().splitlines()
    if drawn := [line[:40] for line in recorded if line not in kept]:
        return f"drawn again: {drawn}"
    return "" if len(records["training"]["steps"]) == 6 else "it has other steps"


def _servers_below(pid: int) -> list[int]:
    """Return the processes of vLLM's server that descend from a process."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    servers = []
    for child in below.intersection(parents):
        with suppress(OSError):  # it has ended
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if words[1:3] == [b"-m", b"vllm.entrypoints.openai.api_server"]:
                servers.append(child)
    return servers


def _types_are_those_of_the_registry(models: Models, folder: Path) -> str:
    """Compare the types of models that recipes may name with vLLM's registry."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    python = str(environments.vllm(models.environment))
    listed = subprocess.run([python, "-c", _REGISTRY], capture_output=True, text=True, check=True).stdout
    loaded = set(json.loads(listed.strip().splitlines()[-1]))
    types = {name for name, classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if classes in loaded}
    return f"other types: {sorted(types ^ vllm_types.LOADED)}" if types != vllm_types.LOADED else ""


CASES: dict[str, Callable[[Models, Path], str]] = {
    "vllm-types": _types_are_those_of_the_registry,
    "vllm-grpo-lora": _learns({}),
    "vllm-grpo-full": _learns({"method": "full", "training.learning_rate": 2e-5, "training.max_steps": 8}),
    "vllm-grpo-killed": _is_killed_and_goes_on,
}
"""Functions that return what is wrong, by the names of cases; empty for nothing."""
