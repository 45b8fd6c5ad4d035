"""The field `model.rope_scaling` of a recipe: scalings of the rotary embedding, each with the keys that
transformers 5 reads of its type (modeling_rope_utils.py)."""

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from flytune import limits
from flytune.schema import Strict

_Factor = Annotated[float, Field(gt=1, le=limits.FACTOR)]
_Part = Annotated[float, Field(gt=0, le=limits.FACTOR)]
_Parts = Annotated[list[_Part], Field(min_length=1, max_length=limits.LISTED)]
_Length = Annotated[int, Field(gt=0, le=limits.TOKENS)]


class RopeSection(Strict):
    """A scaling of the rotary embedding."""

    rope_type: str
    factor: _Factor
    """Number by which the positions grow that the model is made for."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Keys of rope_parameters in config.json; what is not set is transformers' default."""
        return self.model_dump(exclude_none=True)

    @property
    def positions(self) -> int | None:
        """Positions that the scaled model is made for; None if they follow from the base's."""
        length = getattr(self, "original_max_position_embeddings", None)
        return None if length is None else int(length * self.factor)


class LinearRope(RopeSection):
    """Positions that are divided by the factor (Chen et al. 2023)."""

    rope_type: Literal["linear"]


class DynamicRope(RopeSection):
    """A rotary base that grows with the longest sequence of a batch, from the base's own positions on."""

    rope_type: Literal["dynamic"]


class YarnRope(RopeSection):
    """Slow frequencies that are divided by the factor, and fast ones that stay (YaRN, Peng et al. 2023)."""

    rope_type: Literal["yarn"]
    original_max_position_embeddings: _Length
    """Positions that the base was made for, before any scaling."""
    attention_factor: _Part | None = None
    """Factor of queries and keys; by default 0.1 ln(factor) + 1."""
    beta_fast: _Part | None = None
    """Rotations within the original positions from which a frequency stays; 32 by default."""
    beta_slow: _Part | None = None
    """Rotations below which a frequency is divided by the complete factor; 1 by default."""
    mscale: _Part | None = None
    """Weight of ln(factor) in the numerator of the attention factor, with mscale_all_dim."""
    mscale_all_dim: _Part | None = None
    """Weight of ln(factor) in its denominator, with mscale."""
    truncate: bool | None = None
    """Rounding of the bounds between slow and fast frequencies to whole dimensions; true by default."""

    @model_validator(mode="after")
    def _read_together(self) -> Self:
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("mscale and mscale_all_dim are read together only; write both, or neither")
        if self.mscale is not None and self.attention_factor is not None:
            raise ValueError("mscale and mscale_all_dim have no effect beside attention_factor; remove them")
        fast, slow = self.beta_fast or 32, self.beta_slow or 1
        if fast <= slow:
            raise ValueError(f"beta_fast {fast:g} must be greater than beta_slow {slow:g}")
        return self


class Llama3Rope(RopeSection):
    """Frequencies that are divided by the factor where their wavelength is long (Llama 3.1)."""

    rope_type: Literal["llama3"]
    original_max_position_embeddings: _Length
    """Positions that the base was made for, before any scaling."""
    low_freq_factor: _Part
    """Wavelengths above original_max_position_embeddings / low_freq_factor are scaled completely."""
    high_freq_factor: _Part
    """Wavelengths below original_max_position_embeddings / high_freq_factor stay."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor:g} must be greater than low_freq_factor "
                f"{self.low_freq_factor:g}"
            )
        return self


class LongRope(RopeSection):
    """A factor for each frequency, one list for short batches and one for long ones (Ding et al. 2024)."""

    rope_type: Literal["longrope"]
    original_max_position_embeddings: _Length
    """Positions that the base was made for; a batch with a longer sequence is scaled by long_factor."""
    short_factor: _Parts
    """Divisors of the frequencies in other batches, one for each: half of a head's rotated dimensions."""
    long_factor: _Parts
    """Divisors of the frequencies in batches with a longer sequence."""

    @property
    def parameters(self) -> dict[str, Any]:
        # max_position_embeddings has it: transformers 4 reads it there alone, and 5 there too.
        return self.model_dump(exclude={"factor"})

    @model_validator(mode="after")
    def _equally_long(self) -> Self:
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"short_factor has {len(self.short_factor)} numbers and long_factor {len(self.long_factor)}; "
                "each has one for each frequency"
            )
        return self


_Scaling = LinearRope | DynamicRope | YarnRope | Llama3Rope | LongRope
_FIELDS = {
    get_args(section.model_fields["rope_type"].annotation)[0]: section.model_fields
    for section in get_args(_Scaling)
}


def _without_others(value: Any) -> Any:
    """Return a scaling's content.

    Raises:
        ValueError: it has keys of another type, which transformers would ignore.
    """
    if not isinstance(value, dict) or not isinstance(kind := value.get("rope_type"), str):
        return value
    foreign = [name for name in value if name not in _FIELDS.get(kind, value)]
    owners = {name: [other for other, fields in _FIELDS.items() if name in fields] for name in foreign}
    if ignored := [f"{name} (of {' and '.join(kinds)})" for name, kinds in owners.items() if kinds]:
        raise ValueError(
            f"{', '.join(ignored)}: no effect with rope_type {kind}; remove it, or write that type"
        )
    return value


RopeScaling = Annotated[
    Annotated[_Scaling, Field(discriminator="rope_type")], BeforeValidator(_without_others)
]
