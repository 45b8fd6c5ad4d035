"""Sizes of a model, memory of a workload, seconds of its step: in closed form, without a GPU and without
weights."""

from training_estimates.accelerators import Accelerator
from training_estimates.counting import count as sizes_of
from training_estimates.degrees import Degrees
from training_estimates.errors import LibrariesMissingError, SizesError
from training_estimates.framework import AdapterKernels, Framework, Loss
from training_estimates.layout import Layout
from training_estimates.memory import Memory
from training_estimates.memory import memory as memory_of
from training_estimates.sizes import Geometry, Linear
from training_estimates.step_time import StepTime
from training_estimates.step_time import step as step_of
from training_estimates.workload import Contrast, Decoding, Optimizer, Workload

__all__ = [
    "Accelerator",
    "AdapterKernels",
    "Contrast",
    "Decoding",
    "Degrees",
    "Framework",
    "Geometry",
    "Layout",
    "LibrariesMissingError",
    "Linear",
    "Loss",
    "Memory",
    "Optimizer",
    "SizesError",
    "StepTime",
    "Workload",
    "memory_of",
    "sizes_of",
    "step_of",
]
