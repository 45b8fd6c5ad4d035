"""This machine's first GPU as a row of shapes.yaml, for tests that need a GPU."""

import subprocess

from flytune.hardware import Shape


def this_machine() -> Shape:
    """Return the shape, read from the driver's library: a process that has started CUDA cannot be forked."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", "--id=0"]
    name, mib = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().rsplit(", ", 1)
    row = {"name": "here", "accelerator": name, "processes": 1, "gpu_memory_gib": int(mib) / 1024, "cpu": 4}
    return Shape(**row, memory_gib=32, shared_memory_gib=2, disk_gib=50, price_per_hour=1.0)
