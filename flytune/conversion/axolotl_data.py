"""Data sets of axolotl: places, formats and prompts."""

import re
from pathlib import Path
from typing import Any

from flytune.conversion import training
from flytune.conversion.draft import Draft

_LOCAL = re.compile(r"^[./~]|/$|\.(jsonl?|ndjson|csv|tsv|txt|parquet|arrow)(\.\w+)?$|://")
_LOADERS = ("json", "jsonl", "csv", "parquet", "arrow", "text")
"""Names of the data sets library for files, in place of a path."""
_ALPACA: dict[str, dict[str, str]] = {
    "alpaca": {}, "alpaca_chat": {}, "alpaca_instruct": {}, "alpaca_w_system": {}, "gpteacher": {"output": "response"},
    "summarizetldr": {"instruction": "article", "output": "summary"},
    "oasst": {"instruction": "INSTRUCTION", "output": "RESPONSE"},
    "jeopardy": {"instruction": "question", "input": "category", "output": "answer"},
    "aya": {"instruction": "inputs", "output": "targets"},
    "context_qa": {"instruction": "article", "input": "question", "output": "answer"},
    "context_qa.load_v2": {"instruction": "context", "input": "question", "output": "answer"},
    "alpaca_chat.load_qa": {"instruction": "question", "output": "answer"},
    "alpaca_chat.load_camel_ai": {"instruction": "message_1", "output": "message_2"},
    **{
        f"alpaca_w_system.load_{name}": {"instruction": "question", "output": "response", "system": "system_prompt"}
        for name in ("open_orca", "open_orca_chatml", "openorca_chatml")
    },
}  # fmt: skip
"""Types of a question and an answer, and their columns that have other names."""
_SEPARATORS = {"context_qa": "\n===\n", "context_qa.load_v2": "\nQuestion: "}
"""Text between instruction and input of types whose prompt is a chat."""
_WORDS = {
    "jeopardy": 'the words "what is" are not written before the answers, nor the sentence about clues',
    "summarizetldr": "the sentence that asks for a summary is not written; data.system_prompt may say it",
    "context_qa": "the sentence before the context is not written; data.system_prompt may say it",
    "context_qa.load_v2": 'the words "Context:" and "Answer:" are not written',
}
"""Words of a type's prompt that the recipe's samples do not have."""
_INPUT = "\n\n### Input:\n"
"""Text between instruction and input in the prompt of the type alpaca."""
_PAIRS = {
    "argilla": {"chosen": "chosen_response", "rejected": "rejected_response"},
    "intel": {"instruction": "question"},
    "icr": {"instruction": "input"},
    "prompt_pairs": {"instruction": "prompt"},
    "ultra": {}, "argilla_chat": {}, "default": {}, "argilla_dpo": {}, "load": {},
}  # fmt: skip
"""Types of pairs after the dot, and their columns that have other names; a column `instruction` is a question of a chat."""
_LABELLED = {"ultra": {"instruction": "prompt"}, "argilla_chat": {"prompt": "chosen"}, "argilla": {}}
"""The same of labelled answers, where they differ."""


def put_data(draft: Draft) -> None:
    """Set the section `data`."""
    datasets, pretraining = draft.take("datasets") or [], draft.take("pretraining_dataset") or []
    datasets = datasets if isinstance(datasets, list) else [datasets]
    if pretraining and not datasets:
        named = pretraining if isinstance(pretraining, list) else [pretraining]
        datasets = [{"type": "pretrain"} | (one if isinstance(one, dict) else {"path": one}) for one in named]
    if not datasets or not all(isinstance(one, dict) for one in datasets):
        draft.refuse("datasets: a list of data sets with path and type is missing")
    templates: list[tuple[str, str]] = []
    sources = [source for one in datasets for source in _sources(draft, dict(one), templates)]
    training.put_sources(draft, sources)
    _template(draft, templates, sources)
    if draft.get("data.chat_template") == "alpaca":
        for source in sources:
            if source.get("format") == "instruction":
                source.setdefault("input_separator", _INPUT)
        training.put_sources(draft, sources)
    _tokens(draft)
    draft.put("data.max_length", training.number(draft, "sequence_len", 512))
    packs = bool(draft.take("sample_packing")) or bool(draft.take("pretraining_sample_concatenation"))
    if packs and draft.get("objective.name") is None:
        draft.put("data.packing", True)
    treatment = {"truncate": "truncate", "raise": "error"}.get(str(draft.take("excess_length_strategy")), "drop")
    is_text = all(source.get("format") == "text" for source in sources)
    draft.put("data.too_long", "split" if is_text and treatment == "drop" else treatment, "as axolotl" if not is_text else "")
    if draft.take("train_on_inputs") and draft.get("objective.name") is None:
        draft.put("data.completion_only_loss", False, "train_on_inputs")
    if draft.take("dataset_exact_deduplication"):
        draft.put("data.deduplicate", True)
    draft.same(("default_system_message", "data.system_prompt"))
    _heldout(draft, sources)


