"""Self-test on a machine of your cluster: all ways of training compute the same.

flyte run flyte2/selftest.py selftest --shape t4-8
"""

from flyte2.driver import driver
from flyte2.stages import call
from flytune.selftest import Matrix
from flytune.stages.table import SELFTEST


@driver.task
async def selftest(shape: str = "cpu-2", pairs: str = "") -> Matrix:
    """Compare every method and sharding, or the named `pairs` (full/zero2,lora/zero3/cpu), with plain
    training on one shape."""
    matrix: Matrix = await call(SELFTEST, shape)(pairs=pairs)
    return matrix
