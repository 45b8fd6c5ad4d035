"""Merging an adapter into its base: what that changes is measured before it is kept."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from flytune.adapters.load import copy_tokenizer
from flytune.errors import ExportError
from flytune.export import gate
from flytune.export.tensors import verify
from flytune.files import written_atomically
from flytune.models import base as models_base
from flytune.models import loading, probe
from flytune.recipe.recipe import Recipe
from flytune.schema import Record, Strict

MERGED = "merge.json"
Onto = Literal["16-bit weights", "dequantized 4-bit weights", "the base's weights"]


class Candidate(Strict):
    """One way of merging, held against the trained model: the adapter on the base as it was trained on."""

    onto: Onto
    divergence: float
    """KL(trained || merged) in nats, mean over the tokens of the fixed prompts."""
    worst: float
    """The largest at a token."""
    agreement: float
    """Share of tokens after which both expect the same next one."""


class Merge(Record):
    """merge.json: what was merged, and what it cost."""

    base: str
    revision: str | None
    dtype: str
    """Of the merged weights: the base's."""
    tokens: int
    """Of the fixed prompts."""
    candidates: list[Candidate]
    """The first is the one that was kept."""


def merge(artifact: Path, out: Path) -> Merge:
    """Merges the adapter of `artifact` into its base and writes the nearer candidate to `out`, in the Hugging Face layout.

    An adapter on a 4-bit base has two: onto the 16-bit weights, which it was not trained on, or onto the 4-bit weights made
    16-bit again, which it was. Each is rounded to the base's dtype before it is measured. In memory are at most the base with
    its adapter and one merged model.

    Args:
        artifact: the folder of an adapter's artifact.
        out: a folder that is not there yet; appears only when it is whole.

    Raises:
        ExportError: `out` is there; the artifact has no adapter; its base is gone or another one; what was made is not whole.
    """
    if out.exists():
        raise ExportError(f"{out}: is there already; a merged model is written into a new folder")
    if not (artifact / "adapter_config.json").is_file():
        raise ExportError(f"{artifact}: holds no adapter; a model that was trained whole is not merged")
    loading.quiet()
    recipe = Recipe.from_yaml(artifact / "recipe.yaml")
    gate.check_base(recipe, artifact)
    verify(artifact, recipe)
    trained = _loaded(recipe, artifact)
    prompts = probe.tokenized(gate.tokenizer(artifact))
    expected = [logits for _, logits in probe.logits_of(trained, prompts)]
    ways: list[Onto] = (
        ["16-bit weights", "dequantized 4-bit weights"] if recipe.method.name == "qlora" else ["the base's weights"]
    )
    measured: list[Candidate] = []
    merged: Any = None
    # The way that is expected to be nearer comes last, so that it need not be built again.
    for onto in ways:
        del merged
        gc.collect()
        merged = _merged(recipe, trained, onto)
        measured.append(_measured(onto, expected, merged, prompts))
    candidates = sorted(measured, key=lambda candidate: candidate.divergence)
    if candidates[0].onto != ways[-1]:
        del merged
        gc.collect()
        merged = _merged(recipe, trained, candidates[0].onto)
    made = Merge(
        base=recipe.model.name_or_path,
        revision=loading.commit(recipe.model, local=True),
        dtype=str(merged.dtype).removeprefix("torch."),
        tokens=sum(map(len, prompts)),
        candidates=candidates,
    )
    _write(merged, recipe, artifact, made, out)
    return made


def _loaded(recipe: Recipe, artifact: Path) -> Any:
    try:
        return loading.exported_model(recipe, artifact, device_map=loading.device_map()).eval()
    except (OSError, ValueError, RuntimeError) as error:
        raise ExportError(f"{artifact}: adapter and base {recipe.model.name_or_path} cannot be loaded: {error}") from error


def _merged(recipe: Recipe, trained: Any, onto: Onto) -> Any:
    """The base in its own dtype, with the weights of `trained` added up layer by layer in float32, then rounded once."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        models_base.local_name(recipe.model),
        revision=recipe.model.revision,
        dtype="auto",
        attn_implementation=recipe.model.attn_implementation,
        trust_remote_code=recipe.model.trust_remote_code,
        use_safetensors=True,
        device_map=loading.device_map(),
    ).eval()
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ExportError(
            f"base model {recipe.model.name_or_path}: does not fit into the GPUs beside the trained model; merge in "
            "host memory (CUDA_VISIBLE_DEVICES= flytune merge ...)"
        )
    head = model.get_output_embeddings()
    tied = head.weight if head is not None and head.weight is model.get_input_embeddings().weight else None
    with torch.no_grad():
        for name, layer, delta in _layers(trained):
            target = model.get_submodule(name).weight
            if delta is not None and target is tied:
                raise ExportError(
                    f"{name}: the adapter changes it alone, but head and embedding are one tensor: keep the adapter"
                )
            weight = _dequantized(layer) if onto == "dequantized 4-bit weights" else None
            weight = target.float() if weight is None else weight.to(target.device)
            target.copy_(weight if delta is None else weight + delta.to(target.device, torch.float32))
    return model


def _layers(trained: Any) -> Iterator[tuple[str, Any, Any]]:
    """Every layer that has weights of its own: its name in the base, the layer, and what its adapter adds, if it has one."""
    from peft.tuners.lora import LoraLayer

    for name, module in trained.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            adapted: Any = module
            yield name, adapted.get_base_layer(), adapted.get_delta_weight("default")
        elif hasattr(getattr(module, "weight", None), "quant_state") and not name.endswith(".base_layer"):
            yield name, module, None


def _dequantized(layer: Any) -> Any:
    """The weights that a 4-bit layer computes with, float32 (out, in); None where it is not in 4 bits."""
    from bitsandbytes.functional import dequantize_4bit

    state = getattr(layer.weight, "quant_state", None)
    return None if state is None else dequantize_4bit(layer.weight.data, state).float()


def _measured(onto: Onto, expected: list[Any], merged: Any, prompts: list[list[int]]) -> Candidate:
    import torch

    pairs = list(zip(expected, (logits for _, logits in probe.logits_of(merged, prompts)), strict=True))
    divergences = torch.cat([probe.divergence(mine, theirs) for mine, theirs in pairs])
    same = torch.cat([mine.argmax(dim=-1) == theirs.argmax(dim=-1) for mine, theirs in pairs])
    return Candidate(
        onto=onto,
        divergence=float(divergences.mean()),
        worst=float(divergences.max()),
        agreement=float(same.double().mean()),
    )


def _write(model: Any, recipe: Recipe, artifact: Path, made: Merge, out: Path) -> None:
    """Beside `out` first; it gets its name when all of it was read again."""
    with written_atomically(out) as folder:
        model.save_pretrained(str(folder), max_shard_size="5GB")
        copy_tokenizer(artifact, folder)
        made.write(folder / MERGED)
        verify(folder, recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": made.dtype})}))
