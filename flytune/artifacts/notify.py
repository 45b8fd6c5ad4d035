"""Notifications of the end of a run, by a Slack-compatible webhook. They never fail a run, and its address is never shown."""

import json
import logging
import os
import urllib.error
import urllib.request
from typing import Literal

from flytune.evaluation import guards
from flytune.failures import shortened, without_secrets
from flytune.failures.text import MOST
from flytune.recipe import Recipe
from flytune.records import Metrics

log = logging.getLogger(__name__)

WEBHOOK = "FLYTUNE_WEBHOOK"
"""Environment variable with the webhook's address, from a secret of the cluster (cluster.yaml: secrets.notify)."""
SECONDS = 20.0
LONGEST = 3000
"""Characters of a message, unless its own sentences are longer; Slack cuts at 40,000 and folds messages before that."""


def send(recipe: Recipe, ended: Literal["succeeded", "failed"], text: str) -> bool:
    """Post `text` if the recipe's notify section asks for it; return whether it was accepted. Failures are only logged."""
    if not recipe.notify.webhook or ended not in recipe.notify.on:
        return False
    if not (address := os.environ.get(WEBHOOK)):
        log.warning("notify.webhook: no %s is set (cluster.yaml: secrets.notify), so no message was sent", WEBHOOK)
        return False
    body = json.dumps({"text": shortened(without_secrets(text), MOST)}).encode()
    try:
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SECONDS):
            return True
    except urllib.error.HTTPError as error:
        log.warning("notify.webhook: the address in %s answered %d, so no message was sent", WEBHOOK, error.code)
    except Exception as error:  # noqa: BLE001 (a lost message must not fail a run; the text may contain the address)
        log.warning("notify.webhook: the address in %s was not reached: %s; no message was sent", WEBHOOK, type(error).__name__)
    return False


def success_message(recipe: Recipe, metrics: Metrics, address: str) -> str:
    """Return the message about a stored artifact."""
    low, high = metrics.loss_difference_low, metrics.loss_difference_high
    verdict = "significantly better" if metrics.is_better else "not significantly better"
    broken = "".join(f"\nNot published or promoted: {sentence}" for sentence in guards.broken(recipe, metrics))
    if (reward := metrics.reward) is not None:
        return (
            f"{recipe.name}: done. Held-out pairs: the chosen answer has the larger reward in {reward.accuracy:.0%} "
            f"({reward.accuracy_low:.0%} to {reward.accuracy_high:.0%}) of {reward.pairs}.\nArtifact: {address}{broken}"
        )
    return (
        f"{recipe.name}: done. Held-out perplexity {metrics.base.perplexity:.2f} -> {metrics.tuned.perplexity:.2f}; loss "
        f"{metrics.loss_difference:+.4f} nats per token ({low:+.4f} to {high:+.4f}): {verdict}.\nArtifact: {address}{broken}"
    )
