"""Comparison of champion and challenger: two stored models on the same held-out tokens, paired by sample."""

from pathlib import Path
from typing import Any

from flytune.artifacts import fetch, opening
from flytune.console import output
from flytune.data import heldout_rows
from flytune.errors import DataError
from flytune.evaluation import language_models
from flytune.export import trained_folder
from flytune.models import Row, bootstrap, clean_process, finite_loss, loading, tokenizers
from flytune.recipe import Recipe
from flytune.records import Figure, Metrics
from flytune.records.figures import LOSS
from flytune.registry.history import ModelComparison


def compare_artifacts(recipe: Recipe, challenger: Path, dataset: Path, champion: str) -> ModelComparison:
    """Compare two artifacts; one model is in memory at a time, each loaded as its own recipe says.

    Args:
        recipe: the challenger's recipe; its evaluation section limits the number of samples.
        challenger: local folder of the challenger's artifact.
        dataset: the challenger's prepared data; both models are scored on its held-out samples.
        champion: folder or address of the champion's artifact.

    Raises:
        DataError: the vocabularies differ, so the losses are not of the same tokens.
        ExportError: an artifact is incomplete, or does not load.
    """
    return clean_process.run(_compare, recipe, challenger, dataset, fetch.local_folder(champion), champion)


def compare_with_base(metrics: Metrics) -> ModelComparison:
    """Return the comparison of a challenger with its base model, from its evaluation; for when there is no
    champion.

    Raises:
        DataError: the base has no figure of the challenger's objective.
    """
    compared = metrics.compared
    if compared.base is None or compared.difference is None:
        raise DataError(
            f"held-out {compared.title}: the base model has none, so there is nothing to compare the "
            "challenger with; schedule objective: sft"
        )
    return ModelComparison(
        against="base",
        figure=Figure.model_validate({name: getattr(compared, name) for name in Figure.model_fields}),
        champion=compared.base.value,
        challenger=compared.tuned.value,
        difference=compared.difference.value,
        difference_low=compared.difference.low,
        difference_high=compared.difference.high,
        samples=metrics.samples,
        tokens=metrics.tokens,
    )


def _compare(
    recipe: Recipe, challenger: Path, dataset: Path, champion: Path, against: str
) -> ModelComparison:
    import numpy

    output.install()
    loading.import_libraries()
    # Code of the champion runs if the person's own recipe allows code.
    consent = opening.Consent(recipe.model.trust_remote_code, base_at_address=True)
    recipes = [opening.open_artifact(folder, consent).recipe for folder in (champion, challenger)]
    if _vocabulary(trained_folder(recipes[0], champion)) != _vocabulary(
        trained_folder(recipes[1], challenger)
    ):
        raise DataError(
            f"{against}: its tokenizer has another vocabulary than the challenger's: their losses are of "
            "different tokens and cannot be compared; keep the accepted models of different bases at "
            "different addresses"
        )
    rows = heldout_rows(dataset, recipe.evaluation.max_samples)
    old, tokens = _losses(recipes[0], champion, rows, recipe.evaluation.batch_size, "champion")
    new, _ = _losses(recipes[1], challenger, rows, recipe.evaluation.batch_size, "challenger")
    points, lows, highs = bootstrap(numpy.stack([old, new, new - old], axis=1), tokens)
    return ModelComparison(
        against=against,
        # The only objective that the refresh takes is compared by it.
        figure=LOSS,
        champion=points[0],
        challenger=points[1],
        difference=points[2],
        difference_low=lows[2],
        difference_high=highs[2],
        samples=len(rows),
        tokens=int(tokens.sum()),
    )


def _losses(recipe: Recipe, folder: Path, rows: list[Row], batch_size: int, label: str) -> tuple[Any, Any]:
    # Padding is masked, so any token serves.
    return finite_loss(language_models.tuned_model(recipe, folder), rows, 0, batch_size, label)


def _vocabulary(folder: Path) -> dict[str, int]:
    return dict(tokenizers.load(folder).get_vocab())
