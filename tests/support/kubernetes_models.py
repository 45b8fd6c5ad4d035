"""Content of manifests as Kubernetes' models."""

import re
from typing import Any

from kubernetes import client

_KINDS = re.compile(r"(list|dict)[\[(](?:str, )?(\w+)[\])]", re.IGNORECASE)
_PLAIN = {"str": str, "int": int, "bool": bool, "object": (str, int)}


def model(kind: str, content: Any, where: str) -> Any:
    """Return content as Kubernetes' model, whose setters check what is required; refuse keys that the model
    does not have."""
    if match := _KINDS.fullmatch(kind):
        wanted = list if match[1].lower() == "list" else dict
        assert isinstance(content, wanted), where
        items = enumerate(content) if isinstance(content, list) else content.items()
        parts = {key: model(match[2], item, f"{where}.{key}") for key, item in items}
        return list(parts.values()) if wanted is list else parts
    if kind in _PLAIN:
        assert isinstance(content, _PLAIN[kind]), where
        return content
    made = getattr(client, kind)
    names = {key: name for name, key in made.attribute_map.items()}
    assert set(content) <= set(names), f"{where}: {set(content) - set(names)}"
    types = made.openapi_types
    return made(
        **{names[key]: model(types[names[key]], item, f"{where}.{key}") for key, item in content.items()}
    )
