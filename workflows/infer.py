"""Batch inference: a tuned model answers a file of prompts on a named shape.

pyflyte run workflows/infer.py infer --artifact ADDRESS --prompts prompts.jsonl --shape cpu-1 --shards 2
"""

from typing import Any

from tasks.base_model import fetch_base_model
from tasks.infer import INFER, join_answers, split_prompts
from workflows.routing import route_to, workflow


@workflow()
def infer(
    artifact: Any, prompts: Any, shape: Any, adapters: Any, trust_remote_code: Any, **asked: Any
) -> Any:
    models = {"artifact": artifact, "adapters": adapters, "trust_remote_code": trust_remote_code}
    split = split_prompts(questions=prompts, **models, **asked)
    scratch = {"scratch_folder": split.scratch_folder}
    base = fetch_base_model(base=split.base)
    answered = route_to(
        "infer", shape, INFER, part=split.parts, folder=split.folder, base=base, **models, **scratch
    )
    return join_answers(parts=split.parts, folder=split.folder, answered=answered, **scratch)
