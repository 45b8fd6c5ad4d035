"""Sample decisions about accepted models."""

from datetime import UTC, datetime

from flytune.registry import Decision, ModelComparison


def comparison(difference, **changes):
    made = {
        "against": "base",
        "champion": 2.0,
        "challenger": 2.0 + difference,
        "difference": difference,
        "samples": 40,
        "tokens": 900,
    }
    return ModelComparison(
        **(made | {"difference_low": difference - 0.05, "difference_high": difference + 0.05} | changes)
    )


def decision(artifact, outcome="accepted", **changes):
    made = {
        "time": datetime.now(UTC),
        "method": "lora",
        "recipe": "r-0",
        "fingerprint": f"of {artifact}",
        "reason": "better",
    }
    return Decision(**(made | {"outcome": outcome, "artifact": artifact} | changes))
