"""The section of objective sft."""

from typing import ClassVar, Literal

from flytune.recipe.objectives.base import ObjectiveSection


class Sft(ObjectiveSection):
    """Supervised fine-tuning: it trains answers."""

    refused_formats: ClassVar[dict[str, str]] = {
        "preference": "has two answers in a row, and objective: sft trains one; write objective: dpo",
        "unpaired": "has undesirable answers, and objective: sft trains all; write objective: kto",
    }

    reads_images: ClassVar[bool] = True

    name: Literal["sft"] = "sft"
    """`sft` trains answers (docs/objectives.md)."""
