"""Tensors of a folder of safetensors files, by the parameter names of a transformers model.

Files are read with pread, not mapped: mapped pages would count as memory of the process until the file is
closed. Renaming and conversion (fused experts, merged projections) are those of transformers, for one
parameter at a time.
"""

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flytune.errors import TrainingError
from flytune.models import tensor_headers, weight_index

logger = logging.getLogger(__name__)

# Bytes of a tensor that are read at a time.
CHUNK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ParameterPart:
    """Part of a parameter that one process holds, and the tensor to load it into."""

    name: str
    shape: tuple[int, ...]
    """Shape of the complete parameter."""
    index: tuple[slice, ...]
    """Position of the part: a slice for each dimension of `shape`."""
    local: Any
    """Tensor of the part's shape to load into."""


class TensorFiles:
    """Tensors of a folder, by name; one file is open at a time.

    Raises:
        TrainingError: there are no safetensors files, or one is missing, truncated, or differs from the
            index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: tuple[Path, Any] | None = None
        self.file_of: dict[str, Path] = {}
        """File of each tensor."""
        expected = _index(folder)
        for path in sorted({folder / name for name in expected.values()}) or [folder / "model.safetensors"]:
            self.file_of |= dict.fromkeys(self._file(path).keys(), path)
        for key, name in expected.items():
            if key not in self.file_of:
                raise TrainingError(
                    f"{folder / name}: has no {key}, which model.safetensors.index.json lists; {_AGAIN}"
                )

    def __getitem__(self, key: str) -> Any:
        """Return a lazy tensor: it has get_shape(), and reads the slices that it is indexed with."""
        return self._file(self.file_of[key]).get_slice(key)

    def _file(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if self._open is None or self._open[0] != path:
            try:
                self._open = (path, safe_open(path, framework="pt", backend="pread"))
            except FileNotFoundError:
                raise TrainingError(f"{path}: no such file; {_AGAIN}") from None
            except (SafetensorError, OSError) as error:
                raise TrainingError(
                    f"{path}: truncated, or not a safetensors file ({error}); {_AGAIN}"
                ) from None
        return self._open[1]


_AGAIN = "download or export the model again"


def _index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor from the index; empty if there is one file."""
    index = folder / weight_index.INDEX
    # As transformers chooses if both exist.
    if index.is_file() and not (folder / "model.safetensors").is_file():
        try:
            return weight_index.weight_map(index.read_bytes())
        except weight_index.IndexRefused as error:
            raise TrainingError(f"{index}: {error}; {_AGAIN}") from None
    if absence := tensor_headers.absence(folder):
        raise TrainingError(f"{folder}: {absence}")
    return {}


