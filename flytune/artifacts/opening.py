"""Opening of artifacts, before anything of one is used: names, sizes, hashes and schema; then the consent to
code and base.

An artifact comes from outside. Code runs only if the person who starts the command says so now, whatever the
recipe in the artifact says; and the base model that it names is used only where that is a model of the hub or
a folder that exists.
"""

from pathlib import Path
from typing import Any, NamedTuple

from flytune import addresses, json_core
from flytune.errors import ExportError
from flytune.models import adapter_files, base, heads, loading
from flytune.recipe import Recipe
from flytune.records import Contents
from flytune.records.contents import verify
from flytune.sentences import at_revision

FLAG = "--trust-remote-code"


class Artifact(NamedTuple):
    """A verified artifact on this machine."""

    folder: Path
    recipe: Recipe
    """Recipe of the artifact; with the base that the person named, if one was named."""
    contents: Contents


class Consent(NamedTuple):
    """The person's decisions, made now, on what an artifact asks for."""

    trust_remote_code: bool = False
    """True if code of the artifact and of its base model may run."""
    base: str | None = None
    """The base model of the person, instead of the one that the artifact names."""
    base_at_address: bool = False
    """True if the artifact may name a base at an address of storage (s3://...), as in a cluster's pods."""


NONE = Consent()
"""No consent: neither code, nor another base."""


def open_artifact(folder: Path, consent: Consent = NONE) -> Artifact:
    """Verify all files of an artifact and return it with its recipe.

    Args:
        folder: the artifact on this machine.
        consent: what the person allows.

    Raises:
        ExportError: as `flytune.records.contents.verify`; the recipe asks for code without consent; or its
            base is refused.
        RecipeError: recipe.yaml is damaged.
    """
    contents = verify(folder)
    recipe = Recipe.from_yaml(folder / "recipe.yaml")
    check_code(folder, recipe, consent.trust_remote_code)
    if consent.base is not None:
        addresses.check(consent.base, "the base model", ExportError)
        model = recipe.model.model_copy(update={"name_or_path": consent.base, "revision": None})
        recipe = recipe.model_copy(update={"model": model})
    elif loading.is_adapter(folder):
        _check_base(folder, recipe.model.name_or_path, consent.base_at_address)
    return Artifact(folder, recipe, contents)


def require_language_model(recipe: Recipe, where: Path | str) -> None:
    """Refuse a model with another head, where a language model is needed.

    Raises:
        ExportError: it is one.
    """
    if reason := heads.head_of(recipe).no_words:
        raise ExportError(f"{where}: objective: {recipe.objective.name}: {reason}")


def check_code(folder: Path, recipe: Recipe | None, trust_remote_code: bool) -> None:
    """Refuse code of an artifact, and of the base model that it names, without consent.

    Raises:
        ExportError: there is some.
    """
    if trust_remote_code:
        return
    if recipe is not None and recipe.model.trust_remote_code:
        raise ExportError(
            f"{folder}: its recipe has model.trust_remote_code: Python files of "
            f"{recipe.model.name_or_path!r:.200} would run here, with your credentials in reach; read them "
            f"first, then give {FLAG}"
        )
    for name in ("config.json", "tokenizer_config.json", "processor_config.json", "generation_config.json"):
        file = folder / name
        try:
            names_code = file.is_file() and json_core.load_object(file.read_bytes()).get("auto_map")
        except (OSError, json_core.JSONError) as error:
            raise ExportError(f"{file}: cannot be read: {addresses.reason(error)}") from None
        if names_code:
            raise ExportError(
                f"{file}: names Python files of the model's own (auto_map), which would run here, with your "
                f"credentials in reach; read them first, then give {FLAG}"
            )


def describe_base(folder: Path, consent: Consent) -> str:
    """Return the base model that would be used, and who names it."""
    if consent.base is not None:
        return f"{consent.base} (--base)"
    model = Recipe.from_yaml(folder / "recipe.yaml").model
    return f"{at_revision(model.name_or_path, model.revision)} (named by the artifact)"


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the checked adapter_config.json of an artifact.

    Raises:
        ExportError: it is damaged or absurd.
    """
    file = folder / adapter_files.CONFIG
    try:
        return adapter_files.read(file.read_bytes())
    except (adapter_files.AdapterConfigRefused, OSError) as error:
        raise ExportError(f"{file}: {error}; do not use it") from None


def _check_base(folder: Path, name: str, at_address: bool) -> None:
    is_storage = base.is_address(name) and name.partition("://")[0].lower() not in (
        "http",
        "https",
        "ftp",
        "file",
    )
    if base.is_address(name) and not (at_address and is_storage):
        raise ExportError(
            f"{folder}: its base model is at an address that the artifact names, {name!r:.200}; if you know "
            "it, name it yourself: --base ADDRESS"
        )
    if "\\" in name or (
        base.is_path(name) and not base.is_address(name) and not Path(name).expanduser().is_dir()
    ):
        raise ExportError(
            f"{folder}: its base model is the folder {name!r:.200}, which is not on this machine (seen from "
            f"{Path.cwd().name}/); name it: --base FOLDER, or an address"
        )
