"""FSDP2: parameters, gradients and optimizer states are sharded over the processes, each parameter along its rows."""

from typing import ClassVar

from flytune.strategies.strategy import Strategy


class FullyShardedDataParallel(Strategy):
    """torch.distributed.fsdp.fully_shard."""

    name = "fsdp"
    refuses: ClassVar = dict.fromkeys(("full", "lora", "qlora"), "not built yet")
