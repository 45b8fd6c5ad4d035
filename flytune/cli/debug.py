"""`flytune debug EXECUTION [STAGE]`."""

import argparse
import sys
import time

from flytune.cli import arguments
from flytune.cluster import debug_pods, executions, flyte2_sdk, runs_of_flyte2
from flytune.cluster.debug_program import PORT
from flytune.errors import RecipeError

NAMESPACE_OF_FLYTE2 = "flyte"
"""Namespace of all pods of the open backend of Flyte 2."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "execution", help="an execution whose pods are still there: its id, or its address in the console"
    )
    parser.add_argument(
        "stage",
        nargs="?",
        help="such as train or evaluate_model (default: the newest that failed, else that runs)",
    )
    parser.add_argument(
        "--hours", type=float, default=2.0, help="time after which the pod ends by itself (default: 2)"
    )
    parser.add_argument("--end", action="store_true", help="delete the execution's pods to look into")
    parser.add_argument("--namespace", help="that of the pods (default: PROJECT-DOMAIN; flyte on Flyte 2)")
    arguments.add_cluster(parser, "whose namespace the pods are in")


def run(options: argparse.Namespace) -> int:
    """Start a copy of each pod of a stage, which waits; print how to look into it, and how to run the stage
    again in it."""
    if not 0 < options.hours <= 168:
        raise RecipeError(f"--hours {options.hours:g}: must be more than 0 and at most 168, a week")
    parsed = runs_of_flyte2.parse(options.execution) or executions.parse(
        options.execution, options.project, options.domain
    )
    if parsed is None:
        raise RecipeError(
            f"{options.execution:.300}: neither an execution's id nor its address in the console"
        )
    execution = parsed.name
    by_default = NAMESPACE_OF_FLYTE2 if flyte2_sdk.config_file() else f"{parsed.project}-{parsed.domain}"
    with debug_pods.connected(options.namespace or by_default) as cluster:
        if options.end:
            names = cluster.end(execution)
            sys.stdout.write(
                "".join(f"{name}: deleted\n" for name in names) or f"{execution}: no pod to look into\n"
            )
            return 0
        stage = debug_pods.chosen(cluster.stages(execution), options.stage, execution, cluster.namespace)
        seconds = 3600 * options.hours
        ends = time.strftime("%H:%M UTC", time.gmtime(time.time() + seconds))
        meeting = None
        for original in stage.pods:
            pod = cluster.start(debug_pods.copy_of(original, execution, seconds, meeting), original)
            state = "has failed" if stage.has_failed else "runs, or has ended"
            _say(f"{pod.name}: as {pod.copied}, of {stage.name}, which {state}; it ends by itself at {ends}")
            lines = cluster.lines(pod, _Progress())
            # The ranks of all pods meet at the first one, which runs by now.
            meeting = meeting or cluster.address(pod)
            for line in lines:
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
