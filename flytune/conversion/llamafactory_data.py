"""Data sets of LLaMA-Factory, by their names in dataset_info.json."""

import re
from functools import cache
from pathlib import Path
from typing import Any

from flytune import files, json_core
from flytune.conversion import axolotl_data, training
from flytune.conversion.axolotl_data import renamed
from flytune.conversion.draft import Draft
from flytune.data.columns import LLAMA_FACTORY

_BUILT_IN = Path(__file__).with_name("llamafactory_datasets.json")
_DEMO_FILES = "hf://datasets/llamafactory/demo_data"
"""LLaMA-Factory's own small files on the hub."""
_OTHER_MEDIA = re.compile("video|audio|omni")
_PIXELS = 768 * 768
"""LLaMA-Factory's image_max_pixels where the file has none."""


def put_data(draft: Draft, stage: str) -> None:
    """Set the section `data`."""
    most, folder = training.number(draft, "max_samples"), draft.take("dataset_dir", "data")
    sources = []
    for name in _names(draft.take("dataset")):
        source = _source(draft, name, str(folder), stage)
        limits = [int(limit) for limit in (most, source.pop("max_samples", None)) if limit]
        sources.append(source | ({"max_samples": min(limits)} if limits else {}))
    training.put_sources(draft, sources)
    _template(draft, stage)
    draft.put("data.max_length", training.whole(draft, "cutoff_len", 2048))
    _packing(draft, stage)
    if draft.take("train_on_prompt") and stage == "sft":
        draft.put("data.completion_only_loss", False, "train_on_prompt")
    draft.same(
        ("default_system", "data.system_prompt"), ("split_special_tokens", "data.split_special_tokens")
    )
    _heldout(draft, sources, str(folder), stage)


def _names(value: Any) -> list[str]:
    return [
        name.strip()
        for name in (value if isinstance(value, list) else str(value or "").split(","))
        if str(name).strip()
    ]


@cache
def _built_in() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = json_core.load(_BUILT_IN.read_bytes())
    return rows


def _info(draft: Draft, folder: str) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder with dataset_info.json, and its content; None if it is not on this machine."""
    for start in (Path(), *list(draft.path.absolute().parents)[:5]):
        place = start / folder
        file = place / "dataset_info.json"
        if file.is_file():
            try:
                content = json_core.load(files.read_regular(file, json_core.LARGEST))
            except (json_core.JSONError, OSError) as error:
                draft.refuse(f"{file}: cannot be read: {error!s:.200}")
            return place, content if isinstance(content, dict) else {}
    return None


def _source(draft: Draft, name: str, folder: str, stage: str) -> dict[str, Any]:
    """Return the source of a data set by its name."""
    listing = _info(draft, folder)
    if listing and isinstance(entry := listing[1].get(name), dict):
        samples = {"max_samples": entry["num_samples"]} if entry.get("num_samples") else {}
        return _place(draft, name, entry, listing[0]) | _format(draft, name, entry, stage) | samples
    if (known := _built_in().get(name)) is None:
        path = Path(folder) / name
        if path.exists() or name.endswith((".json", ".jsonl", ".csv", ".parquet")):
            return {"path": str(path if path.exists() else name)}
        if name.count("/") == 1:
            return {"dataset_name": name}
        draft.refuse(
            f"dataset: {name}: no such name in {folder}/dataset_info.json, and none of LLaMA-Factory's own"
        )
    if known.get("media"):
        _put_images(draft, name, stage, _OTHER_MEDIA.search(name) is not None)
        if not known.get("file") and not known.get("hub"):
            draft.refuse(
                f"dataset: {name}: where it lies is not known here; write its entry into a dataset_info.json "
                "beside the file"
            )
    entry = {"file_name": known.get("file"), "hf_hub_url": known.get("hub")} | known
    return _place(draft, name, entry, None) | _format(draft, name, entry, stage)


def _put_images(draft: Draft, name: str, stage: str, has_others: bool) -> None:
    """Write that the rows have images, of which LLaMA-Factory reduces the large ones."""
    if has_others:
        draft.refuse(f"dataset: {name}: video and audio are not trained")
    if stage != "sft":
        draft.refuse(f"dataset: {name}: images are trained with stage sft alone")
    draft.put("data.images", True)
    if draft.get("data.max_pixels") is None:
        draft.put("data.max_pixels", draft.take("image_max_pixels", _PIXELS), "image_max_pixels")


def _place(draft: Draft, name: str, entry: dict[str, Any], folder: Path | None) -> dict[str, Any]:
    """Return the keys of a source that say where its rows are."""
    if hub := entry.get("hf_hub_url"):
        if inner := entry.get("folder"):
            draft.refuse(
                f"dataset: {name}: folder: {inner}: of a repository all files are read; write path: "
                f"{axolotl_data.of_hub(hub, inner)} into the source of a recipe"
            )
        place = {
            "dataset_name": hub,
            "dataset_config": entry.get("subset"),
            "dataset_split": entry.get("split"),
        }
        return {
            key: value for key, value in place.items() if value and (key, value) != ("dataset_split", "train")
        }
    axolotl_data.require_whole(draft, f"dataset: {name}: split", entry.get("split"))
    if address := entry.get("cloud_file_name"):
        return {"path": str(address)}
    if not (file := entry.get("file_name")):
        draft.refuse(
            f"dataset: {name}: its entry names neither a file nor a repository of the Hugging Face hub"
        )
    if folder is not None:
        return {"path": str(folder / str(file))}
    draft.note(
        f"dataset: {name}",
        f"{file} of LLaMA-Factory's own data, read from the hub; name data/{file} if you have it",
    )
    return {"path": f"{_DEMO_FILES}/{file}"}


def _format(draft: Draft, name: str, entry: dict[str, Any], stage: str) -> dict[str, Any]:
    """Return format and columns of a data set."""
    columns = entry.get("columns") or {}
    pictures = columns.get("images") or columns.get("image")
    if pictures or columns.get("videos") or columns.get("audios"):
        _put_images(draft, name, stage, bool(columns.get("videos") or columns.get("audios")))
    if stage == "pt":
        return {"format": "text"} | renamed({"text": _named(columns, "instruction")})
    is_chat = entry.get("formatting") in ("sharegpt", "openai")
    prompt = _turns(draft, name, entry) if is_chat else _question(columns)
    of_all = prompt | {key: columns[key] for key in ("system", "tools") if columns.get(key)}
    of_all |= {"images": pictures} if pictures else {}
    separator = {} if is_chat else {"input_separator": "\n"}
    if stage in ("dpo", "rm"):
        if not entry.get("ranking"):
            draft.refuse(f"dataset: {name}: stage {stage} needs pairs, and its entry has no ranking: true")
        pair = {key: columns.get(key, key) for key in ("chosen", "rejected")}
        return {"format": "preference"} | renamed(of_all | pair) | separator
    answer = {} if is_chat else {"output": _named(columns, "output")}
    if stage == "kto":
        answer = {"completion": answer["output"]} if answer else {}
        return (
            {"format": "unpaired"}
            | renamed(of_all | answer | {"label": _named(columns, "label", "kto_tag")})
            | separator
        )
    if entry.get("ranking"):
        draft.refuse(f"dataset: {name}: has pairs, which stage sft does not train; write stage: dpo")
    if not is_chat:
        form = "instruction"
    elif "messages" in prompt:
        form = "messages"
    else:
        form = "sharegpt"
    return {"format": form} | renamed(of_all | answer) | separator


def _named(columns: dict[str, Any], ours: str, default: str = "") -> Any:
    """Return the data's name of our column; by default LLaMA-Factory's own."""
    return columns.get(LLAMA_FACTORY[ours], default or ours)


def _question(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a question."""
    named = {ours: _named(columns, ours) for ours in ("instruction", "input")}
    return named | ({"history": columns["history"]} if columns.get("history") else {})


