"""Stages of a local run, in a worker process of this machine."""

import asyncio
import atexit

from flytune.stages.calls import Call, StageResult
from flytune.stages.worker import Worker

WORKER = Worker()
atexit.register(WORKER.end)


async def made(call: Call) -> StageResult:
    """Return what a stage makes in the worker, which runs one stage at a time."""
    found: StageResult = await asyncio.to_thread(WORKER.call, call.run)
    return found
