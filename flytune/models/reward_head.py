"""The head of a reward model, `score`: its first values, and the rewards of sequences.

A reward model is transformers' sequence classifier with one output: the head's product with the hidden state
of the last token that is not padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytune.errors import ExportError
from flytune.models import vocabulary
from flytune.models.safetensors_files import ParameterPart
from flytune.models.scoring import Row, innermost, padded

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
