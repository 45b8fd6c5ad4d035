"""Requirements of a run by phase: GPU memory from the closed form, host memory, /dev/shm and disk.

Every constant has a unit and a source. docs/measured/memory.md has the errors of these figures.

The time to bring a base model's weights from where they are to the processes that train, at each attempt.

A model of the hub or at an address is downloaded by each node to its disk, and read from there; a model on a
volume is read from the volume. Rates are those of cluster.yaml and shapes.yaml. Where these give none, they
are taken from LambdaLabsML's distributed-training-guide (05-training-llama-405b/README.md), where Llama 3.1
405B, 811 GB, is initialized on 8 nodes in 50 minutes from a shared drive and in 3 minutes from a node's own
disk; the rate of an object store is assumed.
"""

import sys
from functools import cache
from importlib import metadata

from flytune.hardware import Cluster, Shape, Volume, load_cluster
from flytune.models import base
from flytune.objectives.bound import BoundRecipe
from flytune.planning.calibration import load_factors
from flytune.planning.save_interval import WRITE_RATE
from flytune.recipe import VllmEngine
from flytune.records import Loading, Need
from flytune.records.plan import DRAW, EXPORT, LOAD, PHASES, SAVE
from training_estimates import Memory, Workload, decoding, model_states
from training_estimates import memory as estimates_memory
from training_estimates.memory import GIB
from training_estimates.model_states import States
from training_estimates.workload import BYTES

SHARED_DRIVE_GBS = 811 / (50 * 60)
"""GB/s of all nodes together from a volume without read_gbs: the published run's."""
NVME_GBS = 811 / (3 * 60)
"""GB/s from a node's NVMe disk, for rows without disk_read_gbs: the published run's."""
DISK_GBS = 0.25
"""GB/s from a node's other disk, for rows without disk_read_gbs: assumed, of a network disk."""
STORE_GBS = 0.5
"""GB/s at which a node downloads from the cluster's storage, without store_read_gbs: assumed, of one process
with s3fs."""


def loading_forecast(
    bound: BoundRecipe, shape: Shape, workload: Workload, cluster: Cluster
) -> Loading | None:
    """Return the time of an attempt to load the base model on a cluster; None on a shape without GPUs, whose
    runs are local."""
    if not shape.is_gpu:
        return None
    size = workload.geometry.parameters * (4.0 if workload.geometry.dtype == "float32" else 2.0)
    sharding, degrees = bound.sharding, workload.degrees
    # Of slices, each process reads its own; otherwise each node reads all files, from its page cache after
    # the first time.
    share = min(1.0, degrees.processes / degrees.shards) if sharding.reads_slices else 1.0
    name = bound.recipe.model.name_or_path
    if volume := volume_of(name, shape, cluster):
        seconds, rate = _of_volume(volume, size * share, shape.nodes)
        return Loading(
            source=f"volume {volume.name}",
            bytes=round(size),
            parts={f"volume {volume.name} ({rate})": seconds},
        )
    store = min(cluster.store_read_gbs or STORE_GBS, shape.fabric.gbs)
    disk = shape.disk_read_gbs or (NVME_GBS if shape.nvme else DISK_GBS)
    assumed = ("" if cluster.store_read_gbs else ", assumed", "" if shape.disk_read_gbs else ", assumed")
    return Loading(
        source="the cluster's storage",
        bytes=round(size),
        parts={
            f"the cluster's storage ({store:.3g} GB/s a node{assumed[0]})": size / store / 1e9,
            f"each node's disk ({disk:.3g} GB/s{assumed[1]})": size * share / disk / 1e9,
        },
    )


def volume_of(name: str, shape: Shape, cluster: Cluster) -> Volume | None:
    """Return the volume that pods read the model from; None for a model that they download.

    Whether a cache that pods cannot write has the model is unknown here, so that a download is counted.
    """
    if name.startswith("/"):
        return cluster.volume_at(name, shape.name)
    if cluster.model_cache is None or base.is_address(name) or base.is_path(name):
        return None
    volume = cluster.volume_at(cluster.model_cache, shape.name)
    return None if volume is None or volume.read_only else volume


