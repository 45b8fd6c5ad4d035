"""Batch inference: a tuned model answers a file of prompts on a named shape.

flyte run --local flyte2/infer.py infer --artifact ADDRESS --prompts prompts.jsonl --shape cpu-1 --shards 2
"""

import asyncio

from flyte.io import Dir, File

from flyte2.driver import driver
from flyte2.stages import call
from flytune.models import Generation
from flytune.stages.table import BASE_MODEL, INFER, JOIN, SPLIT


@driver.task
async def infer(
    artifact: Dir,
    prompts: File,
    shape: str,
    adapters: dict[str, Dir] = {},  # noqa: B006 (Flyte reads it once)
    shards: int = 1,
    generation: Generation = Generation(),  # noqa: B008 (frozen)
    scratch_folder: str = "",
    trust_remote_code: bool = False,
) -> Dir:
    """Split the prompts, answer all parts in parallel on `shape`, and join the answers in order.

    Code of the artifact and of its base model runs only with `trust_remote_code`, whatever its recipe says.
    After a failure, a second run answers only the parts that have no answers below `scratch_folder`.
    """
    models = {"artifact": artifact, "adapters": adapters, "trust_remote_code": trust_remote_code}
    asked = {
        "questions": prompts,
        "shards": shards,
        "generation": generation,
        "scratch_folder": scratch_folder,
    }
    parts, folder, scratch, request = await call(SPLIT)(**asked, **models)
    base = await call(BASE_MODEL)(base=request)
    shared = {"folder": folder, "base": base, "scratch_folder": scratch, **models}
    answered = await asyncio.gather(*(call(INFER, shape)(part=part, **shared) for part in parts))
    joined: Dir = await call(JOIN)(
        parts=parts, folder=folder, answered=list(answered), scratch_folder=scratch
    )
    return joined
