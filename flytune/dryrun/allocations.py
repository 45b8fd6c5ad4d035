"""A ledger of storages: their sizes and lifetimes, and the operation and module that allocated them.

It records the results of operations, so it counts requests to torch's allocator, and not the memory inside of
a kernel.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from flytune import patches

PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER = (
    "parameters",
    "gathered parameters",
    "gradients",
    "optimizer states",
)
MASTERS, ACTIVATIONS, TEMPORARIES, COMMUNICATION = (
    "master copies",
    "activations",
    "temporaries",
    "communication buffers",
)
KINDS = [PARAMETERS, GATHERED, MASTERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, COMMUNICATION, TEMPORARIES]
FORWARD = "forward"

_COLLECTIVES = {"c10d", "_c10d_functional", "fsdp"}


@dataclass(slots=True)
class Life:
    """One storage from its allocation until it is freed; times count the ledger's entries."""

    bytes: int
    born: int
    operation: str
    module: str
    died: int | None = None
    kind: str | None = None
    stream: int = 0
    """CUDA stream that it is allocated on: 0 for the default one, others as FSDP uses them first."""


@dataclass
class AllocationLedger:
    """Record of all storages that are allocated within `watch`.

    Older storages are not in it; storages that outlive it are alive at its end.
    """

    rounding: int = 1
    """Unit of sizes, in bytes: 512 for CUDA's caching allocator (c10/cuda/CUDACachingAllocator,
    kMinBlockSize)."""
    lives: list[Life] = field(default_factory=list)
    stages: list[tuple[str, int]] = field(default_factory=list)
    """Names of stages with their start times."""
    module: str = ""
    """Path of the module whose forward or backward pass runs, or ran last."""
    now: int = 0
    paused: bool = False
    _streams: dict[Any, int] = field(default_factory=dict)
    _open: dict[int, Life] = field(default_factory=dict)
    """Lives of the storages that are not freed yet, by the addresses of the storages."""
    _references: dict[int, Any] = field(default_factory=dict)
    """Weak references to the same storages, which say when each is freed."""

    @contextmanager
    def watch(self, fake: bool = False) -> Iterator[None]:
        """Record all allocations of this thread; `fake` tensors have sizes and no memory."""
        original, propagate = patches.torch.RESIZE.current(), patches.torch.PROPAGATED_SHAPE.current()

        def resize_(storage: Any, size: int) -> Any:
            original(storage, size)
            self._resized(storage, size)
            return storage

        # FSDP frees and allocates gathered parameters by resizing storages, which is not an operation that a
        # mode gets.
        def unwatched(*arguments: Any) -> Any:
            self.paused = True
            try:
                return propagate(*arguments)
            finally:
                self.paused = False

        with (
            patches.torch.RESIZE.replaced(resize_),
            # DTensor finds the shape of an operation's result by running it on fake tensors of the full size.
            patches.torch.PROPAGATED_SHAPE.replaced(unwatched),
            _on_fake(self) if fake else _on_real(self),
        ):
            yield

    @contextmanager
    def paths(self, model: Any) -> Iterator[None]:
        """Record storages with the module that runs, in forward and in backward."""
        from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

        names = {module: name for name, module in model.named_modules()}

        def enter(module: Any, _: Any) -> None:
            self.module = names.get(module, self.module)

        def leave(module: Any, _: Any, output: Any) -> None:
            name = names.get(module, self.module)
            self.module = name.rpartition(".")[0]
            node = getattr(output[0] if isinstance(output, tuple) else output, "grad_fn", None)
            if node is not None:
                node.register_prehook(lambda _: setattr(self, "module", name))

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def stage(self, name: str) -> None:
        """Begin the stage `name`."""
        self.stages.append((name, self.now))

    def mark(self, tensors: Iterable[Any], kind: str) -> None:
        """Set the kind of the storages of `tensors`; of DTensors, of their local shards."""
        for tensor in tensors:
            life = self.life_of(tensor)
            if life:
                life.kind = kind

    def add(self, tensors: Iterable[Any], operation: str) -> None:
        """Record the storages of `tensors` that are not recorded yet."""
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            if storage._cdata not in self._open and storage.nbytes():
                self._begin(storage, storage.nbytes(), operation)

    def life_of(self, tensor: Any) -> Life | None:
        """Return the life of a tensor's storage; None if it is not recorded."""
        return self._open.get(local(tensor).untyped_storage()._cdata)

    def adopt(self, tensor: Any, life: Life) -> None:
        """Let a storage that is not recorded be the one of `life`."""
        self._follow(local(tensor).untyped_storage(), life)

    def _follow(self, storage: Any, life: Life) -> None:
        # A storage's Python object lives as long as the storage.
        key = storage._cdata
        self._open[key] = life
        self._references[key] = weakref.ref(storage, lambda _: self._end(key))

    def kind_of(self, tensor: Any) -> str | None:
        life = self.life_of(tensor)
        return life.kind if life else None

    def ran(self, operation: Any, arguments: Any, output: Any) -> None:
        """Record the storages that an operation has allocated."""
        if self.paused:
            return
        tensors = _tensors(output)
        self.add(tensors, str(operation))
        if getattr(operation, "namespace", "") in _COLLECTIVES:
            for argument in arguments:
                tensors += _tensors(argument)
            self.mark((tensor for tensor in tensors if not self.kind_of(tensor)), COMMUNICATION)

    def totals(self, without: Iterable[str] = ()) -> list[int]:
        """Return the bytes alive after each entry, `without` these kinds."""
        changes = [0] * (self.now + 1)
        left_out = set(without)
        for life in self.lives:
            if life.kind not in left_out:
                changes[life.born] += life.bytes
                if life.died is not None:
                    changes[life.died] -= life.bytes
        return list(accumulate(changes))

    def alive(self, time: int) -> list[Life]:
        return [life for life in self.lives if life.born <= time and (life.died is None or life.died > time)]

    def spans(self) -> Iterator[tuple[str, int, int]]:
        """List each stage with its first and last time; the last stage has not ended."""
        times = [*(start for _, start in self.stages[1:]), self.now]
        yield from ((name, start, end) for (name, start), end in zip(self.stages, times, strict=True))

    def assign_kinds(self) -> None:
        """Give a kind to each storage that has none: activations if it outlives forward, else temporary."""
        for name, start, end in self.spans():
            alive = self.alive(end) if name.endswith(FORWARD) else []
            for life in alive:
                if life.kind is None and life.born > start:
                    life.kind = ACTIVATIONS
        for life in self.lives:
            life.kind = life.kind or TEMPORARIES

    def _begin(self, storage: Any, size: int, operation: str) -> None:
        self.now += 1
        life = Life(
            -(-size // self.rounding) * self.rounding, self.now, operation, self.module, stream=self._stream()
        )
        self.lives.append(life)
        self._follow(storage, life)

    def _stream(self) -> int:
        import torch

        # torch.cpu keeps the stream that FSDP selects, like torch.cuda, and does nothing else with it.
        return self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))

    def _end(self, key: int) -> None:
        life = self._open.pop(key, None)
        if life:
            self._references.pop(key)
            self.now += 1
            life.died = self.now

    def _resized(self, storage: Any, size: int) -> None:
        key = storage._cdata
        if key in self._open:
            self._open[key].kind = GATHERED
            self._end(key)
        if size:
            self._begin(storage, size, "resize_")
            self._open[key].kind = GATHERED


