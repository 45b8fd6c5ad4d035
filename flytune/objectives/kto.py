"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306), with TRL's KTOTrainer.

An answer that is labelled desirable shall gain log-probability against a reference model, one labelled
undesirable lose it; both are compared with the KL divergence from the reference, which answers to other
prompts estimate.

TRL pairs each prompt of a micro batch with the answer of the row before it, and takes the mean over the micro
batch of all processes, so that its loss depends on the layout. Here the rows of an optimizer step are paired
in the same way, with its mean: the same number for any micro batch and any number of processes. With one
micro batch in a step, on one process, both are equal.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from flytune.data import weight_advice
from flytune.models import Row
from flytune.models.scoring import IGNORED
from flytune.objectives.base import FILLER, ReferenceKind
from flytune.objectives.dpo import PREFERENCE_LOSS, REWARD, DirectPreference, sequence_batch, trained_loss
from flytune.objectives.preferences import LabelledRows
from flytune.recipe import Kto, Recipe
from flytune.records import Manifest
from flytune.records.figures import (
    ACCURACY,
    LOSS,
    MARGIN,
    PERPLEXITY,
    PREFERRED,
    Figure,
    of_answers,
    of_labels,
)

_KL = "KL_"

_MARGIN = of_labels(MARGIN).model_copy(
    update={
        "scaled_by": PREFERENCE_LOSS.scaled_by,
        "meaning": f"{of_labels(MARGIN).meaning}; {REWARD} base",
    }
)


def _of_label(label: str, moved: str) -> list[Figure]:
    """List the figures of the answers with one label."""
    reward = Figure(
        name=f"{label}_reward",
        title=f"reward of {label} answers",
        better="higher" if label == "desirable" else "lower",
        neutral=0.0,
        scaled_by=PREFERENCE_LOSS.scaled_by,
    )
    share = Figure(
        name=f"{label}_moved",
        title=f"{label} answers whose log-probability {moved}",
        unit="share of answers",
        better="higher",
        neutral=0.5,
    )
    return [reward, share]


_FIGURES = [
    of_labels(PREFERENCE_LOSS),
    of_labels(ACCURACY).model_copy(update={"step": ""}),
    _MARGIN,
    of_labels(PREFERRED).model_copy(
        update={
            "meaning": "pairs whose desirable answer is more probable to the model for each token than the "
            "undesirable one"
        }
    ),
    *_of_label("desirable", "rose"),
    *_of_label("undesirable", "fell"),
    # Those of undesirable answers are measured where the held-out rows have no others.
    *(of_answers(figure, label) for label in ("desirable", "undesirable") for figure in (PERPLEXITY, LOSS)),
]


class UnpairedPreference(DirectPreference):
    """TRL's KTOTrainer on labelled answers; the reference, and what it excludes, are those of dpo."""

    name = "kto"
    references: ClassVar[tuple[ReferenceKind, ...]] = ("adapter", "copy")
    card_rows = "labelled answers; a pair is any desirable answer with any undesirable one"
    logged: ClassVar[Mapping[str, str]] = {"reward_margin": "rewards/margins"}
    head_outputs = ("log_probs", "entropy", "mean_logits")
    heldout_rows = LabelledRows

    def figures(self) -> list[Figure]:
        return [
            *_FIGURES,
            trained_loss("per answer", f"{self.section.loss_type[0]} of an answer, times its label's weight"),
        ]

    def warnings(self, manifest: Manifest) -> list[str]:
        objective, desirable = self.recipe.objective, manifest.train.desirable or 0
        undesirable = manifest.train.samples - desirable
        assert isinstance(objective, Kto)
        if not desirable or not undesirable:
            return []
        share = objective.desirable_weight * desirable / (objective.undesirable_weight * undesirable)
        if 0.99 <= share <= 1.35:
            return []
        return [
            f"objective: desirable answers weigh {share:.3g} times as much as undesirable ones; "
            f"{weight_advice(desirable, undesirable)}"
        ]

    def frozen_passes(self) -> int:
        return 3 if _estimates_kl(self.recipe) else 1

    def run_passes(self, trained: Callable[[], Any], frozen: Callable[[], Any]) -> tuple[Any, Any]:
        if not _estimates_kl(self.recipe):
            return super().run_passes(trained, frozen)
        # add_kl runs them before the first forward pass of training.
        reference = frozen()
        return trained(), reference

    def cost(self) -> str:
        if not _estimates_kl(self.recipe):
            return "each row has one more forward pass, of the reference"
        return (
            "each row has three more forward passes: of the reference, and of both models with another row's "
            "answer, which estimate the KL divergence"
        )

    def log_counts(self, batch: dict[str, Any]) -> dict[str, Any]:
        desirable = batch["label"].sum()
        undesirable = batch["label"].numel() - desirable
        return super().log_counts(batch) | {
            "rewards/chosen": desirable,
            "logps/chosen": desirable,
            "rewards/rejected": undesirable,
            "logps/rejected": undesirable,
        }

    def arguments(self) -> dict[str, Any]:
        names = ("beta", "desirable_weight", "undesirable_weight", "disable_dropout")
        fields = {name: getattr(self.recipe.objective, name) for name in names}
        return fields | {"loss_type": self.section.loss_type[0], "remove_unused_columns": False}

    def arguments_class(self) -> Any:
        from trl import KTOConfig

        return KTOConfig

    @classmethod
    def trainer_class(cls) -> Any:
        return _trainer_class()

    def collator(self, pad_token_id: int) -> Callable[[list[Row]], dict[str, Any]]:
        return LabelledCollator(pad_token_id)

    def joined(self) -> Callable[[Row, Row], Row] | None:
        if not _estimates_kl(self.recipe):
            return None
        return functools.partial(mismatched, self.recipe.data.max_length)

    def scored_batches(self, trainer: Any, rows: Sequence[Row]) -> Iterable[Any]:
        batches = [*super().scored_batches(trainer, rows)]
        trainer.add_kl(trainer.model_wrapped, batches, [FILLER not in row for row in rows])
        return batches


