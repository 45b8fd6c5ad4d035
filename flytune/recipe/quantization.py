"""The quantization of a frozen base: the fields of `method` that only qlora has."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from flytune import limits
from flytune.schema import Strict

Quantized = Literal["nf4", "nf4_double", "fp4", "fp4_double", "int8"]
"""Formats of quantized weights; `_double`: the scales of their blocks are quantized too."""
_SINCE: dict[str, Any] = {"since": "0.2.0"}


class Quantization(Strict):
    """The format of a quantized base (bitsandbytes), in the spelling of transformers' BitsAndBytesConfig."""

    _of_8_bit: ClassVar[tuple[str, ...]] = ("llm_int8_threshold",)
    _of_4_bit: ClassVar[tuple[str, ...]] = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant")

    bnb_4bit_quant_type: Annotated[Literal["nf4", "fp4"], Field(json_schema_extra=_SINCE)] = "nf4"
    """4-bit numbers of a qlora base: `nf4`, spaced like a normal distribution, or `fp4`, floating-point numbers."""
    bnb_4bit_use_double_quant: Annotated[bool, Field(json_schema_extra=_SINCE)] = True
    """Quantization of the 4-bit blocks' scales too, which saves 0.37 bits a weight."""
    load_in_8bit: Annotated[bool, Field(json_schema_extra=_SINCE)] = False
    """A qlora base in 8 bits (LLM.int8) instead of 4."""
    llm_int8_threshold: Annotated[float, Field(ge=0, le=limits.FACTOR, json_schema_extra=_SINCE)] = 6.0
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
        # A recipe that went through JSON carries every field; only changed ones are a decision.
        if changed := [name for name in given if getattr(self, name) != type(self).model_fields[name].default]:
            remedy = "remove one of them" if self.load_in_8bit else "write load_in_8bit: true beside it"
            raise ValueError(f"{', '.join(changed)}: no effect {without} 8 bits (load_in_8bit); {remedy}")
        return self
