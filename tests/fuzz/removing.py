"""Removal of a protection from a process, and the first input that notices it."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tests.fuzz import isolation
from tests.fuzz.inputs import CHUNK, Result, run
from tests.fuzz.kinds import Samples

MOST_CHUNKS = 16
"""Chunks of each kind that are tried at most."""


@dataclass(frozen=True, slots=True)
class Removal:
    """A protection that can be removed."""

    name: str
    held_by: str
    """File that has it, as docs/security.md names it."""
    kinds: tuple[str, ...]
    """Kinds of inputs that it concerns."""
    remove: Callable[[], object]
    """Function that removes it from this process."""


def noticed(
    removal: Removal, seed: int, samples: Samples, chunks: int = MOST_CHUNKS
) -> tuple[Result | None, int]:
    """Return the first input that fails without a protection, and not with it; None if none does. And the
    number of inputs."""
    # In a process of its own. A place that is not there would end every input, and look like a notice.
    if (put := isolation.run(removal.remove)).verdict != "accepted":
        raise RuntimeError(f"{removal.name}: cannot be removed: {put.text}")
    tried = 0
    for chunk in range(chunks):
        for name in removal.kinds:
            for one in run(name, seed, chunk, samples, before=removal.remove):
                tried += 1
                if one.outcome.verdict == "failure" and not _fails(one, samples):
                    return one, tried
    return None, tried


def _fails(one: Result, samples: Samples) -> bool:
    again = run(one.kind, one.seed, one.chunk, samples, only=one.number, count=CHUNK)
    return any(result.outcome.verdict == "failure" for result in again)


def instead(place: str, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Return a function that puts `make(old)` in the place of a function, method, property or constant.

    Args:
        place: `package.module:name` or `package.module:Class.name`; a function is replaced in all modules
        that have it. make: function from what is there.
    """

    def put() -> None:
        module, _, path = place.partition(":")
        *above, last = path.split(".")
        holder: Any = import_module(module)
        for name in above:
            holder = getattr(holder, name)
        old = inspect.getattr_static(holder, last)
        new = make(old)
        setattr(holder, last, new)
        for other in list(sys.modules.values()) if not above and callable(old) else ():
            name = getattr(other, "__name__", "")
            if (
                name.partition(".")[0] in ("flytune", "training_estimates", "tasks", "workflows", "tests")
                and vars(other).get(last) is old
            ):
                setattr(other, last, new)

    return put


def returns(value: Any) -> Callable[[Any], Any]:
    """Return a maker of functions that do nothing but return a value."""
    return lambda old: lambda *_, **__: value


def each(*functions: Callable[[], object]) -> Callable[[], None]:
    def put() -> None:
        for function in functions:
            function()

    return put


def then(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a maker of functions whose result is changed."""
    return lambda old: lambda *given, **named: change(old(*given, **named))


def recoded(place: str, code: Callable[..., Any]) -> Callable[[], None]:
    """Return a function that gives a function another content; schemas that were made before have the
    function itself."""

    def put() -> None:
        module, _, name = place.partition(":")
        getattr(import_module(module), name).__code__ = code.__code__  # type: ignore[attr-defined]

    return put


def schema(*changes: tuple[str, Any], of: str = "flytune.recipe:Recipe") -> Callable[[], None]:
    """Return a function that changes values of these keys in the schema of recipes, or of records; None
    removes them."""

    def put() -> None:
        from pydantic_core import SchemaValidator

        module, _, name = of.partition(":")
        model = getattr(import_module(module), name)

        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                kept = {key: one for key, one in value.items() if (key, None) not in changes}
                return {key: dict(changes).get(key, changed(one)) for key, one in kept.items()}
            return [changed(one) for one in value] if isinstance(value, list) else value

        model.__pydantic_validator__ = SchemaValidator(
            changed(model.__pydantic_core_schema__), _use_prebuilt=False
        )

    return put
