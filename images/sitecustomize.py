"""Filter for messages about open connections, which pyflyte-fast-execute does not close after it has fetched
the code.

Python imports this file when it starts, from the images' PYTHONPATH. Tasks close their connections
(tasks/runtime/termination.py).
"""

import logging
import sys

if any(part.endswith("pyflyte-fast-execute") for part in sys.orig_argv):
    # flytekit's event loops report through this logger.
    logging.getLogger("flytekit").addFilter(lambda record: "Unclosed" not in record.getMessage())
