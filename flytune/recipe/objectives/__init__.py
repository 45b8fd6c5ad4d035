"""The section `objective` of a recipe. A new objective is a file in this folder, and its class in the
union."""

from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, Field

from flytune.recipe.objectives.base import ObjectiveSection
from flytune.recipe.objectives.classify import Classify
from flytune.recipe.objectives.distill import Distill
from flytune.recipe.objectives.dpo import Dpo
from flytune.recipe.objectives.embed import Embed
from flytune.recipe.objectives.grpo import Grpo
from flytune.recipe.objectives.kto import Kto
from flytune.recipe.objectives.reward import Reward
from flytune.recipe.objectives.sft import Sft

__all__ = [
    "SECTIONS",
    "Classify",
    "Distill",
    "Dpo",
    "Embed",
    "Grpo",
    "Kto",
    "Objective",
    "ObjectiveSection",
    "Reward",
    "Sft",
]

_Section = Sft | Dpo | Kto | Reward | Grpo | Classify | Distill | Embed
SECTIONS: dict[str, type[ObjectiveSection]] = {
    get_args(section.model_fields["name"].annotation)[0]: section for section in get_args(_Section)
}


def _with_name(value: Any) -> Any:
    """Return a section's content with its name, sft by default, and without other objectives' fields at their
    defaults.

    Raises:
        ValueError: there are other objectives' fields.
    """
    if not isinstance(value, dict):
        return value
    named = {"name": "sft"} | value
    if not isinstance(named["name"], str) or (mine := SECTIONS.get(named["name"])) is None:
        return named
    foreign = [name for name in named if name not in mine.model_fields]
    owners = {
        name: [key for key, section in SECTIONS.items() if name in section.model_fields] for name in foreign
    }
    # Recipes of 0.6 and earlier have all objectives' fields.
    for name in [
        name for name in foreign if any(_is_default(SECTIONS[key], name, named[name]) for key in owners[name])
    ]:
        del named[name]
        del owners[name]
    if other := [name for name in owners if owners[name]]:
        able = " or ".join(key for key in SECTIONS if all(key in owners[name] for name in other))
        raise ValueError(
            f"{', '.join(other)}: only for name: {able or 'dpo'}, and this is {named['name']}; remove them"
        )
    return named


def _is_default(section: type[ObjectiveSection], name: str, value: Any) -> bool:
    default = section.model_fields[name].get_default()
    return type(value) is type(default) and value == default


Objective = Annotated[Annotated[_Section, Field(discriminator="name")], BeforeValidator(_with_name)]
