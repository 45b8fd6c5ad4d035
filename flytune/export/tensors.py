"""Checks of the tensors of an exported folder against the folder's own configuration and its base model."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune.errors import ExportError, FlytuneError
from flytune.models import adapter_files, heads, loading, safetensors_files, sharded_loading, weight_index
from flytune.models.experts import base_name
from flytune.recipe import Model, Recipe
from flytune.sentences import counted, counted_of

_NOT_STORED = "nothing was stored"
_INDEX = weight_index.INDEX


def verify(folder: Path, recipe: Recipe) -> int:
    """Compare the tensors of `folder`, a model or an adapter, with its configuration and the recipe's dtype.

    Returns: the number of tensors.

    Raises:
        ExportError: names the tensor that is missing, unknown, of another shape or dtype, empty, not finite,
            or all zero; or the file that is missing, cut, or holds other tensors than the index says.
    """
    adapter = (folder / "adapter_config.json").is_file()
    index = _index(folder)
    shapes: dict[str, list[int]] = {}
    zeros: dict[str, str] = {}
    for file in tqdm(_files(folder, index), desc="reading the export again", unit=" files", delay=2):
        shapes |= _read(file, adapter, "float32" if adapter else recipe.model.dtype, zeros)
        if moved := sorted(name for name in _names(file) if index and index.get(name) != file.name):
            raise ExportError(
                f"{file.name}: {moved[0]}: {_INDEX} says that it is in {index.get(moved[0], 'no file')}; "
                f"{_NOT_STORED}"
            )
    if missing := sorted(index.keys() - shapes.keys()):
        raise ExportError(f"{index[missing[0]]}: {missing[0]}: {_INDEX} says that it is there; {_NOT_STORED}")
    if not shapes:
        raise ExportError(f"{folder.name}: no tensors in *.safetensors; {_NOT_STORED}")
    _check_adapter(folder, shapes) if adapter else _check_model(folder, shapes, recipe)
    _check_zeros(zeros, {} if adapter else _zero_in_base(zeros, recipe.model))
    return len(shapes)


def _index(folder: Path) -> dict[str, str]:
    path = folder / _INDEX
    if not path.is_file():
        return {}
    try:
        return weight_index.weight_map(path.read_bytes())
    except weight_index.IndexRefused as error:
        raise ExportError(f"{_INDEX}: {error}; {_NOT_STORED}") from None


def _files(folder: Path, index: dict[str, str]) -> list[Path]:
    for name in sorted(set(index.values())):
        if not (folder / name).is_file():
            raise ExportError(f"{name}: listed in {_INDEX} but missing; {_NOT_STORED}")
    return sorted(folder.glob("*.safetensors"))


def _names(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as tensors:
        return list(tensors.keys())


def _read(file: Path, adapter: bool, dtype: str, zeros: dict[str, str]) -> dict[str, list[int]]:
    """Return the shapes of one file's tensors after checking their values; add all-zero ones to `zeros` with
    their file."""
    import torch
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, list[int]] = {}
    try:
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                tensor, where = tensors.get_tensor(name), f"{file.name}: {name}"
                if tensor.numel() == 0:
                    raise ExportError(f"{where}: empty, found shape {list(tensor.shape)}; {_NOT_STORED}")
                if tensor.is_floating_point() and str(tensor.dtype) != f"torch.{dtype}":
                    raise ExportError(
                        f"{where}: is {str(tensor.dtype).removeprefix('torch.')}, expected {dtype}; "
                        f"{_NOT_STORED}"
                    )
                # One pass, in which a NaN prevails. A look at each value takes 80 times as long: 20 s for 1B
                # parameters.
                ends = torch.aminmax(tensor) if tensor.is_floating_point() else (0, tensor.any())
                low, high = map(float, ends)
                if not (math.isfinite(low) and math.isfinite(high)):
                    bad = int((~torch.isfinite(tensor)).sum())
                    raise ExportError(
                        f"{where}: {counted_of(bad, tensor.numel(), 'value', 'is', 'are')} not finite; "
                        f"{_NOT_STORED}"
                    )
                if low == high == 0:
                    zeros[name] = file.name
                shapes[name] = list(tensor.shape)
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{file.name}: cut short or damaged ({error}); {_NOT_STORED}") from None
    return shapes


def _check_model(folder: Path, shapes: dict[str, list[int]], recipe: Recipe) -> None:
    """Compare names and shapes with the model that config.json describes, by transformers' own rules of
    loading."""
    described = Model(
        name_or_path=str(folder),
        dtype=recipe.model.dtype,
        # Names and shapes do not depend on it; every model has this one.
        attn_implementation="eager",
        trust_remote_code=recipe.model.trust_remote_code,
    )
    try:
        model = sharded_loading.meta_model(
            described, recipe.model.dtype, heads.head_of(recipe), recipe.training.seed
        )
        persistent = model.state_dict().keys()
        wanted = dict(model.named_parameters())
        wanted |= {name: buffer for name, buffer in model.named_buffers() if name in persistent}
        sources = safetensors_files.sources(safetensors_files.TensorFiles(folder), model, wanted)
    except (FlytuneError, OSError, ValueError) as error:
        raise ExportError(
            f"{folder.name}/config.json: describes no model that could be built: {error}"
        ) from error
    used: set[str] = set()
    for name, tensor in wanted.items():
        source = sources.get(name)
        if source is None:
            raise _missing(folder, [other for other in wanted if other not in sources])
        if isinstance(source, safetensors_files.Converted):
            _check_converted(folder, name, source, tensor.shape, shapes)
            used |= {key for keys in source.keys.values() for key in keys}
            continue
        used.add(source.key)
        if shapes[source.key] != list(tensor.shape):
            file = safetensors_files.TensorFiles(folder).file_of[source.key].name
            raise ExportError(
                f"{file}: {source.key}: expected shape {list(tensor.shape)}, found {shapes[source.key]}; "
                f"{_NOT_STORED}"
            )
    if unknown := sorted(shapes.keys() - used):
        why = (
            "it is tied to another one (tie_word_embeddings)"
            if unknown[0] in persistent
            else "the model has no such tensor"
        )
        raise ExportError(f"{folder.name}: {unknown[0]}: {why}, and config.json asks for none; {_NOT_STORED}")


def _check_converted(
    folder: Path, name: str, source: safetensors_files.Converted, shape: Any, shapes: dict[str, list[int]]
) -> None:
    """Check that all parts of a parameter (a layer's experts, for example) are there, with equal shapes."""
    from transformers.core_model_loading import MergeModulelist

    stacked = type(source.transform.operations[0]) is MergeModulelist
    for pattern in source.transform.source_patterns:
        keys = source.keys.get(pattern, [])
        if not keys or (stacked and len(keys) != shape[0]):
            wanted = shape[0] if stacked else 1
            raise ExportError(
                f"{folder.name}: {name} is made of tensors {pattern}: {wanted} expected by the "
                f"configuration, found {len(keys)}; {_NOT_STORED}"
            )
        if unlike := [key for key in keys if shapes[key] != shapes[keys[0]]]:
            difference = f"expected shape {shapes[keys[0]]}, as {keys[0]} has, found {shapes[unlike[0]]}"
            raise ExportError(f"{folder.name}: {unlike[0]}: {difference}; {_NOT_STORED}")


def _check_adapter(folder: Path, shapes: dict[str, list[int]]) -> None:
    """Check that each lora_A has its lora_B and vice versa, both of the configured rank; loading the base
    checks the rest."""
    try:
        config = adapter_files.read((folder / adapter_files.CONFIG).read_bytes())
        adapter_files.check_ranks(config, shapes)
    except adapter_files.AdapterConfigRefused as error:
        raise ExportError(f"{folder.name}/{adapter_files.CONFIG}: {error}; {_NOT_STORED}") from None
    ranks, rank = config.get("rank_pattern") or {}, config.get("r", adapter_files.DEFAULT_RANK)
    partner = {name: _partner(name) for name in shapes if _partner(name)}
    if missing := sorted(other for other in partner.values() if other not in shapes):
        raise _missing(folder, missing)
    owners = tuple("." + parameter.rpartition(".")[0] for parameter in config.get("target_parameters") or ())
    experts = [name for name in partner if base_name(name.partition(".lora_")[0]).endswith(owners)]
    for name in experts:
        # A factor has the ranks of all experts of a layer, one after the other.
        mine, other = (shapes[name][0], shapes[partner[name]][-1]) if ".lora_A." in name else (rank, rank)
        if mine != other or (not ranks and mine % rank):
            raise ExportError(
                f"adapter_model.safetensors: {name}: has {counted(mine, 'row')}, and its lora_B "
                f"{counted(other, 'column')}; both must have {rank} for each expert; {_NOT_STORED}"
            )
    for name in partner.keys() - {*experts}:
        shape = shapes[name]
        wanted = [rank, *shape[1:]] if ".lora_A." in name else [*shape[:-1], rank]
        if not ranks and shape != wanted:
            raise ExportError(
                f"adapter_model.safetensors: {name}: expected shape {wanted}, found {shape}; {_NOT_STORED}"
            )


def _partner(name: str) -> str:
    for mine, other in ((".lora_A.", ".lora_B."), (".lora_B.", ".lora_A.")):
        if mine in name:
            return name.replace(mine, other)
    return ""


def _missing(folder: Path, names: Collection[str]) -> ExportError:
    first, more = sorted(names)[0], f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ExportError(
        f"{folder.name}: {first}{more}: expected by the configuration, found in no file; {_NOT_STORED}"
    )


def _check_zeros(zeros: dict[str, str], excused: Collection[str]) -> None:
    for name, file in zeros.items():
        if name not in excused:
            raise ExportError(
                f"{file}: {name}: all zero, so it was never trained or never gathered; {_NOT_STORED}"
            )


def _zero_in_base(names: Collection[str], model: Model) -> set[str]:
    """Return those of `names` that are all zero in the base model's files too (an unused bias, for
    example; RoBERTa's kinds of tokens)."""
    if not names:
        return set()
    base = safetensors_files.TensorFiles(loading.local_folder(model))
    # A model without a head leaves the first part out: model.norm.weight is norm.weight there.
    stored = {name.partition(".")[2]: name for name in base.file_of} | {name: name for name in base.file_of}
    return {name for name in names if name in stored and not base[stored[name]][...].any()}
