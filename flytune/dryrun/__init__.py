"""The dry run: peak memory of a training step from the real model code, without weights and without a GPU.

The model, PEFT's adapters, FSDP2 at the true number of processes, checkpointing, TRL's loss, clipping and
AdamW run on tensors that have sizes and no memory (torch's FakeTensorMode), while a ledger records the
lifetime of storages. Recipes that cannot be run so are planned by the closed form
(training_estimates/memory.py).
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from flytune.dryrun.case import Case, DryRun, Profile
from flytune.errors import RecipeError
from flytune.recipe import Recipe
from flytune.sharding import SHARDINGS, sharding_of
from training_estimates.degrees import Degrees

__all__ = ["Case", "DryRun", "Profile", "left_out", "refusal", "run"]


VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
"""Variables of the process that traces. Compiling parts of the loss and of the hooks would take a third of
the time, without any benefit for fake tensors."""
_WAY_ON = "where the closed form knows the model, plan it without --dry-run"


def refusal(recipe: Recipe) -> str | None:
    """Return why a recipe has no dry run; None if it has one."""
    if recipe.method.name == "qlora" and recipe.method.load_in_8bit:
        return (
            "8-bit layers (bitsandbytes) look for outliers in the values of their inputs, which fake "
            "tensors do not have"
        )
    if recipe.method.name == "qlora" and recipe.method.use_dora:
        return "DoRA reads the values of 4-bit weights, which fake tensors do not have"
    sharding = sharding_of(recipe)
    if not sharding.traceable:
        able = " and ".join(name for name, other in SHARDINGS.items() if other.traceable)
        return f"sharding {sharding.name} does not run on fake tensors; {able} do"
    return None


def left_out(recipe: Recipe) -> str:
    """Return the setting of a recipe that the dry run ignores, as a sentence; empty if there is none."""
    named = [name for name in ("torch_compile", "use_liger_kernel") if getattr(recipe.training, name)]
    return f"{named[0]} is left out: the trace has the layers as written" if named else ""


def run(
    recipe: Recipe, config: Path, degrees: Degrees, micro_batch: int, profile: Profile | None = None
) -> DryRun:
    """Return bytes of one rank in each phase of training, and by kind at the peak; it takes seconds, of which
    ten are imports.

    It runs in a subprocess, which patches libraries and starts a process group of ranks that do not exist.

    Args:
        config: folder with the base model's config.json.
        degrees: number of processes, and what they divide.
        micro_batch: samples of recipe.data.max_length tokens in one forward pass.
        profile: differences of another framework.

    Raises:
        RecipeError: the recipe has no dry run (see `refusal`), or its model cannot be built from `config`.
    """
    if reason := refusal(recipe):
        raise RecipeError(f"recipe {recipe.name}: no dry run: {reason}; {_WAY_ON}")
    case = Case(
        recipe=recipe,
        config=str(config),
        degrees=degrees,
        micro_batch=micro_batch,
        profile=profile or Profile(),
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "flytune.dryrun"],
        input=case.model_dump_json(),
        capture_output=True,
        text=True,
        env=os.environ | VARIABLES,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise RecipeError(
            f"recipe {recipe.name}: no dry run of the model in {config}: {last[:300]}; {_WAY_ON}"
        )
    answer = DryRun.parse(done.stdout)
    return answer.model_copy(update={"seconds": time.monotonic() - started})
