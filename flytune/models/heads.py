"""The heads of models: which class of transformers loads them, how they begin, and what compares them after
an export."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flytune.errors import ExportError
from flytune.models import vocabulary
from flytune.models.safetensors_files import ParameterPart
from flytune.models.scoring import Row, finite_loss, innermost, padded
from flytune.recipe import Recipe, Reward
from training_estimates.sizes import Geometry

NAME = "score.weight"
"""Name of the head's weight, float of shape (1, hidden size)."""
TYPES = frozenset(
    (
        "arcee",
        "cohere_compass_text",
        "deepseek_v2",
        "deepseek_v3",
        "diffllama",
        "doge",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "gpt_oss",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "jamba",
        "jetmoe",
        "llama",
        "minimax",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "persimmon",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "seed_oss",
        "smollm3",
        "stablelm",
        "starcoder2",
    )
)
"""Model types of text whose sequence classifier in transformers 5 is GenericForSequenceClassification, with
that head."""
_SCALE = 0.02
"""Standard deviation of the first values where the configuration has no initializer_range, as in
transformers."""


def first_values(config: Any, seed: int) -> Any:
    """Return the head's first values, float32 of shape (1, hidden size).

    They follow from the seed and the configuration alone, so that they are equal on every process, with every
    sharding, and in every attempt.
    """
    import torch

    text = config.get_text_config()
    scale = getattr(text, "initializer_range", None) or _SCALE
    drawn = torch.randn(
        1, text.hidden_size, generator=torch.Generator().manual_seed(seed), dtype=torch.float32
    )
    return drawn * scale


def draw(model: Any, seed: int) -> None:
    """Give a loaded reward model the head's first values."""
    import torch

    weight = model.score.weight
    with torch.no_grad(), vocabulary.gathered(weight):
        weight.data.copy_(first_values(model.config, seed).to(weight))


@dataclass(frozen=True)
class Drawn:
    """Source of the head's first values for sharded loading: no file has them."""

    config: Any
    seed: int

    @property
    def order(self) -> tuple[Path, str]:
        return Path(), NAME

    def read(self, part: ParameterPart) -> None:
        """Fill `part` with this process's values."""
        if part.local.numel():
            part.local.copy_(first_values(self.config, self.seed)[part.index])


def is_reward_model(model: Any) -> bool:
    """Return whether a model, live or reloaded, has a reward head."""
    return getattr(innermost(model).config, "num_labels", 0) == 1 and hasattr(innermost(model), "score")


def rewards(
    model: Any, sequences: Sequence[list[int]], pad_token_id: int, batch_size: int = 1, label: str = "rewards"
) -> Any:
    """Return the reward of each sequence of tokens, float64 of shape (sequences,). The training mode is
    restored afterwards.

    Under ZeRO-3 and FSDP every process must call it with equally many sequences.
    """
    import numpy
    import torch
    from tqdm import tqdm

    found = numpy.zeros(len(sequences))
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        with torch.no_grad(), tqdm(total=len(order), desc=label, unit=" answers", delay=2) as bar:
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                ids = padded([sequences[index] for index in batch], pad_token_id).to(device)
                mask = padded([[1] * len(sequences[index]) for index in batch], 0).to(device)
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
                found[batch] = logits.squeeze(-1).double().cpu().numpy()
                bar.update(len(batch))
    finally:
        model.train(was_training)
    return found


def finite_rewards(model: Any, rows: Sequence[Row], pad_token_id: int, batch_size: int, label: str) -> Any:
    """Return the `rewards` of rows by the model that `label` names.

    Raises:
        ExportError: a reward is not finite.
    """
    import numpy

    found = rewards(model, [row["input_ids"] for row in rows], pad_token_id, batch_size, f"{label}: rewards")
    if bad := numpy.flatnonzero(~numpy.isfinite(found)).tolist():
        raise ExportError(
            f"{label}: the reward of held-out answer {bad[0]} is {found[bad[0]]} ({len(bad)} of {len(found)} "
            "are not finite): its weights have diverged, or overflow in model.dtype; lower "
            "training.learning_rate, or use bfloat16"
        )
    return found


def pair_losses(found: Any, center: float | None) -> Any:
    """Return the loss of each pair in nats, as TRL's RewardTrainer computes it.

    Args:
        found: rewards of the chosen sequences, then of the rejected ones.
        center: objective.center_rewards_coefficient.
    """
    import numpy

    chosen, rejected = numpy.split(found, 2)
    return numpy.logaddexp(0.0, rejected - chosen) + (center or 0.0) * (chosen + rejected) ** 2


