"""Configurations of axolotl."""

from flytune.conversion import axolotl_data, grpo, sharding, training
from flytune.conversion.draft import Draft, other_objective
from flytune.recipe import TRACKER_NAMES

_OBJECTIVES = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "grpo": "grpo"}
_PLUGINS = ("liger", "cut_cross_entropy", "lm_eval", "kernels", "swanlab")
"""Words in the names of plugins that do not change what is learned."""
_LIGER = (
    "liger_rope",
    "liger_rms_norm",
    "liger_rms_norm_gated",
    "liger_glu_activation",
    "liger_swiglu",
    "liger_layer_norm",
    "flash_attn_rms_norm",
    "flash_attn_fuse_mlp",
    "unsloth_rms_norm",
    "unsloth_rope",
    "use_kernels",
)


def convert(draft: Draft, gpus: int | None) -> None:
    """Convert a configuration of axolotl."""
    draft.refuse_changes()
    _parts_of_base(draft)
    _plugins(draft)
    draft.same(("base_model", "model.name_or_path"), ("revision_of_model", "model.revision"))
    _model(draft)
    _model_config(draft)
    _rope_scaling(draft)
    _objective(draft)
    replicas, parts = draft.peek("dp_replicate_size"), _sequence_parallel(draft)
    count = sharding.put(draft, gpus or _gpus(draft, parts), replicas=replicas, parts=parts)
    _method(draft)
    axolotl_data.put_data(draft)
    _vision(draft)
    _training(draft, count)
    _records(draft)


def _parts_of_base(draft: Draft) -> None:
    """Refuse a tokenizer, or a config.json, of another model than the base."""
    whole = draft.peek("base_model")
    for key, part in (("tokenizer_config", "tokenizer"), ("base_model_config", "config.json")):
        name = draft.take(key)
        if name not in (None, whole):
            draft.refuse(
                f"{key}: {name}: the {part} is that of model.name_or_path; put it into a folder with the "
                "base's other files, and name that folder as base_model"
            )


def _sequence_parallel(draft: Draft) -> int:
    """Return the GPUs that divide each sample, whose key older files call otherwise."""
    older, parts = (
        training.whole(draft, f"{name}") for name in ("sequence_parallel_degree", "context_parallel_size")
    )
    return parts or older or 1


def _gpus(draft: Draft, parts: int) -> int | None:
    """Return the number of GPUs by the keys of Ray and of parallelism, of which `parts` divide each sample;
    None if the file does not say it."""
    draft.leave("use_ray")
    workers = training.number(draft, "ray_num_workers")
    shard, replicas = (training.number(draft, f"dp_{part}_size") for part in ("shard", "replicate"))
    if not (workers or shard or replicas):
        return None
    return int(workers or (shard or 1) * (replicas or 1) * parts)


def _rope_scaling(draft: Draft) -> None:
    """Write the scaling of the rotary embedding, whose type older files call `type`."""
    scaling = draft.take("rope_scaling")
    if isinstance(scaling, dict):
        named = {"rope_type": scaling.get("rope_type", scaling.get("type"))}
        draft.put(
            "model.rope_scaling", named | {key: value for key, value in scaling.items() if key != "type"}
        )
    elif scaling:
        draft.refuse(f"rope_scaling: {scaling}: must be a mapping with type and factor")


def _model_config(draft: Draft) -> None:
    """Set the balance loss of experts by the changes to config.json; refuse all others."""
    changes = dict(draft.take("model_config") or {})
    is_trained, coefficient = (
        changes.pop("output_router_logits", False),
        changes.pop("router_aux_loss_coef", None),
    )
    if changes:
        draft.refuse(f"model_config: {', '.join(map(str, changes))}: config.json is used as it is")
    if is_trained:
        draft.put("training.router_aux_loss_coef", coefficient)
    else:
        training.put_no_balance_loss(draft)


def _plugins(draft: Draft) -> None:
    names = draft.take("plugins") or []
    for name in [names] if isinstance(names, str) else names:
        if not any(word in str(name).lower() for word in _PLUGINS):
            draft.refuse(f"plugins: {name}: what it changes is not offered")
    if [key for key in _LIGER if draft.take(key)]:
        draft.put(
            "training.use_liger_kernel",
            True,
            "norms, rotation and MLP; the loss is computed in chunks in any case",
        )
    training.put_compile(draft)


