"""Cache folders of the libraries: on a pod's scratch disk; on a laptop below HOME, if it is writable."""

import errno
import logging
import os
import tempfile
from pathlib import Path

from flytune.errors import FlytuneError

log = logging.getLogger(__name__)

_MODELS = {"HF_HOME": "huggingface"}
"""Folder of the hub's models and data sets, by variable; huggingface_hub derives its other folders from
it."""
_COMPILED = {
    "XDG_CACHE_HOME": "cache",
    "XDG_CONFIG_HOME": "config",
    "XDG_DATA_HOME": "data",
    "MPLCONFIGDIR": "matplotlib",
    # DeepSpeed creates a folder there when it is imported, if Triton is installed.
    "TRITON_HOME": "triton",
    "TRITON_CACHE_DIR": "triton/cache",
    "TORCHINDUCTOR_CACHE_DIR": "torch/inductor",
    # DeepSpeed's operators are compiled there as well.
    "TORCH_EXTENSIONS_DIR": "torch/extensions",
    "TORCH_HOME": "torch/hub",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "NLTK_DATA": "nltk",
    # By default lm-evaluation-harness writes next to its own code.
    "LM_HARNESS_CACHE_PATH": "harness",
    "WANDB_DIR": "wandb",
}
"""Folders of content that can be rebuilt in minutes, by variable."""
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def set_up(in_pod: bool) -> bool:
    """Choose a writable cache folder for each library; call it before any of them is imported.

    Variables that are set stay as they are. In a pod all caches are below its temporary folder, on the
    scratch disk. On a laptop only caches that can be rebuilt are, and only if HOME is not writable: the
    system may delete temporary files.

    Returns: whether HOME is writable.
    """
    home = os.path.expanduser("~")
    has_home = _can_be_written(Path(home))
    if has_home and not in_pod:
        return has_home
    folder = Path(tempfile.gettempdir()) / ("caches" if in_pod else f"flytune-caches-{os.getuid()}")
    variables = _COMPILED | (_MODELS if in_pod else {})
    missing = {name: str(folder / path) for name, path in variables.items() if not os.environ.get(name)}
    if in_pod and not has_home:
        missing["HOME"] = str(folder / "home")
    if not missing:  # a rank, whose parent process has set them
        return has_home
    for path in missing.values():
        make_folder(Path(path))
    os.environ.update(missing)
    *others, last = missing
    unwritable = "" if has_home else f"HOME={home} cannot be written; "
    log.warning("%scaches are in %s (%s and %d others)", unwritable, folder, last, len(others))
    return has_home


def hub_folder(name: str) -> Path:
    """Return the folder of that name next to the hub's own cache; it is created if it does not exist.

    Raises:
        FlytuneError: it is not writable.
    """
    from huggingface_hub import constants

    return make_folder(Path(constants.HF_HUB_CACHE) / name)


def make_folder(folder: Path) -> Path:
    """Create a folder with its parents, and return it.

    Raises:
        FlytuneError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(error, folder) from None
    return folder


def home_error(error: OSError) -> FlytuneError | None:
    """Return an error that says which variables to set, for an OSError below HOME; None for any other
    OSError."""
    home = os.path.expanduser("~")
    if error.errno not in _REFUSED or not Path(str(error.filename)).is_relative_to(home):
        return None
    return _unwritable(error, Path(str(error.filename)))


def _unwritable(error: OSError, folder: Path) -> FlytuneError:
    return FlytuneError(
        f"{folder}: cannot be written: {error.strerror}; set HF_HOME, for models and data sets of the hub, "
        f"and TMPDIR to folders that can (HOME is {os.path.expanduser('~')})"
    )


def _can_be_written(folder: Path) -> bool:
    """Return whether this user can write to the folder, or create it."""
    if not folder.is_absolute():  # no HOME, and no entry in /etc/passwd
        return False
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)
