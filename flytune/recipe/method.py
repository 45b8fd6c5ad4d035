"""The section `method` of a recipe, and the quantization of a frozen base, whose fields only qlora has."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from flytune import limits
from flytune.recipe import patterns
from flytune.recipe.sections import Section
from flytune.schema import PathOrAddress, Positive

_TABLES = ("embed_tokens", "lm_head")
_LACKING = {"lora_dropout": "dropout of inputs", "use_dora": "DoRA", "is_pissa": "PiSSA"}


Quantized = Literal["nf4", "nf4_double", "fp4", "fp4_double", "int8"]
"""Formats of quantized weights; `_double`: the scales of their blocks are quantized too."""


class Quantization(Section):
    """The format of a quantized base (bitsandbytes), in the spelling of transformers' BitsAndBytesConfig."""

    _of_8_bit: ClassVar[tuple[str, ...]] = ("llm_int8_threshold",)
    _of_4_bit: ClassVar[tuple[str, ...]] = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")

    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    """4-bit numbers of a qlora base: `nf4`, spaced like a normal distribution, or `fp4`, floating-point
    numbers."""
    bnb_4bit_use_double_quant: bool = True
    """Quantization of the 4-bit blocks' scales too, which saves 0.37 bits a weight."""
    load_in_8bit: bool = False
    """A qlora base in 8 bits (LLM.int8) instead of 4."""
    llm_int8_threshold: Annotated[float, Field(ge=0, le=limits.FACTOR)] = 6.0
    """Size of an activation from which 8-bit layers compute its column in full precision; 0 for none."""

    @property
    def quantized(self) -> Quantized:
        """Format of the quantized weights."""
        if self.load_in_8bit:
            return "int8"
        if self.bnb_4bit_quant_type == "nf4":
            return "nf4_double" if self.bnb_4bit_use_double_quant else "nf4"
        return "fp4_double" if self.bnb_4bit_use_double_quant else "fp4"

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        given, without = (self._of_4_bit, "in") if self.load_in_8bit else (self._of_8_bit, "without")
        if changed := self.changed(*given):
            remedy = "remove one of them" if self.load_in_8bit else "write load_in_8bit: true beside it"
            raise ValueError(f"{', '.join(changed)}: no effect {without} 8 bits (load_in_8bit); {remedy}")
        return self


class Method(Quantization):
    """The trained weights: all, an adapter, or an adapter on a quantized base."""

    name: Literal["full", "lora", "qlora"]
    r: Positive = 16
    """Rank of the adapter."""
    lora_alpha: Positive = 32
    """Scale of the adapter, which is multiplied by lora_alpha / r."""
    lora_dropout: Annotated[float, Field(ge=0, le=limits.DROPOUT)] = 0.05
    target_modules: str | list[str] = "all-linear"
    """Layers with an adapter: `all-linear`, a regular expression, or a list of names."""
    experts: bool = False
    """Adapters on all routed experts too (PEFT's target_parameters), never on routers; lora_dropout is 0
    unless written."""
    use_dora: bool = False
    """DoRA: the norm of each row of an adapted weight is trained apart from its direction."""
    use_rslora: bool = False
    """rsLoRA: the adapter is multiplied by lora_alpha / sqrt(r) instead."""
    init_lora_weights: (
        Literal[True] | Annotated[str, Field(pattern=r"^(gaussian|pissa|pissa_niter_[1-9]\d{0,3})$")]
    ) = True
    """Initial values of the adapter: `gaussian`, or `pissa` (its base's largest singular values;
    pissa_niter_16 is faster)."""
    rank_pattern: dict[str, Positive] = Field(default={}, max_length=patterns.MOST_KEYS)
    """Ranks of layers that have another one than r, by name or regular expression: {down_proj: 32}."""
    alpha_pattern: dict[str, Positive] = Field(default={}, max_length=patterns.MOST_KEYS)
    """Scales of layers that have another one than lora_alpha, by name or regular expression."""
    modules_to_save: list[Literal["embed_tokens", "lm_head"]] = Field(default=[])
    """Tables that are trained completely beside the adapter, and stored with it: input embedding, head."""
    trainable_token_indices: list[Annotated[int, Field(ge=0, le=limits.COUNT)]] = Field(
        default=[], max_length=limits.ADDED_TOKENS
    )
    """Ids of further tokens whose rows of embedding and head are trained, as those of
    model.extra_special_tokens are."""
    adapter: PathOrAddress | None = None
    """An adapter to train further (folder or fsspec address of an artifact) instead of a new one; r and the
    rest must match."""

    @model_validator(mode="before")
    @classmethod
    def _no_dropout_on_experts(cls, content: Any) -> Any:
        """Set lora_dropout to 0 where experts are adapted and it is not written: PEFT adds their adapters to
        the weights."""
        if isinstance(content, dict) and content.get("experts") is True and "lora_dropout" not in content:
            return content | {"lora_dropout": 0.0}
        return content

    @field_validator("target_modules")
    @classmethod
    def _target_pattern(cls, value: str | list[str]) -> str | list[str]:
        if isinstance(value, str):
            patterns.require([value])
        return value

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _end_patterns(cls, value: dict[str, int]) -> dict[str, int]:
        patterns.require(value, patterns.END)
        return value

    @model_validator(mode="after")
    def _adapter_fields(self) -> Self:
        changed = sorted({*self.changed()} - {"name"})
        if self.name != "qlora" and (
            quantized := [name for name in changed if name in Quantization.model_fields]
        ):
            raise ValueError(
                f"{', '.join(quantized)}: only for qlora, whose base is quantized; write name: qlora"
            )
        if self.name == "full" and changed:
            raise ValueError(f"{', '.join(changed)}: only for lora and qlora; full trains all weights")
        if self.is_pissa and self.name == "qlora":
            raise ValueError(
                f"init_lora_weights: {self.init_lora_weights} takes singular values out of 16- or 32-bit "
                "weights, and those of qlora have 4 bits; use method lora, or leave it out"
            )
        for other in ("adapter", "use_dora"):
            if self.is_pissa and getattr(self, other):
                raise ValueError(
                    f"init_lora_weights: {self.init_lora_weights} cannot be combined with {other}; choose one"
                )
        if self.experts:
            self._check_experts()
        if both := sorted(
            {*self.modules_to_save, *(_TABLES if self.trainable_token_indices else ())} & self._named_targets
        ):
            raise ValueError(
                f"{both[0]}: has an adapter by target_modules, and is trained itself; name it in one of them"
            )
        return self

    def _check_experts(self) -> None:
        """Refuse what PEFT (0.21, lora/layer.py: ParamWrapper) and bitsandbytes cannot do with experts."""
        if self.name == "qlora":
            raise ValueError(
                "experts: bitsandbytes quantizes nn.Linear and no fused experts, which would stay in 16 or "
                "32 bits; use lora"
            )
        for field in ("lora_dropout", "use_dora", "is_pissa"):
            if getattr(self, field):
                named = "init_lora_weights" if field == "is_pissa" else field
                raise ValueError(
                    f"experts: {named}: PEFT adds an expert's adapter to its weight, where it has no "
                    f"{_LACKING[field]}; remove {named}"
                )

    @property
    def is_all_linear(self) -> bool:
        """True if all linear layers of the decoder get an adapter; PEFT reads the word in capitals too."""
        return isinstance(self.target_modules, str) and self.target_modules.lower() == "all-linear"

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
