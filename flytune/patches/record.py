"""Records of replaced names: what is replaced, for how long, why, and until when."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

_originals: dict[str, Any] = {}
"""Values of the names before they were replaced until the end of this process."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One name of another library that is replaced."""

    name: str
    """Module, ":", and the path in it; the last part may be a key:
    "deepspeed.ops:__compatible_ops__[deepspeed_shm_comm]"."""
    version: str
    """Release of the library that the replacement was written for."""
    reason: str
    """Fault or lack that it is for."""
    upstream: tuple[str, ...]
    """Functions, classes and modules that the replacement relies on, written like `name`; a test notices when
    one changes."""
    remove_when: str
    """Change of the library after which it is not needed."""
    lasts: ClassVar[str]

    def current(self) -> Any:
        """Return what the name has now. The library is imported here."""
        owner, last, is_key = self._place()
        return owner[last] if is_key else getattr(owner, last)

    def _place(self) -> tuple[Any, str, bool]:
        module, _, path = self.name.partition(":")
        owner: Any = import_module(module)
        path, _, key = path.removesuffix("]").partition("[")
        *parents, last = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return (getattr(owner, last), key, True) if key else (owner, last, False)

    def _set(self, value: Any) -> None:
        owner, last, is_key = self._place()
        if is_key:
            owner[last] = value
        else:
            setattr(owner, last, value)


class ProcessPatch(Patch):
    """Name that is replaced until the process ends."""

    lasts = "process"

    @property
    def is_installed(self) -> bool:
        """True if this process, or the one that it was forked from, has replaced the name."""
        return self.name in _originals

    def original(self) -> Any:
        """Return what the name had before this process replaced it."""
        return _originals[self.name] if self.is_installed else self.current()

    def install(self, value: Any) -> None:
        """Replace the name from now on."""
        _originals.setdefault(self.name, self.current())
        self._set(value)


class BlockPatch(Patch):
    """Name that is replaced within a block."""

    lasts = "block"

    @contextmanager
    def replaced(self, value: Any) -> Iterator[None]:
        """Replace the name within the block."""
        owner, last, is_key = self._place()
        has = owner if is_key else vars(owner)
        is_own, before = (
            last in has,
            has.get(last),
        )  # an attribute as it is there: a staticmethod, and no inherited one
        self._set(value)
        try:
            yield
        finally:
            if is_own:
                self._set(before)
            elif is_key:
                del owner[last]
            else:
                delattr(owner, last)


class ObjectPatch(Patch):
    """Method that is replaced on some objects, which stay the library's: its class keeps the method."""

    lasts = "object"

    def on(self, owner: Any, value: Any) -> None:
        """Replace the method on one object."""
        setattr(owner, self.name.rpartition(".")[2], value)
