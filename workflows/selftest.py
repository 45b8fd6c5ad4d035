"""That all ways of training compute the same, proven on a machine of your cluster.

pyflyte run --remote --copy all workflows/selftest.py selftest --shape t4-8
"""

from flytekit import workflow

from flytune.selftest.matrix import Matrix
from tasks.selftest import SELFTEST
from workflows.routing import on


@workflow
def selftest(shape: str = "cpu-2", pairs: str = "") -> Matrix:
    """Hold every method and sharding, or the named `pairs` (full/zero2,lora/zero3/cpu), against plain training on one shape."""
    matrix: Matrix = on("selftest", shape, SELFTEST, pairs=pairs)
    return matrix
