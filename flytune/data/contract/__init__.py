"""The data contract: checks of prepared data before a GPU is requested, made on the stored samples alone."""

import logging
from pathlib import Path
from typing import Any

from pydantic import Field

from flytune.data import missing_values
from flytune.data.check import Check, Verdict
from flytune.data.contract import checks as contract_checks
from flytune.data.contract.statistics import Statistics
from flytune.data.rows import row_kind
from flytune.errors import DataError
from flytune.recipe import Data
from flytune.records import Manifest
from flytune.schema import Record
from flytune.sentences import counted

logger = logging.getLogger(__name__)
CONTRACT = "contract.json"
_OVERLAPS = ("overlap", "near overlap")
"""Checks whose faults make the figures of the held-out samples too good."""
_LOSSES = ("truncated", "truncated tokens", "dropped", "dropped tokens")
"""Checks of what is cut off or dropped: once it is most of the data, the held-out samples are not what was
meant."""
_MOST = 0.5


class Contract(Record):
    """contract.json, which is stored with the manifest."""

    checks: list[Check] = Field(min_length=1)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all checks."""
        verdicts = {check.verdict for check in self.checks}
        if "stop" in verdicts:
            return "stop"
        return "warning" if "warning" in verdicts else "ok"

    @property
    def faults(self) -> list[Check]:
        """Return the checks that did not pass: those that stop a run first."""
        return sorted(
            (check for check in self.checks if check.verdict != "ok"),
            key=lambda check: check.verdict != "stop",
        )

    @property
    def doubts(self) -> list[str]:
        """Return what makes figures of the held-out samples doubtful, as clauses with their counts."""
        return [
            check.found
            for check in self.faults
            if check.name in _OVERLAPS or (check.name in _LOSSES and check.share > _MOST)
        ]

    @property
    def has_unknown_tokens(self) -> bool:
        """True if there are ids without a row in the embedding, with which no model can be trained."""
        return any(check.name == "vocabulary" and check.verdict == "stop" for check in self.checks)


def enforce(
    folder: Path,
    manifest: Manifest,
    data: Data,
    tokenizer: Any,
    rows: int | None,
    trains_next: bool = False,
) -> Contract:
    """Check the prepared data in `folder`, and write contract.json there; `manifest` need not be written yet.

    Args:
        folder: folder of the data, with its shards and its tokenizer.
        manifest: its counts.
        data: section of the recipe.
        tokenizer: its tokenizer.
        rows: as in `Statistics`.
        trains_next: whether the run that trains on it shows the faults in the same terminal.

    Raises:
        DataError: checks stop the run, and data.contract is not `warn`, or tokens have no row; the message
            has all of them.
    """
    contract = check(folder, manifest, data, tokenizer, rows)
    contract.write(folder / CONTRACT)
    warnings, stops = (
        [str(check) for check in contract.checks if check.verdict == verdict]
        for verdict in ("warning", "stop")
    )
    is_refused = bool(stops) and (data.contract == "stop" or contract.has_unknown_tokens)
    for line in warnings if is_refused or not trains_next else []:
        logger.warning("%s", line)
    if manifest.left_out and not any(
        check.name == "left out" and check.verdict != "ok" for check in contract.checks
    ):
        logger.info("columns not used: %s", ", ".join(manifest.left_out))
    if is_refused:
        lines = "\n  ".join(stops)
        raise DataError(
            f"{manifest.source}: the prepared data fails {len(stops)} of "
            f"{counted(len(contract.checks), 'check')}:\n"
            f"  {lines}\n"
            + (
                "Tokens without a row in the embedding end training, whatever data.contract says"
                if contract.has_unknown_tokens
                else "To train on it anyway, set data.contract: warn; flytune xray shows the samples"
            )
        )
    for line in [] if trains_next else stops:
        logger.error("%s", line)
    return contract


def stored(folder: Path) -> Contract | None:
    """Return the contract of the prepared data in `folder`; None where it has none, as data of early
    releases."""
    return Contract.read(folder / CONTRACT) if (folder / CONTRACT).is_file() else None


def check(folder: Path, manifest: Manifest, data: Data, tokenizer: Any, rows: int | None = None) -> Contract:
    """Return the results of all checks. Reads each shard once, one row group at a time; `rows` as in
    `Statistics`."""
    statistics = Statistics.read(folder, manifest, tokenizer, rows)
    return Contract(
        checks=[
            *contract_checks.answers(statistics, manifest, data),
            *contract_checks.tokens(statistics, manifest, data),
            *contract_checks.tokenizer(manifest),
            *contract_checks.template(statistics, manifest, data),
            *contract_checks.bare_prompts(statistics, manifest),
            *contract_checks.day(statistics, data),
            *contract_checks.round_trip(statistics),
            *contract_checks.shares(statistics, manifest, data),
            *contract_checks.thoughts(manifest, data),
            *contract_checks.left_out(manifest),
            *contract_checks.settings(manifest),
            *missing_values.checks(manifest),
            *contract_checks.duplicates(statistics, manifest),
            *contract_checks.contradictions(statistics, row_kind(manifest.row_kind, manifest.negatives)),
            *row_kind(manifest.row_kind).checks(manifest),
        ]
    )