def _of_volume(volume: Volume, node_bytes: float, nodes: int) -> tuple[float, str]:
    """Return the seconds until all nodes have read so many bytes each, and the rate in words."""
    if volume.read_gbs is None:
        return (
            nodes * node_bytes / SHARED_DRIVE_GBS / 1e9,
            f"{SHARED_DRIVE_GBS:.2f} GB/s for all nodes, assumed",
        )
    alone = node_bytes / volume.read_gbs / 1e9
    if volume.total_read_gbs is None or nodes * volume.read_gbs <= volume.total_read_gbs:
        return alone, f"{volume.read_gbs:.3g} GB/s a node"
    return nodes * node_bytes / volume.total_read_gbs / 1e9, f"{volume.total_read_gbs:.3g} GB/s for all nodes"


# GiB of a Python process that has imported torch, transformers and trl, without a model (RSS on a CPU): with
# torch's CPU build, and with PyPI's wheel for Linux, which is the CUDA build (1.36 GB).
CPU_BUILD_GIB = 1.0
CUDA_BUILD_GIB = 1.27
# GiB of host memory that a process takes for CUDA: context, kernels and libraries (cuBLAS) as they are
# loaded. Published: 322,040 kB after the import of torch and 2,056,600 with a tensor on the GPU
# (pytorch/pytorch issue 113326: torch 2.2, lazy loading); 479 and 1,344 to 1,425 MB (torch 2.10, a small
# model, Windows; huggingface.co/owensong/Inflect-Micro-v2, discussion 6). The larger is taken.
CUDA_HOST_GIB = (2_056_600 - 322_040) * 1024 / GIB
# GiB of page-locked host memory of a process for NCCL's connections to other nodes: 9.19 MiB each (a report
# with a backtrace: tonyd2wild/DeepSeek-V4.1-Flash-vLLM-DGX-Spark, issue 8), one each way for each of 16
# channels (assumed). Between GPUs of a node it uses /dev/shm, or none of it where they reach each other.
NCCL_NETWORK_GIB = 2 * 16 * 9.19 / 1024
# GiB of /dev/shm for NCCL's segments between the processes of a node: what its troubleshooting guide
# recommends for containers (--shm-size=1g). Flytune's batches do not use it: they are collated in the process
# that trains.
NCCL_SHM_GIB = 1.0
# Host memory of weights that are converted while they are loaded, over that of the result: Llama 2 7B, 25,704
# MiB in float32, took 32,744 less a process of 1,506 (docs/measured/loading.md).
CONVERTED = 1.22
VLLM = "vLLM's GPU memory"
"""Resource: the part of a GPU that a server of vLLM takes."""
# GiB that vLLM keeps free for activations: Llama 3 8B, with its defaults
# (github.com/vllm-project/vllm/pull/10511, comment of 2024-12-14).
VLLM_ACTIVATIONS_GIB = 1.26
# Bytes of an exported file at most; the process that writes holds one (flytune/export/write.py).
EXPORT_FILE = 5e9


def of(bound: BoundRecipe, shape: Shape, workload: Workload, lasting: States) -> list[Need]:
    """Return all of a run's needs on a shape; memory of a GPU (on a cpu shape of a process) first.

    Args:
        lasting: the workload's model states.
    """
    memory = estimates_memory.memory(workload, lasting)
    if not shape.is_gpu:
        return [
            _process(bound, shape, workload, memory, lasting),
            _shared(shape, workload),
            _disk(bound, shape, workload, lasting),
        ]
    return [
        _need("GPU memory", shape.gpu_memory_gib, _tables(bound, shape, workload, memory)),
        _host(bound, shape, workload, lasting),
        _shared(shape, workload),
        _disk(bound, shape, workload, lasting),
        *_server(bound, shape, workload),
    ]


def checkpoint_bytes(workload: Workload) -> float:
    """Return the bytes of a checkpoint: trained weights as the optimizer has them (float32 of DeepSpeed), and
    its states."""
    width = workload.updated_bytes
    return width * workload.trained + model_states.state_bytes(workload, width)


def consolidated_bytes(bound: BoundRecipe, workload: Workload) -> float:
    """Return bytes of the weights that are written beside each checkpoint to be published
    (publish.every_save)."""
    return _exported(workload) if bound.recipe.publish.every_save else 0.0


