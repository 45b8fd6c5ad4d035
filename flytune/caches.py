"""Caches of the libraries: on the scratch disk of a pod; on a laptop below HOME, as far as it can be written."""

import errno
import logging
import os
import tempfile
from pathlib import Path

from flytune.errors import FlytuneError

log = logging.getLogger(__name__)

_MODELS = {"HF_HOME": "huggingface"}
"""Models and data sets of the hub; its other variables follow from it."""
_COMPILED = {
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "XDG_DATA_HOME": "data",
    "MPLCONFIGDIR": "matplotlib",
    # DeepSpeed makes a folder there as it is imported, where Triton is installed.
    "TRITON_HOME": "triton",
    "TRITON_CACHE_DIR": "triton/cache",
    "TORCHINDUCTOR_CACHE_DIR": "torch/inductor",
    # DeepSpeed's operators are compiled there as well.
    "TORCH_EXTENSIONS_DIR": "torch/extensions",
    "TORCH_HOME": "torch/hub",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "NLTK_DATA": "nltk",
    # lm-evaluation-harness would write beside its own code.
    "LM_HARNESS_CACHE_PATH": "harness",
    "WANDB_DIR": "wandb",
}
"""Folders of what can be made again in minutes, by variable."""
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def settle(in_pod: bool) -> bool:
    """Give each library a folder for its cache that can be written; call it before any of them is imported.

    A variable that is set stays. In a pod all caches go below its temporary folder, the scratch disk. On a laptop only those do
    that can be made again, and only where HOME cannot be written: models are not put where the system may clear them.

    Returns: whether HOME can be written.
    """
    home = os.path.expanduser("~")
    has_home = _can_be_written(Path(home))
    if has_home and not in_pod:
        return has_home
    folder = Path(tempfile.gettempdir()) / ("caches" if in_pod else f"flytune-caches-{os.getuid()}")
    variables = _COMPILED | (_MODELS if in_pod else {})
    missing = {name: str(folder / below) for name, below in variables.items() if not os.environ.get(name)}
    if in_pod and not has_home:
        missing["HOME"] = str(folder / "home")
    if not missing:  # a rank: its parent has done it
        return has_home
    for path in missing.values():
        made(Path(path))
    os.environ.update(missing)
    unwritable = "" if has_home else f"HOME={home} cannot be written; "
    log.warning("%scaches are in %s (%s and %d others)", unwritable, folder, next(reversed(missing)), len(missing) - 1)
    return has_home


def hub_folder(name: str) -> Path:
    """Return the folder of that name beside the hub's own cache, made where it does not exist.

    Raises:
        FlytuneError: it cannot be written.
    """
    from huggingface_hub import constants

    return made(Path(constants.HF_HUB_CACHE) / name)


def made(folder: Path) -> Path:
    """Return the folder itself, made with its parents.

    Raises:
        FlytuneError: it cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(error, folder) from None
    return folder


def refusal(error: OSError) -> FlytuneError | None:
    """Return an error below HOME in words that say what to set; None for any other."""
    home = os.path.expanduser("~")
    if error.errno not in _REFUSED or not Path(str(error.filename)).is_relative_to(home):
        return None
    return _unwritable(error, Path(str(error.filename)))


def _unwritable(error: OSError, folder: Path) -> FlytuneError:
    return FlytuneError(
        f"{folder}: cannot be written: {error.strerror}; set HF_HOME, for models and data sets of the hub, and TMPDIR to "
        f"folders that can (HOME is {os.path.expanduser('~')})"
    )


def _can_be_written(folder: Path) -> bool:
    """Return whether this user may write there, or make it."""
    if not folder.is_absolute():  # no HOME, and a user whom /etc/passwd does not know
        return False
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)
