"""Arguments of TRL, of its command lines and YAML files."""

import re
from pathlib import Path
from typing import Any

from flytune import yaml_core
from flytune.conversion import axolotl_data, classification, grpo, sharding, training
from flytune.conversion.command import OBJECTIVES
from flytune.conversion.draft import Draft

_LEARNING_RATES = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4, "grpo": 1e-6, "distill": 2e-5}


def convert(draft: Draft, gpus: int | None, objective: str | None) -> None:
    """Convert TRL's arguments; the objective is one of the recipe's, or None if the file does not name it."""
    objective = objective or _objective_of(draft)
    draft.refuse_changes()
    _model(draft, "float32" if objective == "classify" else "bfloat16")
    if objective == "classify":
        classification.put(draft, sharding.put(draft, gpus))
        _records(draft)
        return
    if objective != "sft":
        _objective(draft, objective)
    elif (loss := draft.take("loss_type")) not in (None, "nll", "chunked_nll"):
        draft.refuse(f"loss_type: {loss}: sft has the cross entropy of each token")
    count = sharding.put(draft, gpus)
    _method(draft)
    _data(draft, objective)
    _training(draft, objective, count)
    _records(draft)


def _objective_of(draft: Draft) -> str:
    """Return the objective by the name of the file, or by keys that only one has."""
    name = draft.path.stem.lower()
    for part, objective in OBJECTIVES.items():
        if re.search(rf"(?<![a-z]){part}(?![a-z])", name):
            return objective
    if draft.has("desirable_weight") or draft.has("undesirable_weight"):
        return "kto"
    if draft.has("center_rewards_coefficient"):
        return "reward"
    if draft.has("teacher_model_name_or_path"):
        return "distill"
    if draft.has("reward_funcs") or draft.has("num_generations"):
        return "grpo"
    if draft.has("beta") or draft.has("precompute_ref_log_probs"):
        return "dpo"
    draft.note("(the trainer)", "sft: the file does not name it; flytune convert --objective NAME")
    return "sft"


def _model(draft: Draft, dtype_of_weights: str) -> None:
    draft.same(("model_name_or_path", "model.name_or_path"))
    revision = draft.take("model_revision")
    if revision not in (None, "main"):
        draft.put("model.revision", revision)
    _arguments_of_loading(draft)
    training.put_model(draft)
    dtype = draft.take("dtype") or draft.take("torch_dtype")
    training.put_dtype(draft, dtype_of_weights)
    if dtype in ("bfloat16", "float16"):
        draft.put("model.dtype", dtype)
        draft.put("training.master_dtype", "bfloat16" if dtype == "bfloat16" else None, f"dtype: {dtype}")
    if value := draft.take("attn_implementation"):
        training.put_attention(draft, "attn_implementation", value)


def _arguments_of_loading(draft: Draft) -> None:
    """Read dtype and attention of model_init_kwargs; refuse the file if it loads another model by them."""
    arguments = draft.take("model_init_kwargs") or {}
    try:
        arguments = yaml_core.load(arguments) if isinstance(arguments, str) else arguments
    except yaml_core.YAMLError as error:
        draft.refuse(f"model_init_kwargs: {error}")
    if not isinstance(arguments, dict):
        draft.refuse("model_init_kwargs: must be a mapping")
    for key in arguments:
        if key not in _OF_LOADING:
            draft.refuse(
                f"model_init_kwargs: {key}: a base is loaded as its config.json says, and quantized by "
                "load_in_4bit or load_in_8bit; write its revision as model_revision"
            )
    draft.add(arguments, "TRL")
    for key, reason in _WITHOUT_EFFECT.items():
        draft.leave(key, reason)


_WITHOUT_EFFECT = {
    "use_cache": "training keeps no keys and values of earlier tokens",
    "device_map": "sharding says where weights are",
    "low_cpu_mem_usage": "weights are read once",
    "use_safetensors": "only safetensors are read",
}
"""Arguments of loading a model that change nothing which is trained, and why."""
_OF_LOADING = ("dtype", "torch_dtype", "attn_implementation", "trust_remote_code", *_WITHOUT_EFFECT)
"""Arguments of loading a model that are read."""


