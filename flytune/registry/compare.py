"""Champion and challenger: two stored models on the same held-out tokens, paired by sample."""

from pathlib import Path
from typing import Any

from flytune.artifacts import fetch
from flytune.data.heldout import heldout_rows
from flytune.errors import DataError
from flytune.evaluation import score
from flytune.export.folder import trained_folder
from flytune.models import loading
from flytune.models.scoring import Row, bootstrap, finite_loss
from flytune.recipe.recipe import Recipe
from flytune.records.metrics import Metrics
from flytune.registry.history import Duel


def duel(recipe: Recipe, challenger: Path, dataset: Path, champion: str) -> Duel:
    """Holds two artifacts against each other; one model is in memory at a time, each loaded as its own recipe says.

    Args:
        recipe: its evaluation section says how many samples are scored.
        challenger: its artifact, on this machine's disk.
        dataset: the challenger's prepared data; its held-out part is what both are asked.
        champion: the folder or address of its artifact.

    Raises:
        DataError: the two have different vocabularies, so that their losses are not of the same tokens.
        ExportError: one is not whole, or does not load.
    """
    return score.in_subprocess(_duel, recipe, challenger, dataset, fetch.fetched(champion), champion)


def against_base(metrics: Metrics) -> Duel:
    """Where there is no champion: the challenger against its base model, as its own evaluation has it."""
    return Duel(
        against="base",
        champion=metrics.base.loss,
        challenger=metrics.tuned.loss,
        difference=metrics.loss_difference,
        difference_low=metrics.loss_difference_low,
        difference_high=metrics.loss_difference_high,
        samples=metrics.samples,
        tokens=metrics.tokens,
    )


def _duel(recipe: Recipe, challenger: Path, dataset: Path, champion: Path, against: str) -> Duel:
    import numpy

    loading.quiet()
    recipes = [Recipe.from_yaml(folder / "recipe.yaml") for folder in (champion, challenger)]
    if _vocabulary(trained_folder(recipes[0], champion)) != _vocabulary(trained_folder(recipes[1], challenger)):
        raise DataError(
            f"{against}: its tokenizer has another vocabulary than the challenger's: their losses are of different tokens and "
            "cannot be compared; keep the accepted models of different bases at different addresses"
        )
    rows = heldout_rows(dataset, recipe.evaluation.max_samples)
    old, tokens = _losses(recipes[0], champion, rows, recipe.evaluation.batch_size, "champion")
    new, _ = _losses(recipes[1], challenger, rows, recipe.evaluation.batch_size, "challenger")
    points, lows, highs = bootstrap(numpy.stack([old, new, new - old], axis=1), tokens)
    return Duel(
        against=against,
        champion=points[0],
        challenger=points[1],
        difference=points[2],
        difference_low=lows[2],
        difference_high=highs[2],
        samples=len(rows),
        tokens=int(tokens.sum()),
    )


def _losses(recipe: Recipe, folder: Path, rows: list[Row], batch_size: int, label: str) -> tuple[Any, Any]:
    # Padding is masked: any token will do.
    return finite_loss(score.tuned_model(recipe, folder), rows, 0, batch_size, label)


def _vocabulary(folder: Path) -> dict[str, int]:
    from transformers import AutoTokenizer

    return dict(AutoTokenizer.from_pretrained(str(folder)).get_vocab())
