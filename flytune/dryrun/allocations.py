"""A ledger of storages: their sizes and lifetimes, and the operation and module that allocated them.

It records the results of operations, so it counts requests to torch's allocator, and not the memory inside of
a kernel.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

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
    _open: dict[int, tuple[Life, Any]] = field(default_factory=dict)

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
            entry = self._open.get(local(tensor).untyped_storage()._cdata)
            if entry:
                entry[0].kind = kind

    def add(self, tensors: Iterable[Any], operation: str) -> None:
        """Record the storages of `tensors` that are not recorded yet."""
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            if storage._cdata not in self._open and storage.nbytes():
                self._begin(storage, storage.nbytes(), operation)

    def life_of(self, tensor: Any) -> Life | None:
        """Return the life of a tensor's storage; None if it is not recorded."""
        entry = self._open.get(local(tensor).untyped_storage()._cdata)
        return entry[0] if entry else None

    def adopt(self, tensor: Any, life: Life) -> None:
        """Let a storage that is not recorded be the one of `life`."""
        storage = local(tensor).untyped_storage()
        key = storage._cdata
        self._open[key] = life, weakref.ref(storage, lambda _: self._end(key))

    def kind_of(self, tensor: Any) -> str | None:
        life = self.life_of(tensor)
        return life.kind if life else None

    def ran(self, operation: Any, arguments: Any, output: Any) -> None:
        """Record the storages that an operation has allocated."""
        if self.paused:
            return
        tensors = [
            tensor
            for tensor in (output if isinstance(output, (tuple, list)) else (output,))
            if _has_memory(tensor)
        ]
        self.add(tensors, str(operation))
        if getattr(operation, "namespace", "") in _COLLECTIVES:
            flat = [
                x
                for argument in arguments
                for x in (argument if isinstance(argument, (tuple, list)) else (argument,))
            ]
            used = [tensor for tensor in [*flat, *tensors] if _has_memory(tensor)]
            self.mark((tensor for tensor in used if not self.kind_of(tensor)), COMMUNICATION)

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
            if name.endswith(FORWARD):
                for life in self.alive(end):
                    if life.kind is None and life.born > start:
                        life.kind = ACTIVATIONS
        for life in self.lives:
            life.kind = life.kind or TEMPORARIES

    def _begin(self, storage: Any, size: int, operation: str) -> None:
        key = storage._cdata
        self.now += 1
        life = Life(
            -(-size // self.rounding) * self.rounding, self.now, operation, self.module, stream=self._stream()
        )
        self.lives.append(life)
        # A storage's Python object lives as long as the storage.
        self._open[key] = life, weakref.ref(storage, lambda _: self._end(key))

    def _stream(self) -> int:
        import torch

        # torch.cpu keeps the stream that FSDP selects, like torch.cuda, and does nothing else with it.
        return self._streams.setdefault(torch.cpu.current_stream(), len(self._streams))

    def _end(self, key: int) -> None:
        entry = self._open.pop(key, None)
        if entry:
            self.now += 1
            entry[0].died = self.now

    def _resized(self, storage: Any, size: int) -> None:
        key = storage._cdata
        if key in self._open:
            self._open[key][0].kind = GATHERED
            self._end(key)
        if size:
            self._begin(storage, size, "resize_")
            self._open[key][0].kind = GATHERED


def _has_memory(value: Any) -> bool:
    import torch

    # Reading the device of a fake tensor is an operation.
    return isinstance(value, torch.Tensor) and (hasattr(value, "fake_device") or value.device.type != "meta")


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


def _on_fake(ledger: AllocationLedger) -> Any:
    """Return a FakeTensorMode that records results: one mode is faster than two.

    Layers repeat the same operations on the same sizes, and torch's own cache of them takes most of the time
    for its keys. Here an operation with one new or viewed tensor is looked up by the layout of its arguments.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

    device, add = torch.ops.prim.device.default, torch.ops.aten.add.Tensor
    plain = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout)
    known: dict[Any, tuple[Any, ...] | None] = {}
    simple: dict[Any, bool] = {}

    def key_of(value: Any) -> Any:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:
                raise TypeError
            return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
        if kind in (list, tuple):
            return tuple(map(key_of, value))
        if isinstance(value, plain):
            return kind, value
        raise TypeError

    def layout_of(func: Any, args: Any, output: Any) -> tuple[Any, ...] | None:
        """Return shape, strides, offset, dtype, device and the index of the viewed argument; None for other
        results."""
        if type(output) is not FakeTensor or output.constant is not None:
            return None
        storage = output.untyped_storage()._cdata
        of = [
            place
            for place, arg in enumerate(args)
            if type(arg) is FakeTensor and arg.untyped_storage()._cdata == storage
        ]
        dense = (
            output.untyped_storage().nbytes() == output.numel() * output.element_size()
            and output.storage_offset() == 0
        )
        if bool(of) != func.is_view or not (of or dense):
            return None
        layout = output.shape, output.stride(), output.storage_offset(), output.dtype, output.fake_device
        return *layout, of[0] if of else None

    class Watch(FakeTensorMode):
        inside = 0

        def repeat(self, layout: tuple[Any, ...], args: Any) -> Any:
            shape, stride, offset, dtype, on, viewed = layout
            with in_kernel_invocation_manager(self):
                view = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
                if viewed is not None:
                    view.set_(args[viewed].untyped_storage(), offset, shape, stride)
            return FakeTensor(self, view, on)

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is device:
                # Most operations are this one.
                return args[0].fake_device
            if func is add and not self.inside and _follows_embedding():
                return args[0]
            key = None
            if simple.get(func) is None:
                schema = getattr(func, "_schema", None)
                simple[func] = schema is not None and not schema.is_mutable and len(schema.returns) == 1
            if simple[func] and args and type(args[0]) is FakeTensor:
                try:
                    key = (
                        func,
                        tuple(map(key_of, args)),
                        tuple((name, key_of(value)) for name, value in (kwargs or {}).items()),
                    )
                    if layout := known.get(key):
                        output = self.repeat(layout, args)
                        if not self.inside:
                            ledger.ran(func, args, output)
                        return output
                except TypeError:
                    key = None
            self.inside += 1
            try:
                output = super().dispatch(func, types, args, kwargs)
            finally:
                self.inside -= 1
            # Operations inside of an operation only find the shape of its result.
            if not self.inside:
                ledger.ran(func, args, output)
            if key is not None and key not in known:
                known[key] = layout_of(func, args, output)
            return output

    return Watch(allow_non_fake_inputs=True)


def _follows_embedding() -> bool:
    """Return whether autograd adds the gradient of an embedding to that of the head that is tied to it.

    It adds in place, but for fake tensors and under a mode (torch/csrc/autograd/input_buffer.cpp,
    can_accumulate_inplace).
    """
    import torch

    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "EmbeddingBackward0"
