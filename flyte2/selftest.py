"""Self-test on a machine of your cluster: all ways of training compute the same.

flyte run flyte2/selftest.py selftest --shape t4-8
"""

from typing import Any

from flyte2.driver import workflow
from flyte2.stages import call
from flytune.stages.table import SELFTEST


@workflow
async def selftest(shape: Any, pairs: Any) -> Any:
    return await call(SELFTEST, shape)(pairs=pairs)
