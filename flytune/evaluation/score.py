"""Figures of base and tuned model on the same held-out samples, and their answers side by side.

The tuned model is loaded from the exported files, in a task of its own: the live model is not measured.
"""

import logging
import time
from pathlib import Path
from typing import Any

from flytune.console import output, step_lines
from flytune.data import contract, heldout_rows, heldout_sources, stored_tokenizer
from flytune.evaluation import expert_load
from flytune.evaluation.language_models import BothModels, compare, tuned_model
from flytune.export import gate
from flytune.models import Row, clean_process, heads, loading
from flytune.models.scoring import samples_sha256
from flytune.objectives import objective_of
from flytune.objectives.heldout import HeldoutFigures, Sides
from flytune.recipe import Recipe
from flytune.records import Metrics, SampleScores, Score
from flytune.records.metrics import SINGLE_SAMPLE

log = logging.getLogger(__name__)
SHOWN = 3
"""Number of figures, the most important ones, of which a line is printed."""


def score_in_subprocess(recipe: Recipe, trained: Path, dataset: Path) -> Metrics:
    """Run `score` in a process without leftovers of training."""
    return clean_process.run(score, recipe, trained, dataset)


def score(recipe: Recipe, trained: Path, dataset: Path) -> Metrics:
    """Score base and tuned model on the first `evaluation.max_samples` held-out samples of `dataset`.

    The gate checks the export first. An adapter's base is loaded once and scored with the adapter switched
    off. What is scored of a row is up to the objective (HeldoutRows). Without held-out samples there are no
    figures.

    Raises:
        DataError: the data set is incomplete, or has no held-out token to score.
        ExportError: `trained` is incomplete, is not what was trained, or cannot be loaded; or a loss is not
            finite.
    """
    output.install()
    started = time.perf_counter()
    rows = heldout_rows(dataset, recipe.evaluation.max_samples)
    loading.import_libraries(*(() if recipe.method.name == "full" else ("peft",)))
    models = BothModels(
        recipe, gate.check(recipe, trained, dataset, rows, lambda: tuned_model(recipe, trained))
    )
    stored_contract = contract.stored(dataset)
    doubts = stored_contract.doubts if stored_contract else []
    fields = {
        "samples": len(rows),
        "doubts": doubts,
        "loaded_as": _loaded_as(recipe),
        "answers": [],
        "tokens": 0,
    }
    if recipe.method.experts:
        fields["untrained_experts"] = expert_load.untrained(models.tuned)
    if rows:
        fields |= _measured(recipe, dataset, models, rows)
        for doubt in [*doubts, *([SINGLE_SAMPLE] if len(rows) == 1 else [])]:
            step_lines.show(f"held-out figures are doubtful: {doubt}")
    metrics = Metrics.model_validate({"figures": []} | fields | {"seconds": time.perf_counter() - started})
    if rows and metrics.untrained_warning:
        log.warning("%s: %s", recipe.name, metrics.untrained_warning)
    return metrics


def _measured(recipe: Recipe, dataset: Path, models: BothModels, rows: list[Row]) -> dict[str, Any]:
    """Return the fields of Metrics that are measured on held-out rows, and print the most important
    figures."""
    objective = objective_of(recipe)
    heldout = objective.heldout_rows(recipe, rows, stored_tokenizer(dataset))
    if heads.head_of(recipe).no_words:
        heldout_figures = heldout.of_both(models)
        fields: dict[str, Any] = {"tokens": sum(len(sequence["input_ids"]) for sequence in heldout.sequences)}
    else:
        heldout_figures, fields = compare(models, heldout, heldout_sources(dataset, len(rows)))
    figures = [
        figure.model_copy(
            update={"neutral": heldout_figures.neutral.get(figure.name, figure.neutral)}
        ).measured(heldout_figures.figures[figure.name])
        for figure in objective.figures()
        if figure.name in heldout_figures.figures
    ]
    for figure in figures[:SHOWN]:
        step_lines.show(step_lines.format_figure(figure))
    scores = SampleScores(
        samples_sha256=samples_sha256(rows),
        weights=heldout_figures.weights.tolist(),
        scores={name: [float(value) for value in values] for name, values in heldout_figures.scores.items()},
    )
    return (
        fields
        | dict(heldout_figures.fields)
        | _scores_of_both(heldout_figures)
        | {"figures": figures, "scores": scores}
    )


def _scores_of_both(heldout_figures: HeldoutFigures) -> dict[str, Any]:
    """Return the fields of Metrics that repeat the tokens' loss of both models, where the objective aims at
    it."""
    loss, perplexity = heldout_figures.figures.get("loss", {}), heldout_figures.figures.get("perplexity", {})
    if "base" not in loss or "base" not in perplexity:
        return {}
    difference = loss["difference"]
    return {
        **{side: _score(side, loss, perplexity) for side in ("base", "tuned")},
        "loss_difference": difference.value,
        "loss_difference_low": difference.low,
        "loss_difference_high": difference.high,
    }


def _score(side: str, loss: Sides, perplexity: Sides) -> Score:
    return Score(
        loss=loss[side].value,
        loss_low=loss[side].low,
        loss_high=loss[side].high,
        perplexity=perplexity[side].value,
        perplexity_low=perplexity[side].low,
        perplexity_high=perplexity[side].high,
    )


def _loaded_as(recipe: Recipe) -> str:
    return (
        recipe.method.quantized.removesuffix("_double")
        if recipe.method.name == "qlora"
        else recipe.model.dtype
    )
