"""Table of failures: how each is recognized, and whether another attempt can succeed. docs/failures.md shows
it."""

import builtins
import re
import signal
from dataclasses import dataclass

from flytune import errors
from flytune.files import FULL_TEXT

RETRIES = 3
"""Number of attempts after the first; only failures that the table calls recoverable use them."""
OUT_OF_GPU_MEMORY, OUT_OF_HOST_MEMORY = "out of GPU memory", "out of host memory"


@dataclass(frozen=True)
class FailureKind:
    """Row of the table: an error belongs to it if its class or a base is one of `types`, or `pattern` is in
    its text."""

    name: str
    recoverable: bool
    advice: str
    types: tuple[str, ...] = ()
    pattern: str = "(?!)"
    signals: tuple[int, ...] = ()
    """Signals that end a rank without a report when it fails this way."""
    notices: bool = False
    """True if it is the consequence of another rank's failure, and never the cause."""

    def is_of(self, error: BaseException) -> bool:
        """Return whether an error belongs to the row, by itself."""
        return self._fits(type(error), f"{type(error).__name__}: {error}")

    def is_named(self, text: str) -> bool:
        """Return whether an error of the text "Type: message" belongs to the row."""
        name = text.partition(": ")[0].rpartition(".")[2]
        error_class = getattr(errors, name, None) or getattr(builtins, name, None)
        is_type = any(name == full_name.rpartition(".")[2] for full_name in self.types)
        return is_type or self._fits(error_class if isinstance(error_class, type) else object, text)

    def _fits(self, error: type, text: str) -> bool:
        names = {f"{base.__module__}.{base.__qualname__}" for base in error.__mro__}
        return bool(names & set(self.types)) or re.search(self.pattern, text) is not None


_ERRNO_AWAY = r"\[Errno (5|70|101|107|110|111|112|113|116|121)\]"
_STATUS = r"\b{0} (?:Client|Server) Error|(?:Client|Server) error '{0}"

