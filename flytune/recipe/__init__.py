"""Recipe files: what a person decided."""

from flytune.recipe.data import Data, Source
from flytune.recipe.method import Method
from flytune.recipe.objective import Objective
from flytune.recipe.optimizers import OPTIMIZERS, OptimizerKind
from flytune.recipe.recipe import DataRequest, Recipe, json_schema
from flytune.recipe.sections import (
    Checkpoints,
    Evaluation,
    Guard,
    Hardware,
    HarnessTask,
    Model,
    Notify,
    Sharding,
)
from flytune.recipe.training import Training
from flytune.schema import Positive

__all__ = [
    "OPTIMIZERS",
    "Checkpoints",
    "Data",
    "DataRequest",
    "Evaluation",
    "Guard",
    "Hardware",
    "HarnessTask",
    "Method",
    "Model",
    "Notify",
    "Objective",
    "OptimizerKind",
    "Positive",
    "Recipe",
    "Sharding",
    "Source",
    "Training",
    "json_schema",
    "sections",
]