def _sources(draft: Draft, one: dict[str, Any], templates: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the sources of a data set, which is one for each of its files."""
    path, files = str(one.pop("path", "") or ""), one.pop("data_files", None)
    kind = one.pop("type", None) or "tokens"
    files = [files] if isinstance(files, str) else list(files or ())
    one.pop("ds_type", None)
    made = _format(draft, kind, one, templates)
    split = one.pop("split", None)
    names = one.pop("name", None), one.pop("revision", None)
    is_local = _LOCAL.search(path) or Path(path).expanduser().exists()
    for key in [key for key, value in one.items() if value not in (None, False, "")]:
        draft.note(f"datasets: {key}", _REASONS.get(key, "not known as a key of a data set; nothing of it is here"))
    if path in _LOADERS or (is_local and files):
        return [{"path": file} | made for file in files] or draft.refuse(f"datasets: path: {path} without data_files")
    if is_local:
        return [{"path": path} | made]
    if path.count("/") > 1 or not path:
        draft.refuse(f"datasets: path: {path or 'missing'}: neither a file nor owner/name on the hub")
    source = {"dataset_name": path, "dataset_config": names[0], "dataset_split": split, "revision": names[1]} | made
    if files:
        draft.note("datasets: data_files", f"of {path}, all files of the split are read")
    if split == "train":
        del source["dataset_split"]
    return [{key: value for key, value in source.items() if value is not None}]


_REASONS = {
    "roles": "the speakers' usual names are known (docs/data.md)",
    "roles_to_train": "answers of the assistant are trained, and a turn's own train: false makes it context",
    "train_on_eos": "the end marker of each answer is trained",
    "train_on_eot": "the end marker of each answer is trained",
    "message_field_training": "a turn's key train or weight says whether it is trained",
    "message_field_training_detail": "a turn is trained as a whole, or not",
    "shards": "max_samples and weight take a part of the rows", "shards_idx": "max_samples and weight take a part of the rows",
    "preprocess_shards": "rows are read in chunks", "drop_system_message": "system messages of the rows are kept",
    "split_thinking": "the reasoning of the last answer is rendered by the template",
    "conversation": "data.chat_template", "trust_remote_code": "data sets with code are not read",
    "field_thinking": "the key is reasoning_content", "template_thinking_key": "the template decides",
    "skip": "max_samples limits rows from the first on", "text_column": "data.columns: {text: NAME}",
}  # fmt: skip
"""Keys of a data set without a counterpart, and why."""


def _format(draft: Draft, kind: Any, one: dict[str, Any], templates: list[tuple[str, str]]) -> dict[str, Any]:
    """Return format and columns of a data set's type; its keys that are used are removed."""
    objective = draft.get("objective.name")
    if isinstance(kind, dict):
        return _own_format(draft, kind, templates, objective)
    family, _, style = str(kind).partition(".")
    family = family.partition(":")[0]
    if template := one.pop("chat_template", None):
        templates.append((str(template), "datasets: chat_template"))
    if inline := one.pop("chat_template_jinja", None):
        templates.append((str(inline), "datasets: chat_template_jinja"))
    if objective in ("dpo", "kto", "reward"):
        return _answers(draft, family, style, one, templates, objective)
    if family in ("chat_template", "sharegpt"):
        return _chat(family, one)
    if family == "tokens":
        return {"format": "tokens"}
    if family in ("completion", "pretrain"):
        column = one.pop("field", None) or one.pop("text_column", None)
        return {"format": "text"} | renamed({"text": column or "text"})
    name = str(kind).removesuffix(".load")
    known = name if name in _ALPACA else family if family != "context_qa" else ""
    if known in _ALPACA:
        is_chat = "chat" in family or family == "context_qa" or name.endswith(":chat")
        templates.append(("chatml" if known.endswith("chatml") else "" if is_chat else "alpaca", f"type: {kind}"))
        if words := _WORDS.get(known):
            draft.note(f"datasets: type: {kind}", words)
        separator = {"input_separator": _SEPARATORS[known]} if known in _SEPARATORS else {}
        return {"format": "instruction"} | renamed(_ALPACA[known]) | separator
    if family == "metharme":
        return {"format": "prompt_completion"} | renamed({"completion": "generation"})
    if family == "input_output":
        draft.refuse(
            "datasets: type: input_output: segments with labels; write input_ids and labels, which are the format tokens"
        )
    draft.refuse(f"datasets: type: {kind}: no format is like it; docs/data.md lists the formats")


def _chat(family: str, one: dict[str, Any]) -> dict[str, Any]:
    columns = _turns(one, family == "sharegpt")
    return {"format": "messages" if "messages" in columns else "sharegpt"} | renamed(columns)


def _turns(one: dict[str, Any], is_sharegpt: bool = False) -> dict[str, str]:
    """Return the columns of a data set of turns, and the names of their keys; its keys for them are removed."""
    names = one.pop("message_property_mappings", None) or {}
    role = one.pop("message_field_role", None) or names.get("role") or ("from" if is_sharegpt else "role")
    content = one.pop("message_field_content", None) or names.get("content") or ("value" if is_sharegpt else "content")
    field = one.pop("field_messages", None) or ("conversations" if is_sharegpt else "messages")
    others = {name: one.pop(f"field_{name}", None) or name for name in ("tools", "system")}
    return turns(str(field), str(role), str(content)) | others


def turns(field: str, role: str, content: str) -> dict[str, str]:
    """Return the columns of a column of turns with these keys: messages, or conversations with any other keys."""
    plain = (role, content) == ("role", "content")
    return {"messages": field} if plain else {"conversations": field, "from": role, "value": content}


def _answers(
    draft: Draft, family: str, style: str, one: dict[str, Any], templates: list[tuple[str, str]], objective: str
) -> dict[str, Any]:
    """Return format and columns of pairs or labelled answers."""
    if family in ("chatml", "llama3", "zephyr", "passthrough"):
        templates.append((family if family != "passthrough" else "", f"type: {family}.{style}"))
    style = style.partition(".")[0]
    if style == "nectar":
        draft.refuse(f"datasets: type: {family}.nectar: rows of several answers with ranks; write pairs of chosen and rejected")
    known = dict(_LABELLED.get(style, _PAIRS.get(style, {})) if objective == "kto" else _PAIRS.get(style, {}))
    if family == "bradley_terry":
        known = {"instruction": "input"}
    elif family == "passthrough":
        known = {}
    own = {name: value for name in ("chosen", "rejected") if (value := one.pop(f"field_{name}", None))}
    has_turns = (family, style) == ("chat_template", "default")
    columns = _turns(one)
    if not has_turns:
        columns.pop("messages", None)
    return {"format": "unpaired" if objective == "kto" else "preference"} | renamed(columns | known | own)


def _own_format(draft: Draft, kind: dict[str, Any], templates: list[tuple[str, str]], objective: str | None) -> dict[str, Any]:
    """Return format and columns of a type that names its fields."""
    used = {key: value for key, value in kind.items() if value not in (None, "")}
    columns = {key.removeprefix("field_"): value for key, value in used.items() if key.startswith("field_")}
    if prompt := used.get("system_prompt"):
        draft.put("data.system_prompt", prompt)
    for key in ("format", "no_input_format", "system_format", "prompt_format", "chosen_format", "rejected_format"):
        if key in used:
            draft.note(f"datasets: type: {key}", "the chat template writes the marks of questions and answers")
    if objective in ("dpo", "reward", "kto"):
        columns["instruction"] = columns.pop("prompt", "prompt")
        return {"format": "unpaired" if objective == "kto" else "preference"} | renamed(columns)
    return {"format": "instruction"} | renamed(columns)


def renamed(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of columns whose names are not the format's."""
    other = {ours: str(theirs) for ours, theirs in columns.items() if ours != theirs}
    return {"columns": other} if other else {}


def _template(draft: Draft, templates: list[tuple[str, str]], sources: list[dict[str, Any]]) -> None:
    """Set the chat template: a shipped one or a file; others are the tokenizer's own."""
    whole, jinja = draft.take("chat_template"), draft.take("chat_template_jinja")
    of_file = (str(jinja), "chat_template_jinja") if jinja else (str(whole or ""), f"chat_template: {whole}")
    rendered = [source for source in sources if source.get("format") not in ("text", "tokens", "prompt_completion")]
    own = dict(pair for pair in templates if pair[0])
    of_all = [*own, *([of_file[0]] if sum(bool(name) for name, _ in templates) < len(rendered) else [])]
    name = of_file[0] if of_file[0] and of_file[0] in of_all else next(iter(own), of_file[0])
    why = own.get(name, of_file[1])
    if len(set(of_all)) > 1:
        draft.note("datasets: type", "one chat template renders all data sets; there each type has the marks of its own")
    elif whole and name != of_file[0]:
        draft.note(of_file[1], f"{why} has marks of its own there")
    if fallback := re.fullmatch(r"tokenizer_default_fallback_(\w+)", name):
        draft.note(why, f"the tokenizer's own chat template; one that has none needs data.chat_template: {fallback[1]}")
    elif name != "jinja":
        put_template(draft, name, why)


def put_template(draft: Draft, name: str, why: str) -> None:
    """Set a chat template by its name in another tool."""
    if not name or name in ("tokenizer_default", "default", "tokenizer"):
        return
    if "{" in name:
        draft.refuse(f"{why}: the template is in the file; write it into a file of its own, and name that")
    if _LOCAL.search(name) or name.endswith((".jinja", ".j2")):
        draft.put("data.chat_template", name)
    elif name in SHIPPED and not (name == "llama3" and "instruct" in str(draft.get("model.name_or_path")).lower()):
        draft.put("data.chat_template", SHIPPED[name], why)
    else:
        draft.note(why, "the tokenizer's own chat template; one that has none needs data.chat_template: NAME or FILE")


SHIPPED = {"chatml": "chatml", "alpaca": "alpaca", "llama3": "llama3", "llama-3": "llama3", "hermes": "chatml_tools"}
"""Templates that are shipped, by their names in other tools."""


def _tokens(draft: Draft) -> None:
    tokens, added = draft.take("special_tokens") or {}, draft.take("tokens") or []
    tokens = dict(tokens) if isinstance(tokens, dict) else {}
    if isinstance(added, dict):  # older files name the special tokens there
        tokens, added = added | tokens, []
    draft.put("data.pad_token", tokens.get("pad_token"))
    draft.put("data.eos_token", tokens.get("eos_token"))
    added = [*(tokens.get("additional_special_tokens") or ()), *added]
    if added:
        draft.put("model.extra_special_tokens", list(dict.fromkeys(map(str, added))))
    for name in ("bos_token", "unk_token"):
        if tokens.get(name):
            draft.note(f"special_tokens: {name}", "the tokenizer's own")


def _heldout(draft: Draft, sources: list[dict[str, Any]]) -> None:
    tests, size = draft.take("test_datasets"), training.number(draft, "val_set_size", 0)
    if tests:
        one = tests[0] if isinstance(tests, list) and isinstance(tests[0], dict) else {}
        files = one.get("data_files")
        path = (files[0] if isinstance(files, list) else files) or str(one.get("path") or "")
        if path and _LOCAL.search(str(path)):
            draft.put("data.heldout_path", str(path), "test_datasets" + ("; the first one" if len(tests) > 1 else ""))
        elif len(sources) == 1 and path == sources[0].get("dataset_name") and one.get("split"):
            draft.put("data.eval_split", one["split"], "test_datasets")
        else:
            draft.note("test_datasets", "held-out data is a file, or a split of the same data set; a share is held out")
        return
    training.put_share(draft, "val_set_size", size)
