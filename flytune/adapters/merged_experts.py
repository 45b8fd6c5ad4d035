"""Experts of a merged model, read from its files and compared one by one with the weights and the adapter
that were trained.

The fixed prompts reach some experts only. What the files have more than the base is multiplied with the
adapter's change: 1 is all of it, 0 none; another expert's is about 0 too.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flytune.errors import ExportError
from flytune.models import experts, safetensors_files
from flytune.sentences import counted

_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Largest relative rounding of a number."""
LARGEST_ERROR = 0.01
"""Largest distance of a share from 1, beside what rounding explains."""
_DEVIATIONS = 8
"""Standard deviations of rounding that are not a fault."""


def check(folder: Path, merged: Any, trained: Any, dtype: str) -> int:
    """Compare each expert in the files of a merged model, and return how many there are.

    Args:
        merged: the model that was written, for names and shapes.
        trained: the base with its adapter.
        dtype: that of the files.

    Raises:
        ExportError: an expert's adapter is not in its weights, or not all of it.
    """
    checked, far, worst = 0, 0.0, ""
    for name, before, change, weight in _weights(folder, merged, trained):
        added = weight - before
        sizes = change.flatten(1).double().square().sum(dim=1)
        shares = (added.flatten(1).double() * change.flatten(1).double()).sum(dim=1) / sizes.clamp_min(1e-300)
        # An adapter that was never trained adds nothing: what is compared is then the size of what was added.
        nothing = sizes == 0
        errors = (shares - 1).abs()
        errors[nothing] = (
            added.flatten(1).double().norm(dim=1)[nothing] / before.flatten(1).double().norm(dim=1)[nothing]
        )
        noise = _ROUNDING[dtype] * weight.flatten(1).double().norm(dim=1) / math.sqrt(weight[0].numel())
        bounds = LARGEST_ERROR + _DEVIATIONS * noise / sizes.sqrt().clamp_min(1e-300)
        bounds[nothing] = 2 * _ROUNDING[dtype]
        checked += len(shares)
        ratio = (errors / bounds).nan_to_num(float("inf"))
        if float(ratio.max()) > max(1.0, far):
            far, place = float(ratio.max()), int(ratio.argmax())
            one = f", expert {place}" * (len(shares) > 1)
            worst = f"{name}{one}: {float(shares[place]):.3g} of its adapter is in the merged weights"
    if far > 1:
        raise ExportError(
            f"{folder.name}: {worst}; of {counted(checked, 'expert')} all must have 1; nothing was stored"
        )
    return checked


def _weights(folder: Path, merged: Any, trained: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield each adapted parameter of experts: its name, and three float32 tensors (experts, ...).

    They are its value in the base, its adapter's change, and its value in the files.
    """
    import torch

    wanted = dict(merged.named_parameters())
    sources = safetensors_files.sources(safetensors_files.TensorFiles(folder), merged, wanted)
    fused = [(name, layer.get_param(), layer) for name, layer in experts.adapted_experts(trained)]
    lists = [
        (f"{name}.weight", layer.get_base_layer().weight, layer)
        for name, layer in experts.listed_experts(trained)
    ]
    for name, before, layer in [*fused, *lists]:
        shape = tuple(wanted[name].shape)
        value = torch.empty(shape, dtype=torch.float32)
        index = tuple(slice(0, size) for size in shape)
        sources[name].read(safetensors_files.ParameterPart(name, shape, index, value))
        numbers = before, layer.get_delta_weight("default"), value
        before, change, value = (number.detach().to("cpu", torch.float32) for number in numbers)
        yield (
            (name, before, change, value)
            if len(shape) == 3
            else (name, before[None], change[None], value[None])
        )