OBJECTIVE = UnpairedPreference


def _estimates_kl(recipe: Recipe) -> bool:
    """Return whether the loss compares rewards with an estimate of the KL divergence, from answers to other
    prompts."""
    return isinstance(recipe.objective, Kto) and recipe.objective.loss_type == ["kto"]


def mismatched(max_length: int, row: Row, before: Row) -> Row:
    """Return `row` with the sequence of its prompt and the answer of the row `before`, cut at max_length
    tokens."""
    prompt, start = _prompt_length(row), _prompt_length(before)
    ids = (row["input_ids"][:prompt] + before["input_ids"][start:])[:max_length]
    labels = ([IGNORED] * prompt + before["labels"][start:])[:max_length]
    return row | {f"{_KL}input_ids": ids, f"{_KL}labels": labels}


def _prompt_length(row: Row) -> int:
    """Return the number of tokens before the first trained one."""
    return next(index for index, label in enumerate(row["labels"]) if label != IGNORED)


@functools.cache
def _trainer_class() -> Any:
    """Return UnpairedTrainer, KTOTrainer on prepared rows. TRL is imported here."""
    import torch
    from trl import KTOTrainer

    class UnpairedTrainer(KTOTrainer):  # type: ignore[misc]
        """KTOTrainer that takes its rows as they are, and estimates the KL divergence once for each optimizer
        step."""

        def __init__(self, *, args: Any, **arguments: Any) -> None:
            loss_type = args.loss_type
            # Of this loss TRL demands neither its own pairs nor two rows in a micro batch, which would be
            # paired there.
            args.loss_type = "apo_zero_unpaired"
            super().__init__(args=args, **arguments)
            args.loss_type = self.loss_type = loss_type
            self.calculate_KL = self.precompute_ref_logps = loss_type == "kto"
            self._step: list[dict[str, Any]] = []

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            self._step, items = super().get_batch_samples(*args, **kwargs)
            return self._step, items

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._step:
                model.train()
                # These are the dictionaries that the following calls get.
                self.add_kl(model, self._step)
                self._step = []
            return super().training_step(model, inputs, *args, **kwargs)

        def add_kl(self, model: Any, batches: list[dict[str, Any]], counted: Sequence[bool] = ()) -> None:
            """Add the reference's log-probabilities to micro batches, and the KL divergence over all of them
            and all processes.

            Every process calls it with equally many; `counted` is False for those that are left out of the
            mean, and empty if there are none.
            """
            if not self.calculate_KL:
                return
            # The sum of the differences, and their number.
            total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
            for place, batch in enumerate(batches):
                difference = self._with_reference(model, batch).to(total.device)
                if not counted or counted[place]:
                    total += torch.stack([difference.sum(), torch.ones_like(difference).sum()])
            total = self.accelerator.reduce(total, reduction="sum")
            for batch in batches:
                batch[f"{_KL}mean"] = (total[0] / total[1]).float()

        def _with_reference(self, model: Any, batch: dict[str, Any]) -> Any:
            """Add the reference's log-probabilities to a micro batch; return the differences of those of the
            answers to other prompts, trained model minus reference, float64 [rows]."""
            inputs = self._prepare_inputs(batch)
            with torch.no_grad(), self.compute_loss_context_manager():
                trained_kl = super()._compute_kl_logps(model, inputs)
            reference, reference_kl = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            batch |= {"ref_logps": reference, f"ref_{_KL}logps": torch.zeros_like(reference_kl)}
            return (trained_kl - reference_kl).double()

        def log(self, *args: Any, **kwargs: Any) -> None:
            """Log the margin of all rows: TRL averages those of the micro batches that have rows of both
            labels."""
            metrics = self._metrics["train"]
            metrics.pop("rewards/margins", None)
            if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
                metrics["rewards/margins"] = [metrics["rewards/chosen"][0] - metrics["rewards/rejected"][0]]
            super().log(*args, **kwargs)

        def _compute_kl_logps(self, model: Any, batch: dict[str, Any]) -> Any:
            """Return the step's mean, and take it out of the batch: TRL passes on to the model what it does
            not know."""
            if f"{_KL}mean" in batch:
                return batch.pop(f"{_KL}mean")
            return super()._compute_kl_logps(model, batch)

    return UnpairedTrainer


@dataclass(frozen=True)
class LabelledCollator:
    """The Trainer's data_collator of labelled answers, with TRL's names."""

    pad_token_id: int

    def __call__(self, rows: list[Row]) -> dict[str, Any]:
        """Return a batch of int64 tensors [rows, longest], padded on the right: input_ids, attention_mask and
        completion_mask, which is 1 for the trained tokens; the same with the prefix KL_ where rows have
        another answer; and label [rows]."""
        import torch

        batch = {"label": torch.tensor([bool(row["label"]) for row in rows])}
        for prefix in ("", _KL) if f"{_KL}input_ids" in rows[0] else ("",):
            sequences = [{name: row[prefix + name] for name in ("input_ids", "labels")} for row in rows]
            padded = sequence_batch(sequences, self.pad_token_id)
            batch |= {prefix + name: value for name, value in padded.items()}
        return batch
