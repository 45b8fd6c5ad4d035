"""Fields that are named nearly alike in all tools, which hand them on to transformers."""

import re
from collections.abc import Sequence
from typing import Any

from flytune import limits
from flytune.conversion import sharding
from flytune.conversion.draft import Draft
from flytune.models.config_json import known_name
from flytune.recipe import OPTIMIZERS, TRACKER_NAMES, Data, Training
from flytune.recipe.schedules import SCHEDULES
from flytune.sentences import counted

_OPTIMIZERS = {
    "adamw_hf": "adamw_torch",
    "adamw": "adamw_torch",
    "adamw_apex_fused": "adamw_torch_fused",
    "optimi_adamw": "adamw_torch_fused",
    "adamw_torch_xla": "adamw_torch",
    "adamw_torch_npu_fused": "adamw_torch_fused",
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_torch_4bit": "adamw_8bit",
    "ao_adamw_8bit": "adamw_8bit",
    "ao_adamw_4bit": "adamw_8bit",
    "ao_adamw_fp8": "adamw_8bit",
    "paged_adamw": "paged_adamw_32bit",
    "lion_pytorch": "lion_32bit",
    "lion": "lion_32bit",
    "paged_lion": "paged_lion_32bit",
}
"""The optimizers of other names and libraries, with the nearest one here."""
_SCHEDULES = {
    "constant_with_warmup": "constant_with_warmup",
    "cosine_with_restart": "cosine_with_restarts",
    "wsd": "warmup_stable_decay",
}


def number(draft: Draft, key: str, default: Any = None) -> Any:
    """Return the number of a key, which YAML 1.1 may have read as a text (2e-5)."""
    value = draft.take(key, default)
    if isinstance(value, str):
        try:
            value = float(value) if re.search(r"[.eE]", value) else int(value)
        except ValueError:
            draft.refuse(f"{key}: {value[:40]} is not a number")
    return value


def whole(draft: Draft, key: str, default: Any = None) -> Any:
    """Return the whole number of a key; refuse the file where it is another number, as the tool itself
    does."""
    value = number(draft, key, default)
    if isinstance(value, float):
        if not value.is_integer():
            draft.refuse(f"{key}: {value:g} is not a whole number")
        return int(value)
    return value


def put_batch(draft: Draft, micro: int, accumulation: int, gpus: int, words: str) -> None:
    """Set the batch of a step; `words` are the tool's names of the two factors."""
    total = micro * accumulation * gpus
    if draft.get("objective.name") == "kto" and draft.get("objective.loss_type") is None and total < 2:
        draft.put(
            "training.global_batch_size",
            2,
            f"{words} = {total}, but kto's estimate of the KL divergence needs two rows",
        )
    else:
        parts = draft.get("sharding.sequence_parallel") or 1
        count = counted(gpus * parts, "GPU") if gpus * parts > 1 else "one GPU"
        count += f", {parts} a sample" * (parts > 1)
        draft.put(
            "training.global_batch_size", total, f"{words}: {micro} x {accumulation}, on {count} (--gpus)"
        )
    draft.put("training.per_device_train_batch_size", micro, "without it: the largest that fits")


def put_optimizer(draft: Draft, name: str) -> None:
    """Set the optimizer, or the nearest one."""
    ours, note = name, ""
    if name not in OPTIMIZERS:
        if name.startswith("schedule_free"):
            draft.refuse(
                f"optimizer {name}: a schedule-free optimizer has other weights for training than for "
                "evaluation and export, which take the trained ones here; write adamw_torch_fused with a "
                "schedule"
            )
        if name not in _OPTIMIZERS:
            draft.refuse(
                f"optimizer {name}: there is none like it; the optimizers are {', '.join(OPTIMIZERS)}"
            )
        ours = _OPTIMIZERS[name]
        note = f"{name}: the nearest here"
    kind = OPTIMIZERS[ours]
    if sharding.has_parts(draft) and (kind.bits == 8 or kind.algorithm == "adafactor"):
        under = draft.get("sharding.name")
        ours, note = "adamw_torch_fused", f"{name} is not offered under {under} (docs/recipes.md, Optimizers)"
    elif kind.paged and draft.get("sharding.offload"):
        ours, note = "adamw_torch_fused", f"{name}: its states are offloaded by sharding.offload"
    draft.put("training.optim", ours, note)


