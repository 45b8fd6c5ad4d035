"""Files that attempts of release 0.2 and before have left beside the checkpoints. To be removed with the
release after 0.3.

record-NUMBER-ID.json                the figures of an attempt, written by its first process
phase-EXECUTION-ATTEMPT-NODE.json    the last phase of a node in an attempt
notes.json                           the micro batch for the next attempt, and the data that it skips
"""

import json

from flytune import json_core
from flytune.failures.table import OUT_OF_GPU_MEMORY

PREFIXES = ("record-", "phase-", "notes.json")


def converted(name: str, content: bytes) -> str | bytes:
    """Return a file's content as that of a record: figures without a phase, or a phase or notes without
    figures."""
    try:
        found = json_core.load_object(content)
    except json_core.JSONError:
        return content  # the record refuses it
    if name.startswith("phase-"):
        found |= {"number": 0, "retry": found.pop("attempt", None), "kind": found.pop("ended", None)}
        found["resumed_from_step"] = found.pop("saved_step", None)
        found.pop("counted_bytes", None)
    elif name == "notes.json":
        found["number"] = 0
        size = found.pop("per_device_train_batch_size", None)
        if size is not None:
            twice = 2 * size if isinstance(size, int) else size
            found |= {"kind": OUT_OF_GPU_MEMORY, "per_device_train_batch_size": twice}
    return json.dumps(found)
