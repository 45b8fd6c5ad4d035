"""Faults that are planted in runs: sitecustomize.py, which Python imports when it starts, has those of a
process of its own."""

import os
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT


def planted(fault: str) -> dict[str, str]:
    """Return the environment of a run with a fault ("FAULT RANKS STEP")."""
    return {"FAULT": fault, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)])}


def ruin(model: Any) -> None:
    """Make all weights NaN: the next loss is NaN, whatever a CPU computes."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
