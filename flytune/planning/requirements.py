"""Requirements of a run by phase: GPU memory from the closed form, host memory, /dev/shm and disk.

Every constant has a unit and a source. docs/measured.md has the errors of these figures.
"""

import sys
from functools import cache
from importlib import metadata

from flytune.estimates import Memory, Workload, model_states
from flytune.estimates import memory as estimates_memory
from flytune.estimates.memory import GIB
from flytune.estimates.workload import BYTES
from flytune.hardware import Shape, load_cluster
from flytune.planning import loading
from flytune.planning.calibration import load_factors
from flytune.recipe import Recipe
from flytune.records import Need
from flytune.records.plan import EVALUATE, EXPORT, FIRST_STEP, LOAD, PHASES, SAVE, STEP
from flytune.sharding import sharding_of

# GiB of a Python process that has imported torch, transformers and trl, without a model (RSS on a CPU): with torch's CPU build,
# and with PyPI's wheel for Linux, which is the CUDA build (1.36 GB).
CPU_BUILD_GIB = 1.0
CUDA_BUILD_GIB = 1.27
# GiB of /dev/shm for NCCL's segments between the processes of a node: what its troubleshooting guide recommends for
# containers (--shm-size=1g). Flytune's batches do not use it: they are collated in the process that trains.
NCCL_SHM_GIB = 1.0
# Bytes a trained parameter in a checkpoint: float32 weight and both moments of Adam.
CHECKPOINT = 12.0
# Bytes of an exported file at most; the process that writes holds one (flytune/export/write.py).
EXPORT_FILE = 5e9


def of(recipe: Recipe, shape: Shape, workload: Workload) -> list[Need]:
    """Return all of a run's needs on a shape; memory of a GPU (on a cpu shape of a process) first."""
    memory = estimates_memory.memory(workload)
    if not shape.is_gpu:
        return [_process(recipe, shape, workload, memory), _shared(shape), _disk(recipe, shape, workload)]
    return [
        _need("GPU memory", shape.gpu_memory_gib, _tables(recipe, shape, workload, memory)),
        _host(recipe, shape, workload),
        _shared(shape),
        _disk(recipe, shape, workload),
    ]


def process_gib(shape: Shape) -> float:
    """Return GiB of a process before it loads anything, by the installed build of torch; on GPUs, by the train image's.

    Where torch is not installed (the plan task's image), the train image's counts too: its lock names PyPI's wheel.
    """
    return CPU_BUILD_GIB if not shape.is_gpu and _has_cpu_build() else CUDA_BUILD_GIB


@cache
def _has_cpu_build() -> bool:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False
    # PyPI's wheels have no local part, and are CPU builds on all systems but Linux.
    return version.endswith("+cpu") or ("+" not in version and sys.platform != "linux")


def _tables(recipe: Recipe, shape: Shape, workload: Workload, memory: Memory) -> dict[str, dict[str, float]]:
    measured = load_factors().get(shape.name)
    factor = measured.memory if measured else 1.0
    tables = {
        phase: {name: size * (1.0 if name in memory.outside else factor) for name, size in table.items()}
        for phase, table in memory.tables.items()
    }
    if recipe.data.packing and workload.attention != "flash":
        # The mask that keeps packed samples apart: one byte a pair of tokens, and a copy in 16 bits.
        mask = 3.0 * workload.tokens * workload.sequence_length
        tables = {name: table | {"attention mask": mask} if "step" in name else table for name, table in tables.items()}
    return tables


def _process(recipe: Recipe, shape: Shape, workload: Workload, memory: Memory) -> Need:
    """Return the memory of a process on a CPU, which holds states and activations, but neither CUDA nor NCCL."""
    process = {"process": process_gib(shape) * GIB}
    tables = {
        phase: {name: size for name, size in table.items() if name not in memory.outside} | process
        for phase, table in _tables(recipe, shape, workload, memory).items()
    }
    tables[LOAD]["weights as loaded"] = _as_loaded(recipe, workload)
    return _need("process memory", (shape.memory_gib - shape.shared_memory_gib) / shape.processes, tables)


def _host(recipe: Recipe, shape: Shape, workload: Workload) -> Need:
    sharding, lasting = sharding_of(recipe), model_states.of(workload)
    own = sharding.processes(shape)
    always = {"processes": own * process_gib(shape) * GIB}
    if workload.offload == "cpu":
        always["offloaded"] = own * lasting.offloaded
    states = sum(lasting.resident.values()) + sum(lasting.optimizer.values())
    phases = {
        LOAD: {"weights as loaded": own * _as_loaded(recipe, workload)},
        # Distributed checkpoints copy the shards of each process to the host before they are written.
        SAVE: {"checkpoint": own * states if sharding.async_checkpoint and workload.method == "full" else 0.0},
        EXPORT: {"file being written": min(EXPORT_FILE, _exported(workload))},
    }
    return _need(
        "host memory", shape.memory_gib - shape.shared_memory_gib, {name: always | phases.get(name, {}) for name in PHASES}
    )


def _as_loaded(recipe: Recipe, workload: Workload) -> float:
    """Return bytes of one process in host memory before they are copied to the GPU.

    Files in the requested dtype are mapped without a copy; slices, zero.Init and quantization take one tensor at a time.
    """
    sharding = sharding_of(recipe)
    converted = workload.geometry.dtype != workload.weight_dtype
    if workload.method == "qlora" or sharding.reads_slices(recipe) or workload.layout.shards_parameters or not converted:
        return 0.0
    return float(workload.geometry.parameters * BYTES[workload.weight_dtype])


def _shared(shape: Shape) -> Need:
    nccl = NCCL_SHM_GIB * GIB if shape.is_gpu and shape.world_size > 1 else 0.0
    return _need(
        "/dev/shm", shape.shared_memory_gib, {name: {"NCCL": nccl} for name in (FIRST_STEP, STEP, EVALUATE, SAVE, EXPORT)}
    )


def _disk(recipe: Recipe, shape: Shape, workload: Workload) -> Need:
    base = {"base model": 2.0 * workload.geometry.parameters}  # as it is stored: 16 bits
    if shape.is_gpu and loading.volume_of(recipe.model.name_or_path, shape, load_cluster()):
        base = {}  # read from the volume
    running = dict(base)
    if workload.offload == "nvme":
        running["offloaded"] = sharding_of(recipe).processes(shape) * model_states.of(workload).offloaded
    saved = dict(running)
    if copies := recipe.checkpoints.copies_on_disk:
        saved["checkpoints"] = CHECKPOINT * workload.trained * copies
    phases = {LOAD: base, FIRST_STEP: running, STEP: running, EVALUATE: running, SAVE: saved}
    return _need("disk", shape.disk_gib, phases | {EXPORT: saved | {"export": _exported(workload)}})


def _exported(workload: Workload) -> float:
    return workload.trained * (float(BYTES[workload.compute_dtype]) if workload.method == "full" else 4.0)


def _need(resource: str, gib: float, tables: dict[str, dict[str, float]]) -> Need:
    phases = {
        phase: {name: round(tables[phase][name]) for name in tables[phase] if tables[phase][name] >= 1}
        for phase in PHASES
        if phase in tables
    }
    # No validation, which would take most of the time of ten thousand candidates.
    return Need.model_construct(resource=resource, available_bytes=round(gib * GIB), phases=phases, engine="closed form")
