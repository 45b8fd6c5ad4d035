"""Several adapters made one, by PEFT's add_weighted_adapter."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from flytune.adapters.load import Adapter, copy_tokenizer, refused, stacked
from flytune.artifacts import catalog
from flytune.errors import ExportError
from flytune.export import manifest
from flytune.export.tensors import verify
from flytune.files import sha256_of, written_atomically
from flytune.records.contents import CONTENTS, Contents, stored
from flytune.schema import Record, Strict

How = Literal[
    "cat", "linear", "svd", "ties", "ties_svd", "dare_linear", "dare_linear_svd", "dare_ties", "dare_ties_svd"
]  # fmt: skip
_PRUNING = ("ties", "dare")


class Source(Strict):
    """An adapter that went into a combined one."""

    address: str
    name: str
    """Its recipe's."""
    weight: float
    r: int
    weights_sha256: str
    """Of its adapter_model.safetensors."""


class Combination(Record):
    """combination.json: what a combined adapter was made from."""

    sources: list[Source]
    how: How
    r: int
    density: float | None
    seed: int
    """Of what dare drops."""
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
) -> Combination:
    """One adapter made of several by PEFT's add_weighted_adapter, stored in `out` as an artifact of its own.

    Its recipe is the first one's with the new rank; combination.json says what it was made from. It is not evaluated.

    Args:
        addresses: folders or fsspec addresses of two or more artifacts.
        out: a folder that is not there yet; appears only when it is whole.
        weights: one for each; 1 when not given.
        how: cat is exact (the sum of what each adds) and as large as all together; svd is the nearest of rank `r` (the
            largest of theirs when not given); linear, ties and dare_* add the factors and ask for equal ranks; ties_svd and
            dare_*_svd do not.
        density: for ties and dare, the share of values that is kept.

    Raises:
        ExportError: `out` is there; an argument does not go with `how`; bases differ; or PEFT cannot combine them, and why.
    """
    if out.exists():
        raise ExportError(f"{out}: is there already; a combined adapter is written into a new folder")
    adapters = [Adapter.of(address) for address in addresses]
    weights = list(weights or [1.0] * len(adapters))
    _check(adapters, weights, how, r, density)
    named = {f"source{number}": adapter for number, adapter in enumerate(adapters)}
    model = stacked(named)
    _add(model, list(named), weights, how, r, density, seed)
    made = Combination(
        sources=[
            Source(
                address=str(address),
                name=adapter.recipe.name,
                weight=weight,
                r=adapter.config["r"],
                weights_sha256=sha256_of(adapter.folder / "adapter_model.safetensors"),
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
    _store(model, adapters[0], made, out)
    return made


def _check(adapters: list[Adapter], weights: list[float], how: str, r: int | None, density: float | None) -> None:
    if len(adapters) < 2:
        raise ExportError(f"{len(adapters)} adapter is nothing to combine; give two or more")
    if len(weights) != len(adapters):
        raise ExportError(f"{len(weights)} weights for {len(adapters)} adapters; give one for each, in the same order")
    if how not in get_args(How):
        raise ExportError(f"{how}: unknown; known are {', '.join(get_args(How))}")
    if r is not None and not how.endswith("svd"):
        raise ExportError(f"r {r}: only svd and *_svd have a choice of rank; {how} has the rank that follows from the adapters")
    if (density is not None) != how.startswith(_PRUNING):
        raise ExportError(f"density {density} with {how}: ties and dare take the share of values to keep; no other does")
    if density is not None and not 0 < density <= 1:
        raise ExportError(f"density {density}: a share of values to keep, in (0, 1]")
    for adapter in adapters:
        # add_weighted_adapter gives the new one alpha = r, which is no scale of 1 with rsLoRA, and drops DoRA's magnitudes.
        if kinds := [kind for kind in ("use_rslora", "use_dora") if adapter.config.get(kind)]:
            raise ExportError(f"{adapter.folder}: its adapter has {kinds[0]}, which PEFT does not combine right")


def _add(model: Any, names: list[str], weights: list[float], how: str, r: int | None, density: float | None, seed: int) -> None:
    """The combined adapter, on the model as `default`: PEFT saves that one without a folder of its own."""
    import torch

    torch.manual_seed(seed)
    with refused(f"PEFT cannot combine these adapters by {how}"):
        model.add_weighted_adapter(
            names, weights, "default", how, svd_rank=r, density=density, svd_full_matrices=False
        )  # fmt: skip


def _store(model: Any, first: Adapter, made: Combination, out: Path) -> None:
    """Beside `out` first; it gets its name when all of it was read again."""
    config = model.peft_config["default"]
    config.base_model_name_or_path, config.revision, config.inference_mode = made.base, made.revision, True
    modules = config.target_modules if isinstance(config.target_modules, str) else sorted(config.target_modules)
    changes = {"r": made.r, "lora_alpha": config.lora_alpha, "target_modules": modules}
    method = first.recipe.method.model_copy(update=changes)
    of = " + ".join(f"{source.weight:g} x {source.name}" for source in made.sources)
    recipe = first.on.model_copy(update={"description": f"combined by {made.how}: {of}", "method": method})
    with written_atomically(out) as folder:
        model.save_pretrained(str(folder), selected_adapters=["default"])
        (folder / "README.md").unlink(missing_ok=True)
        copy_tokenizer(first.folder, folder)
        verify(folder, recipe)
        manifest.listed(recipe, folder, made.revision).write(folder / manifest.MANIFEST)
        (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        made.write(folder / catalog.COMBINATION)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        Contents(files=[stored(path, path.relative_to(folder).as_posix()) for path in files]).write(folder / CONTENTS)
