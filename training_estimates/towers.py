"""The tower, the part of a vision-language model that reads images: its sizes, and its memory and time for
the images of a micro batch.

How large images are, config.json does not say: where a tower does not resize them, each is as large as
`Workload.image_pixels` or a whole row allows.
"""

import math
from typing import Any, NamedTuple

from training_estimates.accelerators import Accelerator
from training_estimates.config_json import Config
from training_estimates.flops import (
    ATTENTION_BACKWARD,
    ATTENTION_HALF_LENGTH,
    product_seconds,
    recomputes,
)
from training_estimates.sizes import Tower
from training_estimates.workload import BYTES, Workload

GATED = ("mistral3", "qwen2_5_vl")
"""Model types whose towers have MLPs of three matrices, and Llama's norms."""
JOINED = ("qwen2_5_vl", "qwen3_vl")
"""Model types with one matrix for queries, keys and values. Its product stays beside the rotated queries and
keys."""
OWN_SIZE = ("mistral3", "qwen2_5_vl", "qwen3_vl")
"""Model types that read an image in its own size; all others resize it, or tiles of it, to one size."""
MASKED = ("mistral3",)
"""Model types whose tower computes attention among the patches of all images of a batch, with a mask."""
ONE_PATCH = ("llava", "llava_onevision")
"""Model types whose images have a token for each patch."""


def of_config(content: dict[str, Any], name: str) -> Tower | None:
    """Return the tower of a config.json; None where there is none, or of an unknown kind."""
    config = Config(content, name)
    vision = Config(config.table("vision_config"), name)
    layers = next((key for key in ("depth", "num_hidden_layers") if key in vision.content), None)
    patches = _patches_of_token(config, vision)
    if layers is None or patches is None:
        return None
    is_gated, is_quick = config.kind in GATED, vision.content.get("hidden_act") == "quick_gelu"
    has_windows = "fullatt_block_indexes" in vision.content
    whole_layers = len(vision.indices("fullatt_block_indexes"))
    tower = Tower(
        layers=vision.size(layers),
        hidden_size=vision.size("hidden_size"),
        intermediate_size=vision.size("intermediate_size"),
        is_gated=is_gated,
        # Queries, keys, values and output; or the joined ones, two that are rotated, the output and its copy.
        attention_kept=7 if config.kind in JOINED else 4,
        # Of each matrix but the last its output, the activation, and what the last one reads.
        mlp_kept=4 if is_gated else 2 + is_quick,
        patches_of_token=patches,
        patch_size=vision.size("patch_size"),
        image_size=None if config.kind in OWN_SIZE else vision.size("image_size"),
        window_layers=vision.size(layers) - whole_layers if has_windows else 0,
        window_size=vision.size("window_size") if has_windows else 0,
        masked=config.kind in MASKED,
    )
    return None if config.problems or vision.problems else tower


def _patches_of_token(config: Config, vision: Config) -> float | None:
    """Return how many patches of an image become one token of the text; None where it is unknown."""
    for part in (vision, config):
        if "spatial_merge_size" in part.content:
            return float(part.size("spatial_merge_size") ** 2)
    if "mm_tokens_per_image" in config.content:
        return (vision.size("image_size") // vision.size("patch_size")) ** 2 / config.size(
            "mm_tokens_per_image"
        )
    if "scale_factor" in config.content:
        return float(config.size("scale_factor") ** 2)
    return 1.0 if config.kind in ONE_PATCH else None


def patches(workload: Workload) -> float:
    """Return the patches of the images of one micro batch on one GPU, if its rows are all images."""
    tower = workload.geometry.tower
    return workload.image_tokens * tower.patches_of_token if tower else 0.0


