"""Liger's layer kernels: the model types that they know, and whether they are installed."""

from importlib.util import find_spec

from flytune.errors import RecipeError

_TYPES = (
    "deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3_text gemma4_text glm4 "
    "gpt_oss granite hunyuan_v1_dense hunyuan_v1_moe llama llama4_text ministral mistral mixtral "
    "nemotron olmo2 olmo3 phi3 qwen2 qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next smollm3"
)
MODEL_TYPES = frozenset(_TYPES.split())
"""Decoders of liger-kernel 0.8.5 (transformers/monkey_patch.py, MODEL_TYPE_TO_APPLY_LIGER_FN)."""


def refusal(model_type: str, trusts_remote_code: bool) -> str | None:
    """Return why Liger's kernels cannot replace a model's norms, rotation and MLP; None if they can."""
    if trusts_remote_code:
        return (
            "the model has code of its own (model.trust_remote_code), whose layers it does not know; "
            "leave it out"
        )
    if model_type not in MODEL_TYPES:
        return f"it has no kernels for {model_type}, and would change nothing; leave it out"
    return None


def require() -> None:
    """Raise a RecipeError if Liger's kernels are not installed here."""
    if find_spec("liger_kernel") is None:
        raise RecipeError(
            "training.use_liger_kernel: liger-kernel is not installed where training runs; build the "
            "training image from this version's Dockerfile, or leave it out"
        )