# The first row that fits is taken: rows that name a cause come before those of errors that wrap others.
KINDS = (
    FailureKind(
        "preempted",
        True,
        "nothing: it resumes from its last checkpoint",
        ("flytune.errors.Preempted",),
        signals=(signal.SIGTERM,),
    ),
    FailureKind(
        "killed again",
        False,
        "a shape with more memory_gib or less shared_memory_gib, or fewer processes a node; if the memory "
        "was far below the limit, look at the node's events",
        ("flytune.errors.KilledAgain",),
    ),
    FailureKind(
        "hang", True, "look at the stacks: one rank is not where the others wait", ("flytune.errors.Hang",)
    ),
    FailureKind(
        "GPUs not as promised",
        False,  # DeviceError.goes_on says when another node may have them
        "as the message says",
        ("flytune.errors.DeviceError",),
    ),
    FailureKind(
        "bad loss",
        False,
        "lower training.learning_rate, or look at the data of that step",
        ("flytune.errors.BadLoss",),
    ),
    FailureKind(
        OUT_OF_GPU_MEMORY,
        False,
        "a smaller training.per_device_train_batch_size or data.max_length, more sharding or offload, or a "
        "larger shape",
        ("flytune.errors.OutOfMemory", "torch.OutOfMemoryError"),
        r"CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation",
    ),
    FailureKind(
        OUT_OF_HOST_MEMORY,
        True,
        "if it happens again, a shape with more memory_gib or less shared_memory_gib",
        ("builtins.MemoryError",),
        r"Cannot allocate memory|can't allocate memory",
        (signal.SIGKILL,),
    ),
    FailureKind(
        "broken GPU",
        True,
        "if it happens again on the same node, take the node out",
        (),
        r"uncorrectable ECC|fallen off the bus|GPU is lost|CUDA error: unknown error|no CUDA-capable device|"
        r"CUDA driver initialization failed|ncclUnhandledCudaError|ncclSystemError",
    ),
    FailureKind(
        "engine away",
        True,
        "nothing: the next attempt starts it anew; if it happens again, what the end of its log says",
        ("flytune.errors.EngineError",),
    ),
    FailureKind(
        "storage full",
        False,
        "make room, or name another folder",
        ("flytune.errors.StorageFull",),
        FULL_TEXT,
    ),
    FailureKind(
        "credentials expired",
        True,
        "nothing: the next pod gets new ones",
        (),
        r"ExpiredToken|RequestExpired|token (has|is) expired",
    ),
    FailureKind(
        "hub refused",
        False,
        "HF_TOKEN in the pods, and the model's licence accepted for that account",
        ("huggingface_hub.errors.GatedRepoError", "huggingface_hub.errors.RepositoryNotFoundError"),
        _STATUS.format("40[13]"),
    ),
    FailureKind(
        "not handed on",
        False,
        "pods with GPUs do not access the hub: they can load the recipe's base model, and models in a folder "
        "or at an address",
        ("huggingface_hub.errors.OfflineModeIsEnabled",),
        r"outgoing traffic has been disabled",
    ),
    FailureKind(
        "hub busy",
        True,
        "nothing; if it persists, a model folder of your own",
        ("huggingface_hub.errors.LocalEntryNotFoundError",),
        _STATUS.format("(?:429|5[0-9][0-9])"),
    ),
    FailureKind(
        "cache not writable",
        False,
        "set HF_HOME and TMPDIR to folders that can be written",
        (),
        r"(PermissionError|Permission denied|Read-only file "
        r"system).*(/\.cache/|/huggingface/|/\.triton|/caches/)",
    ),
    FailureKind(
        "storage refused",
        False,
        "the pod's credentials and their rights at that address",
        (
            "builtins.PermissionError",
            "botocore.exceptions.NoCredentialsError",
            "flytune.errors.StorageRefused",
        ),
        r"AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|Unable to locate credentials|\[Errno "
        r"(1|13|30)\]",
    ),
    FailureKind(
        "collective timeout",
        True,
        "look at the other ranks' logs: one of them did not reach the collective",
        (),
        r"Timed out waiting \d+ ?ms|before timing out|Watchdog caught collective|[Aa]pplication timeout "
        r"caused pair closure",
        (signal.SIGABRT,),
        notices=True,
    ),
    FailureKind(
        "rendezvous",
        True,
        "all pods of the run must start within the rendezvous' timeout: gang scheduling, or free machines",
        ("torch.distributed.elastic.rendezvous.api.RendezvousError", "torch.distributed.DistStoreError"),
        r"waiting for clients|client socket has (failed|timed out)|failed to connect to .*:\d+",
    ),
    FailureKind(
        "peer gone",
        True,
        "look at the other ranks' logs: one of them has failed",
        ("torch.distributed.DistNetworkError",),
        r"RuntimeError: .*(gloo|[Cc]onnection (closed|reset) by peer|Broken pipe)|"
        r"DistBackendError: .*(ncclRemoteError|ncclInternalError|NCCL communicator was aborted)",
        notices=True,
    ),
    FailureKind(
        "storage away",
        True,
        "nothing; if it persists, look at the storage itself",
        (
            "builtins.ConnectionError",
            "builtins.TimeoutError",
            "botocore.exceptions.ConnectionError",
            "botocore.exceptions.HTTPClientError",
            "aiohttp.client_exceptions.ClientConnectionError",
            "flytune.errors.StorageError",
        ),
        _ERRNO_AWAY + r"|SlowDown|ServiceUnavailable|InternalError|RequestTimeout",
    ),
    FailureKind(
        "damaged prepared data",
        False,
        "run it again, which makes the data again (pyflyte: after `pyflyte local-cache clear`; a cluster: "
        "--overwrite-cache)",
        ("flytune.errors.PreparedDataError",),
    ),
    FailureKind("bad data", False, "correct the data; prepare says where", ("flytune.errors.DataError",)),
    FailureKind(
        "bad reward", False, "mend the reward, or the row that it names", ("flytune.errors.RewardError",)
    ),
    FailureKind("refused", False, "as the message says", ("flytune.errors.FlytuneError",)),
)
BUG = FailureKind("bug", False, "look at the traceback; another attempt would fail in the same way")
CRASH = FailureKind(
    "crash",
    False,
    "look at the end of the rank's log; a native library crashed; after SIGBUS, /dev/shm is full",
)


def kind_of(error: BaseException) -> FailureKind:
    """Return the row of an error, or of the errors that it was raised from."""
    chain = list(errors.chain(error, contexts="shown"))
    return next((kind for kind in KINDS if any(kind.is_of(link) for link in chain)), BUG)


def kind_named(text: str) -> FailureKind | None:
    """Return the row of an error with the text "Type: message"."""
    return next((kind for kind in KINDS if kind.is_named(text)), None)
