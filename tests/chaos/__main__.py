"""Chaos test (`make chaos`): training with injected faults, compared with an undisturbed run. See
docs/checkpoints.md."""

import argparse
import os
import sys
import tempfile
import warnings

# Set before any library reads them: no hub, and one thread a process, as with torchrun.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ |= {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "GLOG_minloglevel": "3"}
_home = tempfile.TemporaryDirectory(prefix="flytune-chaos-", ignore_cleanup_errors=True)
os.environ["TMPDIR"] = tempfile.tempdir = _home.name
warnings.simplefilter("ignore")

from tests.chaos.command import main  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200, help="number of faults over all pairs (200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults and their moments (0)")
    parser.add_argument("--pairs", default="", help="full/ddp,lora/fsdp,... (all that run on a CPU)")
    parser.add_argument(
        "--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="number of pairs at a time"
    )
    parser.add_argument(
        "--storage", choices=["both", "folder", "s3"], default="both", help="storage of checkpoints (both)"
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="start a new interpreter for each pod, as containers do: 20 s each",
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the folders, with the logs of all pods")
    arguments = parser.parse_args()
    if arguments.keep:
        _home._finalizer.detach()  # type: ignore[attr-defined]
    sys.exit(main(arguments, _home.name))
