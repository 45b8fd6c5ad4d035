"""`flytune doctor`."""

import argparse
import json
import sys
from collections.abc import Iterator

from rich.console import Console

from flytune.cluster import load_cluster
from flytune.doctor import Finding, admin, kube, laptop
from flytune.shapes import load_shapes

_STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


def run(options: argparse.Namespace) -> int:
    """Shows each finding as it is made; 1 where something fails."""
    console = Console(soft_wrap=True, highlight=False)
    made = []
    for finding in _findings(options):
        made.append(finding)
        if not options.json:
            console.print(f"[{_STYLES[finding.level]}]{finding.level:4}[/] {finding.what:20} ", end="")
            console.print(finding.said, markup=False)
            if finding.do:
                console.print(f"{'':25} -> {finding.do}", markup=False)
    if options.json:
        sys.stdout.write(json.dumps([finding.model_dump() for finding in made], indent=2) + "\n")
    return int(any(finding.level == "FAIL" for finding in made))


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    config = admin.config_file()
    if not options.remote:
        yield from laptop.findings()
        yield from admin.local(config)
        return
    yield from admin.look(config, options.project, options.domain, only_reach=options.reach)
    if not options.reach:
        yield from kube.look(f"{options.project}-{options.domain}", load_shapes(), load_cluster())
