"""The objective GRPO by TRL's arguments, which axolotl has in a section `trl`."""

from typing import Any, get_args

from flytune.conversion import training
from flytune.conversion.draft import Draft
from flytune.recipe.objectives.grpo import LossType
from flytune.sentences import counted

_REWARDS: dict[str, dict[str, str]] = {
    "accuracy_reward": {"name": "exact_answer", "column": "solution"},
    "think_format_reward": {"name": "regular_expression", "pattern": "<think>(?!.*<think>).*</think>.*"},
}
"""Rewards of TRL that judge nearly as one of the recipe's own does."""
_SCALES = {True: "group", False: "none"}
_ENGINE = {
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_importance_sampling_mode": "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max": "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min": "vllm_importance_sampling_clip_min",
}
"""Fields of the engine by TRL's names."""
_DORA = ("use_dora", "peft_use_dora")


def put(draft: Draft) -> None:
    """Set the section `objective`."""
    draft.put("objective.name", "grpo")
    _rewards(draft)
    draft.put("objective.group_size", training.whole(draft, "num_generations", 8))
    draft.put("objective.max_completion_length", training.whole(draft, "max_completion_length", 512))
    for key in ("temperature", "top_p", "top_k", "min_p", "beta"):
        draft.put(f"objective.{key}", training.number(draft, key))
    loss = draft.take("loss_type", "dapo")
    if loss not in get_args(LossType):
        draft.refuse(f"loss_type: {loss}: the losses of objective grpo are {', '.join(get_args(LossType))}")
    draft.put("objective.loss_type", loss)
    _clip_range(draft, loss)
    scale = draft.take("scale_rewards", "group")
    draft.put("objective.scale_rewards", _SCALES[scale] if isinstance(scale, bool) else scale)
    draft.same(
        ("importance_sampling_level", "objective.importance_sampling_level"),
        ("mask_truncated_completions", "objective.mask_truncated_completions"),
        ("disable_dropout", "objective.disable_dropout"),
    )
    _engine(draft)
    without_bias = draft.take("use_bias_correction_kl")
    draft.put("objective.use_bias_correction_kl", without_bias if draft.get("objective.beta") else None)


def _clip_range(draft: Draft, loss: str) -> None:
    """Set the distances at which importance weights are cut, with TRL's defaults, which are those of no
    paper."""
    low, high = training.number(draft, "epsilon", 0.2), training.number(draft, "epsilon_high")
    if loss == "cispo":
        draft.put("objective.epsilon_high", low if high is None else high)
    else:
        draft.put("objective.epsilon", low)
        draft.put("objective.epsilon_high", high)


def _engine(draft: Draft) -> None:
    """Set the engine that draws answers, where it is vLLM and draws the same from the recipe's model."""
    if not draft.take("use_vllm"):
        return
    if any(draft.peek(key) for key in ("load_in_4bit", "load_in_8bit", *_DORA)):
        draft.note("use_vllm", "vLLM has no adapters on a quantized base and no DoRA; transformers draws")
        return
    if draft.take("vllm_importance_sampling_correction", True) is False:
        draft.note("use_vllm", "a recipe corrects for what vLLM rounds; transformers draws without an error")
        return
    engine: dict[str, Any] = {"name": "vllm"}
    for theirs, ours in _ENGINE.items():
        if (value := draft.take(theirs)) is not None:
            engine[ours] = value
    draft.put(
        "objective.engine",
        engine,
        "each node starts a server, also where the file names one; without this line transformers draws",
    )


def _rewards(draft: Draft) -> None:
    """Set the rewards; an empty list, which no recipe may have, where a function of the file's own is among
    them."""
    names, weights = draft.take("reward_funcs") or [], draft.take("reward_weights")
    names = [str(name) for name in ([names] if isinstance(names, str) else names)]
    weights = list(weights) if weights else [1.0] * len(names)
    if len(weights) != len(names):
        draft.refuse(f"reward_weights: {counted(len(weights), 'weight')} for {counted(len(names), 'reward')}")
    known = [name.removeprefix("trl.rewards.") for name in names]
    if names and all(name in _REWARDS for name in known):
        rows: list[dict[str, Any]] = [dict(_REWARDS[name]) for name in known]
        for row, weight in zip(rows, weights, strict=True):
            if weight != 1:
                row["weight"] = float(weight)
        draft.put(
            "objective.rewards",
            rows,
            f"{', '.join(known)}; exact_answer compares final answers, TRL parses formulas",
        )
        return
    listed = (
        ", ".join(f"{name} (weight {weight})" for name, weight in zip(names, weights, strict=True))
        or "none is named"
    )
    draft.put(
        "objective.rewards",
        [],
        f"fill in; there: {listed}. A function of your own is path/to/rewards.py:function, and judges one "
        "completion, where TRL's judges a list; shipped are exact_answer, regular_expression, json_schema "
        "and unit_tests (docs/objectives.md)",
    )
