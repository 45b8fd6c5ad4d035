"""Folders of `datasets.save_to_disk` that somebody else made: their records, their files, and what their rows
name."""

import json
from pathlib import Path
from typing import Any

import datasets
from hypothesis import strategies as st

from flytune.data import readers
from flytune.errors import DataError
from flytune.recipe import Source
from tests.fuzz.isolation import OF_FILE, Wrong
from tests.fuzz.kinds import Samples, kind
from tests.fuzz.mutations import damaged, documents, json_bytes
from tests.fuzz.oracles import plain_json, refuse_shown

_FILE = "data-00000-of-00001.arrow"
_STATE = {
    "_data_files": [{"filename": _FILE}],
    "_fingerprint": "0" * 16,
    "_format_columns": None,
    "_format_kwargs": {},
    "_format_type": None,
    "_output_all_columns": False,
    "_split": None,
}
_STRUCT = {name: {"dtype": of, "_type": "Value"} for name, of in (("bytes", "binary"), ("path", "string"))}
_INFO: dict[str, Any] = {"citation": "", "description": "", "homepage": "", "license": ""}
_INFO |= {"features": {"text": {"dtype": "string", "_type": "Value"}, "image": _STRUCT}}
_MEDIA = {
    name: _INFO | {"features": _INFO["features"] | {"image": {"_type": name}}}
    for name in ("Image", "Audio", "Video")
}
"""Records of data sets with features of images or sounds, which are stored as a path and their content."""
_ELSEWHERE = [
    "../other/data-00000-of-00001.arrow",
    "OTHER/data-00000-of-00001.arrow",
    "./../other/data-00000-of-00001.arrow",
]


def _records() -> st.SearchStrategy[tuple[str, bytes]]:
    named = st.tuples(
        st.sampled_from(["_data_files", "_indices_data_files"]), st.sampled_from(_ELSEWHERE)
    ).map(lambda one: _STATE | {one[0]: [{"filename": one[1]}]})
    forms = st.tuples(
        st.sampled_from(["numpy", "torch", "pandas", "arrow", "jax", "x"]),
        st.sampled_from([None, ["text"], []]),
    )
    formatted = forms.map(lambda one: _STATE | {"_format_type": one[0], "_format_columns": one[1]})
    states = st.one_of(named, named, formatted, documents(_STATE)).map(json_bytes)
    infos = st.one_of(st.sampled_from(list(_MEDIA.values())), documents(_INFO)).map(json_bytes)
    names = st.sampled_from(["../other", "OTHER", "x/../../other", "train"])
    splits = names.map(lambda name: json_bytes({"splits": [name]}))
    return st.one_of(
        st.tuples(st.just("state.json"), states),
        st.tuples(st.just("dataset_info.json"), infos),
        st.tuples(st.just("dataset_dict.json"), splits),
        st.tuples(st.just("state.json"), damaged(json_bytes(_STATE))),
    )


@kind("saved", lambda samples: _records(), share=0.5)
def check_saved(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """The rows of a saved data set are its own, each as it is stored; no file that a record or a row names is
    opened."""
    name, content = given
    secret = str(folder / "secret.png")
    Path(secret).write_text(OF_FILE, encoding="utf-8")
    for one, text in (("saved", "row"), ("other", OF_FILE)):
        rows = [{"text": f"{text} {number}", "image": {"path": secret, "bytes": None}} for number in range(4)]
        datasets.Dataset.from_list(
            rows, features=datasets.Features.from_dict(_INFO["features"])
        ).save_to_disk(folder / one)
    content = content.replace(b"OTHER", str(folder / "other").encode())
    (folder / "saved" / name).write_bytes(content)
    for other in ("state.json", "dataset_info.json") if name == "dataset_dict.json" else ():
        (folder / "saved" / other).unlink()
    refused: DataError | None = None
    read: list[dict[str, Any]] = []
    try:
        read = [row for row, _ in readers.strict(readers.read(Source(path=str(folder / "saved"))))]
    except DataError as error:
        refused = error
    refuse_shown(repr(read))
    written = [{"text": f"row {number}", "image": {"path": secret}} for number in range(4)]
    is_whole = name == "dataset_info.json" and json.loads(content) in _MEDIA.values()
    if is_whole and read != written:
        raise Wrong(f"{refused or read!r:.300}, and the rows are {written!r:.300}")
    if refused is not None:
        raise refused
    if name == "dataset_dict.json":
        raise Wrong(f"{len(read)} rows are read of splits that are not there")
    is_state = name == "state.json" and plain_json(content).get("_data_files") == _STATE["_data_files"]
    if is_state and not plain_json(content).get("_indices_data_files") and read != written:
        raise Wrong(f"{read!r:.300} instead of {written!r:.300}")
