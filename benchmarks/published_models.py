"""Models and layouts that published runs had and that nothing trains today: MPT, the first Qwen, layers by
Llama's names."""

from dataclasses import replace
from typing import Any

from training_estimates.config_json import Config, text_part
from training_estimates.config_sizes import KINDS, LLAMA, ModelType
from training_estimates.config_sizes import geometry as sizes_of
from training_estimates.framework import Kernels, Passes
from training_estimates.kernels import FUSED
from training_estimates.sizes import Geometry
from training_estimates.workload import Workload

PUBLISHED_KINDS = {
    **KINDS,
    # llm-foundry's, of other sizes than transformers' MPT: its MLP may have any width, its positions be a
    # table of vectors.
    "mpt": ModelType(gated=False, attention_bias=False, tied=True),
    # The first Qwen brings its own code.
    "qwen": ModelType(attention_bias=False, qkv_bias=True, layers="transformer.h"),
}
MPT_KERNELS = Kernels(norm=Passes(4, 6 + 6 + 4), rotary=Passes(0, 0), activation=Passes(4, 6), launches=14)
"""torch's own layer norm, whose weight's gradient is a kernel of its own, and GELU; learned positions;
queries, keys and values of one product."""
FROZEN_STREAMS = 2
"""Tensors of the stream's size that FSDP1 keeps of each layer until backward ends if parameters are frozen.

It reshards frozen parameters from hooks on the gradients of a unit's inputs
(_register_post_backward_reshard_only_hooks). Only within a reentrant checkpoint, they stay while the
checkpoints are freed (tests/benchmarks/test_fsdp1_retained.py).
"""


def geometry(config: dict[str, Any], name: str) -> Geometry:
    """Return the sizes of a model whose linear layers have Llama's seven names, and whose experts are
    modules.

    litgpt, and transformers before 5, train all models so.

    Raises:
        SizesError: its config.json lacks a size, has a wrong one, or is of an unknown model type.
    """
    part = text_part(config, name)
    kind = PUBLISHED_KINDS.get(part.kind)
    if kind is not None:
        paths = LLAMA if kind.gated else tuple(path for path in LLAMA if "gate" not in path)
        kind = replace(kind, paths=paths, stacks_experts=False)
    if part.kind == "mpt":
        return _mpt(part, name, kind)
    content = part.content
    if part.kind == "qwen":
        # It counts gate and up together.
        content = content | {"intermediate_size": part.size("intermediate_size") // 2}
    return sizes_of(content, name, kind)


def _mpt(config: Config, name: str, kind: ModelType | None) -> Geometry:
    hidden, attention = config.size("d_model"), config.table("attn_config")
    content = config.content | {
        "hidden_size": hidden,
        "num_hidden_layers": config.content.get("n_layers"),
        "num_attention_heads": config.content.get("n_heads"),
        "intermediate_size": hidden * config.size("expansion_ratio", 4),
    }
    found = sizes_of(content, name, kind)
    # Positions are a table of vectors, unless they are slopes added to the scores.
    positions = 0 if attention.get("alibi") else config.size("max_seq_len", 2048)
    config.check()
    return found.model_copy(update={"extra": found.extra + positions * hidden})


def as_run(workload: Workload) -> Workload:
    """Return the workload of a published run with what its model's own code and FSDP1 add to its
    framework."""
    framework, kind = workload.framework, workload.geometry.model_type
    if kind == "mpt":
        framework = replace(framework, kernels=MPT_KERNELS)
    if kind == "qwen" and workload.attention == "flash":
        # Its own code takes norm and rotation from flash-attn where that is installed.
        framework = replace(framework, kernels=FUSED)
    is_frozen = workload.method != "full" and workload.layout.name.startswith("fsdp1")
    if is_frozen and framework.reentrant and workload.checkpointing != "none":
        framework = replace(framework, retained_streams=FROZEN_STREAMS)
    return replace(workload, framework=framework)
