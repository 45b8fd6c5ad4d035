"""The sharding that another tool's file names by DeepSpeed and FSDP, or its launcher by a configuration of
accelerate."""

import json
import re
from pathlib import Path
from typing import Any

from flytune import files, json_core, yaml_core
from flytune.conversion.draft import Draft
from flytune.written_files import load_yaml

GPUS_OF_A_NODE = 8
"""GPUs that are assumed for DeepSpeed, FSDP and several nodes where nobody says how many."""


def has_parts(draft: Draft) -> bool:
    """Return whether a process has only a part of the optimizer's states."""
    return draft.get("sharding.name") in ("fsdp", "zero1", "zero2", "zero3")


def keeps_masters(draft: Draft) -> bool:
    """Return whether the optimizer has float32 copies of the weights in any case, as DeepSpeed's has."""
    return str(draft.get("sharding.name")).startswith("zero")


def of_launcher(arguments: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the arguments of a command line with the launcher's sharding under the names that transformers
    has for it.

    A configuration of accelerate is read where it is found; otherwise its name says the sharding.
    """
    given = dict(arguments)
    if file := given.pop("config_file", None) or given.pop("accelerate_config", None):
        name = str(file).lower()
        if content := _of_accelerate(path, str(file)):
            given = {key: value for key, value in content.items() if value} | given
        elif re.search(r"zero|deepspeed|ds_", name):
            given["deepspeed"] = given.get("deepspeed") or str(file)
        elif "fsdp" in name:
            given["fsdp"] = given.get("fsdp") or "full_shard"
        elif "multi" in name:
            given["multi_gpu"] = True
    stage, is_deepspeed = given.pop("zero_stage", None), given.pop("use_deepspeed", False)
    devices = [given.pop(f"offload_{part}_device", None) for part in ("optimizer", "param")]
    if stage is not None or (is_deepspeed and "deepspeed" not in given):
        given["deepspeed"] = _deepspeed({"zero_stage": stage, "offload_optimizer_device": devices[0]})
    if given.pop("use_fsdp", False):
        given["fsdp"] = given.get("fsdp") or "full_shard"
    return given


def near(path: Path, name: str) -> Path | None:
    """Return the place of a file that another file names: here, beside that file, or above it; None if it is
    not found."""
    for folder in (Path(), path.parent, *list(path.absolute().parents)[:5]):
        try:
            file = folder / name
            if file.is_file():
                return file
        except OSError:  # a name that no file system takes
            return None
    return None


def _of_accelerate(path: Path, name: str) -> dict[str, Any]:
    """Return the arguments that a configuration of accelerate stands for; none if it is not on this
    machine."""
    file = near(path, name)
    content = load_yaml(file) if file else None
    if not isinstance(content, dict):
        return {}
    kind = str(content.get("distributed_type")).upper()
    launch = {name: content.get(name) for name in ("num_processes", "parallelism_config")}
    if kind == "DEEPSPEED":
        settings = content.get("deepspeed_config") or {}
        return launch | {"deepspeed": settings.get("deepspeed_config_file") or _deepspeed(settings)}
    if kind == "FSDP":
        return launch | {"fsdp": "full_shard", "fsdp_config": content.get("fsdp_config")}
    return launch | {"multi_gpu": kind.startswith("MULTI")}


def _deepspeed(settings: dict[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration for accelerate's names of its settings."""
    stage, device = settings.get("zero_stage"), settings.get("offload_optimizer_device") or "none"
    zero = {"stage": 2 if stage is None else stage} | (
        {"offload_optimizer": {"device": device}} if device != "none" else {}
    )
    return {"zero_optimization": zero}


def put(draft: Draft, gpus: int | None, nodes: int = 1, replicas: int | None = None, parts: int = 1) -> int:
    """Set the sharding that deepspeed, fsdp and fsdp_config name, with its replicas and the GPUs (`parts`)
    that divide a sample; return the number of GPUs, or groups of them, that train samples of their own."""
    parallelism = draft.take("parallelism_config") or {}
    sizes = {
        name: int(parallelism.get(f"parallelism_config_{name}_size") or 1) for name in ("cp", "sp", "tp")
    }
    if sizes["tp"] > 1:
        draft.refuse("parallelism_config_tp_size: layers are not divided among GPUs")
    parts = max(parts, sizes["cp"], sizes["sp"])
    deepspeed, fsdp, config = draft.take("deepspeed"), draft.take("fsdp"), draft.take("fsdp_config")
    draft.leave("fsdp_version")
    offload: str | None = None
    if deepspeed:
        name, offload = _zero(draft, deepspeed)
        note = _note_of_zero(draft, deepspeed, name)
    elif fsdp or config:
        settings = config if isinstance(config, dict) else {}
        offloads = settings.get("fsdp_offload_params") or settings.get("offload_params")
        name, note = "fsdp", "FSDP2, which follows from it"
        if re.search("offload|True", f"{fsdp} {offloads}"):
            offload = "cpu"
        if settings.get("activation_checkpointing") or settings.get("fsdp_activation_checkpointing"):
            draft.put("training.activation_checkpointing", True, "of fsdp_config")
    elif "fsdp" in draft.path.stem.lower():
        name, note = "fsdp", "by the name of the file: accelerate's configuration says it there"
    else:
        gpus = gpus or (GPUS_OF_A_NODE if parts > 1 else None)
        if gpus and gpus > 1:
            name, note = "ddp", ""
        else:
            name, note = "none", "for several GPUs: ddp, zero3 or fsdp"
    draft.put("sharding.name", name, note)
    draft.put("sharding.offload", offload)
    if name == "fsdp" and replicas != 1:
        draft.put("sharding.replicas", replicas)
    if parts > 1:
        draft.put("sharding.sequence_parallel", parts, "by heads, inside a node")
    if not gpus:
        gpus = 1 if name in ("none", "ddp") else GPUS_OF_A_NODE
    return gpus * nodes // parts


def _note_of_zero(draft: Draft, deepspeed: Any, name: str) -> str:
    if not isinstance(deepspeed, str):
        note = "deepspeed: a configuration in the file"
    elif _STAGE.search(deepspeed.lower()) or near(draft.path, deepspeed):
        note = f"deepspeed: {deepspeed}"
    else:
        note = f"deepspeed: {deepspeed}, which is not on this machine, so that stage 3 is assumed"
    if name.startswith("zero"):
        note += f"; a file of your own, sharding: {{name: {name}, config: FILE}}"
    return note


_STAGE = re.compile(r"(?:zero|ds_?z|z|stage|ds)[-_]?([0-3])")
"""Stage of ZeRO in the name of a file."""


def _zero(draft: Draft, deepspeed: Any) -> tuple[str, str | None]:
    """Return the sharding and offload of a DeepSpeed configuration, by its content or the name of its
    file."""
    content = deepspeed
    if isinstance(deepspeed, str) and (file := near(draft.path, deepspeed)):
        try:
            content = json_core.load(files.read_regular(file, yaml_core.LARGEST))
        except json_core.JSONError:
            draft.refuse(f"deepspeed: {deepspeed}: the file is not JSON")
        except OSError as error:
            draft.refuse(f"deepspeed: {deepspeed}: cannot be read: {error.strerror or error}")
    if isinstance(content, dict):
        zero = content.get("zero_optimization") or {}
        stage, text = zero.get("stage", 0), json.dumps(zero)
        uses_nvme, uses_cpu = '"nvme"' in text, '"cpu"' in text
    else:
        match = _STAGE.search(str(deepspeed).lower())
        stage = int(match[1]) if match else 3
        uses_nvme, uses_cpu = "nvme" in str(deepspeed), bool(re.search("cpu|offload", str(deepspeed)))
    offload = "cpu" if uses_cpu else None
    if uses_nvme:
        offload = "nvme"
    if stage not in (1, 2, 3):
        return "ddp", None
    return f"zero{stage}", None if stage == 1 else offload