def _objective(draft: Draft, objective: str) -> None:
    if objective == "grpo":
        grpo.put(draft)
        return
    draft.put("objective.name", objective)
    if objective == "distill":
        _distillation(draft)
        return
    if objective == "reward":
        draft.same(("center_rewards_coefficient", "objective.center_rewards_coefficient"))
        return
    draft.put("objective.beta", training.number(draft, "beta"))
    losses = draft.take("loss_type")
    draft.put("objective.loss_type", [losses] if isinstance(losses, str) else losses)
    if objective == "dpo":
        weights, alpha = draft.take("loss_weights"), training.number(draft, "rpo_alpha")
        if alpha:
            draft.put("objective.loss_type", [*(draft.get("objective.loss_type") or ["sigmoid"]), "sft"])
            weights = [*([1.0] * (len(draft.get("objective.loss_type")) - 1)), alpha]
        draft.put("objective.loss_weights", weights)
        draft.put("objective.label_smoothing", training.number(draft, "label_smoothing"))
        draft.same(("precompute_ref_log_probs", "objective.precompute_ref_log_probs"))
    else:
        draft.same(
            ("desirable_weight", "objective.desirable_weight"),
            ("undesirable_weight", "objective.undesirable_weight"),
        )
    draft.same(("disable_dropout", "objective.disable_dropout"))


def _distillation(draft: Draft) -> None:
    """Set the section by the arguments of GKDTrainer, whose student draws the answers of a share lmbda of the
    batches."""
    draft.put("objective.beta", training.number(draft, "beta", 0.5))
    draft.same(("teacher_model_name_or_path", "objective.teacher_model_name_or_path"))
    if (share := training.number(draft, "lmbda")) is None:
        draft.refuse(
            "lmbda is missing, the share of the answers that the student draws: write 0.5, GKD's default, or "
            "1 of TRL's DistillationTrainer, which has no other"
        )
    if share:
        draft.put("objective.on_policy", share)
        draft.put("objective.drawing_temperature", training.number(draft, "temperature", 0.9))
        draft.put("objective.max_completion_length", training.number(draft, "max_new_tokens", 128))
        draft.note("lmbda", "GKD draws the answers of whole micro batches, by chance; here rows are chosen")
    else:
        draft.leave("temperature", "GKD draws answers by it, and its loss divides by no temperature")
        draft.leave("max_new_tokens", "no answers are drawn")
    draft.note(
        "(the trained tokens)",
        "GKD trains the last answer of a chat, and compares all tokens of the vocabulary; here all answers "
        "are trained, and objective.loss_top_k says how many tokens are compared one by one",
    )


def _method(draft: Draft) -> None:
    in_4, in_8 = draft.take("load_in_4bit"), draft.take("load_in_8bit")
    if not draft.take("use_peft"):
        if in_4 or in_8:
            draft.refuse("load_in_4bit and load_in_8bit without use_peft: a quantized base has no gradients")
        draft.put("method.name", "full")
        if sharding.keeps_masters(draft):
            draft.remove("training.master_dtype")
        for key in ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules"):
            draft.leave(key, "without use_peft, all weights are trained")
        return
    draft.remove("training.master_dtype")
    draft.put("method.name", "qlora" if in_4 or in_8 else "lora")
    if in_8 and not in_4:
        draft.put("method.load_in_8bit", True)
    elif in_4:
        draft.same(("bnb_4bit_quant_type", "method.bnb_4bit_quant_type"))
        draft.put("method.bnb_4bit_use_double_quant", bool(draft.take("use_bnb_nested_quant")))
    draft.put("method.r", training.whole(draft, "lora_r", 16))
    draft.put("method.lora_alpha", training.whole(draft, "lora_alpha", 32))
    draft.put("method.lora_dropout", training.number(draft, "lora_dropout", 0.05))
    targets = draft.take("lora_target_modules")
    training.put_experts(draft, bool(targets))
    training.put_targets(draft, targets, is_all=False)
    training.put_tables(draft, draft.take("lora_modules_to_save"), "lora_modules_to_save")
    for key in ("use_rslora", "use_dora"):
        if draft.take(key):
            draft.put(f"method.{key}", True)


