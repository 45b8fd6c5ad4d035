"""Sizes of a model; memory, step time and communication of a workload, in closed form."""

from flytune.estimates.framework import AdapterKernels, Framework, Loss
from flytune.estimates.memory import Memory
from flytune.estimates.step_time import StepTime
from flytune.estimates.workload import Decoding, Optimizer, Workload

__all__ = [
    "AdapterKernels",
    "Decoding",
    "Framework",
    "Loss",
    "Memory",
    "Optimizer",
    "StepTime",
    "Workload",
    "config_sizes",
    "counting",
    "decoding",
    "framework",
    "intervals",
    "memory",
    "model_states",
    "step_time",
    "workload",
]
