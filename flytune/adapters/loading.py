"""Loading several adapters on one base model, to switch between them or mix them in one batch."""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytune.artifacts import fetch, opening
from flytune.artifacts.opening import Consent
from flytune.errors import ExportError
from flytune.export.folder import MANIFEST
from flytune.models import adapter_files, loading
from flytune.models.library_errors import named
from flytune.recipe import Model, Recipe
from flytune.records import Contents, Export
from flytune.records.contents import CONTENTS, record

BASE = "base"
"""Name of the base model without an adapter, which no adapter can have."""


@dataclass(frozen=True)
class Adapter:
    """The adapter of an artifact on this machine."""

    recipe: Recipe
    folder: Path
    """Folder of the artifact."""
    config: dict[str, Any]
    """Content of adapter_config.json."""
    contents: Contents

    @classmethod
    def of(cls, address: str | Path, consent: Consent = opening.NONE) -> "Adapter":
        """Fetch, verify and read an artifact.

        Raises:
            ExportError: it cannot be read, is not an adapter, or is refused by
                `flytune.artifacts.opening.open_artifact`.
        """
        folder = fetch.local_folder(address)
        if not loading.is_adapter(folder):
            raise ExportError(f"{address}: has no adapter; it is a complete model, which is loaded by itself")
        opened = opening.open_artifact(folder, consent)
        opening.require_language_model(opened.recipe, address)
        config = opening.read_adapter_config(folder)
        _check_ranks(folder, config)
        return cls(opened.recipe, folder, config, opened.contents)

    @property
    def base(self) -> tuple[str, str | None, str]:
        """Base that it was trained on, and needs: model, commit, and precision of the weights."""
        model = self.recipe.model
        method = self.recipe.method
        precision = (
            f"{method.quantized}, computing in {model.dtype}" if method.name == "qlora" else model.dtype
        )
        if method.load_in_8bit:
            precision += f", threshold {method.llm_int8_threshold:g}"
        if model.extra_special_tokens:
            precision += f", with the tokens {', '.join(model.extra_special_tokens)}"
        if model.rope_scaling:
            precision += f", with rope_scaling {model.rope_scaling.parameters}"
        return model.name_or_path, self.config.get("revision") or model.revision, precision

    @property
    def weights_sha256(self) -> str:
        """Hash of its adapter_model.safetensors, which was compared."""
        return next(
            (file.sha256 for file in self.contents.files if file.file == "adapter_model.safetensors"), ""
        )

    @property
    def pinned_recipe(self) -> Recipe:
        """Recipe with the base at the commit that the adapter was trained on."""
        model = Model.model_validate(self.recipe.model.model_dump() | {"revision": self.base[1]})
        return self.recipe.model_copy(update={"model": model})


def _check_ranks(folder: Path, config: dict[str, Any]) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(folder / "adapter_model.safetensors"), framework="numpy") as tensors:
            shapes = {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
        adapter_files.check_ranks(config, shapes)
    except (SafetensorError, OSError, adapter_files.AdapterConfigRefused) as error:
        raise ExportError(
            f"{folder}: the adapter cannot be loaded: {' '.join(str(error).split())[:300]}"
        ) from None


def load(addresses: Mapping[str, str | Path], consent: Consent = opening.NONE) -> Any:
    """Load one base model with several adapters under the given names; the first is active.

    The base is loaded as in their training (quantized for qlora), over all GPUs of the machine. Switch with
    `model.set_adapter(name)`, use the base alone within `model.disable_adapter()`, or choose an adapter for
    each row of a batch with `adapter_names=[...]` (for forward and generate; `__base__` for none).

    Args:
        addresses: folders or fsspec addresses of artifacts.
        consent: what the person allows, of code and base.

    Raises:
        ExportError: an artifact has no adapter, or cannot be read or loaded; they were trained on different
            bases; or a name is not allowed.
    """
    if not addresses:
        raise ExportError("no adapter was given; give at least one")
    for name in addresses:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name in (BASE, "__base__"):
            raise ExportError(
                f"{name!r} cannot be an adapter's name: letters, digits, - and _, and not {BASE} or __base__"
            )
    return load_adapters({name: Adapter.of(address, consent) for name, address in addresses.items()})


def load_adapters(adapters: Mapping[str, Adapter]) -> Any:
    """Do the same as `load` for adapters that are on this machine already."""
    bases = {name: adapter.base for name, adapter in adapters.items()}
    if len(set(bases.values())) > 1:
        lines = [
            f"  {name}: {base} at revision {revision}, {precision}"
            for name, (base, revision, precision) in bases.items()
        ]
        raise ExportError(
            "\n".join(["adapters of different bases cannot share one; load them separately:", *lines])
        )
    loading.import_libraries("peft")
    model: Any = None
    for name, adapter in adapters.items():
        with as_export_error(f"adapter {name} on base model {adapter.base[0]}: cannot be loaded"):
            if model is None:
                model = loading.base_model(
                    adapter.pinned_recipe, adapter.recipe.model.dtype, device_map=loading.device_map()
                )
            model = adapter_files.put(model, adapter.folder, name)
    return model.eval()


def copy_tokenizer(artifact: Path, folder: Path) -> None:
    """Copy the exported files of an adapter's artifact into `folder`, without the adapter itself.

    Raises:
        ExportError: export.json is missing or damaged, or a listed file is missing, or is not one of
            artifact.json.
    """
    exported = record(Export, artifact / MANIFEST)
    verified = {file.file for file in record(Contents, artifact / CONTENTS).files}
    try:
        for name in (file.file for file in exported.files if not file.file.startswith("adapter_")):
            if name not in verified:
                raise ExportError(
                    f"{artifact}: {name!r:.200}: listed in {MANIFEST}, but not one of the "
                    f"artifact's files, by {CONTENTS}; do not use it"
                )
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(artifact / name, folder / name)
    except FileNotFoundError as error:
        raise ExportError(
            f"{error.filename}: listed in {MANIFEST} but missing: the artifact is incomplete"
        ) from None


@contextmanager
def as_export_error(what: str) -> Iterator[None]:
    """Turn errors of PEFT and transformers into an ExportError that begins with `what`."""
    with named(what, ExportError):
        yield
