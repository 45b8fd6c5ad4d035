"""Degrees of parallelism of a run; only here is anything divided by the number of its processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Degrees:
    """The processes of a run, and what they divide among themselves: samples, rows, work (as torchtitan's
    ParallelDims).

    `Layout.degrees` makes them of a shape, and `Plan.degrees` of a plan.
    """

    world: int = 1
    """Number of processes of all nodes: torch's world size."""
    nodes: int = 1
    gpus_per_process: int = 1
    """GPUs of a process that hold different layers and take turns; otherwise 1, as for a process on a CPU."""
    replicas: int = 1
    """Groups of processes that each hold all states; these are divided among the processes of a group."""
    sequence_parallel: int = 1
    """Processes that divide the positions of each sample among themselves."""

    @property
    def data_parallel(self) -> int:
        """Number of processes, or groups of those that share the work on a sample, that train samples of
        their own."""
        return max(1, self.world // self.sequence_parallel)

    @property
    def shards(self) -> int:
        """Number of processes that states are divided among, where a sharding divides them."""
        return self.world // self.replicas

    @property
    def copies(self) -> int:
        """Number of processes that read the same sample."""
        return self.world // self.data_parallel

    @property
    def processes(self) -> int:
        """Number of processes of a node."""
        return self.world // self.nodes

    @property
    def gpus(self) -> int:
        """Number of GPUs of all nodes; on a CPU of processes."""
        return self.world * self.gpus_per_process

    def samples(self, batch: int) -> int:
        """Return the number of a global batch's samples that one data-parallel process trains."""
        return batch // self.data_parallel

    def batch(self, micro_batch: int, accumulation: int) -> int:
        """Return the global batch."""
        return micro_batch * accumulation * self.data_parallel

    def accumulation(self, batch: int, micro_batch: int) -> int:
        """Return the number of micro batches that a global batch is of."""
        return self.samples(batch) // micro_batch

    def near(self, batch: int) -> list[int]:
        """Return the nearest batches that can be shared equally; none where this one can."""
        over = batch % self.data_parallel
        return [size for size in (batch - over, batch - over + self.data_parallel) if size] if over else []

    def rows(self, process: int) -> slice:
        """Return the rows of a list that a process computes; no process has more of them than the first."""
        return slice(process // self.copies, None, self.data_parallel)

    def part(self, process: int) -> slice:
        """Return a process's part of a list of any work that all processes share."""
        return slice(process, None, self.world)
