"""A recipe: what a person decided about one fine-tuning run, and nothing that follows from it.

Recipes are read here and nowhere else: strict, frozen, all mistakes at once. Their fields: sections.py, run_sections.py.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, field_validator, model_validator

from flytune import yaml_core
from flytune.errors import RecipeError
from flytune.recipe.sections import (
    Checkpoints,
    Data,
    Evaluation,
    Hardware,
    Method,
    Model,
    Notify,
    Publish,
    Sharding,
    Tracking,
    Training,
)
from flytune.schema import Strict, dotted, load_yaml, mistakes

_PLANNED = "the planner says it; write training.global_batch_size"
_SHARDED = "write sharding: NAME; the rest follows from it"
ELSEWHERE = {
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "device_map"), _SHARDED),
    "gradient_accumulation_steps": _PLANNED,
    "max_memory": "it follows from the shape",
    "load_in_4bit": "write method: qlora; the weights of a 4-bit model have no gradients, so that it is never trained in full",
    "quantization_config": "write method: qlora",
    "merge": "a run stores the adapter alone: while it trains, the base is sharded (fsdp, zero3) or 4-bit, and merged wrong",
    "gradient_checkpointing": "write training.activation_checkpointing",
    "max_seq_length": "write data.max_length",
    "num_epochs": "write training.num_train_epochs",
    "bf16": "write model.dtype: bfloat16",
    "fp16": "write model.dtype: float16",
}
"""Keys of other tools, and what a recipe says instead."""
# user:password@ or a token before the host, or what signed and shared links carry (S3, GCS, Azure, tokens in general).
_CREDENTIALS = re.compile(
    r"://[^/@\s]*:[^/@\s]+@|https?://[^/@\s]+@|"
    r"://\S*[?&#](?:[\w-]*(?:signature|token|secret|passw(?:or)?d|pwd|credential|(?:api|access|secret|account)[-_]?key)|sig|key|auth)=",
    re.IGNORECASE,
)


class Recipe(Strict):
    """One run."""

    elsewhere = ELSEWHERE
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    """Lower-case letters, digits and dashes."""
    description: str = ""
    model: Model
    data: Data
    method: Method
    sharding: Sharding
    training: Training
    evaluation: Evaluation = Evaluation()
    hardware: Hardware = Hardware()
    checkpoints: Checkpoints = Checkpoints()
    tracking: Tracking = Tracking()
    publish: Publish = Publish()
    notify: Notify = Notify()

    @field_validator("method", "sharding", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        """`method: full` is `method: {name: full}`."""
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="wrap")
    @classmethod
    def _all_mistakes(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # Flyte reads recipes too (from files, from JSON, from the console): every way ends here.
        name = data.get("name") if isinstance(data, dict) else None
        where = f"recipe {name}" if name else "recipe"
        if secrets := [
            f"{dotted(loc)}: an address with credentials, which every artifact and report would show; give them to the "
            "environment, on a cluster by secrets in cluster.yaml"
            for loc in _with_credentials(data)
        ]:
            raise RecipeError.of(where, secrets)
        try:
            return handler(data)
        except ValidationError as error:
            raise RecipeError.of(where, mistakes(error, cls)) from None

    @classmethod
    def from_yaml(cls, path: str | Path) -> "Recipe":
        """Reads a recipe file.

        Raises:
            RecipeError: the file cannot be read, or lists all its mistakes, one a line, with dotted paths.
        """
        content = load_yaml(path)
        if not isinstance(content, dict):
            raise RecipeError(f"{path}: a recipe is a mapping of sections (model, data, method ...), found {content!r:.60}")
        try:
            return cls.model_validate(content)
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from None

    def to_yaml(self) -> str:
        """The recipe as a file that `from_yaml` reads back to an equal one."""
        return yaml_core.dump(self.model_dump(exclude_defaults=True))

    def what_is_trained(self) -> Self:
        """Less the machines and who is told: what changes no model."""
        anywhere = self.evaluation.model_copy(update={"shape": None})
        return self.model_copy(update={"hardware": Hardware(), "notify": Notify(), "evaluation": anywhere})

    def key(self) -> str:
        """16 hex digits that change when any decision changes; a run's identity."""
        text = json.dumps(self.model_dump(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _with_credentials(value: Any, loc: tuple[int | str, ...] = ()) -> Iterator[tuple[int | str, ...]]:
    """Where texts hold such addresses."""
    if isinstance(value, str) and _CREDENTIALS.search(value):
        yield loc
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _with_credentials(part, (*loc, key))


class DataRequest(Strict):
    """What preparing data depends on, and nothing else: the key under which prepared data is cached."""

    model: Model
    data: Data
    fingerprint: str
    """Of the content behind `data` (see flytune.data.fingerprint); changed content is another request."""
    tokenizer: str = ""
    """Of the base model's config and tokenizer files (see flytune.models.base.tokenizer_identity)."""


def json_schema() -> str:
    """The JSON schema of a recipe file, as kept in recipes/recipe.schema.json for editors."""
    schema = Recipe.model_json_schema()
    for section in ("method", "sharding"):
        names = schema["$defs"][section.capitalize()]["properties"]["name"]["enum"]
        schema["properties"][section] = {"anyOf": [schema["properties"][section], {"enum": names}]}
    tasks = schema["$defs"]["Evaluation"]["properties"]["tasks"]
    tasks["items"] = {"anyOf": [tasks["items"], {"type": "string"}]}
    return json.dumps(schema, indent=2) + "\n"
