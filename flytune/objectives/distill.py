"""Distillation (Hinton et al. 2015; generalized Jensen-Shannon divergence: Agarwal et al. 2024, arXiv
2306.13649, eq. 1) of a teacher's distributions, with TRL's SFTTrainer.

The teacher is run once, before training: the rows have its `loss_top_k` most probable tokens for each trained
token. What both models leave for all other tokens together is one more outcome, as TRL's
ServerDistillationTrainer has it (loss_add_tail): without it, a student that puts all of its mass on other
tokens would have no loss.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from flytune.data import Collator
from flytune.models import Row
from flytune.models.own_logits import TOKENS
from flytune.models.scoring import IGNORED
from flytune.objectives.base import ObjectiveBase, ReferenceKind
from flytune.recipe import Distill
from flytune.records.figures import LOSS, PERPLEXITY, Figure
from flytune.sentences import counted

IDS, LOG_PROBS = "teacher_ids", "teacher_log_probs"
"""Keys of a row, and of a batch: the teacher's most probable tokens for each trained token, the most probable
first, and their log-probabilities at the recipe's temperature."""
LEAST_TAIL = 1e-7
"""Smallest mass of all other tokens: rounding may leave less than none."""


class Distillation(ObjectiveBase):
    """TRL's SFTTrainer with the divergence from a teacher; the weight of a row is its number of trained
    tokens."""

    name = "distill"
    references: ClassVar[tuple[ReferenceKind, ...]] = ("precomputed",)
    reads_logits = "the teacher's tokens"

    @property
    def section(self) -> Distill:
        """Return its section of a recipe."""
        assert isinstance(self.recipe.objective, Distill)
        return self.recipe.objective

    def figures(self) -> list[Figure]:
        names = {0.0: "forward KL divergence", 1.0: "reverse KL divergence"}
        meaning = names.get(self.section.beta, "generalized Jensen-Shannon divergence")
        if self.section.alpha:
            meaning += ", and the data's own loss"
        divergence = LOSS.model_copy(
            update={
                "name": "divergence",
                "title": "loss against the teacher",
                "meaning": f"{meaning}, with the teacher's {self.section.loss_top_k} most probable tokens",
                "is_paired": False,
                "scaled_by": ["objective"],
            }
        )
        return [PERPLEXITY, LOSS.model_copy(update={"step": "", "eval_step": ""}), divergence]

    def reference(self) -> ReferenceKind:
        return "precomputed"

    def problems(self) -> list[str]:
        problems = []
        if self.teacher() is None:
            problems.append(
                "objective.teacher_model_name_or_path: missing; name the model whose distributions are "
                "trained"
            )
        if self.recipe.model.trust_remote_code:
            problems.append(
                "objective: distill with model.trust_remote_code: the task that runs the teacher executes no "
                "code of a model's own, and a tokenizer may need it; remove it, or train with objective: sft"
            )
        if self.recipe.training.use_liger_kernel:
            problems.append(
                "objective: distill with training.use_liger_kernel: Liger's loss makes no logits, which the "
                "divergence is computed of; remove it"
            )
        if self.recipe.model.extra_special_tokens:
            problems.append(
                "objective: distill with model.extra_special_tokens: the teacher has no such tokens; remove "
                "them"
            )
        return problems

    def reasons(self) -> list[str]:
        return [
            f"objective: {self.name}: the teacher {self.section.teacher_model_name_or_path} is run once, "
            f"before training, and {self.section.bytes_of_a_token:,} bytes are stored for each trained token "
            f"({counted(self.section.loss_top_k, 'token')} with the log-probability of each)"
        ]

    def arguments_class(self) -> Any:
        from trl import SFTConfig

        return SFTConfig

    def arguments(self) -> dict[str, Any]:
        # The columns of prepared rows are not TRL's.
        return {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}

    @classmethod
    def trainer_class(cls) -> Any:
        return _trainer_class()

    def collator(self, pad_token_id: int) -> Callable[[list[Row]], dict[str, Any]]:
        return functools.partial(batch, Collator(pad_token_id, self.recipe.data.max_length))

    def model_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name not in (IDS, LOG_PROBS, "labels")}

    def row_numbers(self, outputs: Any) -> Any:
        return outputs.logits.logsumexp(dim=-1)

    def card_text(self) -> str:
        section = self.section
        return (
            "Distilled from a teacher (objective.teacher_model_name_or_path in recipe.yaml): its "
            f"{section.loss_top_k} most probable tokens for each trained token, beta {section.beta}, "
            f"temperature {section.temperature}, alpha {section.alpha}."
        )

    def measure(self, trainer: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
        import numpy
        import torch

        model, sums, counts = trainer.model_wrapped, [], []
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), trainer.compute_loss_context_manager():
                for row in rows:
                    inputs = trainer._prepare_inputs(trainer.data_collator([row]))
                    losses = token_losses(model, inputs, self.section)
                    sums.append(float(losses.double().sum()))
                    counts.append(len(losses))
        finally:
            model.train(was_training)
        return numpy.asarray(sums), numpy.asarray(counts)


