"""Launch plans that run by themselves. `pyflyte register workflows` registers them; they start once someone activates them.

pyflyte launchplan --activate finetune_weekly
"""

from pathlib import Path

from flytekit import CronSchedule, LaunchPlan

from flytune.recipe import Recipe
from workflows.finetune import finetune

_RECIPES = Path(__file__).resolve().parent.parent / "recipes"

finetune_weekly = LaunchPlan.get_or_create(
    name="finetune_weekly",
    workflow=finetune,
    fixed_inputs={"recipe": Recipe.from_yaml(_RECIPES / "smollm2-1.7b-lora-ddp.yaml")},
    # Mondays at 02:00 UTC. Unchanged data is not prepared again: its fingerprint is the cache key.
    schedule=CronSchedule(schedule="0 2 * * 1"),
)
