"""Held-out loss and perplexity of base and tuned model on the same tokens, and their answers side by side.

The tuned model is loaded from the exported files, in a task of its own: the live model is not measured.
"""

import gc
import math
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune.console import step_lines
from flytune.data import heldout_rows, heldout_sources
from flytune.errors import DataError, ExportError
from flytune.evaluation import breakdown
from flytune.evaluation.preferences import preference, preference_of_labels
from flytune.evaluation.rewards import reward_metrics
from flytune.evaluation.sample_answers import Questions
from flytune.export import gate
from flytune.models import Generation, bootstrap, clean_process, finite_loss, loading
from flytune.models import generation as models_generation
from flytune.models.scoring import sequences_of
from flytune.recipe import Recipe
from flytune.records import Metrics, Score


def score_in_subprocess(recipe: Recipe, trained: Path, dataset: Path) -> Metrics:
    """Run `score` in a process without leftovers of training."""
    return clean_process.run(score, recipe, trained, dataset)


def score(recipe: Recipe, trained: Path, dataset: Path) -> Metrics:
    """Score base and tuned model on the first `evaluation.max_samples` held-out samples of `dataset`.

    The gate checks the export first. An adapter's base is loaded once and scored with the adapter switched off. Of pairs both
    answers are scored; losses and answers are those of the chosen ones, and of labelled answers those of the desirable ones. Of
    a reward model the pairs' rewards are scored.

    Raises:
        DataError: the data set is incomplete, or has no held-out token to score.
        ExportError: `trained` is incomplete, is not what was trained, or cannot be loaded; or a loss is not finite.
    """
    import numpy

    started = time.perf_counter()
    rows = heldout_rows(dataset, recipe.evaluation.max_samples)
    loading.import_libraries()
    model = gate.check(recipe, trained, dataset, rows, lambda: tuned_model(recipe, trained))
    if recipe.objective.is_reward_model:
        return reward_metrics(recipe, model, rows, _tokenizer(dataset).pad_token_id, started)
    # Chosen or desirable answers come first; all others only show what is preferred.
    sources, desirable = heldout_sources(dataset, len(rows)), sum(row.get("label", 0) for row in rows)
    first = desirable or len(rows)
    if desirable:
        sources = [sources[place] for place in sorted(range(len(rows)), key=lambda place: -rows[place]["label"])]
    questions = Questions.of(recipe.evaluation, sequences_of(rows), _tokenizer(dataset), first)
    tuned = _measure(model, questions, "tuned model")
    if recipe.method.name == "full":
        # One model in memory at a time.
        del model
        gc.collect()
        base = _measure(base_model(recipe), questions, "base model")
    else:
        with model.disable_adapter():
            base = _measure(model, questions, "base model")

    preferred = None
    if len(questions.rows) > len(rows):
        preferred = preference(base.nll, tuned.nll, recipe.objective.beta)
    elif 0 < desirable < len(rows):
        preferred = preference_of_labels(base.nll, tuned.nll, base.tokens, desirable, recipe.objective.beta)
    base, tuned = base.first(first), tuned.first(first)
    tokens = base.tokens
    points, lows, highs = bootstrap(numpy.stack([base.nll, tuned.nll, tuned.nll - base.nll], axis=1), tokens)
    answers = questions.side_by_side(base.answers, tuned.answers)
    step_lines.show(f"held-out loss  base {step_lines.number(points[0])}  tuned {step_lines.number(points[1])}")
    if preferred:
        step_lines.show(
            f"held-out pairs  chosen preferred by base {preferred.base:.0%}  by tuned {preferred.tuned:.0%}  "
            f"reward accuracy {preferred.accuracy:.0%}  margin {step_lines.number(preferred.margin)}"
        )
    return Metrics(
        base=_score(points[0], lows[0], highs[0]),
        tuned=_score(points[1], lows[1], highs[1]),
        loss_difference=points[2],
        loss_difference_low=lows[2],
        loss_difference_high=highs[2],
        samples=first,
        tokens=int(tokens.sum()),
        loaded_as=recipe.method.quantized.removesuffix("_double") if recipe.method.name == "qlora" else recipe.model.dtype,
        answers=answers,
        parts=breakdown.parts(questions.rows[:first], sources[:first], base.nll, tuned.nll, tokens),
        sample_wins=breakdown.wins(tuned.nll - base.nll),
        answer_wins=breakdown.answer_wins(answers) if answers else None,
        preference=preferred,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class _Measured:
    nll: Any
    """Negative log-likelihood of each row, summed over its scored tokens, in nats."""
    tokens: Any
    """Number of scored tokens of each row."""
    answers: list[models_generation.Answer]

    def first(self, rows: int) -> "_Measured":
        return _Measured(self.nll[:rows], self.tokens[:rows], self.answers)


def _measure(model: Any, questions: Questions, label: str) -> _Measured:
    section = questions.section
    nll, tokens = finite_loss(model, questions.rows, questions.pad, section.batch_size, label)
    prompts = [prompt for prompt, _ in questions.prompts]
    generation = Generation(max_new_tokens=section.max_new_tokens, batch_size=section.batch_size)
    with tqdm(total=len(prompts), desc=f"{label}: answers", delay=2) as bar:
        answers = models_generation.answer(model, questions.tokenizer, prompts, generation, questions.ends, bar)
    return _Measured(nll, tokens, answers)


def base_model(recipe: Recipe) -> Any:
    """Load the base model as it was published.

    Raises:
        ExportError: it cannot be loaded.
    """
    try:
        return loading.base_model(recipe, recipe.model.dtype, device_map=loading.device_map())
    except (OSError, ValueError, RuntimeError) as error:
        raise ExportError(f"base model {recipe.model.name_or_path}: cannot be loaded: {_line(error)}") from error


def tuned_model(recipe: Recipe, trained: Path) -> Any:
    """Load the exported model; for lora and qlora, the base model with the adapter.

    Raises:
        ExportError: it cannot be loaded.
    """
    from safetensors import SafetensorError

    # Free an earlier model first.
    gc.collect()
    try:
        with warnings.catch_warnings():
            # Otherwise an adapter's missing tensor keeps its random initial value.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return loading.exported_model(recipe, trained, device_map=loading.device_map())
    except (UserWarning, OSError, ValueError, RuntimeError, SafetensorError) as error:
        what = "tuned model" if recipe.method.name == "full" else f"adapter on base model {recipe.model.name_or_path}"
        raise ExportError(f"{trained}: {what}: cannot be loaded: {_line(error)}") from error


def _tokenizer(dataset: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(dataset / "tokenizer"), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{dataset}: its tokenizer cannot be read ({_line(error)}); prepare the data again") from None


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


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
