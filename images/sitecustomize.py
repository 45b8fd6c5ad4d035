"""Quiet end of pyflyte-fast-execute: it fetches the code, loads none of it, and leaves its connections to S3 open.

Python imports this file as it starts, from the images' PYTHONPATH. Tasks close theirs (tasks/runtime/ending.py).
"""

import logging
import sys

if any(part.endswith("pyflyte-fast-execute") for part in sys.orig_argv):
    # By the logger through which flytekit's loops report it.
    logging.getLogger("flytekit").addFilter(lambda record: "Unclosed" not in record.getMessage())
