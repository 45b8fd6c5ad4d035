"""The data contract: checks of prepared data before a GPU is requested, made on the stored samples alone."""

import logging
from pathlib import Path
from typing import Any

from pydantic import Field

from flytune.data.contract import checks as contract_checks
from flytune.data.contract.checks import Check, Verdict
from flytune.data.contract.statistics import Statistics
from flytune.errors import DataError
from flytune.recipe import Data
from flytune.records import Manifest
from flytune.schema import Record

logger = logging.getLogger(__name__)
CONTRACT = "contract.json"


class Contract(Record):
    """contract.json, which is stored with the manifest."""

    checks: list[Check] = Field(min_length=1)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all checks."""
        verdicts = {check.verdict for check in self.checks}
        return "stop" if "stop" in verdicts else "warning" if "warning" in verdicts else "ok"

    @property
    def has_unknown_tokens(self) -> bool:
        """True if there are ids without a row in the embedding, with which no model can be trained."""
        return any(check.name == "vocabulary" and check.verdict == "stop" for check in self.checks)


def enforce(folder: Path, manifest: Manifest, data: Data, tokenizer: Any, rows: int | None = None) -> Contract:
    """Check the prepared data in `folder`, and write contract.json there; `manifest` need not be written yet.

    Raises:
        DataError: checks stop the run, and data.contract is not `warn`, or tokens have no row; the message has all of them.
    """
    contract = check(folder, manifest, data, tokenizer, rows)
    contract.write(folder / CONTRACT)
    warnings, stops = ([str(one) for one in contract.checks if one.verdict == verdict] for verdict in ("warning", "stop"))
    for line in warnings:
        logger.warning("%s", line)
    if stops and (data.contract == "stop" or contract.has_unknown_tokens):
        lines = "\n  ".join(stops)
        raise DataError(
            f"{manifest.source}: the prepared data fails {len(stops)} of {len(contract.checks)} checks:\n  {lines}\n"
            + (
                "Tokens without a row in the embedding end training, whatever data.contract says"
                if contract.has_unknown_tokens
                else "To train on it anyway, set data.contract: warn; flytune xray shows the samples"
            )
        )
    for line in stops:
        logger.error("%s", line)
    return contract


def check(folder: Path, manifest: Manifest, data: Data, tokenizer: Any, rows: int | None = None) -> Contract:
    """Return the results of all checks. Reads each shard once, one row group at a time; `rows` as in `Statistics`."""
    statistics = Statistics(folder, manifest, tokenizer, rows)
    return Contract(
        checks=[
            *contract_checks.answers(statistics, manifest, data),
            *contract_checks.tokens(statistics, manifest, data),
            *contract_checks.round_trip(statistics),
            *contract_checks.shares(statistics, manifest, data),
            *contract_checks.duplicates(statistics, manifest),
            *(contract_checks.labels(manifest) if manifest.labels else ()),
        ]
    )
