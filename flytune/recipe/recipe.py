"""Recipes: the decisions of a person about one fine-tuning run, without anything that follows from them.

This is the only module that reads recipes: strictly, frozen, with all mistakes reported at once. The fields
are in sections.py and training.py.
"""

import json
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, field_validator, model_validator

from flytune import addresses, json_core, yaml_core
from flytune.errors import RecipeError
from flytune.mistakes import dotted, mistakes
from flytune.recipe import key, peers
from flytune.recipe.data import Data
from flytune.recipe.method import Method
from flytune.recipe.objectives import SECTIONS, Grpo, Objective, Sft
from flytune.recipe.sections import (
    Checkpoints,
    Evaluation,
    Hardware,
    Model,
    Notify,
    Publish,
    Section,
    Sharding,
    Tracking,
)
from flytune.recipe.training import Training
from flytune.row_names import ANSWERS, IMAGE_ANSWERS, RowKindName, with_row_kind
from flytune.schema import Strict, omitted
from flytune.written_files import load_yaml, with_others, wrong_values


class Recipe(Strict):
    """The recipe of one run."""

    elsewhere = peers.Advice(lambda: Recipe)
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    """Name of the run: lower-case letters, digits and dashes."""
    description: str = ""
    """Purpose of the run, in a sentence."""
    model: Model
    data: Data
    method: Method
    sharding: Sharding = Sharding(name="auto")
    training: Training
    objective: Objective = Sft()
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
                f"method.target_modules: rows of {both[0]} are trained for model.extra_special_tokens, and "
                "it cannot have an adapter too; remove it there, or train it completely "
                "(method.modules_to_save)"
            )
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _all_mistakes(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        # Flyte reads recipes too (from files, JSON and the console): all of them are validated here.
        name = data.get("name") if isinstance(data, dict) else None
        where = f"recipe {name:.100}" if isinstance(name, str) and name else "recipe"
        if json_core.is_deep(data):
            raise RecipeError(
                f"{where}: mappings and lists are nested deeper than {yaml_core.DEEPEST}; flatten them"
            )
        if secrets := [
            f"{dotted(loc)}: {addresses.refusal(reason)}" for loc, reason in addresses.found_in(data)
        ]:
            raise RecipeError.of(where, secrets)
        if tool := peers.tool_of(data):
            raise RecipeError(peers.remedy(tool))
        wrong = list(wrong_values(data))
        try:
            recipe = handler(data)
        except ValidationError as error:
            raise RecipeError.of(where, with_others(mistakes(error, cls), wrong)) from None
        if problem := _export_problem(
            recipe.checkpoints.export, recipe.checkpoints.save_steps, recipe.evaluation.eval_steps
        ):
            wrong.append(f"checkpoints.export: {problem}")
        wrong += recipe.objective.problems(recipe.data, recipe.training)
        if recipe.evaluation.eval_steps is not None and not recipe.data.holds_out:
            wrong.append(
                "evaluation.eval_steps: data.heldout_fraction: 0 leaves nothing to evaluate on; remove one "
                "of them"
            )
        if wrong:
            raise RecipeError.of(where, wrong)
        return recipe

    @property
    def row_kind(self) -> RowKindName:
        """Kind of rows that it trains on (flytune.data.rows)."""
        return IMAGE_ANSWERS if self.data.images else self.objective.row_kind

    @classmethod
    def from_yaml(cls, path: str | Path) -> "Recipe":
        """Read a recipe that is stored, and holds the content of all that it names as content
        (flytune.recipe.named_files).

        Raises:
            RecipeError: the file cannot be read; or all its mistakes, one per line, with dotted paths.
        """
        return cls.from_content(load_yaml(path), path)

    @classmethod
    def from_content(cls, content: Any, path: str | Path) -> "Recipe":
        """Return the recipe of a YAML file's content.

        Raises:
            RecipeError: all its mistakes, after the `path` of the file.
        """
        if tool := peers.tool_of(content):
            raise RecipeError(f"{path}: {peers.remedy(tool, path)}")
        if not isinstance(content, dict):
            raise RecipeError(
                f"{path}: a recipe is a mapping of sections (model, data, method ...), found {content!r:.60}"
            )
        try:
            return cls.model_validate(content)
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from None

    def refusals(self) -> list[str]:
        """List what its sections refuse of each other, a line each; planning asks, so that any such recipe
        can be read."""
        sections = [section for _, section in self if isinstance(section, Section)]
        return [line for section in sections for line in section.refusals(self)]

    def to_yaml(self) -> str:
        """Return the content of a file that `from_yaml` reads as an equal recipe."""
        return yaml_core.dump(self.model_dump(exclude_defaults=True))

    def without_infrastructure(self) -> Self:
        """Return the recipe without machines and notifications, which do not change the model."""
        anywhere = self.evaluation.model_copy(update={"shape": None})
        return self.model_copy(update={"hardware": Hardware(), "notify": Notify(), "evaluation": anywhere})

    def key(self) -> str:
        """Return the identity of a run: 16 hex digits that change with any decision."""
        return key.of(self)


def _export_problem(export: str, save: float | str | None, score: float | str | None) -> str | None:
    """Return why checkpoints.export cannot work with checkpoints.save_steps and evaluation.eval_steps; None
    if it can."""
    if export == "last":
        return None
    if unset := [
        name
        for name, value in (("checkpoints.save_steps", save), ("evaluation.eval_steps", score))
        if value is None
    ]:
        return (
            "best takes the checkpoint of the lowest eval_loss, and there are none without "
            f"{' and '.join(unset)}; set them"
        )
    if save == "auto":
        return (
            "best with save_steps: auto, which saves steps that are not scored; write save_steps: "
            f"{score}, as eval_steps"
        )
    multiple = isinstance(save, int) and isinstance(score, int) and 0 in (save % score, score % save)
    if multiple or save == score or 1 in (save, score):
        return None
    return (
        f"best takes checkpoints of scored steps; save_steps {save} is neither a multiple nor a divisor of "
        f"eval_steps {score}: write the same for both"
    )


class DataRequest(Strict):
    """The inputs of data preparation, and nothing else: the key under which prepared data is cached."""

    model: Model
    data: Data
    fingerprint: str
    """Fingerprint of the content that `data` names (see flytune.data.fingerprint); changed content is another
    request."""
    tokenizer: str = ""
    """Identity of the base model's config and tokenizer files (see
    flytune.models.base.tokenizer_identity)."""
    row_kind: RowKindName = omitted(ANSWERS)
    """Name of the kind of rows that the objective trains on (flytune.data.rows)."""
    judged_by: Grpo | None = omitted(None)
    """Rewards with which reference answers are checked, and the most tokens of an answer; None of objectives
    without any."""
    classes: list[str] = omitted([])
    """Names of the labels of rows, in the order of the model's outputs; empty where rows have none."""
    labelling: str = omitted("")
    """Problem whose labels they are, by transformers' name; empty where rows have none."""
    negatives: int = omitted(0)
    """Number of documents of a row that do not belong to its query."""
    text_prompts: list[str] = omitted([])
    """Texts before each query and before each document; empty where there are none."""

    @model_validator(mode="before")
    @classmethod
    def _before_row_kinds(cls, values: Any) -> Any:
        return with_row_kind(values)

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        fingerprint: str,
        data: Data | None = None,
        model: Model | None = None,
        tokenizer: str = "",
    ) -> Self:
        """Return the request of a recipe, by default with its own sections `data` and `model`."""
        return cls(
            model=model or recipe.model,
            data=data or recipe.data,
            fingerprint=fingerprint,
            tokenizer=tokenizer,
            row_kind=recipe.row_kind,
            judged_by=recipe.objective.judged_by,
            classes=recipe.objective.classes,
            labelling=recipe.objective.labelling,
            negatives=recipe.objective.negatives_of_a_row,
            text_prompts=recipe.objective.text_prompts,
        )


def json_schema() -> str:
    """Return the JSON schema of a recipe file, which recipes/recipe.schema.json has for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema"} | Recipe.model_json_schema()
    schema["title"] = "Flytune recipe"
    named = {
        section: schema["$defs"][section.capitalize()]["properties"]["name"]["enum"]
        for section in ("method", "sharding")
    }
    for section, names in (named | {"objective": list(SECTIONS)}).items():
        schema["properties"][section] = {"anyOf": [schema["properties"][section], {"enum": names}]}
    engine = schema["$defs"]["Grpo"]["properties"]["engine"]
    engine["anyOf"] = [*engine.pop("oneOf"), {"enum": list(engine.pop("discriminator")["mapping"])}]
    tasks = schema["$defs"]["Evaluation"]["properties"]["tasks"]
    tasks["items"] = {"anyOf": [tasks["items"], {"type": "string"}]}
    schema["$defs"]["Sharding"]["properties"]["config"]["anyOf"].append({"type": "string"})
    return json.dumps(schema, indent=2) + "\n"
