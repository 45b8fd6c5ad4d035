"""Distillation (Hinton et al. 2015; generalized Jensen-Shannon divergence: Agarwal et al. 2024, arXiv
2306.13649, eq. 1) of a teacher's distributions, with TRL's SFTTrainer.

The teacher is run once, before training: the rows have its `loss_top_k` most probable tokens for each trained
token. Where the student draws answers (on_policy), each process has the teacher too, and these answers get
as many tokens. What both models leave for all other tokens together is one more outcome, as TRL's
ServerDistillationTrainer has it (loss_add_tail): without it, a student that puts all of its mass on other
tokens would have no loss.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from flytune.data import Collator
from flytune.data.order import PLACE
from flytune.models import Row
from flytune.models.own_logits import TOKENS
from flytune.models.scoring import IGNORED
from flytune.objectives.base import Draws, ObjectiveBase, ReferenceKind, tables_beside_adapter
from flytune.objectives.recorded_steps import LOGGED, write_sample
from flytune.objectives.student_answers import StudentAnswers
from flytune.objectives.teacher_tokens import COLUMNS, IDS, LOG_PROBS
from flytune.recipe import Distill
from flytune.records import Manifest
from flytune.records.figures import ANSWER_TOKENS, LOSS, PERPLEXITY, TRUNCATED, Figure
from flytune.records.training import ROLLOUTS
from flytune.rollouts import RolloutLedger
from flytune.sentences import counted

LEAST_TAIL = 1e-7
"""Smallest mass of all other tokens: rounding may leave less than none."""


class Distillation(ObjectiveBase):
    """TRL's SFTTrainer with the divergence from a teacher; the weight of a row is its number of trained
    tokens."""

    name = "distill"
    section: Distill
    references: ClassVar[tuple[ReferenceKind, ...]] = ("precomputed",)
    reads_logits = "the teacher's tokens"
    logged: ClassVar[Mapping[str, str]] = LOGGED

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
        of_drawing = [ANSWER_TOKENS, TRUNCATED] if self.section.on_policy else []
        return [PERPLEXITY, LOSS.model_copy(update={"step": "", "eval_step": ""}), divergence, *of_drawing]

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
        return [*problems, *(self._drawing_problems() if self.section.on_policy else [])]

    def _drawing_problems(self) -> list[str]:
        """List what cannot work with answers that the student draws, and a teacher beside it."""
        section, recipe, method = self.section, self.recipe, self.recipe.method
        where, problems = f"objective.on_policy: {section.on_policy:g}", []
        if section.max_completion_length >= recipe.data.max_length:
            problems.append(
                f"objective.max_completion_length: {section.max_completion_length} leaves no token of "
                f"data.max_length {recipe.data.max_length} for the prompt; raise data.max_length, which "
                "counts both, or lower it"
            )
        sharding, offload = self.sharding, recipe.sharding.offload
        if sharding.no_drawn_answers or sharding.no_reference_copy or offload != "none":
            problems.append(
                f"{where} with sharding {sharding.name}, offload {offload}: each process holds the "
                "teacher complete beside the student, which is tested with none and ddp alone; use one of "
                "these without offload, or on_policy: 0"
            )
        if method.name == "qlora":
            problems.append(
                f"{where} with method qlora: a teacher beside a quantized student is not tested; use method "
                "lora, or on_policy: 0"
            )
        named = [
            *(["method.adapter"] if method.adapter else []),
            *([f"method.init_lora_weights {method.init_lora_weights}"] if method.is_pissa else []),
            *tables_beside_adapter(recipe),
        ]
        if named:
            problems.append(
                f"{where} with {', '.join(named)}: drawing answers is not tested with it; remove it"
            )
        if recipe.model.attn_implementation.startswith("flash"):
            problems.append(
                f"{where} with {recipe.model.attn_implementation}: its batches are padded; write sdpa"
            )
        if recipe.training.on_bad_loss == "skip":
            problems.append(
                f"training.on_bad_loss: skip with {where}: the loss of a step follows from what was drawn "
                "too, not from its data alone; write stop"
            )
        return problems

    def warnings(self, manifest: Manifest) -> list[str]:
        texts = [source.name for source in manifest.sources if source.format == "text"]
        if not texts or not self.section.on_policy:
            return []
        return [
            f"objective.on_policy: {', '.join(texts)}: texts without a prompt, to which no answers are "
            "drawn: they are trained as they are"
        ]

    def draws(self) -> Draws | None:
        section = self.section
        if not section.on_policy:
            return None
        return Draws(
            section.max_completion_length,
            section.per_device_generation_batch_size,
            share=section.on_policy,
            teacher=self.teacher(),
        )

    def finish(self, trainer: Any, out: Path) -> None:
        if self.section.on_policy:
            write_sample(trainer, out)

    def clear(self, address: str) -> None:
        if self.section.on_policy:
            RolloutLedger(address).clear()

    def reasons(self) -> list[str]:
        section = self.section
        kept = (
            f"{section.bytes_of_a_token:,} bytes are stored for each trained token "
            f"({counted(section.loss_top_k, 'token')} with the log-probability of each)"
        )
        once = (
            f"objective: {self.name}: the teacher {section.teacher_model_name_or_path} is run once, before "
            f"training, and {kept}"
        )
        if not section.on_policy:
            return [once]
        return [
            once + (", of held-out rows alone" if section.on_policy == 1 else ""),
            f"objective.on_policy: {section.on_policy:g}: each step draws the answers of this share of its "
            f"rows, of up to {counted(section.max_completion_length, 'token')} each, and the teacher, which "
            "each process holds too, scores them",
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

    def trainer_arguments(self, load: Callable[[], Any]) -> dict[str, Any]:
        return {"student_answers": StudentAnswers(self.recipe)} if self.section.on_policy else {}

    def collator(self, pad_token_id: int) -> Callable[[list[Row]], dict[str, Any]]:
        collate = functools.partial(batch, Collator(pad_token_id, self.recipe.data.max_length))
        return Undrawn(collate) if self.section.on_policy else collate

    def model_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name not in (*COLUMNS, "labels")}

    def row_numbers(self, outputs: Any) -> Any:
        return outputs.logits.logsumexp(dim=-1)

    def card_text(self) -> str:
        section = self.section
        return (
            "Distilled from a teacher (objective.teacher_model_name_or_path in recipe.yaml): its "
            f"{section.loss_top_k} most probable tokens for each trained token, beta {section.beta}, "
            f"temperature {section.temperature}, alpha {section.alpha}." + self._card_text_of_drawing()
        )

    def _card_text_of_drawing(self) -> str:
        section = self.section
        if not section.on_policy:
            return ""
        return (
            f" The student drew the answers of {section.on_policy:.0%} of the rows itself, at temperature "
            f"{section.drawing_temperature}, in the step that trained them; {ROLLOUTS} has some of them."
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


class Undrawn:
    """Collator of rows whose answers are drawn when all of their step are there: it leaves them as they are.

    Rows of another place (held-out ones, those of a dry run) are a batch at once.
    """

    def __init__(self, collate: Callable[[list[Row]], dict[str, Any]]) -> None:
        self.collate = collate

    def __call__(self, rows: list[Row]) -> Any:
        return rows if PLACE in rows[0] else self.collate(rows)


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
        logits: the student's (tokens, vocabulary).
        wanted: the data's own token of each, int64 (tokens,).
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

        def __init__(self, *, student_answers: StudentAnswers | None = None, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.student_answers = student_answers

        def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
            batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
            if self.student_answers is None or not batches:
                return batches, items
            rows_of_batches = self.student_answers.rows(self, batches)
            drawn = [self.data_collator.collate(rows) for rows in rows_of_batches]
            return drawn, self._get_num_items_in_batch(drawn, device)

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
