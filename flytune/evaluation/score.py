"""Figures of base and tuned model on the same held-out samples, and their answers side by side.

The tuned model is loaded from the exported files, in a task of its own: the live model is not measured.
"""

import gc
import logging
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune.console import output, step_lines
from flytune.data import contract, heldout_rows, heldout_sources, stored_tokenizer
from flytune.errors import ExportError
from flytune.evaluation import breakdown, expert_load
from flytune.evaluation.drawn_answers import DrawnRewards, Judge
from flytune.evaluation.preferences import HeldoutFigures, intervals, of_labelled, of_pairs, of_rewards
from flytune.evaluation.sample_answers import Questions
from flytune.export import gate
from flytune.models import Generation, Row, clean_process, finite_loss, loading
from flytune.models import generation as models_generation
from flytune.models.library_errors import named
from flytune.models.scoring import samples_sha256, sequences_of
from flytune.objectives import objective_of
from flytune.recipe import Recipe
from flytune.records import Interval, MeasuredFigure, Metrics, SampleScores, Score
from flytune.records.metrics import SINGLE_SAMPLE

log = logging.getLogger(__name__)
SHOWN = 3
"""Number of figures, the most important ones, of which a line is printed."""


def score_in_subprocess(recipe: Recipe, trained: Path, dataset: Path) -> Metrics:
    """Run `score` in a process without leftovers of training."""
    return clean_process.run(score, recipe, trained, dataset)


def score(recipe: Recipe, trained: Path, dataset: Path) -> Metrics:
    """Score base and tuned model on the first `evaluation.max_samples` held-out samples of `dataset`.

    The gate checks the export first. An adapter's base is loaded once and scored with the adapter switched off. Of pairs both
    answers are scored; sample answers are those of the chosen ones, and of labelled answers those of the desirable ones. Of
    a reward model the pairs' rewards are scored. Without held-out samples there are no figures.

    Raises:
        DataError: the data set is incomplete, or has no held-out token to score.
        ExportError: `trained` is incomplete, is not what was trained, or cannot be loaded; or a loss is not finite.
    """
    output.install()
    started = time.perf_counter()
    rows = heldout_rows(dataset, recipe.evaluation.max_samples)
    loading.import_libraries(*(() if recipe.method.name == "full" else ("peft",)))
    model = gate.check(recipe, trained, dataset, rows, lambda: tuned_model(recipe, trained))
    stored_contract = contract.stored(dataset)
    doubts = stored_contract.doubts if stored_contract else []
    made = {"samples": len(rows), "doubts": doubts, "loaded_as": _loaded_as(recipe), "answers": []}
    if recipe.method.experts:
        made["untrained_experts"] = expert_load.untrained(model)
    if not rows:
        return Metrics.model_validate(made | {"figures": [], "tokens": 0, "seconds": time.perf_counter() - started})
    found, other = _MEASURES[recipe.objective.head](recipe, trained, dataset, model, rows)
    made |= other
    figures = _figures(recipe, found)
    for figure in figures[:SHOWN]:
        step_lines.show(step_lines.format_figure(figure))
    for doubt in [*doubts, *([SINGLE_SAMPLE] if len(rows) == 1 else [])]:
        step_lines.show(f"held-out figures are doubtful: {doubt}")
    scores = SampleScores(
        samples_sha256=samples_sha256(rows),
        weights=found.weights.tolist(),
        scores={name: [float(value) for value in values] for name, values in found.scores.items()},
    )
    measured = made | {"figures": figures, "scores": scores, "seconds": time.perf_counter() - started}
    metrics = Metrics.model_validate(measured)
    if metrics.untrained_warning:
        log.warning("%s: %s", recipe.name, metrics.untrained_warning)
    return metrics


def _figures(recipe: Recipe, found: HeldoutFigures) -> list[MeasuredFigure]:
    """Return the objective's figures that were measured, in its order."""
    return [
        figure.measured(found.figures[figure.name])
        for figure in objective_of(recipe).figures(recipe)
        if figure.name in found.figures
    ]


def _reward_figures(
    recipe: Recipe, trained: Path, dataset: Path, model: Any, rows: list[Row]
) -> tuple[HeldoutFigures, dict[str, Any]]:
    """Return the figures of a reward model, and the other fields of its Metrics."""
    sequences = sequences_of(rows)
    found = of_rewards(recipe, model, sequences, stored_tokenizer(dataset).pad_token_id)
    return found, {"tokens": sum(len(one["input_ids"]) for one in sequences)}


