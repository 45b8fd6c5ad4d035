"""The index of a model's weights, model.safetensors.index.json: which file has which tensor."""

from flytune import json_core, names

INDEX = "model.safetensors.index.json"


class IndexRefused(ValueError):
    """An index that cannot be read, or names files that are not beside it."""


def weight_map(content: str | bytes) -> dict[str, str]:
    """Return the file of each tensor.

    Raises:
        IndexRefused: it is not JSON, has no weight_map of names by names, or names anything but *.safetensors
            beside it.
    """
    try:
        files_of = json_core.load_object(content).get("weight_map")
        if not isinstance(files_of, dict) or not files_of:
            raise IndexRefused("has no weight_map")
        for file in dict.fromkeys(map(str, files_of.values())):
            names.check(file)
        if odd := [
            file for file in files_of.values() if not isinstance(file, str) or "/" in file or _suffix(file)
        ]:
            raise IndexRefused(f"names {odd[0]!r:.80}, which is not a *.safetensors file beside it")
    except (json_core.JSONError, names.NameRefused) as error:
        raise IndexRefused(str(error)) from None
    return files_of


def _suffix(file: str) -> bool:
    return not file.endswith(".safetensors")
