"""Base and tuned language model on the same held-out rows: their losses, their answers, and the objective's
own figures."""

import gc
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune.errors import ExportError
from flytune.evaluation import breakdown, expert_load
from flytune.evaluation.sample_answers import Questions
from flytune.models import Generation, adapter_files, finite_loss, generation, initial_adapter, loading
from flytune.models.library_errors import named
from flytune.objectives.heldout import HeldoutFigures, HeldoutRows, ModelScores, Sides, intervals
from flytune.recipe import Recipe
from flytune.records import Interval


class BothModels:
    """The tuned model and its base, of which only one is in memory at a time where they have no weights in
    common."""

    def __init__(self, recipe: Recipe, tuned: Any) -> None:
        self._recipe, self.tuned = recipe, tuned

    @contextmanager
    def base(self) -> Iterator[Any]:
        """Yield the base model: the tuned one with its adapter switched off; without an adapter `tuned` is
        gone then."""
        if self._recipe.method.name == "full":
            self.tuned = None
            gc.collect()
            yield base_model(self._recipe)
            return
        with self.tuned.disable_adapter():
            yield self.tuned

    @contextmanager
    def start(self) -> Iterator[Any]:
        """Yield the model that training began from: the base with the adapter of method.adapter, which takes
        the place of the tuned one meanwhile.

        Raises:
            TrainingError: it cannot be read.
        """
        import torch

        parameters = adapter_files.trained(self.tuned)
        tuned = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        try:
            initial_adapter.load_weights(self.tuned, self._recipe.method)
            yield self.tuned
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(tuned[name])


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
    adapted = f"adapter on base model {recipe.model.name_or_path}"
    what = "tuned model" if recipe.method.name == "full" else adapted
    with named(f"{trained}: {what}: cannot be loaded", ExportError):
        return loading.exported_model(recipe, trained, device_map=loading.device_map())


@dataclass(frozen=True)
class _Measured:
    """Losses and answers of one model on the held-out rows."""

    scores: ModelScores
    answers: list[generation.GeneratedAnswer]
    expert_tokens: dict[str, Any]
    """Tokens of each expert, by the module that has the experts."""


def compare(
    models: BothModels, heldout: HeldoutRows, sources: list[str]
) -> tuple[HeldoutFigures, dict[str, Any]]:
    """Return the figures of both models, and other fields of Metrics by their names.

    Args:
        sources: name of each row's source.
    """
    described = heldout.described
    questions = Questions.of(heldout.recipe.evaluation, heldout.sequences, heldout.tokenizer, described)
    of_tuned = _measure(models.tuned, heldout, questions, "tuned model")
    with models.base() as base_model_alone:
        of_base = _measure(base_model_alone, heldout, questions, "base model")
    base, tuned = of_base.scores, of_tuned.scores
    if heldout.has_reference and heldout.recipe.method.adapter:
        with models.start() as start:
            nll, _ = finite_loss(
                start, questions.rows, questions.pad, questions.section.batch_size, "reference model"
            )
        base = base._replace(reference=nll)
    figures = heldout.figures(base, tuned)
    base_nll = base.nll[:described]
    tuned_nll = tuned.nll[:described]
    tokens = base.tokens[:described]
    has_tokens = bool(tokens.any())  # prompts need not have reference answers
    if has_tokens:
        figures.figures.update(_losses(base_nll, tuned_nll, tokens, heldout.answers))
    answers = questions.side_by_side(of_base.answers, of_tuned.answers)
    comparable = [answer for answer in answers if answer.reference]
    left_out = heldout.left_out() | {"samples without a trained token": int((tokens == 0).sum())}
    by_label = breakdown.of_labels(base.nll, tuned.nll, base.tokens, heldout.desirable)
    by_source = breakdown.parts(
        heldout.sequences[:described], heldout.by_sequence(sources), base_nll, tuned_nll, tokens
    )
    return figures, {
        "tokens": int(tokens.sum()),
        "answers": answers,
        "left_out": {what: count for what, count in left_out.items() if count},
        "parts": [*by_label, *by_source],
        "sample_wins": breakdown.wins(tuned_nll - base_nll) if has_tokens else None,
        "answer_wins": breakdown.answer_wins(comparable) if comparable else None,
        "expert_loads": expert_load.loads(of_base.expert_tokens, of_tuned.expert_tokens),
    }


def _measure(model: Any, heldout: HeldoutRows, questions: Questions, label: str) -> _Measured:
    section = questions.section
    with expert_load.counting(model) as expert_tokens:
        nll, tokens = finite_loss(model, questions.rows, questions.pad, section.batch_size, label)
    prompts = [prompt for prompt, _ in questions.prompts]
    settings = Generation(max_new_tokens=section.max_new_tokens, batch_size=section.batch_size)
    with tqdm(total=len(prompts), desc=f"{label}: answers", delay=2) as bar:
        answers = generation.answer(
            model, questions.tokenizer, prompts, settings, questions.ends, bar, rows=questions.asked
        )
    return _Measured(ModelScores(nll, tokens, heldout.own_scores(model, label)), answers, expert_tokens)


def _losses(base: Any, tuned: Any, tokens: Any, answers: str) -> dict[str, Sides]:
    """Return loss and perplexity of a token, as figures of the kind of answers that `answers` names."""
    loss = intervals({"base": base, "tuned": tuned, "difference": tuned - base}, tokens)
    perplexity = {side: _perplexity(loss[side]) for side in ("base", "tuned")}
    prefix = f"{answers}_" if answers else ""
    return {f"{prefix}perplexity": perplexity, f"{prefix}loss": loss}


def _perplexity(loss: Interval) -> Interval:
    return Interval(value=_exp(loss.value), low=_exp(loss.low), high=_exp(loss.high))


def _exp(loss: float) -> float:
    """Return exp(loss), at most the largest float: JSON has no infinity."""
    try:
        return math.exp(loss)
    except OverflowError:
        return sys.float_info.max