def _model(draft: Draft) -> None:
    training.put_model(draft)
    pure = next((name for name in ("bfloat16", "float16", "float32") if draft.take(name)), None)
    if pure:
        draft.put("model.dtype", pure)
        draft.take("bf16"), draft.take("fp16")
    else:
        training.put_dtype(draft, "bfloat16")
    for key in ("attn_implementation", "attention"):
        if value := draft.take(key):
            training.put_attention(draft, key, value)
    for key in ("flash_attention", "xformers_attention", "sdp_attention", "flex_attention", "sage_attention"):
        if draft.take(key) and key != "sdp_attention":
            training.put_attention(draft, key, True)
    if draft.take("eager_attention"):
        training.put_attention(draft, "eager_attention", "eager")


def _vision(draft: Draft) -> None:
    """Write that rows have images, where the file names a processor, and whether their tower is trained."""
    frozen = draft.take("freeze_mm_modules")
    if draft.take("processor_type") is None:
        return
    draft.put("data.images", True)
    draft.put("data.too_long", "drop")
    if draft.get("method.name") == "full" and not frozen:
        draft.put("model.vision", "train")


def _objective(draft: Draft) -> None:
    name, beta = draft.take("rl"), draft.take("rl_beta") or draft.take("dpo_beta")
    if draft.take("reward_model"):
        draft.put("objective.name", "reward")
        draft.same(("center_rewards_coefficient", "objective.center_rewards_coefficient"))
        return
    if not name:
        return
    if name not in _OBJECTIVES:
        draft.refuse(f"rl: {other_objective(name)}")
    if name == "grpo":
        draft.lift("trl", "TRL")
        draft.refuse_changes()
        grpo.put(draft)
        return
    draft.put("objective.name", _OBJECTIVES[name])
    draft.put("objective.beta", beta)
    losses = draft.take("dpo_loss_type") or (["ipo"] if name == "ipo" else None)
    if draft.take("dpo_norm_loss"):
        losses = ["sigmoid_norm"]
    alpha = draft.take("rpo_alpha")
    if alpha:
        losses = [*([losses] if isinstance(losses, str) else losses or ["sigmoid"]), "sft"]
        draft.put("objective.loss_weights", [1.0, float(alpha)], "rpo_alpha")
    draft.put("objective.loss_type", losses)
    draft.same(
        ("dpo_label_smoothing", "objective.label_smoothing"),
        ("kto_desirable_weight", "objective.desirable_weight"),
        ("kto_undesirable_weight", "objective.undesirable_weight"),
        ("precompute_ref_log_probs", "objective.precompute_ref_log_probs"),
    )


def _method(draft: Draft) -> None:
    adapter, in_4, in_8 = draft.take("adapter"), draft.take("load_in_4bit"), draft.take("load_in_8bit")
    if adapter and adapter not in ("lora", "qlora"):
        draft.refuse(f"adapter: {adapter}: the adapters are lora and qlora")
    if not adapter:
        _full(draft)
        return
    draft.put("method.name", "qlora" if in_4 or in_8 or adapter == "qlora" else "lora")
    if in_8 and not in_4:
        draft.put("method.load_in_8bit", True)
    draft.same(
        ("lora_r", "method.r"), ("lora_alpha", "method.lora_alpha"), ("lora_model_dir", "method.adapter")
    )
    draft.put("method.lora_dropout", training.number(draft, "lora_dropout", 0.0))
    targets, is_all = draft.take("lora_target_modules"), bool(draft.take("lora_target_linear"))
    training.put_experts(draft, bool(targets or is_all))
    training.put_targets(draft, targets, is_all)
    training.put_tables(draft, draft.take("lora_modules_to_save"), "lora_modules_to_save")
    if draft.take("peft_use_dora"):
        draft.put("method.use_dora", True)
    if draft.take("peft_use_rslora"):
        draft.put("method.use_rslora", True)
    start = draft.take("peft_init_lora_weights")
    draft.put("method.init_lora_weights", start if start is not True else None)
    draft.same(("peft_trainable_token_indices", "method.trainable_token_indices"))
    kinds = draft.take("bnb_config_kwargs") or {}
    for key in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_threshold"):
        draft.put(f"method.{key}", kinds.get(key) if isinstance(kinds, dict) else None)


