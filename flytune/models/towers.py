"""Towers, the parts of a vision-language model that read images: frozen ones, and batches without images."""

from collections.abc import Iterator, Mapping
from typing import Any

from flytune.models import images

_UNUSED = ("last_hidden_state", "hidden_states", "attentions")
"""Outputs of get_image_features that no model adds to its text."""


def freeze(model: Any) -> None:
    """Freeze all but the language model, with its embedding and head.

    The rest stays in eval mode, without dropout, and keeps nothing for a backward pass: transformers makes
    its input require a gradient where activations are checkpointed.
    """
    language = [model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()]
    trained = {id(parameter) for part in language for parameter in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)
    _keep_as_they_are(model, trained)


def _keep_as_they_are(module: Any, trained: set[int]) -> None:
    """Keep the parts without parameters of `trained`, their ids, in eval mode and without gradients.

    Parameters in 4 bits require no gradient, but what adapters beside them compute does.
    """
    import torch

    for part in module.children():
        if any(id(parameter) in trained for parameter in part.parameters()):
            _keep_as_they_are(part, trained)
        elif any(True for _ in part.parameters()):
            part.eval()
            part.forward = torch.no_grad()(part.forward)
            part.train = lambda mode=True, part=part: torch.nn.Module.train(part, False)


def run_always(model: Any, processor: images.Processor) -> None:
    """Run the tower in batches without an image too, on the fixed picture, times 0.

    Processes that share its weights gather them together, and expect gradients of it together: one without an
    image would leave the others waiting.
    """
    import torch

    with_tower = model.base_model
    picture = processor.inputs([[images.fixed()]], torch.zeros((1, 0), dtype=torch.int64))
    fixed = {name: value for name, value in picture.items() if name not in images.TYPES}
    has_images = False

    def look(module: Any, arguments: Any, named: Mapping[str, Any]) -> None:
        nonlocal has_images
        has_images = named.get("pixel_values") is not None

    def add(module: Any, arguments: Any, named: dict[str, Any]) -> Any:
        if has_images:
            return None
        embeddings = named["inputs_embeds"]
        seen = with_tower.get_image_features(
            **{name: value.to(embeddings.device) for name, value in fixed.items()}
        )
        # What the model takes of it with an image too: ZeRO-3 compares how many outputs have gradients.
        used = {name: value for name, value in seen.items() if name not in _UNUSED}
        nothing = sum((features * 0.0).sum() for features in _tensors(used))
        return arguments, named | {"inputs_embeds": embeddings + nothing.to(embeddings.dtype)}

    with_tower.register_forward_pre_hook(look, with_kwargs=True)
    model.get_decoder().register_forward_pre_hook(add, with_kwargs=True)


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif value is not None:
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(part)
