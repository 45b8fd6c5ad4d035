"""Notifications of the end of a run, by a Slack-compatible webhook. They never fail a run, and its address is
never shown."""

import json
import logging
import os
import urllib.request
from collections.abc import Sequence
from typing import Literal

from flytune.failures import shortened, without_secrets
from flytune.failures.text import MOST
from flytune.recipe import Recipe
from flytune.records import MeasuredFigure, Metrics
from flytune.records.metrics import SINGLE_SAMPLE
from flytune.servers import answer_to

log = logging.getLogger(__name__)

WEBHOOK = "FLYTUNE_WEBHOOK"
"""Environment variable with the webhook's address, from a secret of the cluster (cluster.yaml:
secrets.notify)."""
SECONDS = 20.0
"""Limit of the whole exchange, from the look-up of the host's name to the last header of the answer."""
LONGEST = 3000
"""Characters of a message, unless its own sentences are longer; Slack cuts at 40,000 and folds messages
before that."""


def send(recipe: Recipe, ended: Literal["succeeded", "failed", "approval"], text: str) -> bool:
    """Post `text` if the recipe's notify section asks for it; return whether it was accepted. Failures are
    only logged.

    Questions to a person and their answers (`approval`) are posted whichever outcomes are reported.
    """
    if not recipe.notify.webhook or ended not in (*recipe.notify.on, "approval"):
        return False
    if not (address := os.environ.get(WEBHOOK)):
        log.warning(
            "notify.webhook: no %s is set (cluster.yaml: secrets.notify), so no message was sent", WEBHOOK
        )
        return False
    body = json.dumps({"text": shortened(without_secrets(text), MOST)}).encode()
    if not address.lower().startswith(("https://", "http://")):
        log.warning(
            "notify.webhook: what %s has is no address of https:// or http://, so no message was sent",
            WEBHOOK,
        )
        return False
    try:
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        status = answer_to(request, SECONDS, largest=0).status
    except Exception as error:  # noqa: BLE001 (a lost message must not fail a run; the text may contain the address)
        log.warning(
            "notify.webhook: the address in %s was not reached: %s; no message was sent",
            WEBHOOK,
            type(error).__name__,
        )
        return False
    if not 200 <= status < 300:
        log.warning("notify.webhook: the address in %s answered %d, so no message was sent", WEBHOOK, status)
        return False
    return True


def success_message(recipe: Recipe, metrics: Metrics, address: str, broken: Sequence[str]) -> str:
    """Return the message about a stored artifact; `broken` has a sentence for each failed guard."""
    refused = "".join(f"\nNot published or promoted: {sentence}" for sentence in broken)
    if not metrics.figures:
        return (
            f"{recipe.name}: done. No samples were held out, so nothing was measured.\n"
            f"Artifact: {address}{refused}"
        )
    first, compared = metrics.figures[0], metrics.compared
    verdict = "significantly better" if metrics.is_better else "not significantly better"
    headline = f"Held-out {first.title} {_change(first)}"
    if (difference := compared.difference) is not None:
        ends = (
            f"({difference.low:+.4f} to {difference.high:+.4f})" if difference.is_known else "(no interval)"
        )
        headline += f"; {compared.title} {difference.value:+.4f} {compared.unit} {ends}"
    doubts = [*metrics.doubts, *([SINGLE_SAMPLE] if metrics.samples == 1 else [])]
    doubtful = f" In doubt: {'; '.join(doubts)}." if doubts else ""
    return f"{recipe.name}: done. {headline}: {verdict}.{doubtful}\nArtifact: {address}{refused}"


def _change(figure: MeasuredFigure) -> str:
    """Return the values of both models, or that of the tuned one with its interval."""
    form = "{:.0%}" if figure.is_share else "{:.2f}"
    tuned = form.format(figure.tuned.value)
    if figure.base is not None:
        return f"{form.format(figure.base.value)} -> {tuned}"
    unit = figure.unit.removeprefix("share").strip()
    none = "" if figure.neutral is None else f"; {form.format(figure.neutral)} of {figure.neutral_model}"
    ends = (
        f"{form.format(figure.tuned.low)} to {form.format(figure.tuned.high)}"
        if figure.tuned.is_known
        else "no interval"
    )
    return f"{tuned} {unit} ({ends}{none})"
