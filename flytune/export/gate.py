"""The gate: checks that an export is the model that was trained, made on the stored files by another
process."""

from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from flytune.errors import ExportError
from flytune.export import companion_files
from flytune.export.folder import MANIFEST, tokenizer, trained_folder
from flytune.export.tensors import verify
from flytune.files import sha256_of
from flytune.models import Row, adapter_files, experts, heads, loading, probe
from flytune.models import base as models_base
from flytune.models.images import Processor
from flytune.models.scoring import GATE_SAMPLES, gate_sequences
from flytune.recipe import Recipe
from flytune.records import Export, Manifest, TrainingResult
from flytune.schema import RecordError
from flytune.sentences import counted, counted_of
from flytune.sharding import sharding_of

# Nats per token. A full fine-tune's live weights are float32 and its 16-bit export rounds them; kernels
# differ between training and evaluation. Measured on the demo's models: docs/measured/gate.md. A lost tensor
# costs several nats.
LOSS_BOUND = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
# Bound on the logits' distance (probe.distance) of the worst prompt. float32: sums in another order. 16 bits:
# the export rounds weights to 2**-9 (bfloat16) or 2**-12 of themselves, and reloaded layers keep their sums
# in 16 bits where the live ones kept them in float32. Figures: docs/measured/gate.md.
LOGIT_BOUND = {"float32": 1e-3, "bfloat16": 1e-1, "float16": 2e-2}
# Bound on the largest difference of a classifier's probabilities on the worst prompt, for the same reasons.
PROBABILITY_BOUND = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}

# Bound on the distance of an expert's adapter: exports and reloaded adapters are float32, and what is
# compared is float64.
EXPERT_BOUND = 1e-5


def check(recipe: Recipe, trained: Path, dataset: Path, rows: Sequence[Row], load: Callable[[], Any]) -> Any:
    """Check an export completely, and return its model.

    `check_files` comes first. `load` is then called, once, for the model that the files hold; its logits on
    the fixed prompts and its loss on the first of `rows`, the data set's held-out samples, must be those that
    training recorded from the live model before the export. An artifact that is evaluated on other samples
    than those of its own training has no recorded loss to compare with, and neither has one without held-out
    samples.

    Raises:
        ExportError: names the tensor, file or figure, the expected value, and the value found.
    """
    folder = check_files(recipe, trained, dataset)
    model = load()
    first = rows[: min(GATE_SAMPLES, recipe.evaluation.max_samples)]
    with arithmetic_of_training(recipe, model):
        loss = _heldout_loss(recipe, model, first, folder) if first else None
        _check_answers(recipe, trained, model)
    if loss is not None:
        _check_loss(recipe, trained, dataset, loss)
    return model


def arithmetic_of_training(recipe: Recipe, model: Any) -> Any:
    """Return the context in which a reloaded model computes as the live one did: under autocast, if that
    trained it.

    Without it the float32 parts of a quantized model, its head among them, are not rounded as they were in
    training: 0.04 nats of a held-out loss on answers of one kind, where the bound is 0.05
    (docs/measured/gpu.md).
    """
    import torch

    device = next(model.parameters()).device.type
    return torch.autocast(
        device, getattr(torch, recipe.model.dtype), enabled=sharding_of(recipe).uses_autocast
    )


def _heldout_loss(recipe: Recipe, model: Any, rows: Sequence[Row], folder: Path) -> float:
    """Return the reloaded model's loss over all sequences, in the unit of its head."""
    # Padding is masked: any token will do.
    return heads.head_of(recipe).loss(
        model, gate_sequences(rows), tokenizer(folder).pad_token_id or 0, recipe
    )


def check_files(recipe: Recipe, trained: Path, dataset: Path) -> Path:
    """Compare the files of an export with its configuration, its manifest, the recipe and the data set's
    tokenizer.

    Returns: the folder of the weights.

    Raises:
        ExportError: names the tensor or file, the expected value, and the value found.
    """
    folder = trained_folder(recipe, trained)
    if recipe.method.name != "full":
        check_base(recipe, folder)
    else:
        _check_config(recipe, folder)
    verify(folder, recipe)
    _check_tokenizer(folder, dataset)
    companion_files.check(recipe, folder)
    _check_manifest(recipe, trained, folder)
    return folder


