"""The contract: what prepared data must be before a GPU is asked for, checked on what is stored and not on how it was made."""

import logging
from pathlib import Path
from typing import Any

from pydantic import Field

from flytune.data.contract import checks as contract_checks
from flytune.data.contract.checks import Check, Verdict
from flytune.data.contract.statistics import Census
from flytune.errors import DataError
from flytune.recipe.sections import Data
from flytune.records.dataset import Manifest
from flytune.schema import Record

logger = logging.getLogger(__name__)
CONTRACT = "contract.json"


class Contract(Record):
    """contract.json, beside the manifest."""

    checks: list[Check] = Field(min_length=1)

    @property
    def verdict(self) -> Verdict:
        """The worst of all lines."""
        verdicts = {check.verdict for check in self.checks}
        return "stop" if "stop" in verdicts else "warning" if "warning" in verdicts else "ok"


def hold(folder: Path, manifest: Manifest, data: Data, tokenizer: Any) -> Contract:
    """Checks the prepared data in `folder` against `manifest`, which need not be written yet, and writes contract.json there.

    Raises:
        DataError: lines that stop the run, all of them; unless data.contract is `warn`.
    """
    contract = check(folder, manifest, data, tokenizer)
    contract.write(folder / CONTRACT)
    told = {verdict: [str(found) for found in contract.checks if found.verdict == verdict] for verdict in ("warning", "stop")}
    for line in told["warning"]:
        logger.warning("%s", line)
    if told["stop"] and data.contract == "stop":
        lines = "\n  ".join(told["stop"])
        raise DataError(
            f"{manifest.source}: not what training needs, in {len(told['stop'])} of {len(contract.checks)} checks:\n  {lines}\n"
            "To train on it all the same set data.contract: warn; flytune xray shows the samples"
        )
    for line in told["stop"]:
        logger.error("%s", line)
    return contract


def check(folder: Path, manifest: Manifest, data: Data, tokenizer: Any) -> Contract:
    """All checks, with what was found; raises nothing. Reads each shard once, a row group at a time."""
    census = Census(folder, manifest, tokenizer)
    return Contract(
        checks=[
            *contract_checks.answers(census, manifest, data),
            *contract_checks.tokens(census),
            *contract_checks.round_trip(census),
            *contract_checks.shares(census, manifest, data),
            *contract_checks.duplicates(census, manifest),
        ]
    )
