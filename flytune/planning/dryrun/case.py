"""What a dry run is asked, and what it answers."""

from typing import Literal

from flytune.recipe.recipe import Recipe
from flytune.schema import Record, Strict


class Profile(Strict):
    """What a framework does in a step; by default what Flytune's training does."""

    kernels: Literal["cuda", "cpu"] = "cuda"
    """Whose memory is predicted: CUDA's kernels and allocator, or a CPU's to the byte."""
    loss: Literal["chunked", "full"] = "chunked"
    """TRL's, which never builds all logits, or the one of transformers, which does."""
    weight_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """That the base model is loaded in; the sharding's when not set."""
    autocast: bool = True
    """True if the forward pass runs under autocast where model.dtype is a 16-bit type."""
    fixed_length: bool = True
    """True if every row is data.max_length long; otherwise sdpa gets a mask of all pairs (unpacked batches of several)."""


class Case(Strict):
    """One question."""

    recipe: Recipe
    config: str
    """Folder with the base model's config.json."""
    world_size: int
    micro_batch: int
    profile: Profile = Profile()


class Storage(Strict):
    """One storage at the peak."""

    bytes: int
    kind: str
    module: str
    """Path of the module that was at work when it was allocated."""
    operation: str


class DryRun(Record):
    """Bytes of torch's allocator on one rank (rank 0); CUDA's and NCCL's own are not in it, nor is fragmentation."""

    phases: dict[str, int]
    """Peak in each: load (what stays of it), then of the first and of a steady step forward, backward and optimizer."""
    kinds: dict[str, int]
    """At the peak."""
    peak_bytes: int
    peak_phase: str
    peak_module: str
    largest: list[Storage]
    """The ten largest at the peak."""
    host_bytes: int
    """What is offloaded: parameters, gradients and optimizer states."""
    seconds: float