def _data(draft: Draft, objective: str) -> None:
    form = {"dpo": "preference", "reward": "preference", "kto": "unpaired"}.get(objective)
    mixture = draft.take("datasets") or draft.take("mixture")
    split, test = draft.take("dataset_train_split"), draft.take("dataset_test_split", "test")
    if isinstance(mixture, list):
        sources = [
            row for dataset in mixture if isinstance(dataset, dict) for row in _sources(draft, dataset)
        ]
    else:
        sources = [_source(draft, split)]
    if form:
        sources = [source | {"format": form} for source in sources]
    if objective == "sft":
        sources = _with_loss(draft, sources)
    training.put_sources(draft, sources)
    share = training.number(draft, "test_split_size")
    if share:
        training.put_share(draft, "test_split_size", share)
    elif not _evaluates(draft):
        draft.put("data.heldout_fraction", 0, "0.02 would show whether tuning helped")
    elif draft.get("data.dataset_name") and not isinstance(mixture, list):
        draft.put("data.eval_split", str(test), "dataset_test_split")
    if objective == "grpo":
        _put_prompt_length(draft)
    else:
        _put_length(draft)
    if draft.take("packing") and objective == "sft":
        draft.put("data.packing", True)
        if draft.take("packing_strategy") == "wrapped":
            draft.put(
                "data.too_long", "split", "packing_strategy: wrapped; attention never crosses samples here"
            )
    draft.same(
        ("pad_token", "data.pad_token"),
        ("eos_token", "data.eos_token"),
        ("chat_template_path", "data.chat_template"),
    )


def _source(draft: Draft, split: Any) -> dict[str, Any]:
    """Return the source of the key dataset_name."""
    name = draft.take("dataset_name")
    if not name:
        draft.refuse("dataset_name is missing")
    if _is_file(str(name)):
        axolotl_data.require_whole(draft, "dataset_train_split", split)
        source: dict[str, Any] = {"path": str(name)}
    else:
        named = {
            "dataset_config": draft.take("dataset_config"),
            "dataset_split": split if split != "train" else None,
        }
        source = {"dataset_name": str(name)} | {
            key: value for key, value in named.items() if value is not None
        }
    column = draft.take("dataset_text_field")
    if column:
        source["format"] = "text"
    return source | ({"columns": {"text": str(column)}} if column not in (None, "text") else {})


def _put_length(draft: Draft) -> None:
    length = training.number(draft, "max_length") or training.number(draft, "max_seq_length") or 1024
    unlimited = (
        "max_length: None there, which cuts nothing; here this is the limit"
        if draft.is_empty("max_length")
        else ""
    )
    draft.put("data.max_length", int(length), unlimited)


def _put_prompt_length(draft: Draft) -> None:
    """Set the length of prompt and answer, which TRL's GRPO does not limit together."""
    prompt, answer = (
        training.whole(draft, "max_prompt_length", 1024),
        draft.get("objective.max_completion_length"),
    )
    draft.put(
        "data.max_length", prompt + answer, f"{prompt} for the prompt, and objective.max_completion_length"
    )
    draft.put("data.too_long", "error", "TRL cuts no prompt")