def _language_figures(
    recipe: Recipe, trained: Path, dataset: Path, model: Any, rows: list[Row]
) -> tuple[HeldoutFigures, dict[str, Any]]:
    """Return the figures of a language model, and the other fields of its Metrics."""
    # Chosen or desirable answers come first; all others only show what is preferred.
    sources, desirable = heldout_sources(dataset, len(rows)), sum(row.get("label", 0) for row in rows)
    first = desirable or len(rows)
    if desirable:
        sources = [sources[place] for place in sorted(range(len(rows)), key=lambda place: -rows[place]["label"])]
    questions = Questions.of(recipe.evaluation, sequences_of(rows), stored_tokenizer(dataset), first)
    judge = Judge(recipe, rows, questions.tokenizer) if recipe.objective.judged_by is not None else None
    tuned = _measure(model, questions, "tuned model", judge)
    if recipe.method.name == "full":
        # One model in memory at a time.
        del model
        gc.collect()
        base = _measure(base_model(recipe), questions, "base model", judge)
    else:
        with model.disable_adapter():
            base = _measure(model, questions, "base model", judge)

    found, answers_of = HeldoutFigures({}, base.tokens, {}), ""
    if judge is not None:
        assert base.rewards is not None
        assert tuned.rewards is not None
        found, answers_of = judge.figures(base.rewards, tuned.rewards), "reference_"
    elif len(questions.rows) > len(rows):
        found, answers_of = of_pairs(base.nll, tuned.nll, recipe.objective.reward_scale), "chosen_"
    elif "label" in rows[0]:
        answers_of = "desirable_" if desirable else "undesirable_"
        if 0 < desirable < len(rows):
            found = of_labelled(base.nll, tuned.nll, base.tokens, desirable, recipe.objective.reward_scale)
    labels = breakdown.of_labels(base.nll, tuned.nll, base.tokens, desirable)
    left_out = {"undesirable answers": len(rows) - first}
    base, tuned = base.first(first), tuned.first(first)
    left_out["samples without a trained token"] = int((base.tokens == 0).sum())
    losses = {"base": base.nll, "tuned": tuned.nll, "difference": tuned.nll - base.nll}
    has_tokens = bool(base.tokens.any())  # prompts need not have reference answers
    if has_tokens:
        loss = intervals(losses, base.tokens)
        perplexity = {side: _exp(loss[side]) for side in ("base", "tuned")}
        found.figures.update({f"{answers_of}perplexity": perplexity, f"{answers_of}loss": loss})
    answers = questions.side_by_side(base.answers, tuned.answers)
    comparable = [answer for answer in answers if answer.reference]
    other = {
        "tokens": int(base.tokens.sum()),
        "answers": answers,
        "left_out": {what: count for what, count in left_out.items() if count},
        "parts": [*labels, *breakdown.parts(questions.rows[:first], sources[:first], base.nll, tuned.nll, base.tokens)],
        "sample_wins": breakdown.wins(losses["difference"]) if has_tokens else None,
        "answer_wins": breakdown.answer_wins(comparable) if comparable else None,
        "expert_loads": expert_load.loads(base.expert_tokens, tuned.expert_tokens),
    }
    if not answers_of:
        found = found._replace(weights=base.tokens, scores={"loss": tuned.nll})
        difference = loss["difference"]
        other |= {side: _score(*_ends(loss[side])) for side in ("base", "tuned")}
        other |= dict(zip(("loss_difference", "loss_difference_low", "loss_difference_high"), _ends(difference), strict=True))
    return found, other


_MEASURES = {"language_model": _language_figures, "scalar": _reward_figures}
"""Functions that measure a model, by its head (flytune.models.heads)."""


def _ends(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high


def _exp(loss: Interval) -> Interval:
    value, low, high = map(_perplexity, _ends(loss))
    return Interval(value=value, low=low, high=high)


def _loaded_as(recipe: Recipe) -> str:
    return recipe.method.quantized.removesuffix("_double") if recipe.method.name == "qlora" else recipe.model.dtype


@dataclass(frozen=True)
class _Measured:
    nll: Any
    """Negative log-likelihood of each row, summed over its scored tokens, in nats."""
    tokens: Any
    """Number of scored tokens of each row."""
    answers: list[models_generation.GeneratedAnswer]
    expert_tokens: dict[str, Any]
    """Tokens of each expert, by the module that has the experts."""
    rewards: DrawnRewards | None = None
    """Rewards of the answers to prompts; None of other kinds of rows."""

    def first(self, rows: int) -> "_Measured":
        return replace(self, nll=self.nll[:rows], tokens=self.tokens[:rows])


def _measure(model: Any, questions: Questions, label: str, judge: Judge | None = None) -> _Measured:
    section = questions.section
    with expert_load.counting(model) as expert_tokens:
        nll, tokens = finite_loss(model, questions.rows, questions.pad, section.batch_size, label)
    prompts = [prompt for prompt, _ in questions.prompts]
    generation = Generation(max_new_tokens=section.max_new_tokens, batch_size=section.batch_size)
    with tqdm(total=len(prompts), desc=f"{label}: answers", delay=2) as bar:
        answers = models_generation.answer(model, questions.tokenizer, prompts, generation, questions.ends, bar)
    rewards = judge.rewards(model, f"{label}: rewards") if judge else None
    return _Measured(nll, tokens, answers, expert_tokens, rewards)


def base_model(recipe: Recipe) -> Any:
    """Load the base model as it was published.

    Raises:
        ExportError: it cannot be loaded.
    """
    with named(f"base model {recipe.model.name_or_path}: cannot be loaded", ExportError):
        return loading.base_model(recipe, recipe.model.dtype, device_map=loading.device_map())


def tuned_model(recipe: Recipe, trained: Path) -> Any:
    """Load the exported model; for lora and qlora, the base model with the adapter.

    Raises:
        ExportError: it cannot be loaded.
    """
    # Free an earlier model first.
    gc.collect()
    what = "tuned model" if recipe.method.name == "full" else f"adapter on base model {recipe.model.name_or_path}"
    with named(f"{trained}: {what}: cannot be loaded", ExportError):
        return loading.exported_model(recipe, trained, device_map=loading.device_map())


def _score(loss: float, low: float, high: float) -> Score:
    perplexities = [_perplexity(value) for value in (loss, low, high)]
    return Score(
        loss=loss,
        loss_low=low,
        loss_high=high,
        perplexity=perplexities[0],
        perplexity_low=perplexities[1],
        perplexity_high=perplexities[2],
    )


def _perplexity(loss: float) -> float:
    """Return exp(loss), at most the largest float: JSON has no infinity."""
    try:
        return math.exp(loss)
    except OverflowError:
        return sys.float_info.max