def check_base(recipe: Recipe, folder: Path) -> None:
    """Compare the base model and commit in an adapter's configuration with the recipe's.

    Raises:
        ExportError: they differ.
    """
    try:
        config = adapter_files.read((folder / adapter_files.CONFIG).read_bytes())
    except adapter_files.AdapterConfigRefused as error:
        raise ExportError(f"{folder.name}/{adapter_files.CONFIG}: {error}; nothing was stored") from None
    where, model = f"{folder.name}/adapter_config.json", recipe.model
    if (base := config.get("base_model_name_or_path")) != model.name_or_path:
        raise ExportError(
            f"{where}: its base is {base}, the recipe's is {model.name_or_path}; nothing was stored"
        )
    # A branch is resolved now: if it has moved since training, the evaluation would use another base model.
    wanted = loading.commit(model)
    if config.get("revision") != wanted:
        raise ExportError(
            f"{where}: trained on revision {config.get('revision')} of {model.name_or_path}, the recipe's is "
            f"{wanted}; name the commit in model.revision; nothing was stored"
        )


def _check_answers(recipe: Recipe, trained: Path, model: Any) -> None:
    """Compare the reloaded model's logits and losses on the fixed prompts with those of the live model."""
    from safetensors import SafetensorError

    try:
        live = probe.Answers.read(trained / probe.PROBE)
    except (SafetensorError, OSError, TypeError) as error:
        raise ExportError(
            f"{probe.PROBE}: missing, cut short or damaged ({error}); nothing was stored"
        ) from None
    _check_experts(trained, live.experts, model)
    exported = probe.ask(model, live.prompts)
    if exported.logits.shape != live.logits.shape:
        raise ExportError(
            f"{probe.PROBE}: the live model answered from {counted(live.logits.shape[1], 'output')}, the "
            f"exported one from {exported.logits.shape[1]}; nothing was stored"
        )
    compared = heads.head_of(recipe).answers_in
    if compared == heads.PROBABILITIES:
        distances, bounds, of_what = (live.logits - exported.logits).abs().amax(dim=1), PROBABILITY_BOUND, ""
    else:
        distances, bounds = probe.distance(live.logits, exported.logits), LOGIT_BOUND
        of_what = "of their spread "
    bound = bounds[recipe.model.dtype]
    worst = int(distances.argmax())
    # Not `>`: a NaN distance is not within the bound.
    if not float(distances.max()) <= bound:
        beyond_it = counted_of(int((distances > bound).sum()), len(distances), "prompt", "is", "are")
        raise ExportError(
            f"{trained.name}: to {probe.PROMPTS[worst]!r} the exported model's {compared} are "
            f"{float(distances[worst]):.2g} {of_what}away from the live model's (bound {bound:g}; "
            f"{beyond_it} beyond it): what was exported is not what was trained; nothing was stored"
        )
    if live.long_ids is not None:
        after = probe.ask_long(model, live.long_ids.tolist())["long_logits"]
        farthest = float(probe.distance(live.long_logits, after).max())
        if not farthest <= bound:
            raise ExportError(
                f"{trained.name}: after {counted(len(live.long_ids), 'token')}, more than the base was made "
                f"for, the exported model's logits are {farthest:.2g} of their spread away from the live "
                f"model's (bound {bound:g}): model.rope_scaling is not in what was exported; nothing was "
                "stored"
            )
    if live.image_ids is not None:
        _check_image(recipe, trained, live, model, bound)
    difference, limit = float((exported.loss - live.loss).mean().abs()), LOSS_BOUND[recipe.model.dtype]
    if not difference <= limit:
        raise ExportError(
            f"{trained.name}: the exported model's loss on the {counted(len(distances), 'fixed prompt')} is "
            f"{difference:.2g} nats away "
            f"from the live model's (bound {limit:g}): what was exported is not what was trained; nothing "
            "was stored"
        )


