"""Repeated layers: some of a decoder's layers are traced, and the ledger is extended to all of them.

Layers that are built alike allocate alike. A unit of them (one layer, or one period of a hybrid model's kinds
of layers) is traced between its neighbours, and its storages are copied for each unit that was left out, as
each would have allocated and freed them. `Trace.predicts` compares that with a trace of one more unit.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from flytune.dryrun.allocations import AllocationLedger, Life
from flytune.models.scoring import innermost

# Layers that are traced on each side of the repeated unit. FSDP gathers a layer while the one before it
# computes, and that is noted as part of the one before this: a storage may be freed two layers away from
# where it was allocated (REACH). One that is freed further away is freed with all others of its kind, in the
# first or last layer.
EDGE, REACH = 3, 2
# Longest period of kinds of layers that is looked for; hybrid models have 2 to 8.
LONGEST = 8
# Attributes in which layers that are alike differ.
_NUMBERS = ("layer_idx", "layer_index", "layer_id", "layer_number", "idx")
_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True, slots=True)
class Repetition:
    """A unit of layers that a decoder repeats."""

    path: str
    """Path of the list of layers in the model."""
    first: int
    """Index of the first layer of the unit that is traced."""
    period: int
    """Layers of a unit."""
    units: int
    """Further units that the decoder has directly behind it, and that can be left out."""


class _Place(NamedTuple):
    """Place of an allocation or a release; places are sorted in the order of time."""

    stage: int
    order: int
    """Number of the layer in this stage, counted from the first that runs; -1 before it."""
    offset: int
    """Number within the layer's part of the stage."""
    copy: int


class _Placed(NamedTuple):
    """A storage of the complete model, by the places of its allocation and its release."""

    traced: Life
    module: str
    born: _Place
    died: _Place | None


class _Part(NamedTuple):
    """Part of a stage: from when a layer begins to run until another one does."""

    time: int
    stage: int
    layer: int | None
    """None before the first layer of a stage."""


class _Copy(NamedTuple):
    """A storage of the complete model, and the one that was traced for it."""

    traced: Life
    born: int
    died: int | None
    module: str


def find(model: Any) -> Repetition | None:
    """Return the repetition that leaves out most of the model's layers; None if too few are alike."""
    base = innermost(model)
    count = getattr(base.config.get_text_config(), "num_hidden_layers", 0)
    decoder = base.get_decoder()
    lists = [
        child for child in decoder.children() if type(child).__name__ == "ModuleList" and len(child) == count
    ]
    if len(lists) != 1:
        return None
    layers = list(lists[0])
    parameters = [{id(parameter) for parameter in layer.parameters()} for layer in layers]
    if sum(map(len, parameters)) != len(set[int]().union(*parameters)):
        return None  # layers share parameters
    path = next(name for name, module in model.named_modules() if module is lists[0])
    kinds = [_kind(layer) for layer in layers]
    runs = [_longest(kinds, period) for period in range(1, LONGEST + 1)]
    repetitions = [Repetition(path, *run) for run in runs if run]
    # One unit less is traced too.
    return max(
        (repetition for repetition in repetitions if repetition.units > 1),
        key=lambda repetition: (repetition.units - 1) * repetition.period,
        default=None,
    )


def leave_out(model: Any, repetition: Repetition, units: int) -> int:
    """Remove `units` units of layers, and their entries in lists of the configuration; return the number of
    layers left."""
    layers, start = model.get_submodule(repetition.path), repetition.first + repetition.period
    count, removed = len(layers), slice(start, start + units * repetition.period)
    del layers[removed]
    base = innermost(model)
    config = base.config.get_text_config()
    for name, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and len(value) == count:
            kept = list(value)
            del kept[removed]
            setattr(config, name, type(value)(kept))
    config.num_hidden_layers = len(layers)
    return len(layers)