def attended(workload: Workload) -> float:
    """Return the patches among which the tower computes attention: those of the largest image, or of all
    images of a micro batch where they are one sequence with a mask."""
    tower, of_batch = workload.geometry.tower, patches(workload)
    if tower is None or _is_masked(tower, workload):
        return of_batch
    if tower.image_size is not None:
        return (tower.image_size // tower.patch_size) ** 2
    of_row = of_batch / workload.micro_batch
    if workload.image_pixels is None:
        return of_row
    return min(of_row, math.ceil(workload.image_pixels / tower.patch_size**2))


def kept_bytes(workload: Workload) -> float:
    """Return what a trained tower keeps from its forward pass to its backward pass; 0 of a frozen one."""
    tower = workload.geometry.tower
    if tower is None or not workload.trains_tower:
        return 0.0
    of_patch = _stream(tower, workload) if recomputes(workload) else _kept(tower, workload)
    return patches(workload) * tower.layers * of_patch + _mask(tower, workload)


def working_bytes(workload: Workload) -> float:
    """Return the most that is held while the tower computes: what it keeps, and what one layer needs."""
    tower = workload.geometry.tower
    if tower is None:
        return 0.0
    # Backward: gradients of the MLP's inner numbers. Forward: the stream, a norm's output, and those numbers.
    inner = (3 if tower.is_gated else 2) * tower.intermediate_size
    layer = BYTES[workload.compute_dtype] * (inner + 2 * tower.hidden_size)
    if workload.trains_tower and recomputes(workload):
        layer += _kept(tower, workload)
    mask = 0.0 if workload.trains_tower else _mask(tower, workload)
    return kept_bytes(workload) + patches(workload) * layer + mask


def _mask(tower: Tower, workload: Workload) -> float:
    """Return the bytes of the mask, a number for each pair of patches."""
    return BYTES[workload.weight_dtype] * patches(workload) ** 2 if _is_masked(tower, workload) else 0.0


def _is_masked(tower: Tower, workload: Workload) -> bool:
    """Return whether a mask keeps images apart; FlashAttention takes their lengths instead."""
    return tower.masked and workload.attention != "flash"


def _stream(tower: Tower, workload: Workload) -> int:
    """Return the bytes of the input of a layer, for each patch."""
    return BYTES[workload.compute_dtype] * tower.hidden_size


def _kept(tower: Tower, workload: Workload) -> int:
    """Return the bytes that a trained layer keeps for its backward pass, for each patch."""
    compute = BYTES[workload.compute_dtype]
    # Input and output of a norm; of Llama's a float32 copy of the input, and its product with the factor.
    norm = 4 + 2 * compute if tower.is_gated else 2 * compute
    hidden, inner = 2 * norm + compute * tower.attention_kept, compute * tower.mlp_kept
    return tower.hidden_size * hidden + tower.intermediate_size * inner


class Seconds(NamedTuple):
    """Seconds of the tower over one micro batch, by part of StepTime."""

    forward: float = 0.0
    recomputation: float = 0.0
    backward: float = 0.0


def seconds(workload: Workload, accelerator: Accelerator) -> Seconds:
    """Return the time of the tower's matrix products and attention for one micro batch."""
    tower = workload.geometry.tower
    if tower is None or not workload.image_tokens:
        return Seconds()
    count, hidden, inner = patches(workload), tower.hidden_size, tower.intermediate_size
    shapes = [
        (count, hidden, 3.0 * hidden),
        (count, hidden, hidden),
        *[(count, hidden, inner)] * (2 if tower.is_gated else 1),
        (count, inner, hidden),
    ]
    products = tower.layers * sum(product_seconds(shape, accelerator) for shape in shapes)
    attention = _attention_seconds(tower, workload, accelerator)
    forward = products + attention
    if not workload.trains_tower:
        return Seconds(forward)
    backward = 2 * products + ATTENTION_BACKWARD * attention
    return Seconds(forward, forward if recomputes(workload) else 0.0, backward)


def attention_lengths(workload: Workload) -> list[tuple[int, float]]:
    """Return numbers of layers, and among how many patches each of their patches attends."""
    tower, whole = workload.geometry.tower, attended(workload)
    if tower is None:
        return []
    window = (tower.window_size / tower.patch_size) ** 2
    return [(tower.layers - tower.window_layers, whole), (tower.window_layers, min(whole, window))]


def _attention_seconds(tower: Tower, workload: Workload, accelerator: Accelerator) -> float:
    """Return seconds of attention in the forward pass of all layers."""
    rate = accelerator.attention_tflops * 1e12 * workload.framework.attention_share
    # At half speed for ATTENTION_HALF_LENGTH patches, as the language model's attention.
    lengths = sum(layers * (length + ATTENTION_HALF_LENGTH) for layers, length in attention_lengths(workload))
    return 4.0 * tower.hidden_size * patches(workload) * lengths / rate