def _turns(draft: Draft, name: str, entry: dict[str, Any]) -> dict[str, str]:
    """Return the column of turns, and the names of their keys."""
    is_openai, tags = entry.get("formatting") == "openai", entry.get("tags") or {}
    for tag, known in _SPEAKERS.items():
        if (speaker := tags.get(tag, known[0])) not in known:
            draft.refuse(
                f"dataset: {name}: {tag}: {speaker}: of the names of this speaker, {', '.join(known)} are "
                "read"
            )
    keys = [str(tags.get(tag, default[is_openai])) for tag, default in _KEYS.items()]
    return axolotl_data.turns(str((entry.get("columns") or {}).get("messages", "conversations")), *keys)


_SPEAKERS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "chatgpt", "model", "assistant"),
    "system_tag": ("system",),
    "observation_tag": ("observation", "tool", "function_response"),
    "function_tag": ("function_call",),
}
"""Names of speakers that data may have (flytune/data/messages.py), by their names in `tags`."""
_KEYS = {"role_tag": ("from", "role"), "content_tag": ("value", "content")}
"""Keys of turns by their names in `tags`, as they are in ShareGPT's and in OpenAI's turns."""


def _template(draft: Draft, stage: str) -> None:
    name = str(draft.take("template") or "")
    if name and stage != "pt":
        if name == "default":
            draft.refuse(
                "template: default: no shipped template has its marks Human: and Assistant:; name another one"
            )
        axolotl_data.put_template(draft, name, f"template: {name}")


def _packing(draft: Draft, stage: str) -> None:
    neat, packing = draft.take("neat_packing"), draft.take("packing")
    if stage == "pt":
        packs = packing is not False
        draft.put("data.packing", packs, "as stage pt; attention never crosses samples here" if packs else "")
        draft.put("data.too_long", "split")
    elif stage == "sft" and (neat or packing):
        draft.put(
            "data.packing", True, "" if neat else "packing: attention crosses samples there, and not here"
        )


def _heldout(draft: Draft, sources: list[dict[str, Any]], folder: str, stage: str) -> None:
    names, size = _names(draft.take("eval_dataset")), training.number(draft, "val_size")
    if not names:
        training.put_share(draft, "val_size", size)
        return
    source = _source(draft, names[0], folder, stage)
    if len(names) == 1 and "path" in source:
        axolotl_data.put_heldout(draft, sources, source["path"], source, "eval_dataset")
    else:
        draft.note(
            "eval_dataset",
            "held-out data is one file or folder (data.heldout_path); a share of the data is held out",
        )
