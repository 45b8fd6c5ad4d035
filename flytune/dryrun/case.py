"""Input and result of a dry run."""

from typing import Literal

from flytune.objectives.bound import BoundRecipe
from flytune.recipe import Recipe
from flytune.schema import Record, Strict
from training_estimates.degrees import Degrees


class Profile(Strict):
    """Differences between frameworks in a step; the defaults are Flytune's."""

    kernels: Literal["cuda", "cpu"] = "cuda"
    """Device whose memory is predicted: CUDA with its kernels and allocator, or a CPU, to the byte."""
    loss: Literal["chunked", "full"] = "chunked"
    """TRL's, which never builds all logits, or the one of transformers, which does."""
    weight_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype in which the base model is loaded; the sharding's if not set."""
    autocast: bool = True
    """True if the forward pass runs under autocast where model.dtype is a 16-bit type."""
    fixed_length: bool = True
    """True if every row is data.max_length long; otherwise sdpa gets a mask of all pairs (unpacked batches of
    several)."""


class Case(Strict, BoundRecipe):
    """Input of one dry run."""

    recipe: Recipe
    config: str
    """Folder with the base model's config.json."""
    degrees: Degrees
    micro_batch: int
    profile: Profile = Profile()


class PeakStorage(Strict):
    """A storage at the peak."""

    bytes: int
    kind: str
    module: str
    """Path of the module that ran when it was allocated."""
    operation: str


class DryRun(Record):
    """Bytes of torch's allocator on one rank (rank 0), without those of CUDA and NCCL, and without
    fragmentation."""

    phases: dict[str, int]
    """Peak of each phase: load (its remaining bytes); forward, backward and optimizer of the first and of a
    steady step."""
    kinds: dict[str, int]
    """Bytes at the peak, by kind."""
    peak_bytes: int
    peak_phase: str
    peak_module: str
    largest: list[PeakStorage]
    """The ten largest at the peak."""
    drawing_bytes: int = 0
    """Peak while answers are drawn, with the optimizer's states; 0 where none are."""
    host_bytes: int
    """Bytes of offloaded parameters, gradients and optimizer states."""
    seconds: float
