"""Self-test on a machine of your cluster: all ways of training compute the same.

pyflyte run --remote --copy all workflows/selftest.py selftest --shape t4-8
"""

from typing import Any

from tasks.selftest import SELFTEST
from workflows.routing import route_to, workflow


@workflow()
def selftest(shape: Any, pairs: Any) -> Any:
    return route_to("selftest", shape, SELFTEST, pairs=pairs)
