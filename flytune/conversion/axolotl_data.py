"""Data sets of axolotl: places, formats and prompts."""

import re
from pathlib import Path
from typing import Any

from flytune.conversion import training
from flytune.conversion.draft import Draft
from flytune.data.columns import AXOLOTL_LABELLED, AXOLOTL_PAIRS, AXOLOTL_QUESTIONS
from flytune.data.messages import THOUGHT_KEYS
from flytune.sentences import at_revision

_LOCAL = re.compile(r"^[./~]|/$|\.(jsonl?|ndjson|csv|tsv|txt|parquet|arrow)(\.\w+)?$|://")
_LOADERS = ("json", "jsonl", "csv", "parquet", "arrow", "text")
"""Names of the data sets library for files, in place of a path."""
_QUESTIONS = {
    **dict.fromkeys((*AXOLOTL_QUESTIONS, "alpaca_chat", "alpaca_w_system", "alpaca_w_system.load_chat"), ""),
    **dict.fromkeys(
        ("alpaca", "alpaca_instruct", "alpaca_w_system.load_instruct", "gpteacher", "oasst", "aya"), "alpaca"
    ),
    **dict.fromkeys(
        ("alpaca_w_system.load_open_orca_chatml", "alpaca_w_system.load_openorca_chatml"), "chatml"
    ),
}
"""Types of a question and an answer, and the shipped template that has their words, if one has."""
_STYLES = {"": None, "instruct": "alpaca", "chatml": "chatml"}
"""Shipped templates of the styles that follow a type (alpaca:chat); the type's own without one."""
_INPUT = "\n\n### Input:\n"
"""Text between instruction and input in the prompt of the type alpaca."""


def put_data(draft: Draft) -> None:
    """Set the section `data`."""
    datasets = _datasets(draft)
    templates: list[tuple[str, str]] = []
    sources = [source for dataset in datasets for source in _sources(draft, dict(dataset), templates)]
    if draft.get("data.system_prompt") and len(datasets) > 1:
        draft.refuse(
            "datasets: type: system_prompt: the system prompt of a recipe is that of all its sources; divide "
            "the file"
        )
    training.put_sources(draft, sources)
    _template(draft, templates)
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
    _too_long(draft, sources)
    if draft.take("train_on_inputs") and draft.get("objective.name") is None:
        draft.put("data.completion_only_loss", False, "train_on_inputs")
    if draft.take("dataset_exact_deduplication"):
        draft.put("data.deduplicate", True)
    if draft.get("data.system_prompt") is None:
        draft.same(("default_system_message", "data.system_prompt"))
    _heldout(draft, sources)


def _datasets(draft: Draft) -> list[dict[str, Any]]:
    """Return the data sets of the file, or else those of its pretraining."""
    datasets, pretraining = draft.take("datasets") or [], draft.take("pretraining_dataset") or []
    if not datasets:
        entries = pretraining if isinstance(pretraining, list) else [pretraining]
        datasets = [
            {"type": "pretrain"} | (entry if isinstance(entry, dict) else {"path": entry})
            for entry in entries
        ]
    if not isinstance(datasets, list):
        datasets = [datasets]
    if not datasets or not all(isinstance(dataset, dict) for dataset in datasets):
        draft.refuse("datasets: a list of data sets with path and type is missing")
    return datasets


def _too_long(draft: Draft, sources: list[dict[str, Any]]) -> None:
    strategy = draft.take("excess_length_strategy")
    treatment = {"truncate": "truncate", "raise": "error"}.get(str(strategy), "drop")
    if not all(source.get("format") == "text" for source in sources):
        draft.put("data.too_long", treatment, "as axolotl")
    else:
        draft.put("data.too_long", "split" if treatment == "drop" else treatment)


