"""Combining several adapters into one by PEFT's add_weighted_adapter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from flytune.adapters.loading import Adapter, as_export_error, copy_tokenizer, load_adapters
from flytune.addresses import check
from flytune.artifacts import catalog, opening
from flytune.artifacts.opening import Consent
from flytune.errors import ExportError
from flytune.export.folder import MANIFEST, make_manifest
from flytune.export.tensors import verify
from flytune.files import new_output
from flytune.models import adapter_files
from flytune.records.contents import seal
from flytune.schema import Record, Strict
from flytune.sentences import counted

How = Literal[
    "cat", "linear", "svd", "ties", "ties_svd", "dare_linear", "dare_linear_svd", "dare_ties", "dare_ties_svd"
]
_PRUNING = ("ties", "dare")


class CombinedSource(Strict):
    """An adapter that is part of a combined one."""

    address: str
    name: str
    """Name of its recipe."""
    weight: float
    r: int
    weights_sha256: str
    """Hash of its adapter_model.safetensors."""


class Combination(Record):
    """combination.json: the sources and settings of a combined adapter."""

    sources: list[CombinedSource]
    how: How
    r: int
    density: float | None
    seed: int
    """Seed of the values that dare drops."""
    base: str
    revision: str | None


def combine(
    addresses: Sequence[str | Path],
    out: Path,
    weights: Sequence[float] | None = None,
    how: How = "cat",
    r: int | None = None,
    density: float | None = None,
    seed: int = 0,
    consent: Consent = opening.NONE,
) -> Combination:
    """Combine several adapters by PEFT's add_weighted_adapter and store the result in `out` as an artifact.

    Its recipe is the first adapter's with the new rank; combination.json has its sources. It is not
    evaluated.

    Args:
        addresses: folders or fsspec addresses of two or more artifacts.
        out: a folder that does not exist; it is created only when its content is complete.
        weights: one for each adapter; 1 by default.
        how: cat is exact (the weighted sum of the products), with the sum of all ranks; svd is the nearest
            product of rank `r` (the largest of theirs by default); linear, ties and dare_* add the factors
            and need equal ranks; ties_svd and dare_*_svd do not.
        density: for ties and dare, the share of values that is kept.
        consent: what the person allows, of code and base.

    Raises:
        ExportError: `out` exists; an argument does not match `how`; bases differ; or PEFT cannot combine
            them, with its reason.
    """
    if out.exists():
        raise ExportError(f"{out}: exists already; a combined adapter is written into a new folder")
    for address in addresses:
        check(address, "an artifact's address", ExportError)
    adapters = [Adapter.of(address, consent) for address in addresses]
    weights = list(weights or [1.0] * len(adapters))
    _check(adapters, weights, how, r, density)
    named = {f"source{number}": adapter for number, adapter in enumerate(adapters)}
    model = load_adapters(named)
    _add(model, list(named), weights, how, r, density, seed)
    combination = Combination(
        sources=[
            CombinedSource(
                address=str(address),
                name=adapter.recipe.name,
                weight=weight,
                r=adapter.config.get("r", adapter_files.DEFAULT_RANK),
                weights_sha256=adapter.weights_sha256,
            )
            for address, adapter, weight in zip(addresses, adapters, weights, strict=True)
        ],
        how=how,
        r=model.peft_config["default"].r,
        density=density,
        seed=seed,
        base=adapters[0].base[0],
        revision=adapters[0].base[1],
    )
    _store(model, adapters[0], combination, out)
    return combination


def _check(
    adapters: list[Adapter], weights: list[float], how: str, r: int | None, density: float | None
) -> None:
    if len(adapters) < 2:
        raise ExportError(f"{len(adapters)} adapter cannot be combined; give two or more")
    if len(weights) != len(adapters):
        raise ExportError(
            f"{counted(len(weights), 'weight')} for {counted(len(adapters), 'adapter')}; give one for each, "
            "in the same order"
        )
    if how not in get_args(How):
        raise ExportError(f"{how}: unknown; known are {', '.join(get_args(How))}")
    if r is not None and not how.endswith("svd"):
        raise ExportError(f"r {r}: only svd and *_svd take a rank; that of {how} follows from the adapters")
    if (density is not None) != how.startswith(_PRUNING):
        raise ExportError(
            f"density {density} with {how}: ties and dare need the share of values to keep; others take none"
        )
    if density is not None and not 0 < density <= 1:
        raise ExportError(f"density {density}: the share of values to keep must be in (0, 1]")
    for adapter in adapters:
        # add_weighted_adapter sets alpha = r, which with rsLoRA is not a scale of 1, and drops DoRA's
        # magnitudes. What it trains of embedding and head, it leaves out.
        kinds: tuple[str, ...] = (
            "use_rslora",
            "use_dora",
            "rank_pattern",
            "alpha_pattern",
            "modules_to_save",
            "trainable_token_indices",
            # It joins factors as those of one matrix, where experts have theirs one after the other.
            "target_parameters",
        )
        if refused := [kind for kind in kinds if adapter.config.get(kind)]:
            raise ExportError(
                f"{adapter.folder}: its adapter has {refused[0]}, which PEFT does not combine correctly"
            )


def _add(
    model: Any,
    names: list[str],
    weights: list[float],
    how: str,
    r: int | None,
    density: float | None,
    seed: int,
) -> None:
    """Add the combined adapter to the model as `default`, the name that PEFT saves without a subfolder."""
    import torch

    torch.manual_seed(seed)
    with as_export_error(f"PEFT cannot combine these adapters by {how}"):
        model.add_weighted_adapter(
            names, weights, "default", how, svd_rank=r, density=density, svd_full_matrices=False
        )


def _store(model: Any, first: Adapter, combination: Combination, out: Path) -> None:
    """Write the artifact to a temporary folder, check its tensors, and rename it to `out`."""
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.revision, config.inference_mode = (
        combination.base,
        combination.revision,
        True,
    )
    # The order of a set of names differs from process to process.
    modules = (
        config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules)
    )
    config.target_modules = modules
    changes = {"r": combination.r, "lora_alpha": config.lora_alpha, "target_modules": modules}
    method = first.recipe.method.model_copy(update=changes)
    formula = " + ".join(f"{source.weight:g} x {source.name}" for source in combination.sources)
    recipe = first.pinned_recipe.model_copy(
        update={"description": f"combined by {combination.how}: {formula}", "method": method}
    )
    with new_output(out) as folder:
        model.save_pretrained(str(folder), selected_adapters=["default"])
        (folder / "README.md").unlink(missing_ok=True)
        copy_tokenizer(first.folder, folder)
        verify(folder, recipe)
        make_manifest(recipe, folder, combination.revision).write(folder / MANIFEST)
        (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        combination.write(folder / catalog.COMBINATION)
        seal(folder, "artifact")