def _with_loss(draft: Draft, sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the sources of sft with the format of which TRL trains the same tokens, and set
    data.completion_only_loss.

    By default TRL trains every token of chats and texts, and of rows of prompt and completion the
    completions. Where nothing says which rows a source has, they are chats, and other rows are an error.
    """
    only, answers = draft.take("completion_only_loss"), draft.take("assistant_only_loss")
    if answers or only:
        return sources
    if only is False:
        draft.put("data.completion_only_loss", False, "completion_only_loss: false")
        return sources
    kinds = [source.get("format") or _rows_of(draft, source) for source in sources]
    if "prompt_completion" in kinds:
        if {"messages", None} & set(kinds):
            draft.refuse(
                "datasets: of chats TRL trains every token, of rows of prompt and completion the completions "
                "alone, and data.completion_only_loss is that of all sources; write assistant_only_loss: "
                "true, or divide the file"
            )
        return sources
    draft.put(
        "data.completion_only_loss",
        False,
        "of chats, TRL trains every token where assistant_only_loss is not set; for rows of prompt and "
        "completion, whose completions it trains, remove this line and format: messages",
    )
    return [source | {"format": kind or "messages"} for source, kind in zip(sources, kinds, strict=True)]


def _rows_of(draft: Draft, source: dict[str, Any]) -> str | None:
    """Return the format of a source on this machine by the columns of its first row; None if nothing says
    it."""
    path = str(source.get("path", ""))
    file = sharding.near(draft.path, path) if path.endswith((".jsonl", ".json", ".csv")) else None
    if file is None:
        return None
    with file.open(encoding="utf-8", errors="replace") as lines:
        beginning = lines.read(_BEGINNING)
    columns = set(
        re.findall(r"[\w]+", beginning.partition("\n")[0])
        if path.endswith(".csv")
        else _KEY.findall(beginning)
    )
    if {"prompt", "completion"} <= columns:
        return "prompt_completion"
    return next((form for name, form in _FORMATS.items() if name in columns), None)


_BEGINNING = 1 << 20
_KEY = re.compile(r'"(\w+)"\s*:')
_FORMATS = {"messages": "messages", "conversations": "sharegpt", "text": "text"}
"""Formats by a column that only their rows have."""


def _is_file(name: str) -> bool:
    return bool(re.search(r"^[./~]|\.(jsonl?|csv|parquet)$|://", name)) or Path(name).exists()


def _evaluates(draft: Draft) -> bool:
    """Return whether TRL evaluates during training, which eval_steps alone does not make it do."""
    return any(draft.peek(key) not in (None, False, "no") for key in ("eval_strategy", "evaluation_strategy"))


def _sources(draft: Draft, dataset: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sources of an entry of TRL's mixture, which is one for each of its files."""
    split = str(dataset.get("split") or "train")
    files, path = dataset.get("data_files"), str(dataset.get("path") or "")
    is_mapping = isinstance(files, dict)
    if isinstance(files, dict):
        files = files.get(split)
    for key in set(dataset) - {"path", "name", "split", "data_files", "data_dir"}:
        draft.note(
            f"datasets: {key}", _REASONS.get(key, "not known as a key of a data set; nothing of it is here")
        )
    if files or dataset.get("data_dir") or _is_file(path):
        # The keys of a mapping are its splits.
        axolotl_data.require_whole(draft, "datasets: split", None if is_mapping else split)
    if path in ("json", "csv", "parquet", "text", "arrow"):
        names = [files] if isinstance(files, str) else list(files or ())
        return [{"path": str(name)} for name in names] or draft.refuse(
            f"datasets: path: {path} without data_files"
        )
    if _is_file(path):
        return [{"path": path}]
    if isinstance(files, str):
        files = [files]
    elif not files and dataset.get("data_dir"):
        files = [dataset["data_dir"]]
    if files:
        return [{"path": axolotl_data.of_hub(path, str(file))} for file in files]
    source = {
        "dataset_name": path,
        "dataset_config": dataset.get("name"),
        "dataset_split": split if split != "train" else None,
    }
    return [{key: value for key, value in source.items() if value is not None}]


_REASONS = {"columns": "columns that no sample has are not read"}
"""Keys of an entry of a mixture without a counterpart, and why."""


def _training(draft: Draft, objective: str, gpus: int) -> None:
    draft.put("training.activation_checkpointing", draft.take("gradient_checkpointing") is not False)
    if draft.take("use_liger_kernel") or draft.take("use_liger"):
        draft.put("training.use_liger_kernel", True)
    training.put_defaults_of_transformers(draft, _LEARNING_RATES[objective], "adamw_torch_fused", gpus)


def _records(draft: Draft) -> None:
    if not _evaluates(draft):
        draft.leave("eval_steps", "without eval_strategy TRL does not evaluate")
    training.put_times(draft, "evaluation", None)
    training.put_best(draft)
    draft.same(("per_device_eval_batch_size", "evaluation.batch_size"))
    reports = draft.take("report_to") or []
    training.put_tracking(draft, reports.split(",") if isinstance(reports, str) else list(reports))
    if draft.take("push_to_hub"):
        training.put_publishing(draft, draft.take("hub_model_id", "?"))
