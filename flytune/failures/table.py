"""What a run can die of, and whether another attempt is worth its price: one table. docs/failures.md shows it."""

import builtins
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from flytune import errors

RETRIES = 3
"""Attempts beyond the first that a train task has; only what the table calls recoverable uses them."""


@dataclass(frozen=True)
class Kind:
    """A row of the table: an error is of it when its class or a base has one of `types`, or `pattern` is in its text."""

    name: str
    recoverable: bool
    advice: str
    types: tuple[str, ...] = ()
    pattern: str = "(?!)"
    signals: tuple[int, ...] = ()
    """A rank that left no report and was ended by one of these died of it."""
    notices: bool = False
    """Whether it is what the others see when a rank has failed, and never the cause."""

    def is_of(self, error: BaseException) -> bool:
        return self._fits(type(error), f"{type(error).__name__}: {error}")

    def is_named(self, text: str) -> bool:
        """Return whether a text, "Type: message", is an error of it."""
        name = text.partition(": ")[0].rpartition(".")[2]
        known = getattr(errors, name, None) or getattr(builtins, name, None)
        is_type = any(name == one.rpartition(".")[2] for one in self.types)
        return is_type or self._fits(known if isinstance(known, type) else object, text)

    def _fits(self, error: type, text: str) -> bool:
        names = {f"{base.__module__}.{base.__qualname__}" for base in error.__mro__}
        return bool(names & set(self.types)) or re.search(self.pattern, text) is not None


# flytune.errors.StorageError says which it is; what neither of these fits may come back.
_FULL = (
    r"\[Errno (27|28|122)\]|\(os error (27|28|122)\)|QuotaExceeded|EntityTooLarge"
    r"|StorageError: .*(it is full|could not be written)"
)
_REFUSED = r"StorageError: .*(it refuses|there is no such place)"
_ERRNO_AWAY = r"\[Errno (5|70|101|107|110|111|112|113|116|121)\]"
_STATUS = r"\b{0} (?:Client|Server) Error|(?:Client|Server) error '{0}"

