"""`make chaos`: training that is killed, cut off and starved, and must come out the same. See docs/checkpoints.md."""

import argparse
import os
import sys
import tempfile
import warnings

# Before any library reads them; no hub, and one thread a process, as torchrun gives it.
os.environ |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ |= {"PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error", "GLOG_minloglevel": "3"}
_home = tempfile.TemporaryDirectory(prefix="flytune-chaos-", ignore_cleanup_errors=True)
os.environ["TMPDIR"] = tempfile.tempdir = _home.name
warnings.simplefilter("ignore")

from tests.chaos.running import main  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200, help="in all, over all pairs (200)")
    parser.add_argument("--seed", type=int, default=0, help="of what strikes when (0)")
    parser.add_argument("--pairs", default="", help="full/ddp,lora/fsdp,...: all that run on a CPU, when not given")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2), help="pairs at once")
    parser.add_argument("--storage", choices=["both", "folder", "s3"], default="both", help="where checkpoints lie (both)")
    parser.add_argument("--cold", action="store_true", help="a new interpreter for each pod, as a container has: 20 s each")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    parser.add_argument("--keep", action="store_true", help="keep the folders, logs of all pods included")
    arguments = parser.parse_args()
    if arguments.keep:
        _home._finalizer.detach()  # type: ignore[attr-defined]
    sys.exit(main(arguments, _home.name))
