"""Answers that a student draws to the prompts of the data in the step that trains them, and the teacher's
tokens for them.

Which rows of a step get one follows from the run's seed, the step and the row's place in it; the answer from
the weights, the prompt and random numbers of its own (flytune.rollouts). Drawn answers are in the ledger
before the step trains them, so that a run that is killed draws nothing twice.
"""

import time
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

from flytune.data.order import PLACE
from flytune.models import Row, loading
from flytune.models.scoring import IGNORED
from flytune.objectives import teacher_tokens
from flytune.objectives.drawing_engines import TrainedModel, gathered
from flytune.objectives.recorded_steps import RecordedSteps, logs_of
from flytune.objectives.rollout_steps import drawing_of, hash_of, text_of
from flytune.recipe import Distill, Recipe
from flytune.records.plan import DRAW
from flytune.rollouts import Completion, Group, Rollout, WantedAnswer, key_of, numbers


class _Prompt(NamedTuple):
    """A row of a step whose answer is drawn."""

    place: int
    """Place in its step."""
    tokens: list[int]


class StudentAnswers(RecordedSteps):
    """Maker of the rows of each step, on one of a run's processes. All processes call it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        assert isinstance(recipe.objective, Distill)
        self._recipe, self._section = recipe, recipe.objective
        self._engine = TrainedModel()
        self._teacher: Any = None

    def rows(self, trainer: Any, batches: Sequence[Sequence[Row]]) -> list[list[Row]]:
        """Return the rows of a step, by micro batch: those whose answers are drawn with these answers, and
        with the teacher's tokens for them."""
        started, step = time.monotonic(), trainer.state.global_step + 1
        with trainer.run.peaks.during(DRAW):
            mine = [prompt for batch in batches for row in batch for prompt in self._chosen(row, step)]
            prompts = sorted(gathered(trainer, mine))
            answers = self._answers(trainer, step, prompts, len(batches[0])) if prompts else {}
            drawn = [[self._with_answer(row, answers) for row in batch] for batch in batches]
            completed = [self._with_tokens(trainer, batch) for batch in drawn]
        if not answers:
            return completed
        for name, value in logs_of([*answers.values()], started).items():
            trainer._metrics["train"][name].append(value)
        return completed

    def _chosen(self, row: Row, step: int) -> list[_Prompt]:
        """Return the prompt of a row whose answer is drawn; none where the answer of the data is trained."""
        prompt = prompt_of(row)
        [number] = numbers(self._recipe.training.seed, step, [], row[PLACE], 1)
        is_drawn = bool(prompt) and number < self._section.on_policy
        return [_Prompt(row[PLACE], prompt)] if is_drawn else []

    def _answers(
        self, trainer: Any, step: int, prompts: Sequence[_Prompt], micro_batch: int
    ) -> dict[int, Rollout]:
        """Return the answers of a step by the places of their rows: those in the ledger, or drawn ones."""
        made_by = self._made_by(trainer, step, prompts)
        tokens = [prompt.tokens for prompt in prompts]
        groups = self.known(trainer, step, made_by, tokens) or self._drawn(
            trainer, step, made_by, prompts, micro_batch
        )
        return {prompt.place: group.completions[0] for prompt, group in zip(prompts, groups, strict=True)}

    def _made_by(self, trainer: Any, step: int, prompts: Sequence[_Prompt]) -> dict[str, str]:
        """Return the keys of all that the answers of a step follow from."""
        recipe, drawing = self._recipe, self._drawing(trainer)
        limits = (recipe.training.seed, self._section.max_completion_length, recipe.data.max_length)
        return {
            "rows": hash_of(prompts),
            "drawing": hash_of([*astuple(drawing), *limits]),
            "weights": trainer.run.saver.weights_after(step - 1),
        }

    def _drawing(self, trainer: Any) -> Any:
        temperature = self._section.drawing_temperature
        return drawing_of(trainer.processing_class, trainer.model, temperature)

    def _drawn(
        self, trainer: Any, step: int, made_by: dict[str, str], prompts: Sequence[_Prompt], micro_batch: int
    ) -> list[Group]:
        """Return the answers of a step, drawn by all processes in equal parts, and recorded by the first
        one."""
        processes, rank = trainer.args.world_size, trainer.args.process_index
        share = -(-len(prompts) // processes)
        # A process with a prompt less draws to the first one too: all make equally many passes.
        mine = [*prompts[rank::processes], prompts[0]][:share]
        wanted = [self._wanted(prompt, step) for prompt in mine]
        at_a_time = self._section.per_device_generation_batch_size or micro_batch
        completions = self._engine.draw(trainer, step, wanted, self._drawing(trainer), at_a_time)
        drawn = [(prompt.place, answer) for prompt, answer in zip(mine, completions, strict=True)]
        by_place: dict[int, Completion] = dict(gathered(trainer, drawn))
        tokenizer = trainer.processing_class
        groups = [
            Group(
                step=step,
                prompt=prompt.tokens,
                text=str(tokenizer.decode(prompt.tokens, skip_special_tokens=True)),
                completions=[_rollout(tokenizer, by_place[prompt.place])],
                made_by=made_by,
            )
            for prompt in prompts
        ]
        if trainer.is_world_process_zero():
            self.ledger(trainer).write(step, groups)
        return groups

    def _wanted(self, prompt: _Prompt, step: int) -> WantedAnswer:
        """Return the answer to a prompt that is drawn in a step."""
        key = key_of(self._recipe.training.seed, step, prompt.tokens, prompt.place)
        room = self._recipe.data.max_length - len(prompt.tokens)
        return WantedAnswer(prompt.tokens, key, min(self._section.max_completion_length, room))

    def _with_answer(self, row: Row, answers: dict[int, Rollout]) -> Row:
        """Return a row with its drawn answer in the place of the data's, if it has one."""
        if row[PLACE] not in answers:
            return row
        prompt, answer = prompt_of(row), answers[row[PLACE]].tokens
        labels = [IGNORED] * len(prompt) + answer
        return {PLACE: row[PLACE], "input_ids": prompt + answer, "labels": labels}

    def _with_tokens(self, trainer: Any, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of a micro batch, those without the teacher's tokens with them."""
        if not (unknown := [row for row in rows if teacher_tokens.IDS not in row]):
            return list(rows)
        if self._teacher is None:
            self._teacher = self._loaded(trainer)
        tokenizer = trainer.processing_class
        columns = teacher_tokens.columns(
            self._teacher, unknown, self._recipe, tokenizer.pad_token_id, len(tokenizer)
        )
        by_place = {row[PLACE]: row | of_row for row, of_row in zip(unknown, columns, strict=True)}
        return [by_place.get(row[PLACE], row) for row in rows]

    def _loaded(self, trainer: Any) -> Any:
        """Return the teacher, frozen and complete, on the device of this process."""
        folder: Path = trainer.run.reference.folder / teacher_tokens.FOLDER
        own = teacher_tokens.recipe_of(self._recipe)
        here = own.model.model_copy(update={"name_or_path": str(folder), "revision": None})
        recipe = own.model_copy(update={"model": here})
        model = loading.base_model(recipe, self._recipe.model.dtype, device_map={"": trainer.args.device})
        return model.requires_grad_(False).eval()


def prompt_of(row: Row) -> list[int]:
    """Return the tokens before a row's last answer, which is the last run of trained tokens; none where there
    is no prompt."""
    labels = row["labels"]
    last = max((at for at, label in enumerate(labels) if label != IGNORED), default=-1)
    before = max((at for at in range(last) if labels[at] == IGNORED), default=-1)
    return list(row["input_ids"][: before + 1])


def _rollout(tokenizer: Any, answer: Completion) -> Rollout:
    return Rollout(
        tokens=answer.tokens,
        text=text_of(tokenizer, answer),
        log_probs=answer.log_probs,
        rewards=[],
        truncated=answer.is_truncated,
    )
