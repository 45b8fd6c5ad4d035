"""Rollouts of a training step: the answers to its prompts, their rewards and advantages, and the micro
batches made of them."""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any

from flytune import __version__
from flytune.data.order import PLACE
from flytune.data.rows.prompts import prompt_length, stored_prompt
from flytune.errors import FlytuneError
from flytune.models import Row, end_markers
from flytune.models.generation import padding_token
from flytune.models.scoring import padded
from flytune.objectives import importance
from flytune.objectives.drawing_engines import draw_evaluated, engine_of, gathered, with_attention
from flytune.objectives.recorded_steps import RecordedSteps, logs_of
from flytune.recipe import Grpo, Recipe
from flytune.recipe.rewards import as_json
from flytune.records.plan import DRAW
from flytune.rewards import Judged, RewardProcess
from flytune.rollouts import Completion, Drawing, Group, Rollout, WantedAnswer, key_of

log = logging.getLogger(__name__)
_EPSILON = 1e-4
"""Term that TRL adds to a standard deviation."""


class Rollouts(RecordedSteps):
    """Maker of the micro batches of each step, on one of a run's processes. All processes call it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        assert isinstance(recipe.objective, Grpo)
        self._recipe, self.section = recipe, recipe.objective
        self._rewards = RewardProcess(self.section)
        self.engine = engine_of(recipe)

    def batches(self, trainer: Any, batches: list[list[Row]]) -> list[dict[str, Any]]:
        """Return TRL's micro batches of the rows of a step, which follow from the step's prompts alone.

        Raises:
            RewardError: a reward fails.
            StorageError: what was drawn cannot be recorded.
        """
        started, step = time.monotonic(), trainer.state.global_step + 1
        with trainer.run.peaks.during(DRAW):
            step_rows = self._rows(trainer, batches)
            made_by, prompts = self._made_by(trainer, step, step_rows), [prompt for prompt, _ in step_rows]
            groups = self.known(trainer, step, made_by, prompts) or self._drawn(
                trainer, step, batches, made_by
            )
        flat = [completion for group in groups for completion in group.completions]
        advantages, figures = advantages_of(self.section, [rollout.rewards for rollout in flat])
        if step == 1 and trainer.is_world_process_zero():
            self._warn_without_gradient(flat, figures["frac_reward_zero_std"] == 1)
        figures |= logs_of(flat, started)
        weights = importance.weights_of(
            self.section, [(rollout, self._is_masked(rollout)) for rollout in flat]
        )
        if weights is not None:
            weights.check(step)
            figures |= weights.figures
        for name, value in figures.items():
            trainer._metrics["train"][name].append(value)
        trained = sum(len(rollout.tokens) for rollout in flat if not self._is_masked(rollout))
        pad = trainer.processing_class.pad_token_id
        tensors = [self._batch(batch, groups, advantages, pad) for batch in batches]
        if weights is not None:
            tensors = [
                batch | weights.of_batch([row[PLACE] for row in rows], batch["completion_ids"].shape[1])
                for batch, rows in zip(tensors, batches, strict=True)
            ]
        # On the device of the model, as TRL has it.
        prepared = [
            trainer._prepare_inputs(batch | {"num_items_in_batch": _tensor(trained)}) for batch in tensors
        ]
        if self.section.beta:
            prepared = [
                batch | {"ref_per_token_logps": trainer.reference_log_probs(batch)} for batch in prepared
            ]
        return prepared

    def _warn_without_gradient(self, answers: Sequence[Rollout], are_equal: bool) -> None:
        """Warn if the first step has no gradient; learning_guard.py ends a run in which it stays so.

        `are_equal` is True if all answers to each prompt have equal rewards.
        """
        if all(self._is_masked(answer) for answer in answers):
            reason = "all drawn answers are cut, and mask_truncated_completions leaves them out"
            advice = "raise objective.max_completion_length and data.max_length"
        elif not are_equal:
            return
        elif not any(answer.text.strip() for answer in answers):
            reason = "all drawn answers are empty"
            advice = (
                "an instruct model answers bare text with nothing: write prompts as messages, or "
                "data.columns: {instruction: prompt}"
            )
        else:
            reason = "all answers to each prompt have equal rewards"
            advice = (
                "look at them, in rollouts beside the checkpoints: rewards that tell answers apart or "
                "easier prompts help"
            )
        log.warning(
            "step 1: %s, so it has no gradient, and a run in which that stays so is ended; %s", reason, advice
        )

    def _is_masked(self, rollout: Rollout) -> bool:
        return self.section.mask_truncated_completions and rollout.truncated

    def _batch(self, rows: list[Row], groups: Sequence[Group], advantages: Any, pad: int) -> dict[str, Any]:
        size = self.section.group_size
        places = [row[PLACE] for row in rows]
        prompts = [groups[place // size].prompt for place in places]
        rollouts = [groups[place // size].completions[place % size] for place in places]
        masks = [[int(not self._is_masked(rollout))] * len(rollout.tokens) for rollout in rollouts]
        batch = {
            "prompt_ids": padded(prompts, pad, left=True),
            "prompt_mask": padded([[1] * len(prompt) for prompt in prompts], 0, left=True),
            "completion_ids": padded([rollout.tokens for rollout in rollouts], pad),
            "completion_mask": padded(masks, 0),
            "advantages": advantages[places],
        }
        return with_attention(batch)

    def _rows(self, trainer: Any, batches: list[list[Row]]) -> list[tuple[list[int], str]]:
        """Return the tokens of the step's prompts and the columns of their rows, in their order."""
        size = self.section.group_size
        mine = [
            (row[PLACE] // size, (row["input_ids"][: prompt_length(row)], row["fields"]))
            for batch in batches
            for row in batch
        ]
        by_place = dict(gathered(trainer, mine))
        return [by_place[place] for place in range(len(by_place))]

    def _made_by(self, trainer: Any, step: int, rows: list[tuple[list[int], str]]) -> dict[str, str]:
        """Return the keys of all that the answers of a step and their rewards follow from."""
        section, recipe = self.section, self._recipe
        drawing = drawing_of(trainer.processing_class, trainer.model, section.temperature, section)
        limits = (
            recipe.training.seed,
            section.group_size,
            section.max_completion_length,
            recipe.data.max_length,
        )
        engine = {} if section.engine.draws_as_trained else {"engine": section.engine.name}
        return engine | {
            "rows": hash_of(rows),
            "drawing": hash_of([*astuple(drawing), *limits]),
            # The project's own rewards are of its version.
            "rewards": hash_of([as_json(section.rewards), __version__]),
            "weights": trainer.run.saver.weights_after(step - 1),
        }

    def _drawn(
        self, trainer: Any, step: int, batches: list[list[Row]], made_by: dict[str, str]
    ) -> list[Group]:
        """Return the groups of a step, drawn by all processes, and judged and recorded by the first one."""
        from accelerate.utils import broadcast_object_list

        section = self.section
        drawing = drawing_of(trainer.processing_class, trainer.model, section.temperature, section)
        rows = [row for batch in batches for row in batch]
        wanted = [self._wanted(row, step) for row in rows]
        at_a_time = section.per_device_generation_batch_size or len(batches[0])
        drawn = self.engine.draw(trainer, step, wanted, drawing, at_a_time)
        mine = [(row[PLACE], row, completion) for row, completion in zip(rows, drawn, strict=True)]
        drawn_by_all = sorted(gathered(trainer, mine), key=lambda answer: answer[0])
        outcome: list[Any] = [None]
        if trainer.is_world_process_zero():
            try:
                judged_groups = self._judged(
                    trainer, step, [(row, answer) for _, row, answer in drawn_by_all]
                )
                outcome = [[group.model_copy(update={"made_by": made_by}) for group in judged_groups]]
                self.ledger(trainer).write(step, outcome[0])
            except FlytuneError as error:  # the other processes wait for what was found
                outcome = [error]
        groups = broadcast_object_list(outcome)[0]
        if isinstance(groups, FlytuneError):
            # A reward's error, or the storage's, after which another attempt may go on.
            raise groups
        return list(groups)

    def _wanted(self, row: Row, step: int) -> WantedAnswer:
        """Return the answer that a row of the stream stands for."""
        prompt = row["input_ids"][: prompt_length(row)]
        key = key_of(self._recipe.training.seed, step, prompt, row[PLACE] % self.section.group_size)
        return WantedAnswer(prompt, key, most_tokens(self._recipe, prompt))

    def _judged(self, trainer: Any, step: int, drawn: Sequence[tuple[Row, Completion]]) -> list[Group]:
        """Return the groups of a step with their rewards."""
        size, tokenizer, groups_judged = self.section.group_size, trainer.processing_class, list[Group]()
        texts = [text_of(tokenizer, answer) for _, answer in drawn]
        items = [judged(row, text, f"step {step}") for (row, _), text in zip(drawn, texts, strict=True)]
        values = self._rewards.values(items)
        for start in range(0, len(drawn), size):
            row = drawn[start][0]
            completions = [
                Rollout(
                    tokens=answer.tokens,
                    text=text,
                    log_probs=answer.log_probs,
                    trained_log_probs=list(answer.trained_log_probs),
                    rewards=rewards,
                    truncated=answer.is_truncated,
                )
                for (_, answer), text, rewards in zip(
                    drawn[start : start + size],
                    texts[start : start + size],
                    values[start : start + size],
                    strict=True,
                )
            ]
            prompt = row["input_ids"][: prompt_length(row)]
            text = str(tokenizer.decode(prompt, skip_special_tokens=True))
            groups_judged.append(Group(step=step, prompt=prompt, text=text, completions=completions))
        return groups_judged

    def heldout(self, trainer: Any, rows: Sequence[Row]) -> list[float]:
        """Return the reward of the most probable answer to each held-out prompt. Every process calls it with
        equally many."""
        drawing, size, drawn = (
            drawing_of(trainer.processing_class, trainer.model, 0.0, self.section),
            self._recipe.evaluation.batch_size,
            list[Completion](),
        )
        for start in range(0, len(rows), size):
            prompts = [row["input_ids"][: prompt_length(row)] for row in rows[start : start + size]]
            drawn += draw_evaluated(
                trainer, prompts, [[0.0] * most_tokens(self._recipe, prompt) for prompt in prompts], drawing
            )
        texts = [text_of(trainer.processing_class, answer) for answer in drawn]
        items = [judged(row, text, "a held-out row") for row, text in zip(rows, texts, strict=True)]
        return [self.section.total(values) for values in self._rewards.values(items)]


def drawing_of(tokenizer: Any, model: Any, temperature: float, section: Grpo | None = None) -> Drawing:
    """Return the settings of a drawing with a temperature; `section` may leave improbable tokens out."""
    ends = tuple(end_markers(tokenizer, model))
    drawing = Drawing(ends, padding_token(tokenizer, ends), temperature)
    if section is None:
        return drawing
    return replace(drawing, top_p=section.top_p, top_k=section.top_k, min_p=section.min_p)


def most_tokens(recipe: Recipe, prompt: Sequence[int]) -> int:
    """Return the most tokens of an answer to a prompt."""
    assert isinstance(recipe.objective, Grpo)
    return min(recipe.objective.max_completion_length, recipe.data.max_length - len(prompt))


def judged(row: Row, text: str, where: str) -> Judged:
    """Return an answer to a stored row as rewards get it."""
    stored = stored_prompt(row)
    return Judged(stored.prompt, text, stored.columns, f"{where}, prompt {stored.shown!r:.120}")


def text_of(tokenizer: Any, completion: Completion) -> str:
    """Return a completion as text, without special tokens."""
    return str(tokenizer.decode(completion.tokens, skip_special_tokens=True))


def advantages_of(section: Grpo, values: Sequence[Sequence[float]]) -> tuple[Any, dict[str, float]]:
    """Return the advantage of each answer of a step, float32 (answers,), and what TRL logs of the rewards.

    The same operations as TRL's GRPOTrainer (sum_then_normalize).
    """
    import torch

    by_reward = torch.tensor(values, dtype=torch.float32)
    rewards = torch.tensor([section.total(value) for value in values], dtype=torch.float32)
    grouped = rewards.view(-1, section.group_size)
    means = grouped.mean(dim=1).repeat_interleave(section.group_size)
    spread = grouped.std(dim=1).repeat_interleave(section.group_size)
    equal = torch.isclose(spread, torch.zeros_like(spread)).float().mean()
    if section.scale_rewards == "batch":
        spread = rewards.std().expand_as(rewards)
    advantages = rewards - means
    if section.scale_rewards != "none":
        advantages = advantages / (spread + _EPSILON)
    logs = {
        f"rewards/{reward.name}/mean": float(by_reward[:, place].mean())
        for place, reward in enumerate(section.rewards)
    }
    logged = {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "frac_reward_zero_std": float(equal),
    }
    return advantages, logs | logged


def hash_of(content: Any) -> str:
    """Return 16 hex digits of what answers follow from."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _tensor(number: int) -> Any:
    import torch

    return torch.tensor(number)