class Trace:
    """Forward and backward pass of a model without some units of its layers, as a ledger records them."""

    def __init__(self, ledger: AllocationLedger, repetition: Repetition, layers: int) -> None:
        """Take the number of layers that are left in the model."""
        self.ledger, self.repetition, self.layers = ledger, repetition, layers
        self._notes: list[_Part] = []
        self._module = re.compile(rf"{re.escape(repetition.path)}\.(\d+)(?![^.])")

    @contextmanager
    def noted(self, model: Any) -> Iterator[None]:
        """Note when each layer begins, in forward and in backward."""
        handles = []
        for index, layer in enumerate(model.get_submodule(self.repetition.path)):

            def enter(*_: Any, index: int = index) -> None:
                self._note(index)

            def leave(module: Any, _: Any, output: Any, index: int = index) -> None:
                node = getattr(output[0] if isinstance(output, tuple) else output, "grad_fn", None)
                if node is not None:
                    node.register_prehook(lambda _: self._note(index))

            handles += [
                layer.register_forward_pre_hook(enter, prepend=True),
                layer.register_forward_hook(leave, prepend=True),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def predicts(self, other: "Trace") -> bool:
        """Return whether this trace, extended by one unit, is the `other`, which has it: the bytes of each
        layer's part."""
        if not (self._is_regular() and other._is_regular()):
            return False
        copies, parts = self._extended(1)
        theirs = [*(part.time for part in other._parts()[1:]), other.ledger.now]
        lives = [_Copy(life, life.born, life.died, life.module) for life in other.ledger.lives]
        return _profile(copies, parts) == _profile(lives, theirs)

    def extend(self, units: int) -> dict[int, list[Life]]:
        """Add `units` units to the ledger; return the copies of lives that have not ended, by the id of their
        original."""
        copies, parts = self._extended(units)
        ledger, alive, lives = self.ledger, dict[int, list[Life]](), list[Life]()
        count = self.layers + units * self.repetition.period
        with_layers = {note.stage for note in self._notes}
        sizes = [1 + (count if stage in with_layers else 0) for stage in range(len(ledger.stages))]
        ends = [parts[last - 1] for last in accumulate(sizes)]
        originals = set[int]()
        for copy in copies:
            life = copy.traced
            if id(life) in originals:
                life = replace(copy.traced, born=copy.born, died=copy.died, module=copy.module)
                if copy.died is None:
                    alive.setdefault(id(copy.traced), []).append(life)
            originals.add(id(copy.traced))
            lives.append(life)
        for copy, life in zip(copies, lives, strict=True):
            life.born, life.died, life.module = copy.born, copy.died, copy.module
        ledger.lives, ledger.now = lives, parts[-1]
        ledger.stages = [(name, end) for (name, _), end in zip(ledger.stages, [0, *ends], strict=False)]
        return alive

    def _note(self, layer: int) -> None:
        stage = len(self.ledger.stages) - 1
        if not self._notes or self._notes[-1][1:] != (stage, layer):
            self._notes.append(_Part(self.ledger.now, stage, layer))

    def _parts(self) -> list[_Part]:
        """List the parts of all stages."""
        begins = [_Part(time, stage, None) for stage, (_, time) in enumerate(self.ledger.stages)]
        return sorted([*begins, *self._notes], key=lambda part: part.stage)

    def _is_regular(self) -> bool:
        """Return whether each stage has all layers once, in order or in reverse, or none."""
        layers = list(range(self.layers))
        orders = [
            [note.layer for note in self._notes if note.stage == stage]
            for stage in range(len(self.ledger.stages))
        ]
        return all(order in (layers, layers[::-1], []) for order in orders)

    def _extended(self, units: int) -> tuple[list[_Copy], list[int]]:
        """Return all storages with `units` further units, by birth, and the time when each part of a stage
        ends."""
        placed = self._placed(units)
        births = [(copy.born, number, True) for number, copy in enumerate(placed)]
        deaths = [(copy.died, number, False) for number, copy in enumerate(placed) if copy.died is not None]
        events = sorted([*births, *deaths])
        born: dict[int, int] = {}
        died: dict[int, int] = {}
        for time, (_, number, is_birth) in enumerate(events, 1):
            (born if is_birth else died)[number] = time
        copies = [
            _Copy(copy.traced, born[number], died.get(number), copy.module)
            for number, copy in enumerate(placed)
        ]
        keys = [(place.stage, place.order) for place, _, _ in events]
        count = self.layers + units * self.repetition.period
        with_layers = {note.stage for note in self._notes}
        orders = [
            (stage, order)
            for stage in range(len(self.ledger.stages))
            for order in range(-1, count if stage in with_layers else 0)
        ]
        return sorted(copies, key=lambda copy: copy.born), [bisect_right(keys, order) for order in orders]

    def _placed(self, units: int) -> list[_Placed]:
        """Return all storages with `units` further units, with the places where they begin and end."""
        first, period = self.repetition.first, self.repetition.period
        parts, count = self._parts(), self.layers + units * period
        starts = [part.time for part in parts]
        # The last layer's note comes first.
        firsts = {note.stage: note.layer for note in reversed(self._notes)}
        reverse = {stage for stage, layer in firsts.items() if layer}

        def part_of(time: int) -> _Part:
            return parts[bisect_left(starts, time) - 1]

        def index(layer: int, copy: int) -> int:
            """Return a layer's index in the complete model."""
            if layer < first:
                return layer
            return layer + (copy if layer < first + period else units) * period

        def near(home: int | None, copy: int, layer: int) -> int:
            """Return the index of a traced layer for the copy of a storage of the layer `home`: a neighbour
            of that is copied with it."""
            if home is None or abs(layer - home) > REACH:
                return index(layer, 0)
            return index(home, copy) + layer - home

        def place(time: int, home: int | None, copy: int) -> _Place:
            part = part_of(time)
            if part.layer is None:
                return _Place(part.stage, -1, time - part.time, copy)
            order = near(home, copy, part.layer)
            if part.stage in reverse:
                order = count - 1 - order
            return _Place(part.stage, order, time - part.time, copy)

        placed: list[_Placed] = []
        for life in self.ledger.lives:
            part = part_of(life.born)
            named = self._module.match(life.module)
            home = part.layer
            if home is None and named and part.stage == 0:
                home = int(named[1])
            is_repeated = home is not None and first <= home < first + period
            for copy in range(units + 1 if is_repeated else 1):
                module = life.module
                if named:
                    layer = near(home, copy, int(named[1]))
                    module = f"{self.repetition.path}.{layer}{life.module[named.end() :]}"
                died = None if life.died is None else place(life.died, home, copy)
                placed.append(_Placed(life, module, place(life.born, home, copy), died))
        return placed


def _profile(lives: list[_Copy], ends: list[int]) -> list[tuple[int, int]]:
    """Return the most bytes that are alive in each part, and those at its end."""
    changes = [0] * (ends[-1] + 1)
    for life in lives:
        changes[life.born] += life.traced.bytes
        if life.died is not None:
            changes[life.died] -= life.traced.bytes
    totals, result, start = list(accumulate(changes)), [], 0
    for end in ends:
        result.append((max(totals[start : end + 1]), totals[end]))
        start = end
    return result


def _kind(layer: Any) -> Any:
    """Return what two layers that allocate alike have in common: modules, sizes and settings."""
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple(
                (key, *_sizes(value))
                for key, value in (*module._parameters.items(), *module._buffers.items())
            ),
            tuple(
                sorted((key, repr(value)) for key, value in vars(module).items() if _is_setting(key, value))
            ),
        )
        for name, module in layer.named_modules()
    )


def _sizes(tensor: Any) -> tuple[Any, ...]:
    return () if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _is_setting(name: str, value: Any) -> bool:
    return isinstance(value, _PLAIN) and not name.startswith("_") and name not in _NUMBERS


def _longest(kinds: list[Any], period: int) -> tuple[int, int, int] | None:
    """Return first layer, period and number of the further units of the longest run of `kinds` with this
    period."""
    best, start = (0, 0), 0
    for end in range(len(kinds) + 1):
        if end == len(kinds) or (end - start >= period and kinds[end] != kinds[end - period]):
            best = max(best, (end - start, -start))
            start = end - period + 1 if end < len(kinds) else end
    length, start = best[0], -best[1]
    units = (length - 2 * EDGE - period) // period
    return (start + EDGE, period, units) if units > 0 else None
