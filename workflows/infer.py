"""A tuned model's answers to a file of prompts, on the machines named.

pyflyte run workflows/infer.py infer --artifact ADDRESS --prompts prompts.jsonl --shape cpu-1 --shards 2
"""

from flytekit import workflow
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flytune.models.generation import Generation
from tasks.base_model import fetch_base_model
from tasks.infer import INFER, join_answers, split_prompts
from workflows.routing import on


@workflow
def infer(
    artifact: FlyteDirectory,
    prompts: FlyteFile,
    shape: str,
    adapters: dict[str, FlyteDirectory] = {},  # noqa: B006 (Flyte reads it once)
    shards: int = 1,
    generation: Generation = Generation(),  # noqa: B008 (frozen)
    keep: str = "",
) -> FlyteDirectory:
    """Deal the prompts out, answer all parts at once on `shape`, and join the answers in order.

    Run again after a failure, only parts without answers are answered: those of others lie at `keep`.
    """
    split = split_prompts(
        questions=prompts, artifact=artifact, adapters=adapters, shards=shards, generation=generation, keep=keep
    )
    base = fetch_base_model(base=split.base)
    shared = {"folder": split.folder, "artifact": artifact, "adapters": adapters, "base": base, "keep": split.keep}
    answered = on("infer", shape, INFER, part=split.parts, **shared)
    return join_answers(parts=split.parts, folder=split.folder, answered=answered, keep=split.keep)