def _check_image(recipe: Recipe, trained: Path, live: probe.Answers, model: Any, bound: float) -> None:
    """Compare the answer to the prompt about the fixed picture with that of the live model."""
    folder, name = trained_folder(recipe, trained), trained.name
    words = tokenizer(folder)
    after = probe.ask_image(model, words, Processor(str(folder), None, words, recipe.data.max_pixels))
    if after["image_ids"].tolist() != live.image_ids.tolist():
        raise ExportError(
            f"{name}: the exported processor writes {counted(len(after['image_ids']), 'token')} of the fixed "
            f"picture and its question, the one that was trained with {len(live.image_ids):,} or others; "
            "nothing was stored"
        )
    distance = float(probe.distance(live.image_logits, after["image_logits"]).max())
    if not distance <= bound:
        raise ExportError(
            f"{name}: to {probe.PICTURED!r}, with the fixed picture, the exported model's logits are "
            f"{distance:.2g} of their spread away from the live model's (bound {bound:g}): what reads images "
            "is not what was trained; nothing was stored"
        )


def _check_experts(trained: Path, live: Any, model: Any) -> None:
    """Compare each expert's adapter with that of the live model; the prompts reach only some experts."""
    names, exported = experts.expert_names(model), experts.fingerprints(model)
    if (exported is None) != (live is None) or (exported is not None and exported.shape != live.shape):
        counts = [0 if prints is None else len(prints) for prints in (live, exported)]
        raise ExportError(
            f"{trained.name}: the live model had adapters on {counted(counts[0], 'expert')}, the exported "
            f"one has them on {counts[1]:,}; nothing was stored"
        )
    if exported is None:
        return
    distance, worst = experts.farthest(live, exported)
    if not distance <= EXPERT_BOUND:
        raise ExportError(
            f"{trained.name}: {names[worst]}: its exported adapter is {distance:.2g} of itself away from the "
            f"live one (bound {EXPERT_BOUND:g}): what was exported is not what was trained; nothing was "
            "stored"
        )


def _check_loss(recipe: Recipe, trained: Path, dataset: Path, loss: float) -> None:
    """Compare the reloaded model's loss on the first held-out samples with the live model's in
    training.json."""
    live = TrainingResult.read(trained / "training.json").heldout_loss
    if live is None or _gate_samples(trained, dataset, recipe) != _gate_samples(dataset, dataset, recipe):
        return
    if not abs(loss - live) <= LOSS_BOUND[recipe.model.dtype]:
        raise ExportError(
            f"{trained.name}: the exported model's loss on the first "
            f"{counted(GATE_SAMPLES, 'held-out sample')} is {loss:.4f}, the live "
            f"model's was {live:.4f} (bound {LOSS_BOUND[recipe.model.dtype]}): what was exported is not what "
            "was trained; nothing was stored"
        )


def _gate_samples(folder: Path, dataset: Path, recipe: Recipe) -> tuple[Any, int]:
    """Return the held-out split and number of samples scored: from an artifact's own records, else from data
    set and recipe."""
    manifest, recipe_file = folder / "manifest.json", folder / "recipe.yaml"
    if recipe_file.is_file():
        recipe = Recipe.from_yaml(recipe_file)
    heldout = Manifest.read(manifest if manifest.is_file() else dataset / "manifest.json").heldout
    return heldout, min(GATE_SAMPLES, recipe.evaluation.max_samples)


def _check_config(recipe: Recipe, folder: Path) -> None:
    """Compare config.json with the recipe's dtype and the base model: a mistake that the files share is not
    seen in them."""
    origin = models_base.local_name(recipe.model, weights=False)
    config, base = _config(str(folder), None, recipe), _config(origin, recipe.model.revision, recipe)
    for name, written, wanted in (
        ("the recipe's dtype", str(config.dtype).removeprefix("torch."), recipe.model.dtype),
        ("the base model's model_type", config.model_type, base.model_type),
        ("the base model's tie_word_embeddings", _tied(config), _tied(base)),
        *(
            (f"{name} of the recipe's objective", getattr(config, name, None), value)
            for name, value in heads.head_of(recipe).arguments.items()
        ),
    ):
        if written != wanted:
            raise ExportError(
                f"{folder.name}/config.json: says {written}; {name} is {wanted}; nothing was stored"
            )