def _full(draft: Draft) -> None:
    draft.put("method.name", "full")
    for key in (
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "lora_target_linear",
        "lora_modules_to_save",
    ):
        draft.leave(key, "without adapter, all weights are trained")
    if not sharding.has_parts(draft) and draft.get("model.dtype") == "bfloat16":
        draft.put(
            "training.master_dtype", "bfloat16", "as axolotl trains the weights; float32 loses no update"
        )


def _training(draft: Draft, gpus: int) -> None:
    draft.put("training.learning_rate", training.number(draft, "learning_rate"))
    micro = training.whole(draft, "micro_batch_size", 1)
    accumulation = training.whole(draft, "gradient_accumulation_steps")
    if accumulation is None and (batch := training.whole(draft, "batch_size")):
        accumulation = max(1, batch // micro)
    training.put_batch(
        draft, micro, accumulation or 1, gpus, "micro_batch_size x gradient_accumulation_steps"
    )
    training.put_length(draft, "num_epochs", 1.0)
    training.put_optimizer(draft, str(draft.take("optimizer", "adamw_torch_fused")))
    schedule, arguments = draft.take("lr_scheduler", "cosine"), draft.take("lr_scheduler_kwargs")
    least, constant = draft.take("cosine_min_lr_ratio"), draft.peek("cosine_constant_lr_ratio")
    if least and constant and schedule == "cosine":
        draft.refuse(
            f"cosine_constant_lr_ratio: {constant}: a cosine decays until the last step here, without a "
            "phase of its lowest rate; leave it out, or take lr_scheduler_type: warmup_stable_decay"
        )
    if least is not None and schedule == "cosine":
        schedule, arguments = "cosine_with_min_lr", {"min_lr_rate": least}
    training.put_schedule(draft, str(schedule), arguments)
    training.put_warmup(draft, 0.03, "axolotl's default, there at most 100 steps")
    training.put_numbers(draft)
    noise = draft.take("noisy_embedding_alpha")
    if noise and draft.get("training.neftune_noise_alpha") is None:
        draft.put("training.neftune_noise_alpha", noise)
    checkpointing = draft.take("gradient_checkpointing") or bool(
        draft.get("training.activation_checkpointing")
    )
    note = f"gradient_checkpointing: {checkpointing}; recomputed" if isinstance(checkpointing, str) else ""
    draft.put("training.activation_checkpointing", bool(checkpointing), note)
    training.put_times(draft, "checkpoints", "epoch", "axolotl's default")
    draft.same(("save_total_limit", "checkpoints.save_total_limit"))


def _records(draft: Draft) -> None:
    if draft.get("data.heldout_fraction") == 0:
        for key in ("evals_per_epoch", "eval_steps", "eval_strategy", "evaluation_strategy"):
            draft.leave(key, "without held-out data there is nothing to evaluate")
    default = "epoch" if draft.get("data.heldout_fraction") != 0 else None
    training.put_times(draft, "evaluation", default, "axolotl's default")
    training.put_best(draft)
    draft.same(
        ("eval_batch_size", "evaluation.batch_size"), ("eval_max_new_tokens", "evaluation.max_new_tokens")
    )
    tasks = draft.take("lm_eval_tasks")
    if isinstance(tasks, list) and tasks:
        draft.put("evaluation.tasks", tasks)
    _tracking(draft)
    training.put_publishing(draft, draft.take("hub_model_id"))


def _tracking(draft: Draft) -> None:
    project = draft.take("wandb_project")
    # A project of Weights & Biases is enough for axolotl to report to it.
    used = [
        tracker
        for tracker in TRACKER_NAMES
        if draft.take(f"use_{tracker}") or (project and tracker == "wandb")
    ]
    for tracker in TRACKER_NAMES:
        project = project or draft.take(f"{tracker}_project_name") or draft.take(f"{tracker}_experiment_name")
    training.put_tracking(draft, used, project)
