"""Batch inference: a tuned model answers a file of prompts on a named shape.

pyflyte run workflows/infer.py infer --artifact ADDRESS --prompts prompts.jsonl --shape cpu-1 --shards 2
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.models import Generation
from tasks.base_model import fetch_base_model
from tasks.infer import INFER, join_answers, split_prompts
from workflows.routing import route_to


@workflow
def infer(
    artifact: FlyteDirectory,
    prompts: FlyteFile,
    shape: str,
    adapters: dict[str, FlyteDirectory] = {},  # noqa: B006 (Flyte reads it once)
    shards: int = 1,
    generation: Generation = Generation(),  # noqa: B008 (frozen)
    scratch_folder: str = "",
    trust_remote_code: bool = False,
) -> FlyteDirectory:
    """Split the prompts, answer all parts in parallel on `shape`, and join the answers in order.

    Code of the artifact and of its base model runs only with `trust_remote_code`, whatever its recipe says.
    After a failure, a second run answers only the parts that have no answers below `scratch_folder`.
    """
    split = split_prompts(
        questions=prompts,
        artifact=artifact,
        adapters=adapters,
        shards=shards,
        generation=generation,
        scratch_folder=scratch_folder,
        trust_remote_code=trust_remote_code,
    )
    base = fetch_base_model(base=split.base)
    scratch = {"scratch_folder": split.scratch_folder}
    shared = {"folder": split.folder, "artifact": artifact, "adapters": adapters, "base": base, **scratch}
    answered = route_to(
        "infer", shape, INFER, part=split.parts, **shared, trust_remote_code=trust_remote_code
    )
    return join_answers(parts=split.parts, folder=split.folder, answered=answered, **scratch)