def gather_reason(bound: BoundRecipe, workload: Workload) -> list[str]:
    """Return what writing weights to publish costs, as a line of the plan; none where none are
    published."""
    size = consolidated_bytes(bound, workload)
    if not size:
        return []
    return [
        f"publish.every_save: each save also writes the weights as the export does, {size / GIB:.3g} GiB on "
        f"the first node: training waits {size / WRITE_RATE:.3g} s at {WRITE_RATE / 1e9:.0f} GB/s (assumed), "
        f"with {min(EXPORT_FILE, size) / GIB:.3g} GiB of host memory for a file"
    ]


def process_gib(shape: Shape) -> float:
    """Return GiB of a process before it loads anything, by the installed build of torch; on GPUs, by the
    train image's.

    Where torch is not installed (the plan task's image), the train image's counts too: its lock names PyPI's
    wheel.
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


def _tables(
    bound: BoundRecipe, shape: Shape, workload: Workload, memory: Memory
) -> dict[str, dict[str, float]]:
    measured = load_factors().get(shape.name)
    factor = measured.memory if measured else 1.0
    tables = {
        phase: {name: size * (1.0 if name in memory.outside else factor) for name, size in table.items()}
        for phase, table in memory.tables.items()
    }
    draws = bound.objective.draws()
    if draws and draws.gpu_share and not draws.own_gpus:
        # It sleeps while the model trains.
        tables[DRAW]["vLLM"] = draws.gpu_share * workload.gpu_memory_gib * GIB
    if bound.recipe.data.packing and workload.attention != "flash":
        # The mask that keeps packed samples apart: one byte a pair of tokens, and a copy in 16 bits.
        mask = 3.0 * workload.tokens * workload.sequence_length
        tables = {
            name: table | {"attention mask": mask} if "step" in name else table
            for name, table in tables.items()
        }
    return tables


def _server(bound: BoundRecipe, shape: Shape, workload: Workload) -> list[Need]:
    """Return what a server of vLLM needs at the least of its part of a GPU, to start and to draw one answer;
    empty without one."""
    draws = bound.objective.draws()
    if draws is None or draws.gpu_share is None:
        return []
    # It refuses to start where not even one sample of data.max_length fits.
    drawn = {
        "weights": BYTES[workload.compute_dtype] * float(workload.geometry.parameters),
        "activations": VLLM_ACTIVATIONS_GIB * GIB,
        "KV cache": decoding.cache_bytes(workload, 1, workload.sequence_length),
    }
    return [_need(VLLM, draws.gpu_share * shape.gpu_memory_gib, {DRAW: drawn})]


def _server_bytes(bound: BoundRecipe, workload: Workload, processes: int = 1) -> float:
    """Return bytes of host memory of the servers that so many processes of a node start: a process each, and
    weights that are on a CPU or asleep."""
    draws = bound.objective.draws()
    if draws is None or draws.gpu_share is None:
        return 0.0
    if draws.own_gpus:
        return draws.own_gpus * CUDA_BUILD_GIB * GIB
    weights = BYTES[workload.compute_dtype] * workload.geometry.parameters
    return processes * (weights + CUDA_BUILD_GIB * GIB)


def _process(bound: BoundRecipe, shape: Shape, workload: Workload, memory: Memory, lasting: States) -> Need:
    """Return the memory of a process on a CPU, which holds states and activations, but neither CUDA nor
    NCCL."""
    process = {"process": process_gib(shape) * GIB}
    tables = {
        phase: {name: size for name, size in table.items() if name not in memory.outside} | process
        for phase, table in _tables(bound, shape, workload, memory).items()
    }
    if server := _server_bytes(bound, workload):
        # On a CPU it does not sleep.
        size = server + VllmEngine.cpu_cache_gib * GIB
        tables = {
            phase: table if phase == LOAD else table | {"vLLM": size} for phase, table in tables.items()
        }
    tables[LOAD]["weights as loaded"] = _as_loaded(bound, workload)
    tables[SAVE] |= _gathered(bound, workload)
    tables[EXPORT]["best checkpoint"] = _best(bound, workload, lasting)
    return _need("process memory", (shape.memory_gib - shape.shared_memory_gib) / shape.processes, tables)


def _host(bound: BoundRecipe, shape: Shape, workload: Workload, lasting: States) -> Need:
    sharding = bound.sharding
    processes = workload.degrees.processes
    always = {"processes": processes * process_gib(shape) * GIB, "CUDA": processes * CUDA_HOST_GIB * GIB}
    if shape.nodes > 1:
        always["NCCL"] = processes * NCCL_NETWORK_GIB * GIB
    always["offloaded"] = processes * (lasting.offloaded - lasting.on_disk)
    always["offload buffers"] = processes * lasting.buffers
    states = sum(lasting.resident.values()) + sum(lasting.optimizer.values())
    phases = {
        LOAD: {"weights as loaded": processes * _as_loaded(bound, workload)},
        # Distributed checkpoints copy the shards of each process to the host before they are written.
        SAVE: {
            "checkpoint": processes * (states + lasting.paged)
            if sharding.async_checkpoint and workload.method == "full"
            else 0.0
        }
        | _gathered(bound, workload),
        EXPORT: {
            "file being written": min(EXPORT_FILE, _exported(workload)),
            "best checkpoint": processes * _best(bound, workload, lasting),
        },
    }
    # CUDA evicts them from the GPU for whatever else is allocated there.
    server = _server_bytes(bound, workload, processes)
    paged = {"paged optimizer states": processes * lasting.paged, "vLLM": server}
    return _need(
        "host memory",
        shape.memory_gib - shape.shared_memory_gib,
        {name: always | (paged if name != LOAD else {}) | phases.get(name, {}) for name in _phases(workload)},
    )


def _phases(workload: Workload) -> list[str]:
    return [phase for phase in PHASES if phase != DRAW or workload.decoding]


def _gathered(bound: BoundRecipe, workload: Workload) -> dict[str, float]:
    """Return host memory of the process that gathers weights at a save.

    DeepSpeed has all of ZeRO-3's trained ones at once, in the dtype that it computes in; afterwards, those
    that are published are of one file.
    """
    if not bound.recipe.checkpoints.save_steps:
        return {}
    whole = float(workload.trained * BYTES[workload.compute_dtype]) if bound.sharding.saves_gathered else 0.0
    file = min(EXPORT_FILE, consolidated_bytes(bound, workload))
    return {"gathered weights": whole} if whole > file else {"file being written": file}


def _as_loaded(bound: BoundRecipe, workload: Workload) -> float:
    """Return bytes of one process in host memory before they are copied to the GPU.

    Files in the requested dtype are mapped without a copy; slices, zero.Init and quantization take one tensor
    at a time.
    """
    if bound.sharding.loads_by_tensor or workload.geometry.dtype == workload.weight_dtype:
        return 0.0
    return CONVERTED * workload.geometry.parameters * BYTES[workload.weight_dtype]


def _best(bound: BoundRecipe, workload: Workload, lasting: States) -> float:
    """Return bytes of one process in host memory while it loads the checkpoint that `export: best` takes.

    DeepSpeed reads its states as one file each, optimizer included; the other shardings read one tensor at a
    time.
    """
    if bound.recipe.checkpoints.export == "last" or not bound.sharding.loads_whole_states:
        return 0.0
    return sum(lasting.optimizer.values()) + lasting.offloaded


def _shared(shape: Shape, workload: Workload) -> Need:
    nccl = NCCL_SHM_GIB * GIB if shape.is_gpu and workload.gpus > 1 else 0.0
    return _need(
        "/dev/shm",
        shape.shared_memory_gib,
        {name: {"NCCL": nccl} for name in _phases(workload) if name != LOAD},
    )


def _disk(bound: BoundRecipe, shape: Shape, workload: Workload, lasting: States) -> Need:
    base = {"base model": 2.0 * workload.geometry.parameters}  # as it is stored: 16 bits
    if shape.is_gpu and volume_of(bound.recipe.model.name_or_path, shape, load_cluster()):
        base = {}  # read from the volume
    if workload.decoding and workload.decoding.teacher:
        base["teacher"] = 2.0 * workload.decoding.teacher.parameters  # its files came with its tokens
    running = dict(base)
    running["offloaded"] = workload.degrees.processes * lasting.on_disk
    saved = dict(running)
    if copies := bound.recipe.checkpoints.copies_on_disk:
        saved["checkpoints"] = checkpoint_bytes(workload) * copies
        # Those that are uploaded: a save during an upload gathers none.
        saved["gathered weights"] = consolidated_bytes(bound, workload)
    phases = dict.fromkeys(_phases(workload), running) | {LOAD: base, SAVE: saved}
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
    return Need.model_construct(
        resource=resource, available_bytes=round(gib * GIB), phases=phases, engine="closed form"
    )