# The first that fits is taken, so that what names its cause stands before what wraps others.
KINDS = (
    Kind(
        "preempted",
        True,
        "nothing: it goes on from its last checkpoint",
        ("flytune.errors.Preempted",),
        signals=(signal.SIGTERM,),
    ),
    Kind(
        "killed again",
        False,
        "a shape with more memory_gib or less shared_memory_gib, or fewer processes a node; if the memory was far below the "
        "limit, look at the node's events",
        ("flytune.errors.KilledAgain",),
    ),
    Kind("hang", True, "look at the stacks: which rank is not where the others wait", ("flytune.errors.Hang",)),
    Kind(
        "GPUs not as promised",
        False,  # DeviceError.goes_on says when another node may have them
        "as the message says",
        ("flytune.errors.DeviceError",),
    ),
    Kind("bad loss", False, "lower training.learning_rate, or look at the data of that step", ("flytune.errors.BadLoss",)),
    Kind(
        "out of GPU memory",
        False,
        "a smaller training.per_device_train_batch_size or data.max_length, more sharding or offload, or a larger shape",
        ("flytune.errors.OutOfMemory", "torch.OutOfMemoryError"),
        r"CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation",
    ),
    Kind(
        "out of host memory",
        True,
        "if it comes again, a shape with more memory_gib or less shared_memory_gib",
        ("builtins.MemoryError",),
        r"Cannot allocate memory|can't allocate memory",
        (signal.SIGKILL,),
    ),
    Kind(
        "broken GPU",
        True,
        "if it comes again on the same node, take the node out",
        (),
        r"uncorrectable ECC|fallen off the bus|GPU is lost|CUDA error: unknown error|no CUDA-capable device|"
        r"CUDA driver initialization failed|ncclUnhandledCudaError|ncclSystemError",
    ),
    Kind(
        "storage full",
        False,
        "make room, or name another folder",
        (),
        _FULL,
    ),
    Kind(
        "credentials expired",
        True,
        "nothing: the next pod gets new ones",
        (),
        r"ExpiredToken|RequestExpired|token (has|is) expired",
    ),
    Kind(
        "hub refused",
        False,
        "HF_TOKEN in the pods, and the model's licence accepted for that account",
        ("huggingface_hub.errors.GatedRepoError", "huggingface_hub.errors.RepositoryNotFoundError"),
        _STATUS.format("40[13]"),
    ),
    Kind(
        "not handed on",
        False,
        "pods with GPUs ask no hub: whatever they load must be the recipe's base model, or lie in a folder or at an address",
        ("huggingface_hub.errors.OfflineModeIsEnabled",),
        r"outgoing traffic has been disabled",
    ),
    Kind(
        "hub busy",
        True,
        "nothing; if it stays, a model folder of your own",
        ("huggingface_hub.errors.LocalEntryNotFoundError",),
        _STATUS.format("(?:429|5[0-9][0-9])"),
    ),
    Kind(
        "cache not writable",
        False,
        "set HF_HOME and TMPDIR to folders that can be written",
        (),
        r"(PermissionError|Permission denied|Read-only file system).*(/\.cache/|/huggingface/|/\.triton|/caches/)",
    ),
    Kind(
        "storage refused",
        False,
        "the pod's credentials and their rights at that address",
        ("builtins.PermissionError", "botocore.exceptions.NoCredentialsError"),
        _REFUSED + r"|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|Unable to locate credentials|\[Errno (1|13|30)\]",
    ),
    Kind(
        "collective timeout",
        True,
        "look at the other ranks' logs: one of them did not come",
        (),
        r"Timed out waiting \d+ ?ms|before timing out|Watchdog caught collective|[Aa]pplication timeout caused pair closure",
        (signal.SIGABRT,),
        notices=True,
    ),
    Kind(
        "rendezvous",
        True,
        "all pods of the run must come up within the rendezvous' timeout: gang scheduling, or free machines",
        ("torch.distributed.elastic.rendezvous.api.RendezvousError", "torch.distributed.DistStoreError"),
        r"waiting for clients|client socket has (failed|timed out)|failed to connect to .*:\d+",
    ),
    Kind(
        "peer gone",
        True,
        "look at the other ranks' logs: one of them has failed",
        ("torch.distributed.DistNetworkError",),
        r"RuntimeError: .*(gloo|[Cc]onnection (closed|reset) by peer|Broken pipe)|"
        r"DistBackendError: .*(ncclRemoteError|ncclInternalError|NCCL communicator was aborted)",
        notices=True,
    ),
    Kind(
        "storage away",
        True,
        "nothing; if it stays, the storage itself",
        (
            "builtins.ConnectionError",
            "builtins.TimeoutError",
            "botocore.exceptions.ConnectionError",
            "botocore.exceptions.HTTPClientError",
            "aiohttp.client_exceptions.ClientConnectionError",
        ),
        _ERRNO_AWAY + r"|StorageError: |SlowDown|ServiceUnavailable|InternalError|RequestTimeout",
    ),
    Kind("bad data", False, "mend the data; prepare says where", ("flytune.errors.DataError",)),
    Kind("refused", False, "as the message says", ("flytune.errors.FlytuneError",)),
)
BUG = Kind("bug", False, "the traceback says where; it would happen again")
CRASH = Kind("crash", False, "see the end of the rank's log, in a native library; after SIGBUS, /dev/shm is full")


def kind_of(error: BaseException) -> Kind:
    """The row that an error belongs to, by itself or by what it was raised from."""
    chain = list(_chain(error))
    return next((kind for kind in KINDS if any(kind.is_of(link) for link in chain)), BUG)


def kind_named(text: str) -> Kind | None:
    """Return the row that a text, "Type: message", belongs to."""
    return next((kind for kind in KINDS if kind.is_named(text)), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
