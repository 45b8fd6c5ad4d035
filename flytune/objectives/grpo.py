"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300) and its family, with TRL's
GRPOTrainer.

The model draws several answers to each prompt, rewards judge them, and an answer is trained by how much
better it is than the others to its prompt. TRL computes the loss; what is drawn, judged and recorded is here
(flytune.rollouts, flytune.rewards): TRL draws with the generator of a rank, so that the answers would follow
from the number of processes.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

from flytune import patches
from flytune.data import Collator
from flytune.data.order import PLACE
from flytune.models import Row
from flytune.objectives import importance
from flytune.objectives.base import Draws, ObjectiveBase, ReferenceKind, tables_beside_adapter
from flytune.objectives.drawing_engines import evaluated
from flytune.objectives.drawn_answers import PromptRows
from flytune.objectives.recorded_steps import LOGGED, write_sample
from flytune.objectives.rollout_steps import Rollouts
from flytune.recipe import Grpo, Recipe, VllmEngine
from flytune.records.figures import ANSWER_TOKENS, LOSS, TRUNCATED, Figure, of_answers, of_step
from flytune.records.training import ROLLOUTS
from flytune.rewards import walls_of
from flytune.rollouts import RolloutLedger, vllm_types
from flytune.sentences import counted
from training_estimates.sizes import Geometry

REWARD = Figure(
    name="reward",
    title="reward",
    better="higher",
    meaning="mean of the rewards times their weights; on held-out prompts of the most probable answer",
    is_paired=True,
    step="reward",
)
POLICY_LOSS = LOSS.model_copy(
    update={
        "name": "policy_loss",
        "title": "policy loss",
        "unit": "",
        "better": "neither",
        "is_paired": False,
        "meaning": "TRL's loss of the drawn answers, which says nothing about their quality",
        "eval_step": "",
    }
)


STEPS = (
    of_step(
        "equal_rewards", "prompts without a gradient", "all answers have the same reward", "share of prompts"
    ),
    ANSWER_TOKENS,
    TRUNCATED,
    of_step("entropy", "entropy", "of the trained tokens", "nats per token"),
)
WEIGHTS = (
    of_step(
        "importance_mean",
        "mean importance weight",
        "probability of a drawn answer by the trained model over that by the engine; 1 where they agree",
    ),
    of_step("importance_max", "largest importance weight", "before it was cut"),
    of_step("importance_cut", "cut importance weights", "outside of their bounds", "share"),
)
KL = of_step("kl", "KL divergence", "from the reference, estimated from the trained tokens", "nats per token")
PASS = Figure(
    name="pass_at_1",
    title="pass@1",
    unit="share of prompts",
    better="higher",
    meaning="drawn answers with the reward of the reference answer, or more",
)


