"""Answers the Case that it reads from standard input: `flytune.planning.dryrun.run` starts it as a process of its own."""

import gc
import sys
import warnings

from flytune.planning.dryrun import trace
from flytune.planning.dryrun.case import Case

# What was imported stays, and a step makes millions of short-lived objects without cycles.
warnings.simplefilter("ignore")
case = Case.model_validate_json(sys.stdin.read())
gc.disable()
sys.stdout.write(trace.trace(case).model_dump_json())
