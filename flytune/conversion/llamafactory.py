"""Configurations of LLaMA-Factory."""

import re
from typing import Any

from flytune.conversion import llamafactory_data, sharding, training
from flytune.conversion.draft import Draft, other_objective
from flytune.recipe import TRACKER_NAMES
from flytune.sentences import enumerated

_STAGES = {"sft": "sft", "pt": "sft", "dpo": "dpo", "kto": "kto", "rm": "reward"}
_FOR_OTHERS = {
    "export_dir": "it merges an adapter, which is flytune merge ARTIFACT --out FOLDER",
    "infer_backend": "it serves a model; docs/serve.md names the servers that load an artifact",
}


def convert(draft: Draft, gpus: int | None) -> None:
    """Convert a configuration of LLaMA-Factory."""
    stage = draft.take("stage", "sft" if draft.has("dataset") else None)
    _check_purpose(draft, stage)
    draft.refuse_changes()
    _model(draft, str(stage))
    _objective(draft, str(stage))
    workers = draft.take("ray_num_workers")
    count = sharding.put(draft, gpus or (int(workers) if workers else None))
    _method(draft)
    llamafactory_data.put_data(draft, str(stage))
    _vision(draft)
    _refuse_rope_scaling(draft)
    _training(draft, count)
    _records(draft)


def _check_purpose(draft: Draft, stage: Any) -> None:
    """Refuse files that train nothing, or by a stage that is not offered."""
    if not draft.has("dataset"):
        for key, reason in _FOR_OTHERS.items():
            if draft.has(key):
                draft.refuse(f"it trains nothing: {reason}")
        if draft.has("eval_dataset") or draft.has("task") or draft.take("do_predict"):
            draft.refuse(
                "it trains nothing: it evaluates a model, which a recipe's section evaluation does after "
                "training"
            )
        draft.refuse("it names no dataset, so that it trains nothing")
    if draft.take("do_train") is False or (draft.take("do_predict") and not stage):
        draft.refuse("it trains nothing (do_train: false)")
    if stage not in _STAGES:
        draft.refuse(f"stage: {other_objective(str(stage))}")


def _model(draft: Draft, stage: str) -> None:
    draft.same(("model_name_or_path", "model.name_or_path"), ("adapter_name_or_path", "method.adapter"))
    revision = draft.take("model_revision")
    if revision not in (None, "main"):
        draft.put("model.revision", revision)
    training.put_model(draft)
    if draft.take("pure_bf16"):
        draft.put("model.dtype", "bfloat16")
        draft.put("training.master_dtype", "bfloat16", "pure_bf16")
        draft.take("bf16")
    else:
        training.put_dtype(draft, "float32")
    if draft.peek("moe_aux_loss_coef") is None and stage != "rm":
        training.put_no_balance_loss(draft)
    if value := draft.take("flash_attn"):
        training.put_attention(draft, "flash_attn", value)
    tokens = draft.take("add_special_tokens")
    if tokens:
        draft.put("model.extra_special_tokens", tokens if isinstance(tokens, list) else _parts(tokens))
        draft.leave("resize_vocab")
    if draft.has("new_special_tokens_config"):
        draft.refuse("new_special_tokens_config: write the tokens of that file as add_special_tokens: a,b")


def _refuse_rope_scaling(draft: Draft) -> None:
    if scaling := draft.take("rope_scaling"):
        draft.refuse(
            f"rope_scaling: {scaling}: the file does not say the factor, which follows from the base there; "
            "remove it, and write model.rope_scaling into the recipe"
        )


def _vision(draft: Draft) -> None:
    """Write whether the parts that read images are trained, where rows have some."""
    tower = draft.take("freeze_vision_tower", True)
    joined = draft.take("freeze_multi_modal_projector", True)
    if draft.take("freeze_language_model"):
        draft.refuse("freeze_language_model: true: the language model is what is trained")
    if not draft.get("data.images") or (tower and joined):
        return
    if tower or joined or draft.get("method.name") != "full":
        draft.refuse(
            "freeze_vision_tower and freeze_multi_modal_projector: the parts that read images are trained "
            "together, with method full (model.vision: train)"
        )
    draft.put("model.vision", "train")


