"""Rewards of the answers that a model draws to held-out prompts: the most probable one, and several drawn
ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from flytune.data.rows.prompts import prompt_length, stored_prompt
from flytune.models import Row
from flytune.objectives.heldout import HeldoutFigures, HeldoutRows, ModelScores, exact, intervals
from flytune.objectives.rollout_steps import drawing_of, judged, most_tokens, text_of
from flytune.recipe import Grpo, Recipe
from flytune.rewards import RewardProcess
from flytune.rollouts import Completion, draw, numbers

_SAME = 1e-6
"""Difference of rewards that counts as none."""


class DrawnRewards(NamedTuple):
    """Rewards of one model's answers to the held-out prompts."""

    greedy: Any
    """Reward of the most probable answer: float64 (prompts,)."""
    drawn: Any
    """Rewards of the drawn answers: float64 (prompts, answers)."""


class PromptRows(HeldoutRows):
    """Prompts: both models' answers, drawn with the same random numbers, are judged; reference answers
    describe a model."""

    answers = "reference"

    def __init__(self, recipe: Recipe, rows: Sequence[Row], tokenizer: Any) -> None:
        super().__init__(recipe, rows, tokenizer)
        assert isinstance(recipe.objective, Grpo)
        self._section = recipe.objective

    def own_scores(self, model: Any, label: str) -> DrawnRewards:
        """Return the rewards of a model's answers."""
        import numpy

        answers, scores = self._section.eval_answers, list[list[float]]()
        total = len(self.rows) * (1 + answers)
        with (
            RewardProcess(self._section) as process,
            tqdm(total=total, desc=f"{label}: rewards", delay=2) as bar,
        ):
            for index in range(-1, answers):
                texts = self._texts(model, index, bar)
                items = [
                    judged(row, text, "a held-out row") for row, text in zip(self.rows, texts, strict=True)
                ]
                scores.append([self._section.total(values) for values in process.values(items)])
        rewards = numpy.asarray(scores).T
        return DrawnRewards(rewards[:, 0], rewards[:, 1:])

    def _texts(self, model: Any, index: int, bar: Any) -> list[str]:
        """Return an answer to each prompt: the most probable ones with index -1."""
        temperature = 0.0 if index < 0 else self._section.temperature
        drawing = drawing_of(self.tokenizer, model, temperature, self._section)
        completions, size = list[Completion](), self.recipe.evaluation.batch_size
        prompts = [row["input_ids"][: prompt_length(row)] for row in self.rows]
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            uniforms = [
                numbers(self.recipe.training.seed, 0, prompt, index, most_tokens(self.recipe, prompt))
                for prompt in batch
            ]
            completions += draw(model, batch, uniforms, drawing)
            bar.update(len(batch))
        return [text_of(self.tokenizer, completion) for completion in completions]

    def figures(self, base: ModelScores, tuned: ModelScores) -> HeldoutFigures:
        """Return the figures of both models, paired by prompt."""
        import numpy

        references = [stored_prompt(row).reference for row in self.rows]
        places = [place for place, reference in enumerate(references) if reference is not None]
        with RewardProcess(self._section) as process:
            items = [judged(self.rows[place], str(references[place]), "a held-out row") for place in places]
            full = numpy.asarray([self._section.total(values) for values in process.values(items)])
        sides: dict[str, DrawnRewards] = {"base": base.own, "tuned": tuned.own}
        values = {"reward": {side: side_values.greedy for side, side_values in sides.items()}}
        if self._section.eval_answers and places:
            passed = {
                side: side_values.drawn[places] >= full[:, None] - _SAME
                for side, side_values in sides.items()
            }
            values["pass_at_1"] = {side: side_values.mean(axis=1) for side, side_values in passed.items()}
            values["pass_at_k"] = {
                side: side_values.any(axis=1).astype(float) for side, side_values in passed.items()
            }
            values = {
                name: both
                for name, both in values.items()
                if name != "pass_at_k" or self._section.eval_answers > 1
            }
        figures = {}
        for name, both in values.items():
            samples = len(both["tuned"])
            by_side = intervals(
                both | {"difference": both["tuned"] - both["base"]}, numpy.ones(samples, dtype=int)
            )
            is_share = name != "reward"
            figures[name] = {
                side: exact(side_values, samples) if is_share and side != "difference" else side_values
                for side, side_values in by_side.items()
            }
        return HeldoutFigures(
            figures, numpy.ones(len(self.rows), dtype=int), {"reward": sides["tuned"].greedy}
        )
