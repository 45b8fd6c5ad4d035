"""A config.json from outside, read strictly."""

import re
from typing import Any

from training_estimates.errors import SizesError

MOST = 100_000_000
"""Largest number that is taken for a size."""
MOST_LAYERS = 2_000
"""Largest number of layers; building a model of more takes minutes."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
NOT_QUANTIZED = ("modules_to_not_convert", "llm_int8_skip_modules")
"""Keys of a quantization_config with the names of layers that stay as they are."""
_SIZE = re.compile(
    r"(^|_)(size|dim|rank|layers?|heads?|experts?|width|channels|groups|embd|inner|model)$|^(num|n)_"
)


class Config:
    """Checked access to the keys of a config.json; what is wrong is collected in `problems`."""

    def __init__(self, content: dict[str, Any], name: str) -> None:
        self.content, self.name, self.problems = content, name, list[str]()
        self.kind = self._text("model_type") or "?"

    def size(self, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Return a size; `default` where the key is missing or null. A key without default must be there."""
        value = self.content.get(key)
        if value is None:
            if default is None:
                self.problems.append(f"does not say {key}")
            return 1 if default is None else default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.problems.append(f"{key} is {shown(value)}, not a whole number from {least} to {most:,}")
            return least
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.content.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problems.append(f"{key} is {shown(value)}, and neither true nor false")
        return bool(value)

    def table(self, key: str) -> dict[str, Any]:
        value = self.content.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.problems.append(f"{key} is {shown(value)}, not an object")
            return {}
        return value

    def indices(self, key: str) -> set[int]:
        value = self.content.get(key)
        if value is None:
            return set()
        if not isinstance(value, list) or not all(
            isinstance(index, int) and not isinstance(index, bool) for index in value
        ):
            self.problems.append(f"{key} is {shown(value)}, not a list of layers")
            return set()
        return set(value)

    def _text(self, key: str) -> str | None:
        value = self.content.get(key)
        if value is not None and not isinstance(value, str):
            self.problems.append(f"{key} is {shown(value)}, not text")
            return None
        return value

    @property
    def dtype(self) -> str | None:
        return self._text("dtype") or self._text("torch_dtype")

    @property
    def quantized(self) -> str | None:
        """Return the quantization of the published weights; raise a SizesError if its section is wrong."""
        section = self.table("quantization_config")
        method = section.get("quant_method")
        if section and not isinstance(method, str):
            self.problems.append(f"quantization_config.quant_method is {shown(method)}, not text")
        for key in NOT_QUANTIZED:
            written = section.get(key) or []
            if not isinstance(written, list) or not all(isinstance(name, str) for name in written):
                self.problems.append(f"quantization_config.{key} is {shown(written)}, not a list of names")
        self.check()
        return method

    def check(self) -> None:
        """Raise a SizesError if something was wrong."""
        if self.problems:
            reasons = "; ".join(dict.fromkeys(self.problems))
            raise SizesError(f"{self.name}: its config.json ({self.kind:.40}): {reasons}")


def shown(value: Any) -> str:
    """Return a value of a config.json for a message, shortened."""
    text = (
        str(value)
        if not isinstance(value, int) or abs(value) < 10**40
        else f"an integer of {value.bit_length()} bits"
    )
    text = f"'{text}'" if isinstance(value, str) else text
    return text if len(text) <= 40 else f"{text[:40]}..."


def text_part(config: dict[str, Any], name: str) -> Config:
    """Return the part of a config.json that describes the decoder: text_config, if it has one.

    Raises:
        SizesError: text_config is not an object.
    """
    whole = Config(config, name)
    inner = whole.table("text_config")
    whole.check()
    return Config(inner, name) if inner else whole


def check_sizes(config: Config) -> None:
    """Check every key that may be a size, at all depths, before a library builds a model from them.

    Raises:
        SizesError: one is negative or absurdly large, or there are more than MOST_LAYERS layers.
    """

    def look(table: dict[str, Any], at: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                look(value, f"{at}{key}.")
            numbers = value if isinstance(value, list) else [value]
            least, most = (1, MOST_LAYERS) if key in DEPTHS else (-MOST_LAYERS, MOST)
            for number in numbers:
                if (
                    isinstance(number, int | float)
                    and not isinstance(number, bool)
                    and _SIZE.search(key)
                    and not least <= number <= most
                ):
                    config.problems.append(
                        f"{at}{key} is {shown(value)}, and no size from {least:,} to {most:,}"
                    )
                    break

    look(config.content, "")
    config.check()
