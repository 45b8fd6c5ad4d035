"""Values and calls between the process that runs an answer and the one that tests it: a line of JSON for each
message.

Numbers, texts and containers cross as values. Whatever else an answer makes stays in its process: the tests
get a stand-in, which asks for attributes and calls. A stand-in never compares itself with a value: what is
expected stays with the tests.

The process that computes rewards reads this file by its path, so it imports nothing but Python's own library.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

TESTS = "__tests__"
"""Name of the module that tests run as."""
_LONGEST = 2**24
"""Bytes of a message."""
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": collections.deque,
}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda items: collections.Counter(dict(items)),
    "defaultdict": dict,
}
_CONSTRUCTED: dict[str, tuple[Any, Callable[[Any], list[Any]]]] = {
    "complex": (complex, lambda value: [value.real, value.imag]),
    "range": (range, lambda value: [value.start, value.stop, value.step]),
    "slice": (slice, lambda value: [value.start, value.stop, value.step]),
    "Decimal": (decimal.Decimal, lambda value: [str(value)]),
    "Fraction": (fractions.Fraction, lambda value: [value.numerator, value.denominator]),
    "date": (datetime.date, lambda value: [value.year, value.month, value.day]),
    "timedelta": (datetime.timedelta, lambda value: [value.days, value.seconds, value.microseconds]),
}
"""Types whose values are made again from plain arguments."""
_PLAIN = {complex, range, slice, decimal.Decimal, fractions.Fraction, datetime.date, datetime.timedelta}
_CHANGEABLE = (list, dict, set, collections.deque, collections.OrderedDict, collections.Counter)


class Ended(Exception):
    """End of the other process."""


class Peer:
    """One side of the connection."""

    def __init__(self, read: int, write: int, is_answer: bool) -> None:
        """Make it; the side of the tests (not `is_answer`) trusts nothing that it reads."""
        self._read, self._write, self._left = read, write, b""
        self._is_answer = is_answer
        self._given: list[Any] = []

    def serve(self) -> None:
        """Answer requests until the other side ends."""
        while True:
            self._respond(self._receive())

    def ask(self, kind: str, target: Any, /, *arguments: Any, **named: Any) -> Any:
        """Return what an operation on one of the other side's objects results in; raise what it raises."""
        self._send(["ask", kind, self._encoded(target), self._encoded(list(arguments)), self._encoded(named)])
        while (message := self._receive())[0] == "ask":
            self._respond(message)
        if message[0] == "raised":
            raise _error_named(message[1])(*[text for text in message[2] if isinstance(text, str | int)])
        for mine, changed in zip([*arguments, *named.values()], self._decoded(message[2]), strict=True):
            if type(mine) in _CHANGEABLE:
                _change(mine, changed)
        return self._decoded(message[1])

    def send_names(self, namespace: dict[str, Any]) -> None:
        """Send the names that an answer has defined; imported ones as the names that they were imported
        by."""
        names = {name: value for name, value in namespace.items() if not name.startswith("__")}
        self._send([{name: _imported(value) or self._encoded(value) for name, value in names.items()}])

    def receive_names(self) -> dict[str, Any]:
        """Return the names that the answer has defined, with stand-ins for its functions and classes."""
        receive_names = {}
        for name, content in self._receive()[0].items():
            if not (isinstance(content, dict) and "imported" in content):
                receive_names[name] = self._decoded(content)
            elif (target := _resolved(*content["imported"])) is not None:
                receive_names[name] = target
        return receive_names

    def _respond(self, message: list[Any]) -> None:
        _, kind, target, arguments, named = message
        try:
            given, keywords = self._decoded(arguments), self._decoded(named)
            result = self._result(kind, self._decoded(target), given, keywords)
            response = ["result", self._encoded(result), self._encoded([*given, *keywords.values()])]
        except Exception as error:  # noqa: BLE001 (an answer may raise any)
            base = next(
                base_class.__name__
                for base_class in type(error).__mro__
                if getattr(builtins, base_class.__name__, None) is base_class
            )
            response = ["raised", base, [text for text in error.args if isinstance(text, str | int)]]
        self._send(response)

    def _result(self, kind: str, target: Any, given: list[Any], named: dict[str, Any]) -> Any:
        if not self._is_answer:
            _check_request(kind, target, given)
        if kind in _DONE:
            return _DONE[kind](target, *given, **named)
        return getattr(target, kind)(*given, **named)

    def _encoded(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is StandIn:
            return {"yours": object.__getattribute__(value, "_number")}
        if kind.__name__ in _CONTAINERS and kind in _CONTAINERS.values():
            return {kind.__name__: [self._encoded(item) for item in value]}
        if kind in (dict, collections.OrderedDict, collections.Counter, collections.defaultdict):
            return {kind.__name__: [[self._encoded(key), self._encoded(item)] for key, item in value.items()]}
        if kind in (bytes, bytearray):
            return {kind.__name__: value.hex()}
        if kind in _PLAIN:
            return {kind.__name__: [self._encoded(item) for item in _CONSTRUCTED[kind.__name__][1](value)]}
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            plain = self._encoded(value.tolist())
            return {"ndarray": [plain, str(value.dtype)]} if value.shape else plain
        if isinstance(value, type) and value in vars(builtins).values():
            return {"builtin": value.__name__}
        self._given.append(value)
        return {"mine": len(self._given) - 1}

    def _decoded(self, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        ((kind, value),) = content.items()
        if kind in _CONTAINERS:
            return _CONTAINERS[kind](self._decoded(item) for item in value)
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]((self._decoded(key), self._decoded(item)) for key, item in value)
        if kind in ("bytes", "bytearray"):
            return getattr(builtins, kind).fromhex(value)
        if kind in _CONSTRUCTED:
            return _CONSTRUCTED[kind][0](*map(self._decoded, value))
        if kind == "ndarray":
            numpy = importlib.import_module("numpy")
            return numpy.array(self._decoded(value[0]), dtype=numpy.dtype(value[1]))
        if kind == "builtin":
            named = getattr(builtins, value)
            if not isinstance(named, type):
                raise ValueError(f"{value!r:.60} is no type")
            return named
        return StandIn(self, value) if kind == "mine" else self._given[value]

    def _send(self, message: list[Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._write, line) :]

    def _receive(self) -> Any:
        while b"\n" not in self._left:
            part = os.read(self._read, 2**16)
            if not part or len(self._left) > _LONGEST:
                raise Ended("the other process has ended, or sends without end")
            self._left += part
        line, _, self._left = self._left.partition(b"\n")
        return json.loads(line)


def _change(mine: Any, changed: Any) -> None:
    """Give a container the content that the other side has left in its copy."""
    if mine != changed:
        mine.clear()
        mine.extend(changed) if hasattr(mine, "extend") else mine.update(changed)


def _error_named(name: Any) -> type[Exception]:
    error = getattr(builtins, str(name), None)
    return error if isinstance(error, type) and issubclass(error, Exception) else RuntimeError


def _imported(value: Any) -> dict[str, Any] | None:
    """Return the module and the name of a value that is imported from one; None if the answer has made it."""
    module = getattr(value, "__name__" if isinstance(value, type(sys)) else "__module__", None)
    if not isinstance(module, str) or module in ("completion", "builtins") or module not in sys.modules:
        return None
    if isinstance(value, type(sys)):
        return {"imported": [module, None]}
    name = getattr(value, "__qualname__", None) or getattr(value, "_name", None)
    return (
        {"imported": [module, name]}
        if isinstance(name, str) and getattr(sys.modules[module], name, None) is value
        else None
    )


def _resolved(module: str, name: str | None) -> Any:
    try:
        imported = importlib.import_module(module)
    except Exception:  # noqa: BLE001 (a module may raise any when it is imported)
        return None
    return imported if name is None else getattr(imported, name, None)


def _check_request(kind: str, target: Any, given: list[Any]) -> None:
    """Refuse an answer's request that would lead it from what it was given into the process that tests it."""
    owner = target if isinstance(target, type) else type(target)
    is_tests = owner.__module__ == TESTS
    is_public = bool(given) and isinstance(given[0], str) and not given[0].startswith("_")
    if kind in ("getattr", "setattr", "delattr") and not (is_tests and is_public):
        raise AttributeError("an answer may use public attributes of objects that its tests have made")
    if kind in ("setattr", "delattr") and (owner is target or callable(getattr(owner, given[0], None))):
        raise AttributeError("an answer may change no class and no method of its tests")
    if kind not in (*_DONE, *_FORWARDED):
        raise AttributeError(f"{kind!r:.60} is no operation")


_DONE: dict[str, Callable[..., Any]] = {
    "call": lambda target, /, *given, **named: target(*given, **named),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "next": next,
    "iter": iter,
    "len": len,
    "str": str,
    "repr": repr,
    "bool": bool,
    "hash": hash,
    "float": float,
    "int": int,
    "isinstance": lambda target, value: isinstance(value, target),
    "issubclass": lambda target, value: issubclass(value, target),
}
"""Operations of functions."""
_ALONE = (
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__reversed__",
    "__enter__",
    "__exit__",
    "__neg__",
    "__pos__",
    "__invert__",
    "__abs__",
)
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_WITH_ANOTHER = (
    "__add__",
    "__sub__",
    "__mul__",
    "__truediv__",
    "__floordiv__",
    "__mod__",
    "__pow__",
    "__matmul__",
    "__and__",
    "__or__",
    "__xor__",
    "__lshift__",
    "__rshift__",
    "__radd__",
    "__rsub__",
    "__rmul__",
    "__iadd__",
    "__isub__",
    "__imul__",
)
_FORWARDED = (*_ALONE, *_COMPARISONS, *_WITH_ANOTHER)
"""Operations of methods with these names: alone, and with another operand, which may be what a test
expects."""


def _operator(kind: str) -> Callable[..., Any]:
    return lambda self, *given: _forward(kind, self, *given)


_Operators: Any = type("Operators", (), {name: _operator(name) for name in _FORWARDED})


class StandIn(_Operators):  # type: ignore[misc]
    """An object of the other process."""

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, /, *given: Any, **named: Any) -> Any:
        return _ask(self, "call", *given, **named)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __iter__(self) -> Iterator[Any]:
        steps = _ask(self, "iter")
        while True:
            try:
                yield _ask(steps, "next") if isinstance(steps, StandIn) else next(steps)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __len__(self) -> int:
        return int(_ask(self, "len"))

    def __str__(self) -> str:
        return str(_ask(self, "str"))

    def __repr__(self) -> str:
        return str(_ask(self, "repr"))

    def __hash__(self) -> int:
        return int(_ask(self, "hash"))

    def __bool__(self) -> bool:
        return bool(_ask(self, "bool"))

    def __float__(self) -> float:
        return float(_ask(self, "float"))

    def __int__(self) -> int:
        return int(_ask(self, "int"))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, StandIn) and bool(_ask(self, "isinstance", instance))

    def __subclasscheck__(self, subclass: Any) -> bool:
        return isinstance(subclass, StandIn) and bool(_ask(self, "issubclass", subclass))


def _ask(stand_in: Any, kind: str, /, *given: Any, **named: Any) -> Any:
    peer: Peer = object.__getattribute__(stand_in, "_peer")
    return peer.ask(kind, stand_in, *given, **named)


def _forward(kind: str, stand_in: StandIn, *given: Any) -> Any:
    peer: Peer = object.__getattribute__(stand_in, "_peer")
    is_expected = kind not in _ALONE and not peer._is_answer and not isinstance(given[0], StandIn)
    if not is_expected:
        return peer.ask(kind, stand_in, *given)
    # What a test compares with stays here; of an operator's result only an object of the answer is taken.
    if kind in _COMPARISONS:
        return NotImplemented
    result = peer.ask(kind, stand_in, *given)
    return result if isinstance(result, StandIn) else NotImplemented
