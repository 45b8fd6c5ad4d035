"""Shipped recipes, and the content of a minimal one."""

from tests.support.paths import ROOT

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def content(**changes):
    recipe = {
        "name": "r",
        "model": {"name_or_path": "owner/name"},
        "data": {"path": "x.jsonl"},
        "method": "full",
        "sharding": "none",
        "training": {"learning_rate": "2e-4", "global_batch_size": 8},
    }
    return recipe | changes