def _sources(draft: Draft, dataset: dict[str, Any], templates: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the sources of a data set, which is one for each of its files."""
    path = str(dataset.pop("path", "") or "")
    files = dataset.pop("data_files", None) or []
    files = [files] if isinstance(files, str) else list(files)
    kind = dataset.pop("type", None) or "tokens"
    dataset.pop("ds_type", None)
    _refuse_renamed(draft, dataset)
    form = _format(draft, kind, dataset, templates)
    split = str(dataset.pop("split", None) or dataset.pop("train_on_split", None) or "train")
    config, revision = dataset.pop("name", None), dataset.pop("revision", None)
    is_local = _LOCAL.search(path) or Path(path).expanduser().exists()
    folder = dataset.pop("data_dir", None)
    if folder and not files:
        files = [f"{path.rstrip('/')}/{folder}" if is_local and path not in _LOADERS else str(folder)]
    _note_others(draft, dataset)
    if is_local or files:
        require_whole(draft, "datasets: split", split)
    if path in _LOADERS and not files:
        draft.refuse(f"datasets: path: {path} without data_files")
    if path in _LOADERS or (is_local and files):
        return [{"path": file} | form for file in files]
    if is_local:
        return [{"path": path} | form]
    if path.count("/") > 1 or not path:
        draft.refuse(f"datasets: path: {path or 'missing'}: neither a file nor owner/name on the hub")
    if files:
        return [{"path": of_hub(path, file, revision)} | form for file in files]
    source = {
        "dataset_name": path,
        "dataset_config": config,
        "dataset_split": split if split != "train" else None,
        "revision": revision,
    } | form
    return [{key: value for key, value in source.items() if value is not None}]


def _note_others(draft: Draft, dataset: dict[str, Any]) -> None:
    """Note the keys of a data set that are not in its sources, and refuse those that change what is
    trained."""
    for key, value in dataset.items():
        if value in (None, False, ""):
            continue
        if key in _CHANGING and value not in _CHANGING[key][0]:
            draft.refuse(f"datasets: {key}: {_CHANGING[key][1]}")
        reason = _REASONS.get(key, "not known as a key of a data set; nothing of it is here")
        draft.note(f"datasets: {key}", reason)


def _refuse_renamed(draft: Draft, dataset: dict[str, Any]) -> None:
    """Refuse a data set whose turns have other names for keys that are read, beside role and content."""
    for ours, theirs in (dataset.get("message_property_mappings") or {}).items():
        is_thought = {ours, theirs} <= set(THOUGHT_KEYS)
        if ours not in ("role", "content", theirs) and not is_thought:
            draft.refuse(
                f"datasets: message_property_mappings: {ours}: {theirs}: of the keys of a turn, those of "
                f"role and content may have other names; write {ours} into the rows"
            )


def require_whole(draft: Draft, label: str, split: str | None) -> None:
    """Refuse a file of which another split than all its rows is named."""
    if split not in (None, "train"):
        draft.refuse(
            f"{label}: {split}: a file is read completely; write max_samples into the source of a recipe"
        )


def of_hub(repository: str, file: str, revision: str | None = None) -> str:
    """Return the address of a file or folder of a data set on the hub."""
    return f"hf://datasets/{at_revision(repository, revision)}/{file}"


_REASONS = {
    "roles": "the speakers' usual names are known (docs/data.md), and others are an error",
    "roles_to_train": "answers of the assistant are trained",
    "train_on_eos": "the end marker of each answer is trained",
    "train_on_eot": "the end marker of each answer is trained",
    "message_field_training": "it is read as it is there",
    "preprocess_shards": "rows are read in chunks",
    "split_thinking": "the reasoning of the last answer is rendered by the template",
    "conversation": "data.chat_template",
    "trust_remote_code": "data sets with code are not read",
    "field_thinking": "the keys are reasoning_content and thinking",
    "template_thinking_key": "the template decides",
    "text_column": "data.columns: {text: NAME}",
}
"""Keys of a data set without a counterpart, and why."""
_TURN = ("turn",)
_CHANGING: dict[str, tuple[tuple[Any, ...], str]] = {
    "roles_to_train": (
        (["assistant"], ["gpt"], ["assistant", "gpt"]),
        "answers of the assistant are trained, and no others",
    ),
    "train_on_eos": (_TURN, "the end marker of each answer is trained, and no other"),
    "train_on_eot": (_TURN, "the end marker of each answer is trained, and no other"),
    "message_field_training": (
        ("train", "weight"),
        "a turn's key train or weight says whether it is trained",
    ),
    "message_field_training_detail": ((), "a turn is trained as a whole, or not"),
    "shards": ((), "write max_samples, or a weight, into the source of a recipe"),
    "shards_idx": ((), "write max_samples, or a weight, into the source of a recipe"),
    "skip": ((), "rows are read from the first on"),
    "drop_system_message": ((), "system messages of the rows are kept"),
    "field_thinking": (
        ("reasoning_content", "thinking"),
        "the keys of thoughts are reasoning_content and thinking",
    ),
}
"""Keys of a data set that change what is trained: the values of which the recipe does the same, and the
reason for others."""


def _format(
    draft: Draft, kind: Any, dataset: dict[str, Any], templates: list[tuple[str, str]]
) -> dict[str, Any]:
    """Return format and columns of a data set's type; its keys that are used are removed."""
    objective = draft.get("objective.name")
    if isinstance(kind, dict):
        return _own_format(draft, kind, dataset, templates, objective)
    family, _, style = str(kind).partition(".")
    family = family.partition(":")[0]
    if objective == "grpo":
        return _prompts(draft, str(kind), dataset, templates)
    if objective in ("dpo", "kto", "reward"):
        return _answers(draft, family, style, dataset, templates, objective)
    if family in ("chat_template", "sharegpt"):
        templates.append(_own_template(dataset) or ("", ""))
        return _chat(family, dataset)
    if family == "tokens":
        return {"format": "tokens"}
    if family in ("completion", "pretrain"):
        column = dataset.pop("field", None) or dataset.pop("text_column", None)
        return {"format": "text"} | renamed({"text": column or "text"})
    if family == "metharme":
        return {"format": "prompt_completion"} | renamed({"completion": "generation"})
    if family == "input_output":
        draft.refuse(
            "datasets: type: input_output: segments with labels; write input_ids and labels, which are the "
            "format tokens"
        )
    name, _, words = str(kind).removesuffix(".load").partition(":")
    if name not in _QUESTIONS:
        draft.refuse(f"datasets: type: {kind}: no format is like it; docs/data.md lists the formats")
    marks = _STYLES.get(words, "") if words else _QUESTIONS[name]
    templates.append(_own_template(dataset) or _shipped(draft, f"type: {kind}", marks or ""))
    return {"format": "instruction"} | renamed(AXOLOTL_QUESTIONS.get(name, {}))


def _own_template(dataset: dict[str, Any]) -> tuple[str, str] | None:
    """Return the chat template that a data set names itself, and its key; its keys for it are removed."""
    named = {
        key: value for key in ("chat_template", "chat_template_jinja") if (value := dataset.pop(key, None))
    }
    if jinja := named.get("chat_template_jinja"):
        return str(jinja), "datasets: chat_template_jinja"
    if named.get("chat_template") in (None, "tokenizer_default", "jinja"):
        return None
    return str(named["chat_template"]), "datasets: chat_template"


def _shipped(draft: Draft, kind: str, template: str) -> tuple[str, str]:
    """Return the shipped template with the words of a type, and why; refuse the file if none has them."""
    if not template:
        draft.refuse(
            f"datasets: {kind}: it writes words of its own around questions and answers, which no shipped "
            "template has; write them as a Jinja file, and name it in the data set (chat_template_jinja: "
            "FILE)"
        )
    return template, kind


def _prompts(
    draft: Draft, kind: str, dataset: dict[str, Any], templates: list[tuple[str, str]]
) -> dict[str, Any]:
    """Return the columns of prompts, which axolotl makes of rows by a function of one's own."""
    if draft.get("objective.rewards"):
        draft.refuse(
            f"datasets: type: {kind}: a function of your own makes the prompts; write its rows to a file, "
            "and name that"
        )
    draft.note(
        f"datasets: type: {kind}",
        "a function of your own makes the prompts there; rows need a column prompt, or data.columns: "
        "{prompt: NAME}, and those that the rewards read",
    )
    templates.append(_own_template(dataset) or ("", ""))
    return {}


def _chat(family: str, dataset: dict[str, Any]) -> dict[str, Any]:
    columns = _turns(dataset, family == "sharegpt")
    return {"format": "messages" if "messages" in columns else "sharegpt"} | renamed(columns)


def _turns(dataset: dict[str, Any], is_sharegpt: bool = False) -> dict[str, str]:
    """Return the columns of a data set of turns, and the names of their keys; its keys for them are
    removed."""
    names = dataset.pop("message_property_mappings", None) or {}
    role = dataset.pop("message_field_role", None) or names.get("role") or ("from" if is_sharegpt else "role")
    content = (
        dataset.pop("message_field_content", None)
        or names.get("content")
        or ("value" if is_sharegpt else "content")
    )
    field = dataset.pop("field_messages", None) or ("conversations" if is_sharegpt else "messages")
    others = {name: dataset.pop(f"field_{name}", None) or name for name in ("tools", "system")}
    return turns(str(field), str(role), str(content)) | others


def turns(field: str, role: str, content: str) -> dict[str, str]:
    """Return the columns of a column of turns with these keys: messages, or conversations with any other
    keys."""
    plain = (role, content) == ("role", "content")
    return {"messages": field} if plain else {"conversations": field, "from": role, "value": content}


def _answers(
    draft: Draft,
    family: str,
    style: str,
    dataset: dict[str, Any],
    templates: list[tuple[str, str]],
    objective: str,
) -> dict[str, Any]:
    """Return format and columns of pairs or labelled answers."""
    kind = f"type: {family}.{style}"
    style = style.partition(".")[0]
    if style == "nectar":
        draft.refuse(
            f"datasets: {kind}: rows of several answers with ranks; write pairs of chosen and rejected"
        )
    if family == "bradley_terry":
        known, marks = {"instruction": "input"}, "" if style in ("", "chat_template") else style
    elif family == "passthrough":
        known, marks = {}, ""
    elif family in ("chatml", "llama3", "chat_template") and style in AXOLOTL_PAIRS:
        known = AXOLOTL_PAIRS[style]
        if objective == "kto":
            known = AXOLOTL_LABELLED.get(style, known)
        marks = family if family != "chat_template" else ""
    else:
        draft.refuse(f"datasets: {kind}: no format is like it; docs/data.md lists the formats")
    templates.append(_own_template(dataset) or (marks, kind))
    mapped = {name: value for name in ("chosen", "rejected") if (value := dataset.pop(f"field_{name}", None))}
    has_turns = (family, style) == ("chat_template", "default")
    columns = _turns(dataset)
    if not has_turns:
        columns.pop("messages", None)
    return {"format": "unpaired" if objective == "kto" else "preference"} | renamed(columns | known | mapped)


_TEXTS = ("instruction", "prompt", "chosen", "rejected", "completion")
"""Texts of a row that a type may put into words of its own."""


def _own_format(
    draft: Draft,
    kind: dict[str, Any],
    dataset: dict[str, Any],
    templates: list[tuple[str, str]],
    objective: str | None,
) -> dict[str, Any]:
    """Return format and columns of a type that names its fields, and the words around them.

    A recipe has such words in a chat template. A type without any is text: of questions, the question and its
    answer.
    """
    used = {key: value for key, value in kind.items() if value not in (None, "")}
    columns = {
        key.removeprefix("field_"): str(value) for key, value in used.items() if key.startswith("field_")
    }
    compares = objective in ("dpo", "reward", "kto")
    form = {"kto": "unpaired", None: "instruction"}.get(objective, "preference")
    if template := _own_template(dataset):
        templates.append(template)
        if prompt := used.get("system_prompt"):
            draft.put("data.system_prompt", prompt)
        if compares:
            columns["instruction"] = columns.pop("prompt", "prompt")
        return {"format": form} | renamed(columns)
    bare = {f"{{{name}}}" for pair in columns.items() for name in pair} | {f"{{{name}}}" for name in _TEXTS}
    words = {key: value for key, value in used.items() if key.endswith("format") and value not in bare}
    if not compares and "format" not in used:
        words["format"] = "{instruction} {input} "
    if words or (not compares and {"input", "system"} & columns.keys()) or used.get("system_prompt"):
        key, value = next(iter(words.items()), ("system_prompt", used.get("system_prompt", "")))
        _shipped(draft, f"type: {key}: {str(value)[:60]!r}", "")
    columns.pop("system", None)
    if compares:
        return {"format": form} | renamed({"prompt": "prompt"} | columns)
    renames = {
        "prompt": columns.get("instruction", "instruction"),
        "completion": columns.get("output", "output"),
    }
    return {"format": "prompt_completion"} | renamed(renames)


def renamed(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of columns whose names are not the format's."""
    other = {ours: str(theirs) for ours, theirs in columns.items() if ours != theirs}
    return {"columns": other} if other else {}


def _template(draft: Draft, templates: list[tuple[str, str]]) -> None:
    """Set the chat template: a shipped one or a file; others are the tokenizer's own.

    `templates` has that of each data set with chats, and why; without a name it is that of the whole file.
    """
    whole, jinja = draft.take("chat_template"), draft.take("chat_template_jinja")
    of_file = (str(jinja), "chat_template_jinja") if jinja else (str(whole or ""), f"chat_template: {whole}")
    reasons = {named or of_file[0]: why for named, why in templates}
    if len(reasons) > 1:
        rest = of_file[1] if whole or jinja else "the tokenizer's chat template"
        kinds = " and ".join(why if named != of_file[0] else rest for named, why in reasons.items())
        draft.refuse(
            f"datasets: {kinds}: each has marks of its own, and one chat template renders all chats of a "
            "recipe; divide the data sets into a file for each, and train one after the other "
            "(lora_model_dir)"
        )
    name, why = next(iter(reasons.items()), ("", ""))
    if name == of_file[0]:
        why = of_file[1]
    elif whole:
        draft.note(of_file[1], f"{why} has marks of its own there")
    if fallback := re.fullmatch(r"tokenizer_default_fallback_(\w+)", name):
        draft.note(
            why,
            f"the tokenizer's own chat template; one that has none needs data.chat_template: {fallback[1]}",
        )
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
    elif name in SHIPPED and not (
        name == "llama3" and "instruct" in str(draft.get("model.name_or_path")).lower()
    ):
        draft.put("data.chat_template", SHIPPED[name], why)
    else:
        draft.note(
            why, "the tokenizer's own chat template; one that has none needs data.chat_template: NAME or FILE"
        )


SHIPPED = {
    "chatml": "chatml",
    "alpaca": "alpaca",
    "llama3": "llama3",
    "llama-3": "llama3",
    "hermes": "chatml_tools",
}
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


_OF_ROWS = ("format", "columns", "input_separator")
"""Keys of a source that say how its rows are read."""


def put_heldout(
    draft: Draft, sources: list[dict[str, Any]], path: str, form: dict[str, Any], note: str
) -> None:
    """Set held-out rows in a file; `form` has their format and columns, which are those of data beside
    sources."""
    own, trained = ({key: row[key] for key in _OF_ROWS if key in row} for row in (form, sources[0]))
    if len(sources) == 1 and own != trained:
        for key in sources[0]:
            draft.remove(f"data.{key}")
        draft.put("data.sources", sources)
    if len(sources) > 1 or own != trained:
        for key, value in own.items():
            draft.put(f"data.{key}", value)
    draft.put("data.heldout_path", path, note)


def _heldout(draft: Draft, sources: list[dict[str, Any]]) -> None:
    tests, size = draft.take("test_datasets"), training.number(draft, "val_set_size", 0)
    if tests:
        test = tests[0] if isinstance(tests, list) and isinstance(tests[0], dict) else {}
        files = test.get("data_files")
        path = (files[0] if isinstance(files, list) else files) or str(test.get("path") or "")
        is_first = len(tests) > 1 or (isinstance(files, list) and len(files) > 1)
        place = path, test.get("name")
        trained = tuple(sources[0].get(key) for key in ("dataset_name", "dataset_config"))
        if path and _LOCAL.search(str(path)):
            form = _format(draft, test["type"], dict(test), []) if test.get("type") else sources[0]
            put_heldout(
                draft, sources, str(path), form, "test_datasets" + ("; the first one" if is_first else "")
            )
        elif len(sources) == 1 and place == trained and test.get("split"):
            draft.put("data.eval_split", test["split"], "test_datasets")
        else:
            draft.note(
                "test_datasets",
                "held-out data is a file, or a split of the same data set; a share is held out",
            )
        return
    training.put_share(draft, "val_set_size", size)
