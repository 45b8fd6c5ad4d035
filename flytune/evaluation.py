"""Held-out loss and perplexity of base and tuned model on the same tokens, and their answers side by side.

It runs on the exported files, in a task of its own: what is measured is what will be used, not the live model.
"""

import gc
import math
import multiprocessing
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune import gate, loading
from flytune.errors import DataError, ExportError
from flytune.heldout import IGNORED, Row, bootstrap, heldout_loss, heldout_rows, padded
from flytune.recipe import Recipe
from flytune.records import Answer, Metrics, Score
from flytune.run_sections import Evaluation


def score_afresh(recipe: Recipe, trained: Path, dataset: Path) -> Metrics:
    """`score`, in a process of its own where this one has trained: what training left in it must not answer for the files.

    A pod is such a process already; a local run of one process trains and evaluates in the same one.
    """
    # Only training imports TRL.
    if "trl" not in sys.modules:
        return score(recipe, trained, dataset)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
            return fresh.submit(score, recipe, trained, dataset).result()
    except BrokenProcessPool:
        raise ExportError(
            "the process that evaluates ended without a word: killed for want of host memory, as a rule; nothing was stored"
        ) from None


def score(recipe: Recipe, trained: Path, dataset: Path) -> Metrics:
    """Scores base and tuned model on the first `evaluation.max_samples` held-out samples of `dataset`.

    An adapter's base is loaded once and scored with the adapter switched off.

    Raises:
        DataError: the data set is not whole, or has no held-out token to score.
        ExportError: `trained` is not whole, not what was trained, or does not load; or a loss is not finite.
    """
    import numpy

    started = time.perf_counter()
    rows = heldout_rows(dataset, recipe.evaluation.max_samples)
    loading.quiet()
    gate.check_files(recipe, trained, dataset)
    questions = _Questions.of(recipe.evaluation, rows, _tokenizer(dataset))
    if recipe.method.name == "full":
        # One model in memory at a time.
        base = _measure(_base(recipe), questions, "base model")
        model = _tuned(recipe, trained)
    else:
        model = _tuned(recipe, trained)
        with model.disable_adapter():
            base = _measure(model, questions, "base model")
    tuned = _measure(model, questions, "tuned model")

    gate.check_answers(recipe, trained, model)
    gate.check_loss(recipe, trained, tuned.nll, tuned.tokens)
    tokens = base.tokens
    points, lows, highs = bootstrap(numpy.stack([base.nll, tuned.nll, tuned.nll - base.nll], axis=1), tokens)
    return Metrics(
        base=_score(points[0], lows[0], highs[0]),
        tuned=_score(points[1], lows[1], highs[1]),
        loss_difference=points[2],
        loss_difference_low=lows[2],
        loss_difference_high=highs[2],
        samples=len(rows),
        tokens=int(tokens.sum()),
        loaded_as="nf4" if recipe.method.name == "qlora" else recipe.model.dtype,
        answers=[
            Answer(prompt=questions.text(prompt), reference=questions.text(reference), base=of_base, tuned=of_tuned)
            for (prompt, reference), of_base, of_tuned in zip(questions.prompts, base.answers, tuned.answers, strict=True)
        ],
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class _Questions:
    """What is asked of each model: to rate the held-out rows, and to go on after the prompts."""

    wish: Evaluation
    rows: list[Row]
    tokenizer: Any
    prompts: list[tuple[list[int], list[int]]]
    """Prompt and reference answer."""
    ends: list[int]
    """Tokens that end an answer."""
    pad: int

    @classmethod
    def of(cls, wish: Evaluation, rows: list[Row], tokenizer: Any) -> "_Questions":
        ends = sorted({tokenizer.eos_token_id, *(_end_marker(row, tokenizer) for row in rows)} - {None})
        # Padding is masked in any case; any token will do.
        pad = next(token for token in (tokenizer.pad_token_id, *ends, 0) if token is not None)
        prompts = [_prompt(row, tokenizer) for row in rows[: wish.sample_answers]]
        return cls(wish, rows, tokenizer, prompts, ends, pad)

    def text(self, tokens: list[int]) -> str:
        return _text(self.tokenizer, tokens)


@dataclass(frozen=True)
class _Measured:
    nll: Any
    """Of each row, summed over its scored tokens, in nats."""
    tokens: Any
    """Scored tokens of each row."""
    answers: list[str]


def _measure(model: Any, questions: _Questions, label: str) -> _Measured:
    import numpy

    wish = questions.wish
    nll, tokens = heldout_loss(model, questions.rows, questions.pad, wish.batch_size, f"{label}: loss")
    if bad := numpy.flatnonzero(~numpy.isfinite(nll)).tolist():
        raise ExportError(
            f"{label}: the loss of held-out sample {bad[0]} is {nll[bad[0]]} ({len(bad)} of {len(nll)} are not finite): "
            "its weights have diverged, or overflow in model.dtype; lower training.learning_rate, or use bfloat16"
        )
    answers: list[str] = []
    for start in tqdm(range(0, len(questions.prompts), wish.batch_size), desc=f"{label}: answers", delay=2):
        batch = [prompt for prompt, _ in questions.prompts[start : start + wish.batch_size]]
        answers += [questions.text(answer) for answer in _generate(model, batch, questions)]
    return _Measured(nll, tokens, answers)


def _generate(model: Any, prompts: list[list[int]], questions: _Questions) -> list[list[int]]:
    """Greedy continuations, without what follows an end marker."""
    import torch
    from transformers import GenerationConfig

    # The model's own generation config would sample; a new one keeps nothing of it.
    model.generation_config = GenerationConfig(eos_token_id=questions.ends or None, pad_token_id=questions.pad)
    device = next(model.parameters()).device
    input_ids = padded(prompts, questions.pad, left=True).to(device)
    mask = padded([[1] * len(prompt) for prompt in prompts], 0, left=True).to(device)
    wanted = questions.wish.max_new_tokens
    with torch.no_grad():
        output = model.generate(input_ids=input_ids, attention_mask=mask, do_sample=False, max_new_tokens=wanted)
    answers = output[:, input_ids.shape[1] :].tolist()
    return [answer[: next((at for at, token in enumerate(answer) if token in questions.ends), None)] for answer in answers]


def _prompt(row: Row, tokenizer: Any) -> tuple[list[int], list[int]]:
    """What stands before the first trained token, and the trained run that answers it; halves of a plain text."""
    input_ids, labels = row["input_ids"], row["labels"]
    start = next((at for at, label in enumerate(labels) if label != IGNORED), len(labels))
    if not _text(tokenizer, input_ids[:start]):
        half = max(1, len(input_ids) // 2)
        return input_ids[:half], input_ids[half:]
    end = next((at for at in range(start, len(labels)) if labels[at] == IGNORED), len(labels))
    return input_ids[:start], input_ids[start:end]


def _end_marker(row: Row, tokenizer: Any) -> int | None:
    """The special token that ends a sample's last answer (<|im_end|>), unless the answer was cut off before it."""
    # Templates put a line break after it, which is trained on too.
    for label in reversed(row["labels"]):
        if label != IGNORED and tokenizer.decode([label]).strip():
            return label if label in tokenizer.added_tokens_decoder else None
    return None


def _base(recipe: Recipe) -> Any:
    """The base model as it was published."""
    try:
        return loading.base_model(recipe, recipe.model.dtype, device_map=loading.device_map())
    except (OSError, ValueError, RuntimeError) as error:
        raise ExportError(f"base model {recipe.model.name_or_path}: cannot be loaded: {_line(error)}") from error


def _tuned(recipe: Recipe, trained: Path) -> Any:
    """The exported model; with method lora and qlora, the base model with the adapter on top."""
    from safetensors import SafetensorError

    # What was loaded before goes first.
    gc.collect()
    try:
        with warnings.catch_warnings():
            # Otherwise an adapter's tensor that is not there stays at its random start.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            return loading.exported_model(recipe, trained, device_map=loading.device_map())
    except (UserWarning, OSError, ValueError, RuntimeError, SafetensorError) as error:
        what = "tuned model" if recipe.method.name == "full" else f"adapter on base model {recipe.model.name_or_path}"
        raise ExportError(f"{what}: cannot be loaded: {_line(error)}") from error


def _tokenizer(dataset: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(dataset / "tokenizer"))
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
    """exp(loss), at most the largest float: JSON has no infinity."""
    try:
        return math.exp(loss)
    except OverflowError:
        return sys.float_info.max


def _text(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True)).strip()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
