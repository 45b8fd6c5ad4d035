"""Fuzz test (`make fuzz`): hostile and careless inputs, each of which is used right or refused with an error
of ours."""

import argparse
import os
import sys
import tempfile
import warnings

# Set before any library reads them: no hub, and one thread, because each input is a fork.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
os.environ |= {"NO_GCE_CHECK": "true", "PYTHONWARNINGS": "ignore", "TRANSFORMERS_VERBOSITY": "error"}
_home = tempfile.TemporaryDirectory(prefix="flytune-fuzz-", ignore_cleanup_errors=True)
os.environ["TMPDIR"] = tempfile.tempdir = _home.name
os.environ["HF_HOME"] = os.path.join(_home.name, "huggingface")
warnings.simplefilter("ignore")

from tests.fuzz.command import main  # noqa: E402

if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000, help="number of inputs over all kinds (10,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all inputs (0)")
    parser.add_argument("--kinds", default="", help="recipe,rows,... (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="number of processes")
    parser.add_argument(
        "--removals",
        nargs="?",
        const="",
        metavar="WORDS,...",
        help="remove protections (with these words in the name) one by one",
    )
    parser.add_argument("--only", help="CHUNK:NUMBER of one input, whose end is shown")
    sys.exit(main(parser.parse_args(), _home.name))