def put_schedule(draft: Draft, name: str, arguments: Any) -> None:
    """Set the schedule of the learning rate and its arguments."""
    ours = _SCHEDULES.get(name, name)
    if ours not in SCHEDULES:
        draft.refuse(f"schedule {name}: there is none like it; the schedules are {', '.join(SCHEDULES)}")
    draft.put("training.lr_scheduler_type", ours)
    if arguments and isinstance(arguments, dict):
        draft.put(
            "training.lr_scheduler_kwargs",
            {key: value for key, value in arguments.items() if value is not None},
        )


def put_warmup(draft: Draft, default: float, note: str) -> None:
    """Set the warm-up of warmup_steps or warmup_ratio."""
    ratio, steps = number(draft, "warmup_ratio"), number(draft, "warmup_steps")
    if draft.get("training.lr_scheduler_type") == "constant":
        unused = f"its constant does not use {'warmup_steps' if steps else 'warmup_ratio'} either"
        draft.put("training.warmup_steps", 0, unused if steps or ratio else "constant has none")
    elif steps:
        draft.put("training.warmup_steps", steps)
    elif ratio:
        draft.put("training.warmup_steps", ratio, "warmup_ratio: below 1, a share of all steps")
    else:
        given = steps is not None or ratio is not None
        draft.put("training.warmup_steps", 0 if given else default, "" if given else note)


def put_length(draft: Draft, epochs_key: str, default: float) -> None:
    """Set epochs or steps."""
    epochs, steps = number(draft, epochs_key, default), whole(draft, "max_steps")
    if steps and steps > 0:
        draft.put("training.max_steps", steps)
    else:
        draft.put("training.num_train_epochs", epochs)


def put_defaults_of_transformers(draft: Draft, learning_rate: float, optimizer: str, gpus: int) -> None:
    """Set optimizer, schedule, batch, length and saves by the keys and defaults of transformers'
    TrainingArguments."""
    draft.put("training.learning_rate", number(draft, "learning_rate", learning_rate))
    micro = whole(draft, "per_device_train_batch_size", 8)
    accumulation = whole(draft, "gradient_accumulation_steps", 1)
    put_batch(draft, micro, accumulation, gpus, "per_device_train_batch_size x gradient_accumulation_steps")
    put_length(draft, "num_train_epochs", 3.0)
    put_optimizer(draft, str(draft.take("optim", optimizer)))
    put_schedule(draft, str(draft.take("lr_scheduler_type", "linear")), draft.take("lr_scheduler_kwargs"))
    put_warmup(draft, 0, "transformers' default")
    put_numbers(draft)
    put_compile(draft)
    put_times(draft, "checkpoints", 500, "transformers' default")
    draft.same(("save_total_limit", "checkpoints.save_total_limit"))


def put_sources(draft: Draft, sources: list[dict[str, Any]]) -> None:
    """Set the sources of the data; one alone is `data` itself."""
    if len(sources) == 1:
        for key, value in sources[0].items():
            draft.put(f"data.{key}", value)
    else:
        draft.put("data.sources", sources)


def put_share(draft: Draft, key: str, size: Any) -> None:
    """Set the share of held-out samples by the tool's key."""
    if size and size < 1:
        draft.put("data.heldout_fraction", size)
    elif size:
        share = Data.model_fields["heldout_fraction"].default
        draft.put(
            "data.heldout_fraction",
            share,
            f"{key}: {counted(size, 'sample')}; write their share of all samples",
        )
    else:
        draft.put("data.heldout_fraction", 0, f"{key}; 0.02 would show whether tuning helped")


def put_numbers(draft: Draft) -> None:
    """Set the numbers of AdamW, and those that all tools name like transformers."""
    names = (
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "neftune_noise_alpha",
        "logging_steps",
    )
    for name in names:
        value = number(draft, name)
        if name == "logging_steps" and value is not None and value < 1:
            value = None
        draft.put(f"training.{name}", value)
    norm = number(draft, "max_grad_norm")
    if norm == 0:
        draft.put("training.max_grad_norm", limits.FACTOR, "0 there: no clipping")
    else:
        draft.put("training.max_grad_norm", norm)
    seed = number(draft, "seed")
    if seed is not None and seed != Training.model_fields["seed"].default:
        draft.put("training.seed", seed)
        draft.put("data.seed", seed)
    if draft.take("auto_find_batch_size"):
        draft.put("training.auto_find_batch_size", True)
    draft.leave("ddp_timeout", "the data is prepared in a task of its own, so no process waits for it")


