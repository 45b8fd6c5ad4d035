"""Objectives that train a head of a few outputs for a sequence, with TRL's RewardTrainer."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

from flytune.models import Row, heads
from flytune.models.scoring import padded, sequences_of
from flytune.objectives.base import ObjectiveBase, tables_beside_adapter


class SequenceHeadObjective(ObjectiveBase):
    """The parts that a reward model and a classifier have in common."""

    head_of: ClassVar[str]
    """Noun of what the head's outputs are: rewards, or classes."""
    answers_with: ClassVar[str]
    """Phrase of the model and what it gives in the place of words."""
    model_types: ClassVar[Collection[str]] = heads.TYPES
    """Model types that have the head."""
    bases: ClassVar[str] = "llama, mistral, qwen3, gemma3_text ..."
    """Some of them."""
    why_no_adapter: ClassVar[str] = "an adapter of a language model has no head of {head_of}"
    """Reason that training cannot begin from an adapter."""
    why_no_lm_head: ClassVar[str] = "there is no lm_head, and score is trained completely"
    """Reason that method.target_modules cannot name a head."""
    why_no_code: ClassVar[str] = "code of the model's own has its own classifier, or none"
    """Reason that the model cannot be of code of its own."""

    def problems(self) -> list[str]:
        method, where, sentences = self.recipe.method, f"objective: {self.name}", []
        if method.adapter:
            why = self.why_no_adapter.format(head_of=self.head_of)
            sentences.append(
                f"{where} with method.adapter: {why}; merge it first (flytune merge), and name the merged "
                "model in model.name_or_path"
            )
        if method.is_pissa:
            sentences.append(
                f"{where} with method.init_lora_weights {method.init_lora_weights}: its export as LoRA is "
                f"not tested with a head of {self.head_of}; leave init_lora_weights out"
            )
        if named := tables_beside_adapter(self.recipe):
            sentences.append(
                f"{where} with {', '.join(named)}: tables of tokens beside the head of {self.head_of} are "
                "not tested; use method full, or remove them"
            )
        if isinstance(method.target_modules, list) and {"lm_head", "score"} & {*method.target_modules}:
            sentences.append(
                f"{where} with method.target_modules {', '.join(method.target_modules)}: "
                f"{self.why_no_lm_head}; remove it there"
            )
        if reason := self.sharding.no_sequence_head:
            sentences.append(
                f"{where} with sharding {self.recipe.sharding.name}: {reason}; use sharding none or ddp"
            )
        if self.recipe.training.use_liger_kernel:
            sentences.append(
                f"{where} with training.use_liger_kernel: Liger replaces the loss of language models, and "
                "its other kernels are not tested without that; remove it"
            )
        if self.recipe.model.trust_remote_code:
            sentences.append(
                f"{where} with model.trust_remote_code: {self.why_no_code}; use a model type of transformers"
            )
        if self.recipe.evaluation.tasks:
            sentences.append(
                f"{where} with evaluation.tasks: lm-evaluation-harness asks for words, and "
                f"{self.answers_with}; remove it"
            )
        return sentences

    def model_problem(self, model_type: str) -> str | None:
        if model_type in self.model_types:
            return None
        return (
            f"objective: {self.name}: transformers has no sequence classifier of the usual form for "
            f"{model_type} (GenericForSequenceClassification); choose another base model ({self.bases})"
        )

    def arguments_class(self) -> Any:
        from trl import RewardConfig

        return RewardConfig

    def collator(self, pad_token_id: int) -> Callable[[list[Row]], dict[str, Any]]:
        return functools.partial(batch, pad_token_id)


def batch(pad_token_id: int, rows: list[Row]) -> dict[str, Any]:
    """Return a batch of the sequences of rows, int64 tensors [sequences, longest]: as TRL has it, the chosen
    sequences of all pairs, then the rejected."""
    sequences: Sequence[list[int]] = [row["input_ids"] for row in sequences_of(rows)]
    return {
        "input_ids": padded([*sequences], pad_token_id),
        "attention_mask": padded([[1] * len(sequence) for sequence in sequences], 0),
    }


@functools.cache
def prepared_trainer() -> Any:
    """Return PreparedTrainer. TRL is imported here."""
    from trl import RewardTrainer

    class PreparedTrainer(RewardTrainer):  # type: ignore[misc]
        """RewardTrainer that takes its rows as they are, of a model with any number of outputs."""

        def __init__(self, *args: Any, model: Any, **kwargs: Any) -> None:
            # TRL refuses a configuration with more than one output, and reads it nowhere else.
            labels, model.config.id2label = model.config.id2label, {0: ""}
            try:
                super().__init__(*args, model=model, **kwargs)
            finally:
                model.config.id2label = labels

        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    return PreparedTrainer
