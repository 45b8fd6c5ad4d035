"""Loading for FSDP: every process loads all, the first loads all and broadcasts, each reads its slices; side
by side.

`python -m benchmarks.loading --billions 0.5 --ranks 2 4` makes a Llama of random weights, bfloat16 on disk,
in several files, and loads it in float32 in new gloo processes, one way after the other, from files in the
page cache. For each process: the peak of its resident memory (RSS, as the kernel counts it; and the anonymous
part of it, sampled), its memory before loading (base), the bytes of its shard, and the ratio of peak to shard
+ base. All ways must result in equal shards.

The broadcast is accelerate's own (fsdp2_prepare_model with cpu_ram_efficient_loading), at its best: the other
processes start from a model without weights, where transformers would have them read the files as well to
convert the dtype.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from flytune.models import sharded_loading
from flytune.recipe import Model

DTYPE = "float32"
MIB = 2**20


def make(folder: Path, billions: float) -> None:
    """Write a Llama of about that many parameters: 16 layers, files of 400 MB at most."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.initialization import no_init_weights

    layers, vocabulary = 16, 32000
    # 16 layers of 4 h^2 (attention) + 3 * 2.75 h^2 (MLP), and two embeddings of vocabulary * h.
    hidden = 128
    while layers * 12.25 * hidden**2 + 2 * vocabulary * hidden < billions * 1e9:
        hidden += 128
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_attention_heads": hidden // 128,
    }
    config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=layers, tie_word_embeddings=False, **sizes)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype="bfloat16")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.05, 0.05)
    model.save_pretrained(folder, max_shard_size="400MB")


def _shard(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def naive(folder: Path) -> Any:
    """Load the full model in every process, then keep its shard."""
    from transformers import AutoModelForCausalLM

    return _shard(AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE))


def broadcast(folder: Path) -> Any:
    """Load the full model in the first process and broadcast it, parameter by parameter."""
    from types import SimpleNamespace

    import torch
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from transformers import AutoModelForCausalLM

    is_first = os.environ["RANK"] == "0"
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=True,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
    )
    # The attributes that the function reads of an Accelerator, which would not shard on a CPU.
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=is_first,
        device=torch.device("cpu"),
    )
    if is_first:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE)
    else:
        model = sharded_loading.meta_model(Model(name_or_path=str(folder)), DTYPE)
    return fsdp2_prepare_model(accelerator, model)


def sliced(folder: Path) -> Any:
    """Read each process's own rows."""
    model = _shard(sharded_loading.meta_model(Model(name_or_path=str(folder)), DTYPE))
    sharded_loading.load_weights(model, folder)
    return model


WAYS = {"naive": naive, "broadcast": broadcast, "sliced": sliced}


def work(way: str, folder: Path) -> None:
    """Load in this process, and write time and memory to standard output."""
    import accelerate  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama
    from torch.distributed.fsdp import fully_shard  # noqa: F401

    transformers.utils.logging.disable_progress_bar()
    torch.distributed.init_process_group("gloo")
    torch.distributed.barrier()
    base = _status(os.getpid())
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Resets VmHWM.
    started = time.perf_counter()
    model = WAYS[way](folder)
    torch.distributed.barrier()
    seconds, peak = time.perf_counter() - started, _status(os.getpid())["VmHWM"]
    locals_ = [parameter.detach().to_local() for parameter in model.parameters()]
    found = {
        "seconds": seconds,
        "base": base["VmRSS"],
        "peak": peak,
        "shard": sum(local.nbytes for local in locals_),
    }
    # In pieces: a complete tensor would be copied in float64.
    found["checksums"] = [
        float(piece.double().sum()) for local in locals_ for piece in local.flatten().split(2**20)
    ]
    sys.stdout.write(json.dumps(found))


def _status(process: int) -> dict[str, int]:
    """Return VmRSS, VmHWM, RssAnon and RssFile of a process in bytes."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    return {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in lines)
        if "kB" in rest
    }


def measure(way: str, folder: Path, world_size: int) -> list[dict[str, Any]]:
    """Return time and memory of each of `world_size` new processes that load in this way."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.loading",
        "--work",
        way,
        "--folder",
        str(folder),
    ]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | {"RANK": str(rank)} | {key: str(value) for key, value in shared.items()},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(world_size)
    ]
    anonymous = [0] * world_size
    try:
        while any(process.poll() is None for process in processes):
            for rank, process in enumerate(processes):
                if process.poll() is None:
                    # A process that has just ended has no such lines.
                    anonymous[rank] = max(anonymous[rank], _status(process.pid).get("RssAnon", 0))
                elif process.returncode:
                    raise SystemExit(f"{way}: process {rank} of {world_size} ended with {process.returncode}")
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
    found = [json.loads(process.communicate()[0]) for process in processes]
    return [{**one, "anonymous": most} for one, most in zip(found, anonymous, strict=True)]


def main() -> None:
    """Make the model, measure all ways with each number of processes, and show a table for each number."""
    arguments = _arguments()
    if arguments.work:
        work(arguments.work, arguments.folder)
        return
    folder = Path(tempfile.mkdtemp(prefix="flytune-loading-"))
    try:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.loading", "--folder", str(folder)]
        subprocess.run(
            [*command, "--billions", str(arguments.billions), "--make"], check=True, capture_output=True
        )
        for world_size in arguments.ranks:
            _show(folder, {way: measure(way, folder, world_size) for way in WAYS}, world_size)
    finally:
        shutil.rmtree(folder)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--billions", type=float, default=0.5, help="parameters; naive needs 4 bytes and more of each a rank"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--work", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="0.05 billion parameters, two ranks")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.billions, arguments.ranks = 0.05, [2]
    if arguments.make:
        make(arguments.folder, arguments.billions)
        raise SystemExit
    return arguments


def _show(folder: Path, found: dict[str, list[dict[str, Any]]], world_size: int) -> None:
    if len({json.dumps([one["checksums"] for one in told]) for told in found.values()}) > 1:
        raise SystemExit("the ways do not leave equal shards")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    table = Table(
        title=f"Loading {size / 2e9:.2f}B parameters for FSDP, {world_size} ranks; MiB",
        title_justify="left",
    )
    for column in ("way", "rank", "seconds", "base", "shard", "peak", "anonymous", "ratio"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way, told in found.items():
        for rank, one in enumerate(told):
            sizes = [f"{one[name] / MIB:.0f}" for name in ("base", "shard", "peak", "anonymous")]
            ratio = one["peak"] / (one["shard"] + one["base"])
            table.add_row("" if rank else way, str(rank), f"{one['seconds']:.1f}", *sizes, f"{ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