def _tensors(value: Any) -> list[Any]:
    """Return the tensors with memory of an argument or a result: of a tensor, or of a list of some."""
    import torch

    return [
        item
        for item in (value if isinstance(value, (tuple, list)) else (value,))
        # Reading the device of a fake tensor is an operation.
        if isinstance(item, torch.Tensor) and (hasattr(item, "fake_device") or item.device.type != "meta")
    ]


def local(tensor: Any) -> Any:
    """Return the local shard of a DTensor, and any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def _on_real(ledger: AllocationLedger) -> Any:
    """Return a mode that records the results of operations on real tensors."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                # DTensor runs the operation again on its local tensors.
                return NotImplemented
            if func is torch.ops.aten.add.Tensor and _follows_embedding():
                return args[0].add_(args[1])
            output = func(*args, **(kwargs or {}))
            ledger.ran(func, args, output)
            return output

    return Watch()


class _ResultLayout(NamedTuple):
    """Layout of the one new or viewed tensor that an operation returns."""

    shape: Any
    stride: Any
    offset: Any
    dtype: Any
    device: Any
    viewed: int | None
    """Number of the argument that it is a view of; None for a new tensor."""


class _CallKeys:
    """Keys of calls on fake tensors: calls with the same key return tensors of the same layout."""

    def __init__(self) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor

        self._fake = FakeTensor
        torch_values = (torch.dtype, torch.device, torch.memory_format, torch.layout)
        self._plain = (int, float, bool, str, type(None), *torch_values)
        self._has_one_result: dict[Any, bool] = {}

    def key(self, operation: Any, arguments: Any, named: dict[str, Any]) -> Any:
        """Return the key of a call; None for an operation that has not one result, or changes an argument.

        Raises:
            TypeError: an argument is neither a tensor nor a plain value.
        """
        if operation not in self._has_one_result:
            schema = getattr(operation, "_schema", None)
            self._has_one_result[operation] = (
                schema is not None and not schema.is_mutable and len(schema.returns) == 1
            )
        if not self._has_one_result[operation] or not arguments or type(arguments[0]) is not self._fake:
            return None
        return (
            operation,
            tuple(map(self._part, arguments)),
            tuple((name, self._part(value)) for name, value in named.items()),
        )

    def _part(self, value: Any) -> Any:
        kind = type(value)
        if kind is self._fake and value.constant is None:
            return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
        if kind in (list, tuple):
            return tuple(map(self._part, value))
        if isinstance(value, self._plain):
            return kind, value
        raise TypeError


