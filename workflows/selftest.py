"""Self-test on a machine of your cluster: all ways of training compute the same.

pyflyte run --remote --copy all workflows/selftest.py selftest --shape t4-8
"""

from flytekit import workflow

from flytune.selftest import Matrix
from tasks.selftest import SELFTEST
from workflows.routing import route_to


@workflow
def selftest(shape: str = "cpu-2", pairs: str = "") -> Matrix:
    """Compare every method and sharding, or the named `pairs` (full/zero2,lora/zero3/cpu), with plain
    training on one shape."""
    matrix: Matrix = route_to("selftest", shape, SELFTEST, pairs=pairs)
    return matrix
