"""The section `method` of a recipe."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flytune import limits
from flytune.recipe.quantization import Quantization
from flytune.schema import PathOrAddress, Positive

_TABLES = ("embed_tokens", "lm_head")


class Method(Quantization):
    """The trained weights: all, an adapter, or an adapter on a quantized base."""

    name: Literal["full", "lora", "qlora"]
    r: Positive = 16
    """Rank of the adapter."""
    lora_alpha: Positive = 32
    """Scale of the adapter, which is multiplied by lora_alpha / r."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    target_modules: str | list[str] = "all-linear"
    """Layers with an adapter: `all-linear`, a regular expression, or a list of names."""
    use_dora: bool = Field(default=False, json_schema_extra={"since": "0.2.0"})
    """DoRA: the norm of each row of an adapted weight is trained apart from its direction."""
    use_rslora: bool = Field(default=False, json_schema_extra={"since": "0.2.0"})
    """rsLoRA: the adapter is multiplied by lora_alpha / sqrt(r) instead."""
    init_lora_weights: Literal[True] | Annotated[str, Field(pattern=r"^(gaussian|pissa|pissa_niter_[1-9]\d{0,3})$")] = Field(
        default=True, json_schema_extra={"since": "0.2.0"}
    )
    """Initial values of the adapter: `gaussian`, or `pissa` (its base's largest singular values; pissa_niter_16 is faster)."""
    rank_pattern: dict[str, Positive] = Field(default={}, max_length=limits.LISTED, json_schema_extra={"since": "0.2.0"})
    """Ranks of layers that have another one than r, by name or regular expression: {down_proj: 32}."""
    alpha_pattern: dict[str, Positive] = Field(default={}, max_length=limits.LISTED, json_schema_extra={"since": "0.2.0"})
    """Scales of layers that have another one than lora_alpha, by name or regular expression."""
    modules_to_save: list[Literal["embed_tokens", "lm_head"]] = Field(default=[], json_schema_extra={"since": "0.2.0"})
    """Tables that are trained completely beside the adapter, and stored with it: input embedding, head."""
    trainable_token_indices: list[Annotated[int, Field(ge=0, le=limits.COUNT)]] = Field(
        default=[], max_length=limits.ADDED_TOKENS, json_schema_extra={"since": "0.2.0"}
    )
    """Ids of further tokens whose rows of embedding and head are trained, as those of model.extra_special_tokens are."""
    adapter: PathOrAddress | None = None
    """An adapter to train further (folder or fsspec address of an artifact) instead of a new one; r and the rest must match."""

    @model_validator(mode="after")
    def _adapter_fields(self) -> Self:
        given = sorted(self.model_fields_set - {"name"})
        # A recipe that went through JSON (between tasks) carries every field; only changed ones are a decision.
        changed = [name for name in given if getattr(self, name) != type(self).model_fields[name].default]
        if self.name != "qlora" and (quantized := [name for name in changed if name in Quantization.model_fields]):
            raise ValueError(f"{', '.join(quantized)}: only for qlora, whose base is quantized; write name: qlora")
        if self.name == "full" and changed:
            raise ValueError(f"{', '.join(changed)}: only for lora and qlora; full trains all weights")
        if self.is_pissa and self.name == "qlora":
            raise ValueError(
                f"init_lora_weights: {self.init_lora_weights} takes singular values out of 16- or 32-bit weights, and those of "
                "qlora have 4 bits; use method lora, or leave it out"
            )
        for other in ("adapter", "use_dora"):
            if self.is_pissa and getattr(self, other):
                raise ValueError(f"init_lora_weights: {self.init_lora_weights} cannot be combined with {other}; choose one")
        if bad := [key for key in (*self.rank_pattern, *self.alpha_pattern) if not _is_pattern(key)]:
            raise ValueError(f"rank_pattern, alpha_pattern: {bad[0]!r} is no regular expression; write a layer's name")
        if both := sorted({*self.modules_to_save, *(_TABLES if self.trainable_token_indices else ())} & self._named_targets):
            raise ValueError(f"{both[0]}: has an adapter by target_modules, and is trained itself; name it in one of them")
        return self

    @property
    def is_pissa(self) -> bool:
        """True if the adapter starts from the base's singular values, which the frozen weights then lack."""
        return isinstance(self.init_lora_weights, str) and self.init_lora_weights.startswith("pissa")

    @property
    def largest_rank(self) -> int:
        """Largest rank of the exported adapter; PiSSA is exported as LoRA of twice the rank."""
        return max(self.r, *self.rank_pattern.values(), 1) * (2 if self.is_pissa else 1)

    @property
    def _named_targets(self) -> set[str]:
        """Names in target_modules, where it is a list."""
        return set() if isinstance(self.target_modules, str) else set(self.target_modules)


def _is_pattern(key: str) -> bool:
    try:
        re.compile(key)
    except re.error:
        return False
    return True