def _objective(draft: Draft, stage: str) -> None:
    name = _STAGES[stage]
    if name == "sft":
        return
    draft.put("objective.name", name)
    if draft.has("ref_model"):
        reference = draft.take("ref_model")
        if reference != draft.get("model.name_or_path"):
            draft.refuse(f"ref_model: {reference}: the reference is the base model itself")
    betas = [
        value
        for key in ("pref_beta", "dpo_beta", "kto_beta")
        if (value := training.number(draft, key)) is not None
    ]
    if name in ("dpo", "kto"):
        draft.put("objective.beta", betas[0] if betas else None)
    loss = draft.take("pref_loss") or draft.take("dpo_loss") or "sigmoid"
    extra = training.number(draft, "pref_ftx") or training.number(draft, "dpo_ftx")
    if name == "dpo":
        if loss not in ("sigmoid", "hinge", "ipo"):
            draft.refuse(f"pref_loss: {loss}: of LLaMA-Factory's losses, sigmoid, hinge and ipo are offered")
        if draft.take("dpo_label_smoothing"):
            draft.refuse("dpo_label_smoothing: only the losses robust and exo_pair smooth labels here")
        if extra:
            draft.put("objective.loss_type", [loss, "sft"])
            draft.put("objective.loss_weights", [1.0, extra], "pref_ftx")
        elif loss != "sigmoid":
            draft.put("objective.loss_type", [loss])
    if name == "kto":
        draft.same(
            ("kto_chosen_weight", "objective.desirable_weight"),
            ("kto_rejected_weight", "objective.undesirable_weight"),
        )
        if extra:
            draft.refuse(f"pref_ftx: {extra}: objective kto has no loss of its good answers beside it")


def _method(draft: Draft) -> None:
    kind, bits = draft.take("finetuning_type", "lora"), draft.take("quantization_bit")
    if kind not in ("lora", "full"):
        draft.refuse(f"finetuning_type: {kind}: all weights are trained (full), or adapters (lora)")
    if kind == "full":
        draft.put("method.name", "full")
        for key in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target"):
            draft.leave(key, "finetuning_type: full trains all weights")
        if sharding.keeps_masters(draft):
            draft.remove("training.master_dtype")
        return
    draft.remove("training.master_dtype")
    method = draft.take("quantization_method", "bnb")
    if bits and (int(bits) not in (4, 8) or str(method).lower() not in ("bnb", "bitsandbytes", "auto")):
        draft.refuse(f"quantization_bit: {bits} by {method}: bitsandbytes quantizes a base to 4 or 8 bits")
    draft.put("method.name", "qlora" if bits else "lora")
    if bits and int(bits) == 8:
        draft.put("method.load_in_8bit", True)
    elif bits:
        draft.put("method.bnb_4bit_quant_type", draft.take("quantization_type"))
        draft.put("method.bnb_4bit_use_double_quant", draft.take("double_quantization"))
    rank = training.whole(draft, "lora_rank", 8)
    draft.put("method.r", rank)
    draft.put("method.lora_alpha", training.whole(draft, "lora_alpha", 2 * rank))
    draft.put("method.lora_dropout", training.number(draft, "lora_dropout", 0.0))
    targets = draft.take("lora_target", "all")
    training.put_targets(draft, targets, is_all=False)
    training.put_tables(draft, draft.take("additional_target"), "additional_target")
    for key in ("use_rslora", "use_dora"):
        if draft.take(key):
            draft.put(f"method.{key}", True)
    if draft.take("pissa_init"):
        steps = training.whole(draft, "pissa_iter", 16)
        draft.put("method.init_lora_weights", f"pissa_niter_{steps}" if steps > 0 else "pissa")


def _training(draft: Draft, gpus: int) -> None:
    kept = draft.take("gradient_checkpointing") is not False
    draft.put("training.activation_checkpointing", kept and not draft.take("disable_gradient_checkpointing"))
    draft.take("use_unsloth_gc")
    if draft.take("enable_liger_kernel") or draft.take("use_liger_kernel"):
        draft.put("training.use_liger_kernel", True)
    training.put_defaults_of_transformers(draft, 5e-5, "adamw_torch", gpus)


def _records(draft: Draft) -> None:
    if draft.get("data.heldout_fraction") != 0:
        training.put_times(draft, "evaluation", None)
    else:
        for key in ("eval_steps", "eval_strategy", "evaluation_strategy"):
            draft.leave(key, "without held-out data there is nothing to evaluate")
    training.put_best(draft)
    if steps := draft.take("early_stopping_steps"):
        draft.put("evaluation.early_stopping_patience", steps if draft.get("evaluation.eval_steps") else None)
    draft.same(
        ("per_device_eval_batch_size", "evaluation.batch_size"),
        ("max_new_tokens", "evaluation.max_new_tokens"),
    )
    reports = draft.take("report_to") or []
    reports = _parts(reports) if isinstance(reports, str) else [str(report) for report in reports]
    training.put_tracking(draft, reports)
    for name in reports:
        if name not in ("none", "all", *TRACKER_NAMES):
            draft.note(f"report_to: {name}", f"trackers are {enumerated(TRACKER_NAMES)}")
    if draft.take("push_to_hub"):
        training.put_publishing(draft, draft.take("hub_model_id", "?"))


def _parts(text: Any) -> list[str]:
    return [part.strip() for part in re.split(r",", str(text)) if part.strip()]
