"""Batch inference: a tuned model answers a file of prompts on a named shape.

flyte run --local flyte2/infer.py infer --artifact ADDRESS --prompts prompts.jsonl --shape cpu-1 --shards 2
"""

import asyncio
from typing import Any

from flyte2.driver import workflow
from flyte2.stages import call
from flytune.stages.table import BASE_MODEL, INFER, JOIN, SPLIT


@workflow
async def infer(
    artifact: Any, prompts: Any, shape: Any, adapters: Any, trust_remote_code: Any, **asked: Any
) -> Any:
    models = {"artifact": artifact, "adapters": adapters, "trust_remote_code": trust_remote_code}
    parts, folder, scratch, request = await call(SPLIT)(questions=prompts, **models, **asked)
    base = await call(BASE_MODEL)(base=request)
    shared = {"folder": folder, "base": base, "scratch_folder": scratch, **models}
    answered = await asyncio.gather(*(call(INFER, shape)(part=part, **shared) for part in parts))
    return await call(JOIN)(parts=parts, folder=folder, answered=list(answered), scratch_folder=scratch)
