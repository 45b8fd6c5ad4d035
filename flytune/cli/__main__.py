"""`python -m flytune.cli`, where the console script is not installed."""

import sys

from flytune.cli import main

sys.exit(main())
