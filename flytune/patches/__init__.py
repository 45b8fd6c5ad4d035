"""Names of other libraries that Flytune replaces, a file for each library, and why.

Importing this package replaces nothing, and imports none of the libraries: what needs a replacement installs
it.
"""

from flytune.patches import (
    accelerate,
    bitsandbytes,
    datasets,
    deepspeed,
    flyte,
    flytekit,
    fsspec,
    huggingface_hub,
    lm_eval,
    peft,
    torch,
    tqdm,
    transformers,
    trl,
)

__all__ = [
    "accelerate",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "flyte",
    "flytekit",
    "fsspec",
    "huggingface_hub",
    "lm_eval",
    "peft",
    "torch",
    "tqdm",
    "transformers",
    "trl",
]