def put_model(draft: Draft) -> None:
    """Set what follows from the model's name, and leave trust_remote_code out: transformers has most model
    types by now."""
    if draft.take("trust_remote_code"):
        draft.note(
            "trust_remote_code",
            "a model that brings its own code needs model.trust_remote_code: true; most do not",
        )
    if re.search(r"gemma-?2", str(draft.get("model.name_or_path")).lower()):
        draft.put("model.attn_implementation", "eager", "gemma2 has no sdpa in transformers")


def put_dtype(draft: Draft, default: str) -> None:
    """Set the type of the weights by bf16 and fp16, which accelerators compute in."""
    bf16, fp16 = draft.take("bf16"), draft.take("fp16")
    if fp16 in (True, "true"):
        draft.put("model.dtype", "float16", "fp16")
    elif bf16 in (True, "auto", "true", "full"):
        draft.put("model.dtype", "bfloat16")
    elif bf16 is False or fp16 is False:
        draft.put("model.dtype", "float32", "neither bf16 nor fp16")
    else:
        draft.put("model.dtype", default)


def put_attention(draft: Draft, key: str, value: Any) -> None:
    """Set the implementation of attention; torch's own kernels stand for those of other packages."""
    name = str(value).lower()
    if name in ("eager", "disabled"):
        draft.put("model.attn_implementation", "eager")
    elif name not in ("sdpa", "auto", "none") and draft.get("model.attn_implementation") is None:
        draft.put(
            "model.attn_implementation",
            "sdpa",
            f"{key}: {value}; torch's kernels are like it, and in every image",
        )


def put_times(draft: Draft, section: str, default: Any, note: str = "") -> None:
    """Set checkpoints.save_steps or evaluation.eval_steps, by the number of steps, or of times in an epoch,
    of a tool."""
    verb = {"checkpoints": "save", "evaluation": "eval"}[section]
    field = f"{section}.{verb}_steps"
    strategy = draft.take(f"{verb}_strategy") or (
        draft.take("evaluation_strategy") if verb == "eval" else None
    )
    steps, times = number(draft, f"{verb}_steps"), number(draft, f"{verb}s_per_epoch")
    if strategy in ("no", False, "False"):
        return
    if strategy in ("epoch", "best") or times == 1:
        draft.put(field, "epoch", f"{verb}s_per_epoch" if times == 1 else "")
    elif times and (epochs := draft.get("training.num_train_epochs")) is None:
        draft.put(
            field, "epoch", f"{verb}s_per_epoch: {times}; with max_steps, a step of an epoch is not known"
        )
    elif times and times * epochs <= 1:
        draft.put(field, "epoch", f"{verb}s_per_epoch: {times}, and the run has {counted(epochs, 'epoch')}")
    elif times:
        share = float(f"{1 / (times * epochs):.6g}")
        draft.put(
            field,
            share,
            f"{verb}s_per_epoch: {times}, a share of all steps: 1 / ({times} x {counted(epochs, 'epoch')})",
        )
    elif steps:
        draft.put(field, int(steps) if steps >= 1 else steps)
    elif default is not None:
        draft.put(field, default, note)


def put_best(draft: Draft) -> None:
    """Set the export of the best checkpoint, and early stopping, where there are evaluations for them."""
    best, patience = draft.take("load_best_model_at_end"), number(draft, "early_stopping_patience")
    score, save = draft.get("evaluation.eval_steps"), draft.get("checkpoints.save_steps")
    metric = draft.take("metric_for_best_model")
    draft.take("greater_is_better")
    if metric not in (None, "loss", "eval_loss"):
        if best or patience:
            draft.note(
                f"metric_for_best_model: {metric}",
                "only eval_loss is compared, so that the last step is exported, and nothing stops early",
            )
        return
    if patience and score is None:
        draft.note("early_stopping_patience", "without evaluations of the live model nothing stops early")
    elif patience:
        draft.put("evaluation.early_stopping_patience", int(patience))
    if best and score is not None:
        draft.put("checkpoints.export", "best")
        if isinstance(score, float) or isinstance(save, float) or "epoch" in (score, save):
            draft.put("checkpoints.save_steps", score, "best takes checkpoints of scored steps")