class Head:
    """The head of a language model: logits of the vocabulary."""

    name: ClassVar[str] = "language_model"
    outputs: ClassVar[int | None] = None
    """Outputs for each token; None for the vocabulary."""
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    """Class of transformers that loads the model."""
    arguments: ClassVar[Mapping[str, Any]] = {}
    """Arguments of from_pretrained."""
    task_type: ClassVar[str] = "CAUSAL_LM"
    """PEFT's name of the task of an adapter."""
    trained_beside: ClassVar[tuple[str, ...]] = ()
    """Modules that are trained completely beside an adapter (PEFT's modules_to_save)."""
    drawn: ClassVar[tuple[str, ...]] = ()
    """Parameters that a base model's files have no values for."""
    pipeline_tag: ClassVar[str] = "text-generation"
    """The hub's name of the task."""
    loss_unit: ClassVar[str] = "nats per token"
    """Unit of `loss`."""
    no_words: ClassVar[str] = ""
    """Reason that a model with it cannot answer in words; empty where it can."""

    def loader(self) -> Any:
        """Return the class of transformers that loads the model."""
        import transformers

        return getattr(transformers, self.auto_class)

    def geometry(self, geometry: Geometry) -> Geometry:
        """Return the sizes of a base model with this head."""
        return geometry

    def loss_problem(self, geometry: Geometry) -> str | None:
        """Return why a model's loss cannot be trained."""
        return geometry.loss_problem

    def own_logits(self, geometry: Geometry) -> str | None:
        """Return why the loss is computed of all of the model's logits; None where TRL's chunked loss is its
        own."""
        return geometry.own_logits

    def draw(self, model: Any, missing: Iterable[str], seed: int) -> None:
        """Give parameters their first values that a loaded base model's files have no values for."""

    def sources(self, config: Any, seed: int) -> dict[str, Any]:
        """Return the sources of those first values for sharded loading, by parameter."""
        return {}

    def freeze(self, model: Any, recipe: Recipe) -> None:
        """Freeze what a full fine-tune of a base model does not train."""

    def complete(self, model: Any, pad_token_id: Callable[[], int]) -> None:
        """Set what a base model's configuration may lack, before its adapter is loaded."""

    def loss(self, model: Any, sequences: Sequence[Row], pad_token_id: int, recipe: Recipe) -> float:
        """Return the loss that the gate compares: of a language model over all sequences.

        Raises:
            ExportError: it is not finite.
        """
        nll, tokens = finite_loss(model, sequences, pad_token_id, recipe.evaluation.batch_size, "tuned model")
        return float(nll.sum() / tokens.sum())


class ScalarHead(Head):
    """One number for a sequence, `score`: that of a reward model (models/heads.py)."""

    name = "scalar"
    outputs = 1
    auto_class = "AutoModelForSequenceClassification"
    arguments: ClassVar[Mapping[str, Any]] = {"num_labels": 1}
    task_type = "SEQ_CLS"
    trained_beside = ("score",)
    drawn = (NAME,)
    pipeline_tag = "text-classification"
    loss_unit = "nats per pair"
    no_words = (
        "a reward model, which has no head of words; load it with transformers, as the README.md of "
        "the artifact shows"
    )

    def geometry(self, geometry: Geometry) -> Geometry:
        return geometry.with_reward_head()

    def loss_problem(self, geometry: Geometry) -> str | None:
        return None

    def own_logits(self, geometry: Geometry) -> str | None:
        return None

    def draw(self, model: Any, missing: Iterable[str], seed: int) -> None:
        if NAME in missing:
            draw(model, seed)

    def sources(self, config: Any, seed: int) -> dict[str, Any]:
        return {NAME: Drawn(config, seed)}

    def complete(self, model: Any, pad_token_id: Callable[[], int]) -> None:
        # Its reward is that of the last token that is not padding; the base's configuration may name none.
        model.config.get_text_config().pad_token_id = pad_token_id()

    def loss(self, model: Any, sequences: Sequence[Row], pad_token_id: int, recipe: Recipe) -> float:
        assert isinstance(recipe.objective, Reward)
        found = finite_rewards(model, sequences, pad_token_id, recipe.evaluation.batch_size, "tuned model")
        return float(pair_losses(found, recipe.objective.center_rewards_coefficient).mean())


class VisionHead(Head):
    """The head of a language model that reads images too."""

    name = "vision_language_model"
    auto_class = "AutoModelForImageTextToText"
    pipeline_tag = "image-text-to-text"

    def freeze(self, model: Any, recipe: Recipe) -> None:
        if recipe.model.vision == "train":
            return
        language = [model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()]
        trained = {id(parameter) for part in language for parameter in part.parameters()}
        for parameter in model.parameters():
            if id(parameter) not in trained:
                parameter.requires_grad_(False)


LANGUAGE_MODEL, VISION_LANGUAGE_MODEL = Head(), VisionHead()
HEADS: dict[str, Head] = {head.name: head for head in (LANGUAGE_MODEL, VISION_LANGUAGE_MODEL, ScalarHead())}


def loader_of(folder: Path) -> Any:
    """Return the class of transformers that loads the language model in a folder, which may read images."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    is_text = AutoConfig.from_pretrained(folder).model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return (LANGUAGE_MODEL if is_text else VISION_LANGUAGE_MODEL).loader()


def head_of(recipe: Recipe) -> Head:
    """Return the head that a recipe's objective trains."""
    return VISION_LANGUAGE_MODEL if recipe.data.images else HEADS[recipe.objective.head]
