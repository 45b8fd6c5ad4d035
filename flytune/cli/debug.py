"""`flytune debug EXECUTION [STAGE]`."""

import argparse
import sys
import time

from flytune.cli import arguments
from flytune.cluster import debug_pods, flyte2_sdk
from flytune.cluster.debug_program import PORT
from flytune.errors import RecipeError

NAMESPACE_OF_FLYTE2 = "flyte"
"""Namespace of all pods of the open backend of Flyte 2."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("execution", help="id of an execution whose pods are still there")
    parser.add_argument(
        "stage", nargs="?", help="such as train or evaluate_model (default: the newest that failed, else that runs)"
    )
    parser.add_argument("--hours", type=float, default=2.0, help="time after which the pod ends by itself (default: 2)")
    parser.add_argument("--end", action="store_true", help="delete the execution's pods to look into")
    parser.add_argument("--namespace", help="that of the pods (default: PROJECT-DOMAIN; flyte on Flyte 2)")
    arguments.add_cluster(parser, "whose namespace the pods are in")


def run(options: argparse.Namespace) -> int:
    """Start a copy of each pod of a stage, which waits; print how to look into it, and how to run the stage again in it."""
    if not 0 < options.hours <= 168:
        raise RecipeError(f"--hours {options.hours:g}: must be more than 0 and at most 168, a week")
    execution = options.execution.rstrip("/").rpartition("/")[2]
    by_default = NAMESPACE_OF_FLYTE2 if flyte2_sdk.config_file() else f"{options.project}-{options.domain}"
    with debug_pods.connected(options.namespace or by_default) as cluster:
        if options.end:
            names = cluster.end(execution)
            sys.stdout.write("".join(f"{name}: deleted\n" for name in names) or f"{execution}: no pod to look into\n")
            return 0
        stage = debug_pods.chosen(cluster.stages(execution), options.stage, execution, cluster.namespace)
        ends = time.strftime("%H:%M UTC", time.gmtime(time.time() + 3600 * options.hours))
        for pod in cluster.start(stage, execution, 3600 * options.hours):
            state = "has failed" if stage.has_failed else "runs, or has ended"
            _say(f"{pod.name}: as {pod.copied}, of {stage.name}, which {state}; it ends by itself at {ends}")
            for line in cluster.lines(pod, _Progress()):
                _say(f"  {line}")
            _say(f"  look into it: kubectl exec -n {pod.namespace} -it {pod.name} -- bash")
            _say(f"  port-forward: kubectl port-forward -n {pod.namespace} {pod.name} {PORT}:{PORT}")
        where = f"--namespace {cluster.namespace}"
        _say(f"end: flytune debug {execution} --end {where}")
    return 0


class _Progress:
    """Says a new reason for which a pod does not run yet, once."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            sys.stderr.write(f"  waiting: {reason}\n")
            sys.stderr.flush()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
