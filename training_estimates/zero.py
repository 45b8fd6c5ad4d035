"""Parts of DeepSpeed's ZeRO on one GPU, in bytes: one count for the closed form and the dry run."""

from dataclasses import dataclass

from training_estimates.layout import Layout

# Float32 master weights and two moments of a parameter under DeepSpeed (Rajbhandari et al. 2020, §3.1).
MASTER, MOMENTS = 4, 8


@dataclass(frozen=True, slots=True)
class ZeroParts:
    """The parts of one process."""

    layout: Layout
    shards: int
    """Number of processes."""
    trained: float
    """Trained parameters of the model."""
    width: int
    """Bytes of a number of its 16-bit weights."""
    resident_only: bool = False
    """True on a CPU, where memory that nothing has written to takes none."""

    @property
    def partition(self) -> float:
        """Trained parameters that this process updates."""
        return self.trained / self.shards

    @property
    def updated(self) -> float:
        """Parameters of the partition that are updated at a time: under stage 3 a sub group."""
        return min(self.partition, self.layout.sub_group) if self.layout.shards_parameters else self.partition

    @property
    def master_bytes(self) -> float:
        return MASTER * self.partition

    @property
    def gradient_bytes(self) -> float:
        """Bytes of all gradients at the end of backward; stage 1 keeps them whole until the last micro batch
        is reduced."""
        return self.width * (self.partition if self.layout.shards_gradients else self.trained)

    @property
    def bucket_bytes(self) -> float:
        """Bytes of the buckets, two of them with overlap_comm.

        Stages 1 and 2 allocate them at their full size, however few parameters are trained (stage_1_and_2.py,
        setup_buckets).
        """
        whole = not (self.layout.shards_parameters or self.resident_only)
        size = self.layout.bucket if whole else min(self.layout.bucket, self.trained)
        return (2.0 if self.layout.overlaps else 1.0) * size * self.width

    @property
    def update_bytes(self) -> float:
        """Bytes beside the gradients when they are cast for the update: flattened, and the same in
        float32."""
        return MASTER * self.updated + (self.width * self.updated if self.width < MASTER else 0)

    def live_bytes(self, base: float, table: float) -> float:
        """Return the bytes of parameters that stage 3 holds gathered: of `base` bytes, with embedding and
        head of `table`.

        Embedding and head are gathered completely, whatever their size.
        """
        return (
            min(max(self.layout.live, 2 * table) * self.width, base) if self.layout.shards_parameters else 0.0
        )
