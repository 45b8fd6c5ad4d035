"""States of bitsandbytes' optimizers: sharded like their parameters, and still paged after a resume.

bitsandbytes 0.50 cannot update DTensors, which FSDP2 makes of parameters; and its load_state_dict puts states
that were paged on the GPU, where there may be no room for them.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flytune import patches


def adapt(optimizer: Any) -> Any:
    """Return the optimizer; if it is one of bitsandbytes, with states that are sharded and paged."""
    # An optimizer of bitsandbytes has imported it.
    if "bitsandbytes" in sys.modules:
        from bitsandbytes.optim.optimizer import Optimizer8bit

        if isinstance(optimizer, Optimizer8bit):
            # It keeps its type's name and module: transformers and accelerate recognize it by them.
            kind = type(optimizer)
            adapted = type(kind.__name__, (_methods(), kind), {"__module__": kind.__module__})
            patches.bitsandbytes.OPTIMIZER_CLASS.on(optimizer, adapted)
    return optimizer


def _methods() -> type:
    """Return the methods that replace those of Optimizer8bit. torch is imported here."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    def local(tensor: Any) -> Any:
        # to_local() makes another object, without bitsandbytes' mark of a paged tensor.
        return tensor._local_tensor if isinstance(tensor, DTensor) else tensor

    class Methods:
        def get_state_buffer(self: Any, p: Any, dtype: Any = torch.float32) -> Any:
            buffer = super().get_state_buffer(local(p), dtype=dtype)  # type: ignore[misc]
            if not isinstance(p, DTensor):
                return buffer
            # Saved and resharded like its parameter. DTensor.from_local would copy a paged buffer to the GPU.
            meta = TensorMeta(p.shape, p.stride(), dtype)
            return DTensor(
                buffer, DTensorSpec(p.device_mesh, p.placements, tensor_meta=meta), requires_grad=False
            )

        def prefetch_state(self: Any, p: Any) -> None:
            # bitsandbytes reads only the states of `p`; a shard's have the mark of a paged tensor.
            with self._shard(p) as shard:
                super().prefetch_state(shard)  # type: ignore[misc]

        def update_step(self: Any, group: Any, p: Any, gindex: int, pindex: int) -> None:
            with self._shard(p) as shard:
                if shard.numel():
                    super().update_step(group, shard, gindex, pindex)  # type: ignore[misc]

        @contextmanager
        def _shard(self: Any, p: Any) -> Iterator[Any]:
            """Give the local part of a sharded parameter, with its gradient and its state; any other
            parameter as it is."""
            if not isinstance(p, DTensor):
                yield p
                return
            shard, state = local(p), self.state[p]
            shard.grad = local(p.grad)
            self.state[shard] = {name: local(value) for name, value in state.items()}
            yield shard
            state["step"] = self.state.pop(shard)["step"]
            shard.grad = None

        def load_state_dict(self: Any, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
            """Load a state_dict() into the states' own memory.

            Raises:
                ValueError: it is of other parameter groups.
            """
            groups = self.param_groups
            saved_groups = state_dict["param_groups"]
            if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
                raise ValueError("the loaded optimizer states are of other parameter groups")
            for group, saved in zip(groups, saved_groups, strict=True):
                for p, number in zip(group["params"], saved["params"], strict=True):
                    if number in state_dict["state"]:
                        loaded = dict(state_dict["state"][number])
                        loaded |= loaded.pop(self._FSDP_WRAPPED_QUANT_STATE_KEY, {})
                        self.state[p] = {name: self._loaded(p, name, value) for name, value in loaded.items()}
                group.update({name: value for name, value in saved.items() if name != "params"})

        def _loaded(self: Any, p: Any, name: str, value: Any) -> Any:
            """Return a loaded value of the state of `p` in the memory where it belongs."""
            if name not in ("state1", "state2"):
                return value.to(p.device) if isinstance(value, torch.Tensor) else value
            # Unified memory is never freed, so that of an earlier state is used again.
            buffer = self.state.get(p, {}).get(name)
            if buffer is None:
                buffer = self.get_state_buffer(p, dtype=value.dtype)
            if buffer is not value:
                local(buffer).copy_(local(value))
            return buffer

    return Methods
