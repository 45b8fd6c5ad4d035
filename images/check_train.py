"""Check of the training image during its build: without a GPU, libraries are loaded but not run.

python images/check_train.py FLASH_ATTN    (its version, or empty)
"""

import ctypes
import importlib.util
import logging
import sys

log = logging.getLogger(__name__)


def problems(flash_attn_version: str) -> list[str]:
    """Return the problems that training would have on a GPU."""
    import torch
    from deepspeed.git_version_info import installed_ops

    found = []
    if not torch.version.cuda:
        return ["torch is built without CUDA"]
    log.info("CUDA %s, NCCL %s", torch.version.cuda, torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    missing = [name for name in ("cpu_adam", "fused_adam", "utils", "async_io") if not installed_ops[name]]
    if missing:
        found.append(f"DeepSpeed's operators are not compiled in: {', '.join(missing)}")
    try:
        ctypes.CDLL(_cuda_library(torch.version.cuda))
    except OSError as error:
        found.append(f"bitsandbytes: {error}")
    if importlib.util.find_spec("liger_kernel") is None:
        found.append("liger-kernel is not installed (training.use_liger_kernel)")
    if flash_attn_version and (problem := _flash_attn(flash_attn_version)):
        found.append(problem)
    return found


def _flash_attn(version: str) -> str | None:
    try:
        import flash_attn
    except ImportError as error:
        return f"flash_attn: {error}"
    # Its own version has no post release.
    return (
        None
        if version.startswith(flash_attn.__version__)
        else f"flash_attn is {flash_attn.__version__}, not {version}"
    )


def _cuda_library(cuda: str) -> str:
    """Return the path of bitsandbytes' library for GPUs; without a GPU it would load its library for CPUs."""
    from bitsandbytes.cextension import get_cuda_bnb_library_path
    from bitsandbytes.cuda_specs import CUDASpecs

    major, minor = cuda.split(".")[:2]
    return str(get_cuda_bnb_library_path(CUDASpecs((8, 0), f"{major}{minor}", (int(major), int(minor)))))


def main() -> int:
    """Log a line for each problem; return 1 if there is any, else 0."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    found = problems(*sys.argv[1:])
    for problem in found:
        log.error("%s", problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