class GroupPolicy(ObjectiveBase):
    """TRL's GRPOTrainer on answers that are drawn by generators of their own."""

    name = "grpo"
    section: Grpo
    references: ClassVar[tuple[ReferenceKind, ...]] = ("none", "adapter", "copy")
    head_outputs = ("log_probs", "entropy")
    heldout_rows = PromptRows
    logged: ClassVar[Mapping[str, str]] = {
        **LOGGED,
        "reward": "reward",
        "equal_rewards": "frac_reward_zero_std",
        "entropy": "entropy",
        "kl": "kl",
        "importance_mean": importance.MEAN,
        "importance_max": importance.LARGEST,
        "importance_cut": importance.CUT,
    }

    def log_counts(self, batch: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(("entropy", "kl"), batch["completion_mask"].sum())

    def logged_rewards(self) -> dict[str, str]:
        return {reward.name: f"rewards/{reward.name}/mean" for reward in self.section.rewards}

    def figures(self) -> list[Figure]:
        scaled = ["objective.rewards", "objective.max_completion_length"]
        of_reference = [of_answers(LOSS.model_copy(update={"step": "", "eval_step": ""}), "reference")]
        steps, count = [*STEPS], self.section.eval_answers
        if self.section.beta:
            steps.append(KL)
        if not self.section.engine.draws_as_trained:
            steps += WEIGHTS
        several = PASS.model_copy(
            update={
                "name": "pass_at_k",
                "title": f"pass@{count}",
                "meaning": f"prompts of which one of {counted(count, 'answer')} has it",
            }
        )
        passes = [PASS] if count else []
        if count > 1:
            passes.append(several)
        return [REWARD.model_copy(update={"scaled_by": scaled}), *passes, POLICY_LOSS, *steps, *of_reference]

    def problems(self) -> list[str]:
        section, method, where, sentences = self.section, self.recipe.method, f"objective: {self.name}", []
        if section.max_completion_length >= self.recipe.data.max_length:
            sentences.append(
                f"objective.max_completion_length: {section.max_completion_length} leaves no token of "
                f"data.max_length {self.recipe.data.max_length} for the prompt; raise data.max_length, which "
                "counts both, or lower it"
            )
        if self.recipe.training.global_batch_size % section.group_size:
            sentences.append(
                f"training.global_batch_size: {self.recipe.training.global_batch_size}, which counts "
                f"answers, is not a multiple of objective.group_size {section.group_size}"
            )
        offload = "drawing answers is not tested with it" if self.recipe.sharding.offload != "none" else None
        if reason := self.sharding.no_drawn_answers or offload:
            sentences.append(
                f"{where} with sharding {self.recipe.sharding.name}, offload "
                f"{self.recipe.sharding.offload}: {reason}; use none, ddp, zero2 or fsdp without offload"
            )
        if self.reference() == "copy" and (reason := self.sharding.no_reference_copy):
            sentences.append(
                f"objective.beta: {section.beta:g} with method full and sharding "
                f"{self.recipe.sharding.name}: {reason}, and log-probabilities of answers that are not "
                "drawn yet cannot be computed before; use sharding none or ddp, method lora, or beta: 0"
            )
        if method.is_pissa or method.adapter:
            named = (
                "method.adapter" if method.adapter else f"method.init_lora_weights {method.init_lora_weights}"
            )
            sentences.append(
                f"{where} with {named}: not tested; start from a merged model (flytune merge), or remove it"
            )
        if isinstance(method.target_modules, list) and "lm_head" in method.target_modules:
            sentences.append(
                f"{where} with method.target_modules lm_head: TRL's head of log-probabilities has none; "
                "remove it there"
            )
        if named := ", ".join(tables_beside_adapter(self.recipe)):
            sentences.append(
                f"{where} with {named}: tables of tokens beside an adapter are not tested; use method full"
            )
        if self.recipe.model.trust_remote_code:
            sentences.append(
                f"{where} with model.trust_remote_code: drawing from code of a model's own is not tested; "
                "remove it"
            )
        if self.recipe.model.attn_implementation.startswith("flash"):
            sentences.append(
                f"{where} with {self.recipe.model.attn_implementation}: its batches are padded; write sdpa"
            )
        if self.recipe.training.on_bad_loss == "skip":
            sentences.append(
                f"training.on_bad_loss: skip with {where}: the loss of a step says nothing about its data; "
                "write stop"
            )
        if self.recipe.training.max_loss_jump is not None:
            sentences.append(
                f"training.max_loss_jump with {where}: its loss is about 0, of either sign, and has no usual "
                "size; remove it"
            )
        return sentences

    def base_problems(self, geometry: Geometry) -> list[str]:
        problems, engine = super().base_problems(geometry), self.section.engine
        if not engine.draws_as_trained and geometry.model_type not in vllm_types.LOADED:
            problems.append(
                f"objective.engine: vllm with model type {geometry.model_type}: vLLM 0.32.0 has no code of "
                "its own for it (its registry of models); use engine: transformers"
            )
        return problems

    def reference(self) -> ReferenceKind:
        if not self.section.beta:
            return "none"
        return "copy" if self.recipe.method.name == "full" else "adapter"

    def run_passes(self, trained: Callable[[], Any], frozen: Callable[[], Any]) -> tuple[Any, Any]:
        # The reference scores the answers of a step before the step trains them.
        known = frozen() if self.frozen_passes() else None
        return trained(), known

    def _switches_dropout_off(self) -> bool:
        return self.section.disable_dropout

    def repeats(self) -> int:
        return self.section.group_size

    def draws(self) -> Draws:
        section, engine = self.section, self.section.engine
        tokens, at_a_time = section.max_completion_length, section.per_device_generation_batch_size
        if not isinstance(engine, VllmEngine):
            return Draws(tokens, at_a_time)
        share = engine.memory_share if engine.address is None else None
        return Draws(tokens, at_a_time, True, share, engine.gpus)

    def temperature(self) -> float:
        return self.section.temperature

    def reasons(self) -> list[str]:
        section, batch = self.section, self.recipe.training.global_batch_size
        prompts = counted(batch // section.group_size, "prompt")
        of_reference = {
            "none": [],
            "copy": [f"objective.beta: {section.beta:g}: a second, frozen model scores each answer once"],
            "adapter": [
                f"objective.beta: {section.beta:g}: the model with its adapter switched off scores each "
                "answer once"
            ],
        }
        return [
            f"objective: {self.name}: each step draws {counted(section.group_size, 'answer')} to each of "
            f"{prompts}, of up to {counted(section.max_completion_length, 'token')} each",
            *of_reference[self.reference()],
            *walls_of(section),
            *self.dropout_reasons(),
        ]

    def arguments_class(self) -> Any:
        from trl import GRPOConfig

        def make(max_length: None = None, **fields: Any) -> Any:
            """Make the arguments, of which TRL has no max_length here."""
            return GRPOConfig(**fields)

        return make

    def arguments(self) -> dict[str, Any]:
        section = self.section
        same = (
            "max_completion_length",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "beta",
            "loss_type",
            "importance_sampling_level",
            "scale_rewards",
            "mask_truncated_completions",
            "disable_dropout",
            "use_bias_correction_kl",
        )
        epsilon, epsilon_high = section.clip_range
        of_groups = {"num_generations": section.group_size, "epsilon": epsilon, "epsilon_high": epsilon_high}
        return {name: getattr(section, name) for name in same} | of_groups

    @classmethod
    def trainer_class(cls) -> Any:
        return _trainer_class()

    def trainer_arguments(self, load: Callable[[], Any]) -> dict[str, Any]:
        arguments = {"reward_funcs": [_never], "recipe": self.recipe}
        return arguments | ({"load_reference": load} if self.reference() == "copy" else {})

    def collator(self, pad_token_id: int) -> Callable[[list[Row]], Any]:
        return functools.partial(collate, pad_token_id)

    def measure(self, trainer: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
        import numpy

        rewards = trainer.rollouts.heldout(trainer, rows)
        return -numpy.asarray(rewards), numpy.ones(len(rewards))

    def finish(self, trainer: Any, out: Path) -> None:
        write_sample(trainer, out)

    def clear(self, address: str) -> None:
        # The next run of the recipe draws its own answers: its base model may be another one at the same
        # path.
        RolloutLedger(address).clear()

    def card_text(self) -> str:
        section = self.section
        names = ", ".join(f"{reward.name} ({reward.weight:g})" for reward in section.rewards)
        return (
            f"Trained with verifiable rewards: the model drew {counted(section.group_size, 'answer')} to "
            f"each prompt, and these rewards judged them: {names}.\n"
            f"{ROLLOUTS} has some of the drawn answers, with their rewards."
        )


OBJECTIVE = GroupPolicy


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("rewards are computed in a process of their own")


def collate(pad_token_id: int, rows: list[Row]) -> Any:
    """Return rows of the stream as they are, and rows of another place (a dry run) as a batch of their
    answers."""
    if PLACE in rows[0]:
        return rows
    return Collator(pad_token_id, 0)(rows)


@functools.cache
def _trainer_class() -> Any:
    """Return DrawingTrainer, GRPOTrainer with answers that it does not draw itself. TRL is imported here."""
    import torch
    from trl import GRPOTrainer

    class DrawingTrainer(GRPOTrainer):  # type: ignore[misc]
        """GRPOTrainer whose micro batches have the answers of their step, drawn and judged before its first
        forward pass."""

        def __init__(
            self,
            *,
            recipe: Recipe,
            data_collator: Any,
            load_reference: Callable[[], Any] | None = None,
            **arguments: Any,
        ) -> None:
            """Make it; `load_reference` returns another copy of the base model, where that is the
            reference."""
            own_loss = (
                patches.trl.REFERENCE_OF_DRAWN.replaced(lambda *_, **__: load_reference())
                if load_reference
                else nullcontext()
            )
            with own_loss:
                super().__init__(**arguments)
            self.data_collator = data_collator
            self.rollouts = Rollouts(recipe)
            # From here on it only says whether the loss is multiplied by the importance weights of a batch.
            self.use_vllm = not self.rollouts.section.engine.draws_as_trained

        def train(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().train(*args, **kwargs)
            finally:
                self.rollouts.engine.close()

        def get_train_dataloader(self) -> Any:
            return super(GRPOTrainer, self).get_train_dataloader()

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return super(GRPOTrainer, self)._get_train_sampler(*args, **kwargs)

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            batches, items = super().get_batch_samples(*args, **kwargs)
            return (self.rollouts.batches(self, batches) if batches else batches), items

        def _prepare_inputs(self, inputs: Any) -> Any:
            return super(GRPOTrainer, self)._prepare_inputs(inputs)

        def reference_log_probs(self, batch: dict[str, Any]) -> Any:
            """Return the reference's log-probability of each token of a batch's answers: (answers,
            longest)."""
            model = self.ref_model or self.model
            without = nullcontext() if self.ref_model else model.disable_adapter()
            with without:
                return self._log_probs(model, batch)

        def trained_log_probs(self, batch: dict[str, Any]) -> Any:
            """Return the trained model's log-probability of each token of a batch's answers, without dropout:
            (answers, longest)."""
            return self._log_probs(self.model, super(GRPOTrainer, self)._prepare_inputs(batch))

        def _log_probs(self, model: Any, batch: dict[str, Any]) -> Any:
            tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            with evaluated(self, model):
                return self._get_per_token_logps_and_entropies(
                    model, tokens, batch["attention_mask"], batch["completion_ids"].shape[1]
                )[0]

    return DrawingTrainer
