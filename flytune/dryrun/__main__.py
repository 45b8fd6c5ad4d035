"""Subprocess of `flytune.dryrun.run`: it reads a Case from standard input and writes the DryRun to standard
output."""

import gc
import sys
import warnings

from flytune.console import output
from flytune.dryrun import trace
from flytune.dryrun.case import Case

output.install()
# Imported modules stay, and a step makes millions of short-lived objects without cycles.
warnings.simplefilter("ignore")
case = Case.parse(sys.stdin.read())
gc.disable()
sys.stdout.write(trace.trace(case).model_dump_json())
