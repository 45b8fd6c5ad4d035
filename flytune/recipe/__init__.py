"""Recipe files: what a person decided."""

from flytune.recipe import fields, patterns
from flytune.recipe.data import OF_HELDOUT, Data, Source
from flytune.recipe.method import Method
from flytune.recipe.named_files import read_recipe
from flytune.recipe.objectives import (
    SECTIONS,
    Classify,
    Distill,
    Dpo,
    Embed,
    Grpo,
    Kto,
    ObjectiveSection,
    Reward,
    Sft,
)
from flytune.recipe.objectives.engines import TransformersEngine, VllmEngine
from flytune.recipe.optimizers import OPTIMIZERS, OptimizerKind
from flytune.recipe.recipe import DataRequest, Recipe, json_schema
from flytune.recipe.sections import (
    TRACKER_NAMES,
    Checkpoints,
    Evaluation,
    EvaluationTask,
    Guard,
    Hardware,
    HarnessTask,
    Model,
    Notify,
    Sharding,
    TaskSection,
)
from flytune.recipe.training import Training

__all__ = [
    "OF_HELDOUT",
    "OPTIMIZERS",
    "SECTIONS",
    "TRACKER_NAMES",
    "Checkpoints",
    "Classify",
    "Data",
    "DataRequest",
    "Distill",
    "Dpo",
    "Embed",
    "Evaluation",
    "EvaluationTask",
    "Grpo",
    "Guard",
    "Hardware",
    "HarnessTask",
    "Kto",
    "Method",
    "Model",
    "Notify",
    "ObjectiveSection",
    "OptimizerKind",
    "Recipe",
    "Reward",
    "Sft",
    "Sharding",
    "Source",
    "TaskSection",
    "Training",
    "TransformersEngine",
    "VllmEngine",
    "fields",
    "json_schema",
    "patterns",
    "read_recipe",
]