def _layout_of(operation: Any, arguments: Any, output: Any) -> _ResultLayout | None:
    """Return the layout of a result; None unless it is one tensor that fills its memory, or views one
    argument."""
    from torch._subclasses.fake_tensor import FakeTensor

    if type(output) is not FakeTensor or output.constant is not None:
        return None
    storage = output.untyped_storage()
    viewed = [
        place
        for place, argument in enumerate(arguments)
        if type(argument) is FakeTensor and argument.untyped_storage()._cdata == storage._cdata
    ]
    is_dense = output.storage_offset() == 0 and storage.nbytes() == output.numel() * output.element_size()
    if bool(viewed) != operation.is_view or not (viewed or is_dense):
        return None
    return _ResultLayout(
        output.shape,
        output.stride(),
        output.storage_offset(),
        output.dtype,
        output.fake_device,
        viewed[0] if viewed else None,
    )


def _on_fake(ledger: AllocationLedger) -> Any:
    """Return a FakeTensorMode that records results: one mode is faster than two.

    Layers repeat the same operations on the same sizes, and torch's own cache of them takes most of the time
    for its keys. Here an operation with one new or viewed tensor is looked up by the layout of its arguments.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

    device, add = torch.ops.prim.device.default, torch.ops.aten.add.Tensor
    keys = _CallKeys()
    layouts: dict[Any, _ResultLayout | None] = {}

    class Watch(FakeTensorMode):
        inside = 0
        """Depth of operations within others, which only find the shape of a result."""

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is device:
                # Most operations are this one.
                return args[0].fake_device
            if func is add and not self.inside and _follows_embedding():
                return args[0]
            try:
                key = keys.key(func, args, kwargs or {})
                layout = layouts.get(key)
            except TypeError:
                key = layout = None
            if layout is not None:
                output = self.repeat(layout, args)
            else:
                output = self.dispatch_inside(func, types, args, kwargs)
            if not self.inside:
                ledger.ran(func, args, output)
            if key is not None and key not in layouts:
                layouts[key] = _layout_of(func, args, output)
            return output

        def repeat(self, layout: _ResultLayout, args: Any) -> Any:
            with in_kernel_invocation_manager(self):
                view = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
                if layout.viewed is not None:
                    viewed = args[layout.viewed].untyped_storage()
                    view.set_(viewed, layout.offset, layout.shape, layout.stride)
            return FakeTensor(self, view, layout.device)

        def dispatch_inside(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            self.inside += 1
            try:
                return super().dispatch(func, types, args, kwargs)
            finally:
                self.inside -= 1

    return Watch(allow_non_fake_inputs=True)


def _follows_embedding() -> bool:
    """Return whether autograd adds the gradient of an embedding to that of the head that is tied to it.

    It adds in place, but for fake tensors and under a mode (torch/csrc/autograd/input_buffer.cpp,
    can_accumulate_inplace).
    """
    import torch

    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "EmbeddingBackward0"
