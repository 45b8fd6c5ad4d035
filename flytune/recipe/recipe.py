"""Recipes: the decisions of a person about one fine-tuning run, without anything that follows from them.

This is the only module that reads recipes: strictly, frozen, with all mistakes reported at once. The fields are in sections.py
and training.py.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, ValidationError, field_validator, model_validator

from flytune import addresses, yaml_core
from flytune.errors import RecipeError
from flytune.recipe.data import Data
from flytune.recipe.method import Method
from flytune.recipe.objective import Objective
from flytune.recipe.sections import (
    Checkpoints,
    Evaluation,
    Hardware,
    Model,
    Notify,
    Publish,
    Sharding,
    Tracking,
)
from flytune.recipe.training import Training
from flytune.schema import Strict, dotted, is_deep, load_yaml, mistakes, wrong_values

_PLANNED = "the planner computes it; write training.global_batch_size"
_SHARDED = "write sharding: NAME; the rest follows from it"
_DEEPSPEED = "write sharding: NAME; for a DeepSpeed JSON of your own, sharding: {name: NAME, config: FILE}"
ELSEWHERE = {
    **dict.fromkeys(("fsdp", "fsdp_config", "device_map"), _SHARDED),
    "deepspeed": _DEEPSPEED,
    "gradient_accumulation_steps": _PLANNED,
    "max_memory": "remove it; it follows from the shape",
    "load_in_4bit": "write method: qlora; the weights of a 4-bit model have no gradients, so that it is never trained in full",
    "quantization_config": "write method: qlora, and its fields into method",
    "llm_int8_enable_fp32_cpu_offload": "adapters of layers on the CPU would not be trained: accelerate's hooks drop their "
    "gradients; write sharding: {name: fsdp, offload: cpu}, or name a shape with more GPU memory",
    "merge": "a run stores only the adapter, because a sharded (fsdp, zero3) or 4-bit base would be merged wrongly",
    "gradient_checkpointing": "write training.activation_checkpointing",
    "max_seq_length": "write data.max_length",
    **dict.fromkeys(
        ("liger_kernel_config", "use_liger_loss"),
        "write training.use_liger_kernel: norms, rotation and MLP are Liger's; TRL computes the loss in chunks in any case",
    ),
    "num_epochs": "write training.num_train_epochs",
    "bf16": "write model.dtype: bfloat16",
    "fp16": "write model.dtype: float16",
    **dict.fromkeys(("additional_special_tokens", "added_tokens", "special_tokens"), "write model.extra_special_tokens"),
}
"""Keys of other tools, and the recipe's keys to use instead."""


