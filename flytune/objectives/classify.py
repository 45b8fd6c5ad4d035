"""Classifiers of texts (transformers' AutoModelForSequenceClassification), with TRL's RewardTrainer.

The loss of a text with one label is minus its label's log-probability, times the label's weight; of a text
that may have several, the mean over all labels of the same of having each. The loss of a step is the mean
over its texts, whatever the micro batch: torch's CrossEntropyLoss divides by the sum of the weights of a
micro batch instead.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from flytune.models import Row, heads
from flytune.models.scoring import resampled, sequences_of
from flytune.objectives import sequence_heads
from flytune.objectives.heldout import HeldoutFigures, HeldoutRows, intervals
from flytune.objectives.sequence_heads import SequenceHeadObjective
from flytune.recipe import Classify
from flytune.records import Interval, Manifest
from flytune.records.figures import LOSS, SHARE_OF_TEXTS, Figure
from flytune.records.metrics import LabelCounts
from flytune.sentences import counted
from training_estimates.meta_model import ENCODERS
from training_estimates.sizes import Geometry


class ClassifiedRows(HeldoutRows):
    """Texts by the probabilities of their labels."""

    def without_words(self, model: Any) -> HeldoutFigures:
        """Return the figures of a classifier.

        Raises:
            ExportError: an output is not finite.
        """
        import numpy

        section = self.recipe.objective
        assert isinstance(section, Classify)
        pad, batch_size = self.tokenizer.pad_token_id, self.recipe.evaluation.batch_size
        logits = heads.finite_scores(model, self.sequences, pad, batch_size, "classifier")
        wanted = heads.targets(self.rows, len(section.labels))
        given = heads.given_labels(logits, section.has_several_labels)
        values = {
            "accuracy": (wanted == given).all(axis=1),
            "loss": heads.class_losses(logits, wanted, section),
        }
        weights = numpy.ones(len(wanted), dtype=int)
        measured = intervals(values, weights) | {"macro_f1": macro_f1(wanted, given)}
        figures = {name: {"tuned": interval} for name, interval in measured.items()}
        labels = label_counts(section, wanted, given)
        return HeldoutFigures(figures, weights, values, constant_figures(section, wanted), {"labels": labels})


def macro_f1(wanted: Any, given: Any) -> Interval:
    """Return the mean over labels of the harmonic mean of precision and recall, with a 95 % interval of the
    bootstrap over texts.

    Labels that neither the texts nor the model have are left out, as scikit-learn's f1_score does.

    Args:
        wanted, given: which labels each text has, and gets, bool (texts, labels).
    """
    import sys

    import numpy

    weights = numpy.ones(len(wanted), dtype=int)
    columns = numpy.concatenate([wanted & given, wanted, given], axis=1).astype(float)

    def means(shares: Any) -> Any:
        """Return the mean F1 of each row of the means of `columns`."""
        right, texts, answers = numpy.split(shares, 3, axis=1)
        is_there = texts + answers > 0
        f1 = 2 * right / numpy.where(is_there, texts + answers, 1)
        return f1.sum(axis=1) / numpy.maximum(is_there.sum(axis=1), 1)

    value = float(means(columns.mean(axis=0, keepdims=True))[0])
    if len(wanted) < 2:
        return Interval(value=value, low=-sys.float_info.max, high=sys.float_info.max)
    low, high = numpy.percentile(means(resampled(columns, weights)), [2.5, 97.5])
    return Interval(value=value, low=float(low), high=float(high))


def constant_figures(section: Classify, wanted: Any) -> dict[str, float]:
    """Return accuracy and loss of the best answers that are the same for all texts: the most frequent labels,
    and the labels' shares as probabilities.

    With weights other than 1 there is no loss: the best probabilities are others.
    """
    import numpy

    _, counts = numpy.unique(wanted, axis=0, return_counts=True)
    figures = {"accuracy": float(counts.max() / len(wanted))}
    if set(section.weights) == {1.0}:
        shares = wanted.mean(axis=0)
        losses = -shares * numpy.log(numpy.where(shares > 0, shares, 1.0))
        if section.has_several_labels:
            without = 1 - shares
            losses -= without * numpy.log(numpy.where(without > 0, without, 1.0))
        figures["loss"] = float(losses.mean() if section.has_several_labels else losses.sum())
    return figures


def label_counts(section: Classify, wanted: Any, given: Any) -> list[LabelCounts]:
    """Return how the texts of each label are labelled."""
    right = (wanted & given).sum(axis=0)
    return [
        LabelCounts(
            label=label,
            texts=int(wanted[:, place].sum()),
            answered=int(given[:, place].sum()),
            right=int(right[place]),
            answers=[] if section.has_several_labels else given[wanted[:, place]].sum(axis=0).tolist(),
        )
        for place, label in enumerate(section.labels)
    ]


class Classification(SequenceHeadObjective):
    """TRL's RewardTrainer with the loss of labels; all texts have the same weight."""

    name = "classify"
    section: Classify
    head_of = "classes"
    answers_with = "a classifier gives labels"
    model_types = heads.TYPES | ENCODERS.keys()
    bases = f"llama, mistral, qwen3, gemma3_text ..., or an encoder: {', '.join(ENCODERS)}"
    heldout_rows = ClassifiedRows
    logged: ClassVar[Mapping[str, str]] = {"accuracy": "accuracy"}

    def figures(self) -> list[Figure]:
        if self.section.has_several_labels:
            accuracy = f"texts whose labels are exactly those of at least {heads.THRESHOLD:.0%}"
            loss = "mean over labels of minus the log-probability of having each or not"
        else:
            accuracy = "texts whose label is the most probable one"
            loss = "minus the log-probability of the text's label"
        if self.section.class_weight:
            loss += ", times the label's weight"
        return [
            SHARE_OF_TEXTS.model_copy(update={"meaning": accuracy}),
            Figure(
                name="macro_f1",
                title="macro F1",
                better="higher",
                meaning="mean over labels of the harmonic mean of precision and recall",
            ),
            LOSS.model_copy(
                update={
                    "title": "log loss",
                    "unit": "nats per text",
                    "meaning": loss,
                    "scaled_by": ["objective.class_weight", "objective.problem_type"],
                    "neutral_model": SHARE_OF_TEXTS.neutral_model,
                }
            ),
        ]

    def base_problems(self, geometry: Geometry) -> list[str]:
        sentences = super().base_problems(geometry)
        if geometry.model_type in ENCODERS and self.recipe.method.name == "qlora":
            sentences.append(
                f"method: qlora with objective {self.name} on an encoder ({geometry.model_type}): its head, "
                "which is trained completely, would be quantized with it; use method lora or full"
            )
        labels_of_base = geometry.own_labels
        if labels_of_base is not None and list(labels_of_base) != self.section.labels:
            sentences.append(
                f"objective.labels: {', '.join(self.section.labels)[:200]}, but "
                f"{self.recipe.model.name_or_path} is a classifier with {', '.join(labels_of_base)[:200]}; "
                "name its labels, in their order, or a base model without such a head"
            )
        return sentences

    def reasons(self) -> list[str]:
        lines = [
            f"objective: {self.name}: the head has {counted(len(self.section.labels), 'output')}, so there "
            "are no logits of the vocabulary"
        ]
        if self.recipe.evaluation.sample_answers:
            lines.append("evaluation.sample_answers: a classifier answers nothing, so none are sampled")
        return lines

    def warnings(self, manifest: Manifest) -> list[str]:
        counts = dict(zip(manifest.classes, manifest.train.classes, strict=False))
        absent = [label for label in self.section.labels if not counts.get(label)]
        if not absent:
            return []
        return [
            f"objective.labels: no training text has {', '.join(absent)[:200]}; the model never learns when "
            "to give it"
        ]

    def arguments(self) -> dict[str, Any]:
        # The columns of prepared texts are not TRL's.
        return {"disable_dropout": False, "remove_unused_columns": False}

    @classmethod
    def trainer_class(cls) -> Any:
        return _trainer_class()

    def collator(self, pad_token_id: int) -> Callable[[list[Row]], dict[str, Any]]:
        return functools.partial(batch, pad_token_id, len(self.section.labels))

    def model_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name != TARGETS}

    def log_counts(self, batch: dict[str, Any]) -> dict[str, Any]:
        import torch

        return {"accuracy": torch.tensor(len(batch[TARGETS]), device=batch[TARGETS].device)}

    def row_numbers(self, outputs: Any) -> Any:
        return outputs.logits.float().logsumexp(dim=-1)

    def card_text(self) -> str:
        kind = "several labels or none" if self.section.has_several_labels else "one label"
        return f"A classifier that gives a text {kind}. The base has no such head, and so no figures."

    def measure(self, trainer: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
        import numpy

        sequences = [sequence["input_ids"] for sequence in sequences_of(rows)]
        with trainer.compute_loss_context_manager():
            logits = heads.scores(trainer.model_wrapped, sequences, trainer.processing_class.pad_token_id)
        wanted = heads.targets(rows, len(self.section.labels))
        losses = heads.class_losses(logits, wanted, self.section)
        return losses, numpy.ones(len(losses))


OBJECTIVE = Classification
TARGETS = "targets"
"""Key of a batch with which labels each text has."""


def batch(pad_token_id: int, labels: int, rows: list[Row]) -> dict[str, Any]:
    """Return a batch of texts, int64 [rows, longest], with `targets`: 1.0 for each label that a text has,
    float32 [rows, labels]."""
    import torch

    wanted = torch.from_numpy(heads.targets(rows, labels)).float()
    return sequence_heads.batch(pad_token_id, rows) | {TARGETS: wanted}


@functools.cache
def _trainer_class() -> Any:
    """Return ClassTrainer. TRL is imported here."""
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

    class ClassTrainer(sequence_heads.prepared_trainer()):  # type: ignore[misc]
        """RewardTrainer on prepared texts with labels."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            section, targets = self.run.recipe.objective, inputs.pop(TARGETS)
            outputs = model(**inputs, use_cache=False)
            logits = outputs.logits.float()
            weights = torch.tensor(section.weights, device=logits.device)
            if section.has_several_labels:
                loss = binary_cross_entropy_with_logits(logits, targets, weights)
                # The logit of a probability of one half is 0.
                is_right = ((logits >= 0) == (targets > 0)).all(dim=1)
            else:
                classes = targets.argmax(dim=1)
                loss = (weights[classes] * cross_entropy(logits, classes, reduction="none")).mean()
                is_right = logits.argmax(dim=1) == classes
            share = self.accelerator.gather_for_metrics(is_right.float().mean()).mean().item()
            self._metrics["train"]["accuracy"].append(share)
            return (loss, outputs) if return_outputs else loss

    return ClassTrainer
