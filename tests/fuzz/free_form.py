"""Sealed artifacts whose recipes have a path in a value of free form: nothing outside of a second run's
folder is named."""

import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from flytune.artifacts import reproduction
from flytune.errors import RecipeError
from flytune.hardware import shape_named
from flytune.recipe import Recipe
from flytune.sharding import sharding_of
from tests.fuzz.artifacts import ARTIFACT, copied, reseal
from tests.fuzz.isolation import Wrong
from tests.fuzz.kinds import RELEASE, Samples, kind

_PLACES = [
    ["flops_profiler", "output_file"],
    ["comms_logger", "output_path"],
    ["comms_logger", "prof_ops"],
    ["csv_monitor", "output_path"],
    ["tensorboard", "output_path"],
    ["wandb", "project"],
    ["autotuning", "results_dir"],
    ["autotuning", "exps_dir"],
    ["checkpoint", "writer", "config"],
    ["nebula", "persistent_storage_path"],
    ["aio", "block_size"],
    ["compile", "backend"],
    ["zero_optimization", "offload_optimizer", "nvme_path"],
    ["zero_optimization", "offload_param", "nvme_path"],
    ["optimizer", "params", "output"],
    ["optimizer", "type"],
    ["scheduler", "params", "file"],
    ["data_efficiency", "output"],
    ["zero_optimization", "log"],
    ["dump_state"],
    ["communication_data_type"],
    ["bf16", "file"],
    ["fp16", "loss_scale"],
    ["x"],
]
"""Keys of DeepSpeed's configuration that name places, and others."""


def _config(keys: list[str], path: str) -> dict[str, Any]:
    config: dict[str, Any] = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}
    section = config
    for key in keys[:-1]:
        section = section.setdefault(key, {})
    section[keys[-1]] = [path] if keys[-1] == "prof_ops" else path
    if keys[0] in ("flops_profiler", "comms_logger", "csv_monitor", "tensorboard", "autotuning"):
        config[keys[0]]["enabled"] = True
    if keys[-1] == "nvme_path":
        section["device"] = "nvme"
    return config


def _drawn(samples: Samples) -> st.SearchStrategy[tuple[str, Any]]:
    """Draw the section of a recipe, and what it has, in which PATH is a path of the machine."""
    names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=12)
    keys = st.one_of(st.sampled_from(_PLACES), st.lists(names, min_size=1, max_size=3))
    path = st.sampled_from(["PATH", "PATH", "PATH/below", "/tmp/..PATH"])
    config = st.builds(
        lambda keys, path: ("sharding", {"name": "zero3", "config": _config(keys, path)}), keys, path
    )
    schedule = st.builds(
        lambda name, key: ("training", {"lr_scheduler_type": name, "lr_scheduler_kwargs": {key: "PATH"}}),
        st.sampled_from(["cosine", "warmup_stable_decay", "polynomial"]),
        st.sampled_from(["decay_type", "warmup_type", "output"]),
    )
    ranks_ = st.sampled_from(["rank_pattern", "alpha_pattern"]).map(
        lambda name: ("method", {name: {"q_proj": "PATH"}})
    )
    columns = st.sampled_from(["instruction", "PATH"]).map(lambda name: ("data", {"columns": {name: "PATH"}}))
    return st.one_of(*[config] * 4, schedule, ranks_, columns)


@kind("free_form", _drawn, share=0.4)
def check_free_form(samples: Samples, given: tuple[str, Any], folder: Path) -> None:
    """A path in a recipe's free-form value is refused, or nothing that a second run gives to a library has
    it."""
    section, changes = given
    path = "/home/somebody/notes.txt"
    recipe = yaml.safe_load((ARTIFACT / "recipe.yaml").read_bytes())
    recipe["model"] |= {"name_or_path": str(RELEASE / "base")}
    changed = json.loads(json.dumps(changes).replace("PATH", path))
    recipe[section] = changed if section == "sharding" else recipe[section] | changed
    artifact = copied(ARTIFACT, folder / "artifact", "recipe.yaml", yaml.safe_dump(recipe).encode())
    reseal(artifact, "artifact.json")
    read = reproduction.recipe_of(artifact)
    written = Recipe.from_yaml(reproduction.write_recipe(read, folder / "out"))
    if path in json.dumps(written.model_dump(include={"training", "method"})):
        raise Wrong("an argument of a library is a path")
    sharding = sharding_of(written)
    if section != "sharding":
        return
    shape = shape_named("cpu-2").model_copy(update={"nvme": True})
    refused = [*sharding.problems(), *filter(None, [sharding.misfit(shape)])]
    if not refused and path in json.dumps(sharding.config()):
        raise Wrong("DeepSpeed is given a path outside of the run's folder")
    if refused:
        raise RecipeError(f"sharding: {'; '.join(refused)[:500]}")
