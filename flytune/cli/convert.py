"""`flytune convert FILE`."""

import argparse
import errno
import os
import sys
from pathlib import Path

from flytune import files
from flytune.conversion import convert


def run(options: argparse.Namespace) -> int:
    """Print the recipe, or write it to a new file."""
    text = convert(options.file, options.gpus, options.objective)
    if options.output is None:
        sys.stdout.write(text)
        return 0
    out = Path(options.output)
    if out.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))
    with files.new_output(out) as temporary:
        temporary.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{options.output}\n")
    return 0