def put_publishing(draft: Draft, name: Any) -> None:
    """Set the repository on the hub that the model is pushed to."""
    if isinstance(name, str) and re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        draft.put(
            "publish.address",
            f"hf://{name}",
            "after the guards of evaluation; a repository of yours, with a token",
        )
        private = draft.take("hub_private_repo")
        draft.put("publish.private", private if isinstance(private, bool) else None)
    elif name:
        draft.note("push_to_hub", "publish.address: hf://owner/name names the repository")


def put_tracking(draft: Draft, names: Sequence[str], project: Any = None) -> None:
    """Set the trackers that are offered."""
    known = [name for name in dict.fromkeys(names) if name in TRACKER_NAMES]
    if known:
        draft.put("tracking.report_to", known)
        draft.put("tracking.project", project)


def put_compile(draft: Draft) -> None:
    """Set torch_compile, which leaves no room for Liger's kernels."""
    if draft.take("torch_compile") in (True, "true", "auto"):
        draft.put("training.torch_compile", True)
        if draft.get("training.use_liger_kernel"):
            draft.remove("training.use_liger_kernel")
            draft.note("(Liger's kernels)", "torch_compile makes kernels of its own for the same layers")


def put_targets(draft: Draft, value: Any, is_all: bool) -> None:
    """Set the layers with an adapter."""
    if isinstance(value, str) and "," in value:
        value = [part.strip() for part in value.split(",")]
    if isinstance(value, list) and [str(part).lower() for part in value] in (["all"], ["all-linear"]):
        is_all = True
    if is_all or (isinstance(value, str) and value.lower() in ("all", "all-linear", "all_linear")):
        draft.put("method.target_modules", "all-linear")
    elif value:
        draft.put(
            "method.target_modules",
            [value] if isinstance(value, str) and re.fullmatch(r"\w+", value) else value,
        )
    else:
        note = "PEFT's own choice there for Llama, Mistral, Qwen and Gemma; all-linear usually learns more"
        draft.put("method.target_modules", ["q_proj", "v_proj"], note)


def put_tables(draft: Draft, value: Any, key: str) -> None:
    """Set the tables that are trained completely beside an adapter."""
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value or ())
    if other := [name for name in names if name not in ("embed_tokens", "lm_head")]:
        draft.refuse(
            f"{key}: {other[0]}: only embed_tokens and lm_head are trained completely beside an adapter"
        )
    known = known_name(str(draft.get("model.name_or_path"))) or {}
    if "lm_head" in names and known.get("tie_word_embeddings"):
        names = ["embed_tokens"]
        draft.put("method.modules_to_save", names, f"{key}; embedding and head of this model are one tensor")
    elif names:
        draft.put("method.modules_to_save", names)


def put_experts(draft: Draft, has_targets: bool) -> None:
    """Set the adapters on all experts, which PEFT's target_parameters name."""
    value = draft.take("lora_target_parameters")
    if not value:
        return
    names = [value] if isinstance(value, str) else [str(name) for name in value]
    weights = {name.rpartition("experts.")[2] for name in names if "experts." in name}
    if weights != {"gate_up_proj", "down_proj"} or len(names) != 2:
        draft.refuse(
            f"lora_target_parameters: {', '.join(names)}: method.experts adapts gate_up_proj and down_proj "
            "of the experts, both"
        )
    if not has_targets:
        draft.refuse(
            "lora_target_parameters: without lora_target_modules: method.experts adapts experts beside other "
            "layers"
        )
    draft.put("method.experts", True, "lora_target_parameters")


def put_no_balance_loss(draft: Draft) -> None:
    """Leave the balance loss of a known mixture of experts out, as a tool does that does not ask for router
    logits."""
    known = known_name(str(draft.get("model.name_or_path"))) or {}
    if any(known.get(key) for key in ("num_experts", "num_local_experts")):
        draft.put("training.router_aux_loss_coef", 0, "not asked for there; without it: that of config.json")
