"""Merging an adapter into its base model, with a measurement of the change.

Experts of a merged model, read from its files and compared one by one with the weights and the adapter
that were trained.

The fixed prompts reach some experts only. What the files have more than the base is multiplied with the
adapter's change: 1 is all of it, 0 none; another expert's is about 0 too.
"""

import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from flytune.adapters.loading import copy_tokenizer
from flytune.artifacts import lineage, opening
from flytune.artifacts.opening import Consent
from flytune.errors import ExportError
from flytune.export import gate
from flytune.export.folder import tokenizer
from flytune.export.tensors import verify
from flytune.files import new_output
from flytune.models import base as models_base
from flytune.models import (
    config_json,
    experts,
    heads,
    loading,
    probe,
    published,
    rope,
    safetensors_files,
    vectors,
    vocabulary,
)
from flytune.models.experts import adapted_experts
from flytune.models.library_errors import named
from flytune.recipe import Recipe
from flytune.records import Contents
from flytune.records.contents import StoredFile, list_files, record, stored_file
from flytune.records.contents import verify as verify_files
from flytune.records.lineage import LINEAGE
from flytune.schema import Record, Strict, omitted
from flytune.sentences import counted
from flytune.storage import Storage
from training_estimates.sizes import is_fused_name

_ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Largest relative rounding of a number."""
LARGEST_ERROR = 0.01
"""Largest distance of a share from 1, beside what rounding explains."""
_DEVIATIONS = 8
"""Standard deviations of rounding that are not a fault."""


def check_experts(folder: Path, merged: Any, trained: Any, dtype: str) -> int:
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
            expert = f", expert {place}" * (len(shares) > 1)
            worst = f"{name}{expert}: {float(shares[place]):.3g} of its adapter is in the merged weights"
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


MERGED = "merge.json"
Onto = Literal[
    "16-bit weights", "dequantized 4-bit weights", "dequantized 8-bit weights", "the base's weights"
]


class Candidate(Strict):
    """One way of merging, compared with the trained model: the adapter on the base that it was trained on."""

    onto: Onto
    divergence: float
    """Mean KL(trained || merged) over the tokens of the fixed prompts, in nats; of vectors the mean of 1 -
    the cosine similarity over the prompts."""
    worst: float
    """Largest divergence at a token, or of a prompt's vectors."""
    agreement: float
    """Share of tokens after which both models predict the same next token; of vectors, of prompts with the
    same nearest other one."""


class Merge(Record):
    """merge.json: the merged base, and the divergence of each way of merging."""

    base: str
    revision: str | None
    dtype: str
    """Dtype of the merged weights."""
    tokens: int
    """Number of tokens of the fixed prompts."""
    of_vectors: bool = omitted(False)
    """True of an embedding model, whose vectors of the fixed prompts are compared."""
    candidates: list[Candidate]
    """Measured candidates, nearest first; the first was written."""
    experts: int | None = omitted(None)
    """Adapted experts of all layers, each of which was compared in the merged files; None if there are
    none."""
    files: list[StoredFile] = omitted([])
    """The other files of the folder with their hashes, which are compared before the folder is used."""


def merge(artifact: Path, out: Path, consent: Consent = opening.NONE, dtype: str = "auto") -> Merge:
    """Merge the adapter of `artifact` into its base and write the nearest candidate to `out`, in the Hugging
    Face layout.

    An adapter on a quantized base has two candidates: merged into the 16-bit weights, which it was not
    trained on, or into the dequantized weights, which it was trained on. Each is rounded to `dtype` before it
    is measured. At most the base with its adapter and one merged model are in memory.

    Args:
        artifact: the folder of an adapter's artifact.
        out: a folder that does not exist; it is created only when its content is complete.
        consent: what the person allows, of code and base.
        dtype: that of the merged weights; `auto`: the base's.

    Raises:
        ExportError: `out` exists; the artifact has no adapter, is not what was written, or asks for code
            without consent; its base is missing or another one; or the merged files fail the checks.
    """
    if out.exists():
        raise ExportError(f"{out}: exists already; a merged model is written into a new folder")
    if not (artifact / "adapter_config.json").is_file():
        raise ExportError(f"{artifact}: has no adapter; it is a complete model, which needs no merging")
    loading.import_libraries("peft")
    recipe = opening.open_artifact(artifact, consent).recipe
    of_vectors = heads.head_of(recipe).answers_in == heads.VECTORS
    if not of_vectors:
        opening.require_language_model(recipe, artifact)
    if consent.base is None:
        gate.check_base(recipe, artifact)
    verify(artifact, recipe)
    trained = _loaded(recipe, artifact)
    prompts = probe.tokenized(tokenizer(artifact))
    vocabulary.check_ids(trained, [token for prompt in prompts for token in prompt], artifact)
    expected = _answers(trained, prompts)
    ways = _ways(recipe)
    measured: list[Candidate] = []
    merged: Any = None
    # The candidate that is expected to be nearest comes last, so that it need not be built again.
    for onto in ways:
        del merged
        gc.collect()
        merged = _merged(recipe, trained, onto, dtype)
        measured.append(_measured(onto, expected, merged, prompts))
    candidates = sorted(measured, key=lambda candidate: candidate.divergence)
    if candidates[0].onto != ways[-1]:
        del merged
        gc.collect()
        merged = _merged(recipe, trained, candidates[0].onto, dtype)
    merge = Merge(
        base=recipe.model.name_or_path,
        revision=loading.commit(recipe.model, local=True),
        dtype=str(merged.dtype).removeprefix("torch."),
        tokens=sum(map(len, prompts)),
        of_vectors=of_vectors,
        candidates=candidates,
    )
    return _write(merged, trained, recipe, artifact, merge, out)


