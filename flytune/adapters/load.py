"""Several adapters on one base: switched in a millisecond, or mixed in one batch."""

import json
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytune.artifacts import fetch
from flytune.errors import ExportError
from flytune.export import manifest
from flytune.models import loading
from flytune.recipe.recipe import Recipe
from flytune.recipe.sections import Model
from flytune.records.contents import record
from flytune.records.export import Export

BASE = "base"
"""The name that no adapter can have: the base model alone."""


@dataclass(frozen=True)
class Adapter:
    """One artifact's, on this machine."""

    recipe: Recipe
    folder: Path
    """The artifact's."""
    config: dict[str, Any]

    @classmethod
    def of(cls, address: str | Path) -> "Adapter":
        """Raises ExportError where the artifact cannot be read, or has none."""
        folder = fetch.local_folder(address)
        if not loading.is_adapter(folder):
            raise ExportError(f"{address}: holds no adapter; a model that was trained whole stands alone")
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return cls(Recipe.from_yaml(folder / "recipe.yaml"), folder, config)

    @property
    def base(self) -> tuple[str, str | None, str]:
        """What it was trained on, and is only right on: model, commit, and how its weights are held."""
        model = self.recipe.model
        held = f"nf4, computing in {model.dtype}" if self.recipe.method.name == "qlora" else model.dtype
        return model.name_or_path, self.config.get("revision") or model.revision, held

    @property
    def on(self) -> Recipe:
        """Its recipe with the base at the commit that it was trained on."""
        model = Model.model_validate(self.recipe.model.model_dump() | {"revision": self.base[1]})
        return self.recipe.model_copy(update={"model": model})


def load(addresses: Mapping[str, str | Path]) -> Any:
    """One base with all these adapters on it, each under the name it has here; the first is switched on.

    The base is loaded as they were trained on it (4-bit for qlora), over all GPUs of the machine. Switch with
    `model.set_adapter(name)`, ask the base within `model.disable_adapter()`, or give each row of a batch its own by
    `adapter_names=[...]` (to forward and generate; `__base__` for none).

    Args:
        addresses: folders or fsspec addresses of artifacts.

    Raises:
        ExportError: an artifact has no adapter, or cannot be read or loaded; they were trained on different bases; a name
            cannot be one.
    """
    if not addresses:
        raise ExportError("no adapter was named; give at least one")
    for name in addresses:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in (BASE, "__base__"):
            raise ExportError(f"{name!r} cannot be an adapter's name: letters, digits, - and _, and not {BASE} or __base__")
    return stacked({name: Adapter.of(address) for name, address in addresses.items()})


def stacked(adapters: Mapping[str, Adapter]) -> Any:
    """`load`, of adapters that are on this machine already."""
    from peft import PeftModel

    bases = {name: adapter.base for name, adapter in adapters.items()}
    if len(set(bases.values())) > 1:
        lines = [f"  {name}: {base} at revision {revision}, {held}" for name, (base, revision, held) in bases.items()]
        raise ExportError("\n".join(["adapters of different bases cannot share one; load them apart:", *lines]))
    loading.quiet()
    model: Any = None
    for name, adapter in adapters.items():
        with refused(f"adapter {name} on base model {adapter.base[0]}: cannot be loaded"):
            if model is None:
                base = loading.base_model(adapter.on, adapter.recipe.model.dtype, device_map=loading.device_map())
                model = PeftModel.from_pretrained(base, str(adapter.folder), adapter_name=name)
            else:
                found = model.load_adapter(str(adapter.folder), adapter_name=name).missing_keys
                # PEFT tells those of others too, where the name stands anywhere in theirs ("b" in "base_model").
                if missing := [key for key in found if f".{name}." in key]:  # no warning here
                    raise ValueError(f"Found missing adapter keys: {missing[:3]}")
    return model.eval()


def copy_tokenizer(artifact: Path, folder: Path) -> None:
    """Into `folder`: all that an adapter's artifact was exported with, but the adapter itself.

    Raises:
        ExportError: the artifact does not say what it was exported with, or lacks some of it.
    """
    exported = record(Export, artifact / manifest.MANIFEST)
    try:
        for name in (file.file for file in exported.files if not file.file.startswith("adapter_")):
            if not (folder / name).resolve().is_relative_to(folder.resolve()):
                raise ExportError(f"{artifact}: its {manifest.MANIFEST} names {name}, outside of the artifact; do not use it")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(artifact / name, folder / name)
    except FileNotFoundError as error:
        raise ExportError(f"{error.filename}: stands in {manifest.MANIFEST} but is not there: it is not whole") from None


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Makes what PEFT and transformers raise an ExportError that begins with `what`."""
    from safetensors import SafetensorError

    try:
        with warnings.catch_warnings():
            # Otherwise an adapter's tensor that is not there stays at its random start.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            yield
    except (UserWarning, OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise ExportError(f"{what}: {' '.join(str(error).split())[:300]}") from error
