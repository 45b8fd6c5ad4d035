"""What follows from a recipe: shape, world size, micro batch, accumulation, memory."""

from flytune.records import Record
from flytune.strict import Strict


class Component(Strict):
    """One line of the memory table: bytes in the memory of one process (one GPU; on a cpu shape, one rank)."""

    name: str
    bytes: int


class Plan(Record):
    """plan.json: what a run is made of. Frozen; nothing is ever written back into it."""

    recipe: str
    """The recipe's name."""
    key: str
    """The recipe's key."""
    shape: str
    accelerator: str
    nodes: int
    processes: int
    """A node; 1 under device_map, whatever the number of GPUs."""
    world_size: int
    global_batch_size: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    memory: list[Component]
    """Estimated, of one process, with the micro batch above."""
    memory_available_bytes: int
    """Of one GPU; on a cpu shape, a rank's share of the node's memory less /dev/shm."""
    total_parameters: int
    trained_parameters: int
    price_per_hour: float
    """US dollars for all nodes."""
    reasons: list[str]
    """Why the values are what they are, a sentence each."""

    @property
    def memory_bytes(self) -> int:
        return sum(component.bytes for component in self.memory)
