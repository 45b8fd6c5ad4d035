"""The JSON that `flytune plan --json` prints: a plan, with what follows from it, for other programs.

Its version rises where a field is renamed, removed or means something else; new fields do not raise it. Its
schema is docs/plan.schema.json.
"""

import json
from typing import Any, Literal

from flytune.records import Plan
from flytune.schema import Strict

VERSION: Literal[1] = 1


class PlanSummary(Strict):
    """Verdict, peak and price of a plan, which other programs need not compute; the plan's own fields are
    beside these."""

    version: Literal[1] = 1
    """Version of this document."""
    verdict: Literal["fits", "tight", "does not fit"]
    """Verdict by the scarcest resource; tight: less than a tenth of it is left."""
    binding: str
    """The scarcest resource: one of those in `needs`."""
    peak_phase: str
    """Phase that needs most of it."""
    share: float
    """Share of that resource that its peak takes."""
    parts_of_a_billion_tokens: dict[str, float]
    """Price in US dollars of a billion tokens by part of a step; empty where the speed is not known."""
    price_per_billion_tokens: float | None
    """Sum of these."""
    price: list[float]
    """Price of the run in US dollars: likely minimum, estimate, likely maximum; empty where the steps are not
    known."""
    loading_price: float
    """Price in US dollars of loading the base model in one attempt."""


def of(plan: Plan) -> dict[str, Any]:
    """Return the document of a plan."""
    need, billion, seconds = plan.binding, plan.price_per_billion_tokens, sum(plan.step_seconds.values())
    parts = {name: (billion or 0.0) * part / seconds for name, part in plan.step_seconds.items()}
    summary = PlanSummary(
        verdict=plan.verdict,  # type: ignore[arg-type]  # one of three words
        binding=need.resource,
        peak_phase=need.peak_phase,
        share=need.share,
        parts_of_a_billion_tokens=parts if billion else {},
        price_per_billion_tokens=billion,
        price=plan.price,
        loading_price=plan.loading_price,
    )
    return summary.model_dump() | plan.model_dump()


def as_json(plan: Plan) -> str:
    """Return the document of a plan as text."""
    return json.dumps(of(plan), indent=2) + "\n"


def schema() -> str:
    """Return its JSON schema, which docs/plan.schema.json has."""
    parts = [model.model_json_schema(mode="serialization") for model in (PlanSummary, Plan)]
    document: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Flytune plan",
        "description": "What `flytune plan --json` prints. Sizes are bytes, times seconds or hours, prices "
        "US dollars.",
        "type": "object",
        "properties": {name: field for part in parts for name, field in part["properties"].items()},
        # All are always there; null or empty where nothing is known.
        "required": [name for part in parts for name in part["properties"]],
        "$defs": {name: definition for part in parts for name, definition in part.get("$defs", {}).items()},
    }
    # Readers of this version take fields that later releases add.
    for definition in document["$defs"].values():
        definition.pop("additionalProperties", None)
    return json.dumps(document, indent=2) + "\n"
