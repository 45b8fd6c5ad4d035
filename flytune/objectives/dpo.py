"""Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290) and its family, with TRL's
DPOTrainer.

Of two answers to a prompt, the chosen one shall gain log-probability against a reference model, and the
rejected one lose it. The reference of an adapter is the model with the adapter switched off; of full training
a second, frozen model; or it is run once before training, and the rows have its log-probabilities.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from flytune import patches
from flytune.models import Row
from flytune.models.scoring import IGNORED, padded, sequences_of
from flytune.objectives.base import ObjectiveBase, ReferenceKind, tables_beside_adapter
from flytune.objectives.heldout import HeldoutRows
from flytune.objectives.preferences import PairRows
from flytune.recipe import Dpo, Kto
from flytune.records.figures import ACCURACY, LOSS, MARGIN, PERPLEXITY, PREFERRED, Figure, of_answers
from flytune.sentences import counted

PREFERENCE_LOSS = Figure(
    name="preference_loss",
    title="preference loss",
    unit="nats per pair",
    better="lower",
    meaning="minus the log sigmoid of the reward of the chosen answer less that of the rejected one",
    neutral=math.log(2),
    is_paired=True,
    # A reward is a difference from the reference, times beta.
    scaled_by=["objective.beta", "model.name_or_path", "model.revision", "method.adapter"],
)
REWARD = "a reward is objective.beta times the log-probability of an answer, tuned minus"
"""Sentence on rewards, before the name of the reference."""
_START = "the base with the adapter that training began from"
"""The reference of a run with method.adapter."""
_IN_NATS = {"sigmoid", "sigmoid_norm", "robust", "exo_pair"}
"""Losses that are logarithms of probabilities."""


def trained_loss(unit: str, meaning: str) -> Figure:
    """Return the figure of a loss that is only measured in training."""
    return LOSS.model_copy(
        update={"unit": unit, "meaning": meaning, "is_paired": False, "scaled_by": ["objective"]}
    )


class DirectPreference(ObjectiveBase):
    """TRL's DPOTrainer on pairs of sequences; all pairs have the same weight."""

    name = "dpo"
    section: Dpo | Kto
    references: ClassVar[tuple[ReferenceKind, ...]] = ("adapter", "copy", "precomputed")
    logged: ClassVar[Mapping[str, str]] = {
        "reward_accuracy": "rewards/accuracies",
        "reward_margin": "rewards/margins",
    }
    head_outputs: ClassVar[tuple[str, ...]] = ("log_probs", "entropy", "mean_logits", "is_top1")

    heldout_rows: ClassVar[type[HeldoutRows]] = PairRows

    card_rows: ClassVar[str] = "pairs of answers"
    """The rows, in the model card."""

    def figures(self) -> list[Figure]:
        objective = self.recipe.objective
        assert isinstance(objective, Dpo)
        reference = f"the reference, {_START}" if self.recipe.method.adapter else "base"
        meaning = f"{MARGIN.meaning}; {REWARD} {reference}"
        margin = MARGIN.model_copy(update={"scaled_by": PREFERENCE_LOSS.scaled_by, "meaning": meaning})
        shared = [ACCURACY, margin, PREFERRED, of_answers(PERPLEXITY, "chosen"), of_answers(LOSS, "chosen")]
        if objective.loss_type == ["sigmoid"] and set(objective.loss_weights) <= {1.0}:
            return [PREFERENCE_LOSS.model_copy(update={"step": "loss", "eval_step": "eval_loss"}), *shared]
        unit = "nats per pair" if _IN_NATS.issuperset(objective.loss_type) else "per pair"
        return [PREFERENCE_LOSS, *shared, trained_loss(unit, f"{' + '.join(objective.loss_type)} of a pair")]

    def problems(self) -> list[str]:
        method, sharding, sentences = self.recipe.method, self.sharding, []
        where = f"objective: {self.name}"
        never = getattr(self.recipe.objective, "precompute_ref_log_probs", False) is False
        leave_out = (
            "leave out precompute_ref_log_probs: false, or " if "precomputed" in self.references else ""
        )
        if never and method.name == "full" and sharding.no_reference_copy:
            sentences.append(
                f"{where} with method full and sharding {sharding.name}: {sharding.no_reference_copy}; "
                f"{leave_out}use sharding none or ddp, or method lora"
            )
        if never and method.adapter:
            sentences.append(
                f"{where} with method.adapter: the reference is the model with that adapter, and no step can "
                f"run it beside the one that is trained; {leave_out}merge the adapter first (flytune merge), "
                "and name the merged model in model.name_or_path"
            )
        if method.is_pissa:
            sentences.append(
                f"{where} with method.init_lora_weights {method.init_lora_weights}: without its adapter the "
                "model lacks its largest singular values, and is not a reference; leave init_lora_weights out"
            )
        if named := tables_beside_adapter(self.recipe):
            sentences.append(
                f"{where} with {', '.join(named)}: TRL's loss reads the head outside of the adapter, so the "
                "reference would have the trained rows; train them with objective sft first, and merge that "
                "adapter"
            )
        if isinstance(method.target_modules, list) and "lm_head" in method.target_modules:
            sentences.append(
                f"{where} with an adapter on lm_head (method.target_modules): TRL's loss reads the head's "
                "weight alone, so the adapter would not be trained; remove it there"
            )
        return sentences

    def reference(self) -> ReferenceKind:
        method, asked = self.recipe.method, getattr(self.recipe.objective, "precompute_ref_log_probs", False)
        no_model = method.adapter or (method.name == "full" and self.sharding.no_reference_copy)
        if asked is True or (asked == "auto" and no_model):
            return "precomputed"
        return "copy" if method.name == "full" else "adapter"

    def _switches_dropout_off(self) -> bool:
        return self.section.disable_dropout

    def cost(self) -> str:
        """Describe the forward passes of a row."""
        more = "" if self.reference() == "precomputed" else ", and one more of the reference"
        return (
            f"each row is two sequences of up to {counted(self.recipe.data.max_length, 'token')} in one "
            f"forward pass{more}"
        )

    def reasons(self) -> list[str]:
        sort = {
            "copy": "a second, frozen model",
            "adapter": "the same model with its adapter switched off",
            "precomputed": "run once, before training: a step has no pass of it",
        }
        reference = f"objective: {self.name}: {self.cost()}; the reference is {sort[self.reference()]}"
        return [reference, *self._unsmoothed(), *self.dropout_reasons()]

    def _unsmoothed(self) -> list[str]:
        """List the line of the plan about a loss that is another one without label_smoothing."""
        objective = self.recipe.objective
        if not isinstance(objective, Dpo) or "robust" not in objective.loss_type or objective.label_smoothing:
            return []
        return [
            "objective.loss_type: robust with label_smoothing 0 is the loss sigmoid; write the share of "
            "pairs that are labelled the wrong way round, 0.1 for example"
        ]

    def log_counts(self, batch: dict[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(("entropy", "mean_token_accuracy"), batch["completion_mask"][:, 1:].sum())

    def arguments_class(self) -> Any:
        from trl import DPOConfig

        return DPOConfig

    def arguments(self) -> dict[str, Any]:
        objective = self.recipe.objective
        assert isinstance(objective, Dpo)
        return {
            "loss_type": list(objective.loss_type),
            "loss_weights": list(objective.loss_weights) or None,
            "beta": objective.beta,
            "label_smoothing": objective.label_smoothing,
            "disable_dropout": objective.disable_dropout,
            # The columns of prepared pairs are not TRL's.
            "remove_unused_columns": False,
        }

    @classmethod
    def trainer_class(cls) -> Any:
        return _trainer_class()

    def trainer_arguments(self, load: Callable[[], Any]) -> dict[str, Any]:
        if self.reference() == "precomputed":
            return {"reads_reference": True}
        if self.reference() != "copy":
            return {}
        model = load()
        model.config.use_cache = False
        return {"ref_model": model.requires_grad_(False).eval()}

    def collator(self, pad_token_id: int) -> Callable[[list[Row]], dict[str, Any]]:
        return PairCollator(pad_token_id)

    def model_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}

    def row_numbers(self, outputs: Any) -> Any:
        return outputs.log_probs.sum(dim=1)

    def card_text(self) -> str:
        section, reference = self.section, _START if self.recipe.method.adapter else "the base model"
        return (
            f"Trained with {self.name.upper()} ({' + '.join(section.loss_type)}, beta {section.beta}) on "
            f"{self.card_rows}; the reference is {reference}."
        )

    def scored_batches(self, trainer: Any, rows: Sequence[Row]) -> Iterable[Any]:
        """Return a batch of each row, on the trainer's device."""
        return (trainer._prepare_inputs(trainer.data_collator([row])) for row in rows)

    def measure(self, trainer: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
        import numpy
        import torch

        model = trainer.model_wrapped
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), trainer.compute_loss_context_manager():
                batches = self.scored_batches(trainer, rows)
                losses = [float(trainer._compute_loss(model, batch, False)) for batch in batches]
        finally:
            model.train(was_training)
            # They are of single rows, and with the next log line TRL would report their means.
            trainer._metrics["eval"].clear()
        return numpy.asarray(losses), numpy.ones(len(losses))


OBJECTIVE = DirectPreference


@functools.cache
def _trainer_class() -> Any:
    """Return PairTrainer, DPOTrainer on prepared pairs. TRL is imported here."""
    from trl import DPOTrainer

    class PairTrainer(DPOTrainer):  # type: ignore[misc]
        """DPOTrainer that takes its rows as they are; with `reads_reference` also the reference's
        log-probabilities in them."""

        def __init__(self, *args: Any, reads_reference: bool = False, **kwargs: Any) -> None:
            with (
                patches.trl.REFERENCE_MODEL.replaced(lambda *_, **__: None)
                if reads_reference
                else nullcontext()
            ):
                super().__init__(*args, **kwargs)
            # TRL's own argument would compute them here, in each process, with the model that is about to be
            # trained.
            self.precompute_ref_logps = reads_reference

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    return PairTrainer


@dataclass(frozen=True)
class PairCollator:
    """The Trainer's data_collator of pairs: the chosen sequences of all rows, then the rejected ones, as TRL
    has them."""

    pad_token_id: int

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        """Return a batch of int64 tensors [2 x rows, longest]: input_ids, attention_mask and completion_mask.

        They are padded on the right; completion_mask is 1 for the trained tokens. Where the rows have the
        reference's log-probabilities, so has the batch: ref_chosen_logps and ref_rejected_logps, float32
        [rows].
        """
        import torch

        known = {}
        if "ref_logps" in rows[0]:
            chosen, rejected = torch.tensor([row["ref_logps"] for row in rows], dtype=torch.float32).unbind(
                dim=1
            )
            known = {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        return known | sequence_batch(sequences_of(rows), self.pad_token_id)


def sequence_batch(sequences: list[Row], pad_token_id: int) -> dict[str, Any]:
    """Return sequences as tensors that are padded on the right: input_ids, attention_mask and
    completion_mask."""
    return {
        "input_ids": padded([sequence["input_ids"] for sequence in sequences], pad_token_id),
        "attention_mask": padded([[1] * len(sequence["input_ids"]) for sequence in sequences], 0),
        "completion_mask": padded(
            [[int(label != IGNORED) for label in sequence["labels"]] for sequence in sequences], 0
        ),
    }