def is_merged(folder: Path) -> bool:
    """Return whether a folder is that of a merged model."""
    return (folder / MERGED).is_file()


def check_merged(folder: Path, consent: Consent) -> None:
    """Compare a merged model's files with merge.json, and refuse code of its own without consent.

    Raises:
        ExportError: a file is not what was written, or there is code without consent.
    """
    listed = record(Merge, folder / MERGED).files
    if listed:
        verify_files(folder, Contents(files=[*listed, stored_file(folder / MERGED, MERGED)]))
    opening.check_code(folder, None, consent.trust_remote_code)


def require_language_model(folder: Path) -> None:
    """Refuse a merged embedding model, whose head of words a program would draw at random.

    Raises:
        ExportError: it is one.
    """
    if record(Merge, folder / MERGED).of_vectors:
        raise ExportError(f"{folder}: {heads.HEADS[heads.VECTORS].no_words}")


def load(folder: Path, consent: Consent = opening.NONE) -> Any:
    """Return a merged language model, after a check of its files.

    Raises:
        ExportError: as `check_merged` and `require_language_model`; or it cannot be loaded.
    """
    check_merged(folder, consent)
    require_language_model(folder)
    with named(f"{folder}: the merged model cannot be loaded", ExportError):
        return heads.loader_of(folder).from_pretrained(
            folder,
            dtype="auto",
            trust_remote_code=consent.trust_remote_code,
            use_safetensors=True,
            device_map=loading.device_map(),
        )


def _ways(recipe: Recipe) -> list[Onto]:
    """Return the weights that the adapter can be merged into; those that are expected to be nearest come
    last."""
    base_quantization = config_json.published_quantization(recipe.model)
    if base_quantization:
        return [
            "dequantized 8-bit weights"
            if base_quantization.get("load_in_8bit")
            else "dequantized 4-bit weights"
        ]
    if recipe.method.name == "qlora":
        return [
            "16-bit weights",
            "dequantized 8-bit weights" if recipe.method.load_in_8bit else "dequantized 4-bit weights",
        ]
    return ["the base's weights"]


def _loaded(recipe: Recipe, artifact: Path) -> Any:
    with named(f"{artifact}: adapter and base {recipe.model.name_or_path} cannot be loaded", ExportError):
        return loading.exported_model(recipe, artifact, device_map=loading.device_map()).eval()