def _check_tokenizer(folder: Path, dataset: Path) -> None:
    """Compare the exported tokenizer with the data set's: its files, and its results when loaded."""
    stored = dataset / "tokenizer"
    for path in (path for path in sorted(stored.rglob("*")) if path.is_file()):
        name = path.relative_to(stored)
        if not (folder / name).is_file():
            raise ExportError(
                f"{folder.name}/{name}: missing; the data set's tokenizer has it; nothing was stored"
            )
        if (folder / name).read_bytes() != path.read_bytes():
            raise ExportError(
                f"{folder.name}/{name}: not the tokenizer that the data was prepared with; nothing was stored"
            )
    exported, prepared = tokenizer(folder), tokenizer(stored)
    for what, mine, theirs in (
        ("the vocabulary", exported.get_vocab(), prepared.get_vocab()),
        ("the special tokens", exported.special_tokens_map, prepared.special_tokens_map),
        ("the chat template", exported.chat_template, prepared.chat_template),
        # With a config.json in the folder another tokenizer class may be chosen than without one.
        ("the tokens of the fixed prompts", probe.tokenized(exported), probe.tokenized(prepared)),
    ):
        if mine != theirs:
            raise ExportError(
                f"{folder.name}/tokenizer_config.json: loaded from the export, {what} are not those that the "
                "data was prepared with; nothing was stored"
            )


def _check_manifest(recipe: Recipe, trained: Path, folder: Path) -> None:
    """Compare every file with its size and hash in export.json."""
    try:
        export = Export.read(trained / MANIFEST)
    except FileNotFoundError:
        raise ExportError(
            f"{MANIFEST}: missing, so the export was never finished; nothing was stored"
        ) from None
    except RecordError as error:
        raise ExportError(f"{MANIFEST}: not a manifest ({error}); nothing was stored") from None
    if export.base != recipe.model.name_or_path:
        raise ExportError(
            f"{MANIFEST}: made from {export.base}, the recipe's base is {recipe.model.name_or_path}"
        )
    if recipe.method.name == "qlora":
        # Artifacts of 0.1.0 do not say the format, of which there was one.
        exported, wanted = export.quantized or "nf4_double", recipe.method.quantized
        if exported != wanted:
            raise ExportError(
                f"{MANIFEST}: trained on {exported} weights of the base, the recipe's are {wanted}; nothing "
                "was stored"
            )
    written = {file.sha256: file.file for file in export.files}
    with ThreadPool(8) as pool:
        digests = pool.imap(sha256_of, [folder / file.file for file in export.files])
        for file in export.files:
            path, where = folder / file.file, f"{folder.name}/{file.file}"
            if not path.is_file():
                raise ExportError(f"{where}: listed in {MANIFEST} but missing; nothing was stored")
            if (size := path.stat().st_size) != file.size:
                raise ExportError(
                    f"{where}: has {size:,} bytes, {file.size:,} were written; nothing was stored"
                )
            if (digest := next(digests)) != file.sha256:
                other = f"; it is what was written as {written[digest]}" if digest in written else ""
                raise ExportError(f"{where}: its content is not what was written{other}; nothing was stored")


def _tied(config: Any) -> bool:
    """Return whether the head shares the embedding's weights."""
    return bool(
        getattr(
            config.get_text_config(), "tie_word_embeddings", getattr(config, "tie_word_embeddings", False)
        )
    )


def _config(name: str, revision: str | None, recipe: Recipe) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            name, revision=revision, trust_remote_code=recipe.model.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ExportError(
            f"{name}: its config.json cannot be read: {' '.join(str(error).split())}"
        ) from error