@dataclass(frozen=True)
class StoredParameter:
    """Parameter that is stored as it is."""

    files: TensorFiles
    key: str

    @property
    def order(self) -> tuple[Path, str]:
        return self.files.file_of[self.key], self.key

    def read(self, part: ParameterPart) -> None:
        """Load `part` in chunks of CHUNK_BYTES, so that little more than the part is in memory."""
        from safetensors import SafetensorError

        stored = self.files[self.key]
        if tuple(stored.get_shape()) != part.shape:
            raise TrainingError(
                f"{self.order[0]}: {self.key} has the shape {stored.get_shape()}, and the model's {part.name}"
                f" {list(part.shape)}; config.json and weights are not of the same model"
            )
        if not part.local.numel():
            return
        try:
            if not part.shape:
                part.local.copy_(stored[...])
                return
            rows = max(1, CHUNK_BYTES // max(1, part.local[0].numel() * part.local.element_size()))
            first, *rest = part.index
            for start in range(0, len(part.local), rows):
                stop = min(start + rows, len(part.local))
                part.local[start:stop].copy_(stored[(slice(first.start + start, first.start + stop), *rest)])
        except (SafetensorError, OSError) as error:
            raise TrainingError(f"{self.order[0]}: {self.key} cannot be read: {error}") from None


@dataclass(frozen=True)
class Converted:
    """Parameter that transformers builds from tensors with other names (such as fused experts)."""

    files: TensorFiles
    model: Any
    """Stand-in for the model with the attributes that conversions use: config, get_parameter."""
    transform: Any
    first: str
    """Name of the first parameter that the conversion builds."""
    target: str
    """Name of this parameter."""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """Names of tensors in the files, by the pattern that they match, in natural order."""

    @property
    def order(self) -> tuple[Path, str]:
        key = next(iter(self.keys.values()))[0]
        return self.files.file_of[key], key

    def read(self, part: ParameterPart) -> None:
        """Convert and load `part`: of stacked experts only its own, otherwise the complete parameter is
        built."""
        if not part.local.numel():
            return
        index, keys, shape = part.index, self.keys, part.shape
        if self._stacks(part):
            keys = {pattern: key[index[0]] for pattern, key in keys.items()}
            shape = (len(part.local), *shape[1:])
            index = (slice(None), *index[1:])
        try:
            transform = copy.deepcopy(self.transform)
            dtype = part.local.dtype
            transform.collected_tensors = {
                p: [self.files[key][...].to(dtype) for key in listed] for p, listed in keys.items()
            }
            value = transform.convert(self.first, model=self.model, config=self.model.config)[self.target]
        except Exception as error:
            raise TrainingError(
                f"{self.files.folder}: transformers cannot build {part.name} from {', '.join(self.keys)} by "
                f"itself ({type(error).__name__}: {error}); set sharding to ddp or zero3, which load the "
                "whole model"
            ) from error
        value = value[0] if isinstance(value, list) else value
        if tuple(value.shape) != shape:
            raise TrainingError(
                f"{self.files.folder}: {part.name} as transformers builds it from {', '.join(self.keys)} has "
                f"the shape {list(value.shape)}, and not {list(shape)}; config.json and weights are not of "
                "the same model"
            )
        part.local.copy_(value[index])

    def _stacks(self, part: ParameterPart) -> bool:
        """Return whether row i of the parameter is built from the i-th tensor of each pattern alone."""
        from transformers.core_model_loading import Concatenate, MergeModulelist

        stack, *others = self.transform.operations
        return (
            type(stack) is MergeModulelist
            and stack.dim == 0
            and all(type(other) is Concatenate and other.dim > 0 for other in others)
            and all(len(key) == part.shape[0] for key in self.keys.values())
        )


def sources(files: TensorFiles, base: Any, tensors: dict[str, Any]) -> dict[str, StoredParameter | Converted]:
    """Return the source of each parameter and persistent buffer of `base` (`tensors`, by name), if it has
    one.

    The matching is transformers' own (core_model_loading.convert_and_load_state_dict_in_model, steps 1 and
    2).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = getattr(base, "_weight_conversions", None) or get_model_conversion_mapping(base)
    renamings = [transform for transform in mapping if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in mapping if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    model = SimpleNamespace(config=base.config, get_parameter=tensors.__getitem__)
    sources: dict[str, StoredParameter | Converted] = {}
    unused = []
    for key in sorted(files.file_of, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, base.base_model_prefix, tensors)
        if target not in tensors and key in tensors:
            target, pattern = rename_source_key(key, [], [], base.base_model_prefix, tensors)
        if target not in tensors:
            unused.append(key)
        elif pattern is None:
            sources.setdefault(target, StoredParameter(files, key))
        else:
            converted = sources.get(target)
            if not isinstance(converted, Converted):
                converted = Converted(files, model, converter_of[pattern], target, target)
                first, *others = converted.transform.target_patterns
                sources |= {
                    target.replace(first, other): replace(converted, target=target.replace(first, other))
                    for other in others
                }
                sources[target] = converted
            converted.keys.setdefault(pattern, []).append(key)
    if unused:
        logger.info(
            "%s: %d tensors are not used by the model: %s ...",
            files.folder,
            len(unused),
            ", ".join(unused[:3]),
        )
    keep_used_conversions(base, mapping)
    return sources


def keep_used_conversions(model: Any, conversions: Sequence[Any] | None) -> None:
    """Keep those of transformers' conversions of names and tensors that the model's files needed: they are
    reverted when the model is saved. None leaves the model as it is."""
    if conversions is not None:
        model._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]