def _merged(recipe: Recipe, trained: Any, onto: Onto, dtype: str) -> Any:
    """Return the base in a dtype, with the deltas of `trained` added layer by layer in float32 and rounded
    once."""
    import torch

    loader = heads.head_of(recipe).loader()
    model = loader.from_pretrained(
        models_base.local_name(recipe.model),
        revision=recipe.model.revision,
        dtype=dtype,
        attn_implementation=recipe.model.attn_implementation,
        trust_remote_code=recipe.model.trust_remote_code,
        use_safetensors=True,
        device_map=loading.device_map(),
        **rope.arguments(recipe.model),
    ).eval()
    if config_json.published_quantization(recipe.model):
        # Its layers get the trained model's dequantized weights below.
        model = model.dequantize()
        # transformers would write them as it has read them.
        model._weight_conversions = [
            conversion
            for conversion in getattr(model, "_weight_conversions", None) or []
            if not any(map(_is_quantization, conversion.operations))
        ]
    vocabulary.grow(model, recipe.model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ExportError(
            f"base model {recipe.model.name_or_path}: does not fit on the GPUs together with the trained "
            "model; merge in host memory (CUDA_VISIBLE_DEVICES= flytune merge ...)"
        )
    head = model.get_output_embeddings()
    tied = head.weight if head is not None and head.weight is model.get_input_embeddings().weight else None
    with torch.no_grad():
        for name, layer, delta, magnitude in _layers(trained):
            is_parameter = is_fused_name(name)
            target = model.get_parameter(name) if is_parameter else model.get_submodule(name).weight
            if delta is not None and target is tied:
                raise ExportError(
                    f"{name}: the adapter changes it alone, but head and embedding are one tensor: use the "
                    "adapter unmerged"
                )
            weight = loading.dequantized(layer) if onto.startswith("dequantized") else None
            weight = target.float() if weight is None else weight.to(target.device)
            changed = weight if delta is None else weight + delta.to(target.device, torch.float32)
            if magnitude is not None:
                # DoRA (Liu et al. 2024, eq. 5): the rows of the changed weight get the trained norms.
                changed *= (magnitude.to(changed) / torch.linalg.norm(changed, dim=1)).unsqueeze(1)
            target.copy_(changed)
        for name, rows, values in _trained_tables(trained):
            table = model.get_submodule(name).weight
            table[rows] = values.to(table)
    return model


def _is_quantization(operation: Any) -> bool:
    return type(operation).__module__ == "transformers.integrations.bitsandbytes"


def _layers(trained: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield adapted and quantized layers, and experts: name in the base, layer, and delta and magnitudes of
    the adapter."""
    from peft.tuners.lora import LoraLayer

    for name, layer in adapted_experts(trained):
        yield name, layer.get_base_layer(), layer.get_delta_weight("default"), None
    of_experts = {id(layer) for _, layer in adapted_experts(trained)}
    for name, module in trained.get_base_model().named_modules():
        if id(module) in of_experts:
            continue
        if isinstance(module, LoraLayer):
            adapted: Any = module
            magnitude = (
                adapted.lora_magnitude_vector["default"].weight if adapted.lora_magnitude_vector else None
            )
            yield name, adapted.get_base_layer(), adapted.get_delta_weight("default"), magnitude
        elif loading.is_quantized(module) and not name.endswith(".base_layer"):
            yield name, module, None, None


def _trained_tables(trained: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield embedding and head as far as they are trained: name in the base, rows (ids, or all), and their
    values."""
    from peft.utils.other import ModulesToSaveWrapper

    base = trained.get_base_model()
    for name, module in base.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            yield name, slice(None), module.modules_to_save["default"].weight
    for name, layer in vocabulary.row_layers(base):
        yield (
            name.removesuffix(".token_adapter"),
            layer.token_indices["default"],
            layer.trainable_tokens_delta["default"],
        )


def _answers(model: Any, prompts: list[list[int]]) -> list[Any]:
    """Return what is compared of a model: the logits of each prompt, or all prompts' vectors."""
    if vectors.are_made_by(model):
        return [probe.ask(model, prompts).logits]
    return [logits for _, logits in probe.logits_of(model, prompts)]


def _measured(onto: Onto, expected: list[Any], merged: Any, prompts: list[list[int]]) -> Candidate:
    import torch

    pairs = list(zip(expected, _answers(merged, prompts), strict=True))
    if vectors.are_made_by(merged):
        ((mine, theirs),) = ((first.double(), second.double()) for first, second in pairs)
        divergences = 1 - (mine * theirs).sum(dim=1)
        same = _nearest(mine) == _nearest(theirs)
    else:
        divergences = torch.cat([probe.divergence(mine, theirs) for mine, theirs in pairs])
        same = torch.cat([mine.argmax(dim=-1) == theirs.argmax(dim=-1) for mine, theirs in pairs])
    return Candidate(
        onto=onto,
        divergence=float(divergences.mean()),
        worst=float(divergences.max()),
        agreement=float(same.double().mean()),
    )


def _nearest(units: Any) -> Any:
    """Return the number of the vector that is nearest to each one, beside itself, (vectors,)."""
    return (units @ units.T).fill_diagonal_(-1).argmax(dim=1)


def _write(model: Any, trained: Any, recipe: Recipe, artifact: Path, merged: Merge, out: Path) -> Merge:
    """Write the model to a temporary folder, check its tensors, and rename it to `out`; return merge.json
    with its files."""
    from transformers.trainer_utils import align_special_tokens

    with new_output(out) as folder:
        if recipe.data.eos_token or recipe.model.extra_special_tokens:
            # Servers stop at the tokens that the model's own configuration names.
            align_special_tokens(model, tokenizer(artifact))
        generation = model.generation_config if model.can_generate() else None
        if generation is not None:
            published.make_savable(model)
        model.save_pretrained(str(folder), max_shard_size="5GB")
        published.write_config(model.config, recipe.model, merged.dtype, type(model).__name__, folder)
        if generation is not None:
            published.write_generation_config(generation, recipe.model, folder)
        copy_tokenizer(artifact, folder)
        if (artifact / "manifest.json").is_file():
            # A combination of adapters is not a run, and has none.
            lineage.of_artifact(Storage(artifact, "")).write(folder / LINEAGE)
        verify(
            folder,
            recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": merged.dtype})}),
        )
        experts = check_experts(folder, model, trained, merged.dtype) if recipe.method.experts else None
        merged = merged.model_copy(update={"experts": experts})
        merged = merged.model_copy(update={"files": list_files(folder, label="hashing the merged model")})
        merged.write(folder / MERGED)
    return merged