class Recipe(Strict):
    """The recipe of one run."""

    elsewhere = ELSEWHERE
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    """Name of the run: lower-case letters, digits and dashes."""
    description: str = ""
    """Purpose of the run, in a sentence."""
    model: Model
    data: Data
    method: Method
    sharding: Sharding
    training: Training
    objective: Objective = Field(default=Objective(), json_schema_extra={"since": "0.2.0"})
    evaluation: Evaluation = Evaluation()
    hardware: Hardware = Hardware()
    checkpoints: Checkpoints = Checkpoints()
    tracking: Tracking = Tracking()
    publish: Publish = Publish()
    notify: Notify = Notify()

    @field_validator("method", "sharding", "objective", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        """Accept `method: full` for `method: {name: full}`."""
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _rows_or_adapter(self) -> Self:
        named = self.method.target_modules
        both = sorted({"embed_tokens", "lm_head"} & set(named if isinstance(named, list) else ()))
        if self.model.extra_special_tokens and both:
            raise ValueError(
                f"method.target_modules: rows of {both[0]} are trained for model.extra_special_tokens, and it cannot have an "
                "adapter too; remove it there, or train it completely (method.modules_to_save)"
            )
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _all_mistakes(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # Flyte reads recipes too (from files, JSON and the console): all of them are validated here.
        name = data.get("name") if isinstance(data, dict) else None
        where = f"recipe {name!s:.100}" if name else "recipe"
        if is_deep(data):
            raise RecipeError(f"{where}: mappings and lists are nested deeper than {yaml_core.DEEPEST}; flatten them")
        if secrets := [f"{dotted(loc)}: {addresses.refusal(reason)}" for loc, reason in addresses.found_in(data)]:
            raise RecipeError.of(where, secrets)
        wrong = list(wrong_values(data, cls))
        try:
            made = handler(data)
        except ValidationError as error:
            raise RecipeError.of(where, [*mistakes(error, cls), *wrong]) from None
        if problem := _export_problem(made.checkpoints.export, made.checkpoints.save_steps, made.evaluation.eval_steps):
            wrong.append(f"checkpoints.export: {problem}")
        wrong += made.objective.problems(made.data, made.training)
        if wrong:
            raise RecipeError.of(where, wrong)
        return made

    @classmethod
    def from_yaml(cls, path: str | Path) -> "Recipe":
        """Read a recipe file.

        Raises:
            RecipeError: the file cannot be read; or all its mistakes, one per line, with dotted paths.
        """
        content = load_yaml(path)
        if not isinstance(content, dict):
            raise RecipeError(f"{path}: a recipe is a mapping of sections (model, data, method ...), found {content!r:.60}")
        try:
            return cls.model_validate(content)
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from None

    def to_yaml(self) -> str:
        """Return the content of a file that `from_yaml` reads as an equal recipe."""
        return yaml_core.dump(self.model_dump(exclude_defaults=True))

    def without_infrastructure(self) -> Self:
        """Return the recipe without machines and notifications, which do not change the model."""
        anywhere = self.evaluation.model_copy(update={"shape": None})
        return self.model_copy(update={"hardware": Hardware(), "notify": Notify(), "evaluation": anywhere})

    def key(self) -> str:
        """Return the identity of a run: 16 hex digits that change with any decision.

        Stored checkpoints are found by it, so a recipe keeps its key in later versions of Flytune: a field that is newer than
        0.1.0 is marked with `json_schema_extra={"since": VERSION}`, and is not hashed while it has its default.
        """
        decisions = self.model_dump()
        _remove_new_defaults(self, decisions)
        text = json.dumps(decisions, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _remove_new_defaults(section: BaseModel, content: dict[str, Any]) -> None:
    """Remove fields newer than 0.1.0 that have their defaults from the dumped `content` of a section."""
    for name, field in type(section).model_fields.items():
        value, extra = getattr(section, name), field.json_schema_extra
        if isinstance(extra, dict) and "since" in extra and value == field.get_default(call_default_factory=True):
            del content[name]
        elif isinstance(value, BaseModel):
            _remove_new_defaults(value, content[name])
        elif isinstance(value, list):
            for item, part in zip(value, content[name], strict=True):
                if isinstance(item, BaseModel):
                    _remove_new_defaults(item, part)


def _export_problem(export: str, save: int | str | None, score: int | str | None) -> str | None:
    """Return why checkpoints.export cannot work with checkpoints.save_steps and evaluation.eval_steps; None if it can."""
    if export == "last":
        return None
    if unset := [name for name, value in (("checkpoints.save_steps", save), ("evaluation.eval_steps", score)) if value is None]:
        return f"best takes the checkpoint of the lowest eval_loss, and there are none without {' and '.join(unset)}; set them"
    if save == "auto":
        return f"best with save_steps: auto, which saves steps that are not scored; write save_steps: {score}, as eval_steps"
    multiple = isinstance(save, int) and isinstance(score, int) and 0 in (save % score, score % save)
    if multiple or save == score or 1 in (save, score):
        return None
    return (
        f"best takes checkpoints of scored steps; save_steps {save} is neither a multiple nor a divisor of eval_steps {score}: "
        "write the same for both"
    )


class DataRequest(Strict):
    """The inputs of data preparation, and nothing else: the key under which prepared data is cached."""

    model: Model
    data: Data
    fingerprint: str
    """Fingerprint of the content that `data` names (see flytune.data.fingerprint); changed content is another request."""
    tokenizer: str = ""
    """Identity of the base model's config and tokenizer files (see flytune.models.base.tokenizer_identity)."""
    pairs: Annotated[bool, Field(exclude_if=lambda pairs: not pairs)] = False
    """True if each row is a pair of a chosen and a rejected answer (Objective.has_pairs)."""
    labels: Annotated[bool, Field(exclude_if=lambda labels: not labels)] = False
    """True if each row is an answer that is labelled desirable or undesirable (Objective.has_labels)."""

    @classmethod
    def of(cls, recipe: Recipe, fingerprint: str, data: Data | None = None) -> Self:
        """Return the request of a recipe, by default with its own section `data`."""
        return cls(
            model=recipe.model,
            data=data or recipe.data,
            fingerprint=fingerprint,
            pairs=recipe.objective.has_pairs,
            labels=recipe.objective.has_labels,
        )


def json_schema() -> str:
    """Return the JSON schema of a recipe file, which recipes/recipe.schema.json has for editors."""
    schema = Recipe.model_json_schema()
    for section in ("method", "sharding", "objective"):
        names = schema["$defs"][section.capitalize()]["properties"]["name"]["enum"]
        schema["properties"][section] = {"anyOf": [schema["properties"][section], {"enum": names}]}
    tasks = schema["$defs"]["Evaluation"]["properties"]["tasks"]
    tasks["items"] = {"anyOf": [tasks["items"], {"type": "string"}]}
    schema["$defs"]["Sharding"]["properties"]["config"]["anyOf"].append({"type": "string"})
    return json.dumps(schema, indent=2) + "\n"