OBJECTIVE = Distillation


def batch(collate: Collator, rows: list[Row]) -> dict[str, Any]:
    """Return a batch as of sft, with the teacher's tokens for all trained tokens, row by row: int64 and
    float32 (trained tokens, top_k)."""
    import torch

    collated = collate(rows)
    # Counted in the rows: tensors of a dry run have no values.
    tokens = sum(label != IGNORED for row in rows for label in row["labels"][1:])
    ids = torch.tensor([value for row in rows for value in row.get(IDS, [])], dtype=torch.int64)
    log_probs = torch.tensor([value for row in rows for value in row.get(LOG_PROBS, [])])
    # A teacher with fewer tokens than loss_top_k has all of them.
    shape = (tokens, len(ids) // max(1, tokens))
    return collated | {IDS: ids.view(shape), LOG_PROBS: log_probs.view(shape)}


def token_losses(model: Any, inputs: dict[str, Any], section: Distill) -> Any:
    """Return the loss of each trained token in nats, float32 (trained tokens,), in the order of a batch.

    The logits are not copied: TOKENS of them at a time are there in float32, and again in the backward pass.
    """
    import torch
    from torch.nn.functional import pad
    from torch.utils.checkpoint import checkpoint

    tokens = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    logits = model(**tokens, use_cache=False).logits.flatten(0, 1)
    # Position p predicts token p + 1.
    labels = pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED).flatten().to(logits.device).split(TOKENS)
    counts = [int((part != IGNORED).sum()) for part in labels]
    known = (inputs[name].to(logits.device).split(counts) for name in (IDS, LOG_PROBS))
    losses = [
        checkpoint(_of_tile, *tile, section, use_reentrant=False, preserve_rng_state=False)
        for tile in zip(logits.split(TOKENS), labels, *known, strict=True)
    ]
    return torch.cat(losses)


def _of_tile(logits: Any, labels: Any, ids: Any, teacher: Any, section: Distill) -> Any:
    """Return the `tile_losses` of those positions that have a label."""
    is_trained = labels != IGNORED
    return tile_losses(logits[is_trained], labels[is_trained], ids, teacher, section)


def tile_losses(logits: Any, wanted: Any, ids: Any, teacher: Any, section: Distill) -> Any:
    """Return the loss of some trained tokens, float32 (tokens,).

    Args:
        logits: the student's (tokens, vocabulary). wanted: the data's own token of each, int64 (tokens,).
        ids, teacher: the teacher's tokens and their log-probabilities at the temperature, (tokens, top_k).
    """
    logits = logits.float()
    scaled = logits / section.temperature
    student = scaled.gather(1, ids) - scaled.logsumexp(dim=1, keepdim=True)
    if ids.shape[1] < logits.shape[1]:
        student, teacher = with_tail(student), with_tail(teacher)
    losses = divergence(student, teacher, section.beta)
    if section.alpha:
        cross_entropy = logits.logsumexp(dim=1) - logits.gather(1, wanted[:, None])[:, 0]
        losses = (1 - section.alpha) * losses + section.alpha * cross_entropy
    return losses


def with_tail(log_probs: Any) -> Any:
    """Return log-probabilities (tokens, top_k) with that of all other tokens together."""
    import torch

    mass = log_probs.logsumexp(dim=1, keepdim=True).clamp(max=-LEAST_TAIL)
    return torch.cat([log_probs, torch.log(-torch.expm1(mass))], dim=1)


def divergence(student: Any, teacher: Any, beta: float) -> Any:
    """Return the generalized Jensen-Shannon divergence of two distributions in nats, (tokens,), of their
    log-probabilities (tokens, outcomes); 0 is KL(teacher || student), 1 KL(student || teacher)."""
    import math

    import torch

    def kl_divergence(first: Any, second: Any) -> Any:
        return (first.exp() * (first - second)).sum(dim=1)

    if beta == 0:
        return kl_divergence(teacher, student)
    if beta == 1:
        return kl_divergence(student, teacher)
    both = torch.stack([student + math.log1p(-beta), teacher + math.log(beta)])
    mixture = both.logsumexp(dim=0)
    return beta * kl_divergence(teacher, mixture) + (1 - beta) * kl_divergence(student, mixture)


@functools.cache
def _trainer_class() -> Any:
    """Return TeacherTrainer. TRL is imported here."""
    import torch
    from trl import SFTTrainer

    class TeacherTrainer(SFTTrainer):  # type: ignore[misc]
        """SFTTrainer on prepared rows with a teacher's tokens."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            losses = token_losses(model, inputs, self.run.recipe.objective)
            tokens = len(losses) if num_items_in_batch is None else num_items_in_batch
            loss = losses.sum() / torch.as_tensor(tokens, device=losses.device).clamp(min=1)
            # As TRL: the tokens are those of all processes, whose gradients are averaged.
            if num_items_in_batch is not None:
                loss = loss * self.accelerator.num_processes
            return (loss, None) if return_outputs else loss

    return TeacherTrainer
