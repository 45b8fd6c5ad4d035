"""Names of accelerate that are replaced."""

from flytune.patches.record import ObjectPatch, ProcessPatch

_VERSION = "1.15.0"

DISTRIBUTED_TYPE = ProcessPatch(
    name="accelerate:PartialState._shared_state[distributed_type]",
    version=_VERSION,
    reason="accelerate shards with FSDP on accelerators only, and silently uses DDP on a CPU: for tests and "
    "laptops",
    upstream=("accelerate.state:AcceleratorState.__init__",),
    remove_when="it uses FSDP on CPUs where it is asked for",
)
EMPTY_SHARD = ObjectPatch(
    name="torch:Tensor.data_ptr",
    version=_VERSION,
    reason="accelerate finds an optimizer's parameters by their addresses, and all empty shards have the "
    "address 0",
    upstream=("accelerate:Accelerator._prepare_fsdp2",),
    remove_when="it finds parameters by their names",
)
