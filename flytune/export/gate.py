"""The gate: whether an export is what was trained. Run on the stored files, by a process that did not write them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flytune.errors import ExportError
from flytune.export.manifest import MANIFEST
from flytune.export.tensors import verify
from flytune.files import sha256_of
from flytune.models import base as models_base
from flytune.models import loading, probe
from flytune.models.scoring import GATE_SAMPLES
from flytune.recipe.recipe import Recipe
from flytune.records.dataset import Manifest
from flytune.records.export import Export
from flytune.records.training import TrainingResult

# Nats a token. A full fine-tune's live weights are float32 and its 16-bit export rounds them; kernels differ between
# training and evaluation. Seen on the demo's models: docs/measured.md. A tensor that is lost costs whole nats.
LOSS_BOUND = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
# Of the logits' distance (probing.distance), the worst of the prompts. float32: sums in another order. 16 bits: the export
# rounds weights to 2**-9 (bfloat16) or 2**-12 of themselves, and reloaded layers keep their sums in 16 bits where the live
# ones kept them in float32. Figures: docs/measured.md.
LOGIT_BOUND = {"float32": 1e-3, "bfloat16": 1e-1, "float16": 2e-2}


def check_files(recipe: Recipe, trained: Path, dataset: Path) -> Path:
    """Holds the files of an export against its configuration, its manifest, the recipe and the data set's tokenizer.

    Returns: the folder of the weights.

    Raises:
        ExportError: names the tensor or file, what was expected, and what was found.
    """
    folder = trained_folder(recipe, trained)
    if recipe.method.name != "full":
        check_base(recipe, folder)
    else:
        _check_config(recipe, folder)
    verify(folder, recipe)
    _check_tokenizer(folder, dataset)
    _check_manifest(recipe, trained, folder)
    return folder


def check_answers(recipe: Recipe, trained: Path, model: Any) -> None:
    """Holds the answers of the reloaded export against the live model's, as training recorded them before the export.

    Raises:
        ExportError: they differ by more than rounding to the recipe's dtype can explain; or there is no record.
    """
    from safetensors import SafetensorError

    try:
        live = probe.Answers.read(trained / probe.PROBE)
    except (SafetensorError, OSError, TypeError) as error:
        raise ExportError(f"{probe.PROBE}: missing, cut short or damaged ({error}); nothing was stored") from None
    found = probe.ask(model, live.prompts)
    if found.logits.shape != live.logits.shape:
        raise ExportError(
            f"{probe.PROBE}: the live model answered from {live.logits.shape[1]} tokens, the exported one from "
            f"{found.logits.shape[1]}; nothing was stored"
        )
    distances, bound = probe.distance(live.logits, found.logits), LOGIT_BOUND[recipe.model.dtype]
    worst = int(distances.argmax())
    # Not `>`: a distance that is no number is not within the bound.
    if not float(distances.max()) <= bound:
        raise ExportError(
            f"{trained.name}: to {probe.PROMPTS[worst]!r} the exported model's logits are {float(distances[worst]):.2g} of "
            f"their spread away from the live model's (bound {bound:g}; {int((distances > bound).sum())} of {len(distances)} "
            "prompts are beyond it): what was exported is not what was trained; nothing was stored"
        )
    difference, limit = float((found.loss - live.loss).mean().abs()), LOSS_BOUND[recipe.model.dtype]
    if not difference <= limit:
        raise ExportError(
            f"{trained.name}: the exported model's loss on the {len(distances)} fixed prompts is {difference:.2g} nats away "
            f"from the live model's (bound {limit:g}): what was exported is not what was trained; nothing was stored"
        )


def check_loss(recipe: Recipe, trained: Path, dataset: Path, nll: Any, tokens: Any) -> None:
    """Holds the reloaded export's held-out loss against the live model's, as training.json recorded it before the export.

    `nll` and `tokens` are those of the reloaded model, in stored order: summed nats and scored tokens of each sample. Of an
    artifact that is evaluated on other samples than it was when it was stored, there is nothing to hold this against.

    Raises:
        ExportError: they differ by more than rounding the weights to the recipe's dtype can explain.
    """
    live = TrainingResult.read(trained / "training.json").heldout_loss
    if live is None or _asked(trained, dataset, recipe) != _asked(dataset, dataset, recipe):
        return
    found = float(nll[:GATE_SAMPLES].sum() / tokens[:GATE_SAMPLES].sum())
    if not abs(found - live) <= LOSS_BOUND[recipe.model.dtype]:
        raise ExportError(
            f"{trained.name}: the exported model's loss on the first {GATE_SAMPLES} held-out samples is {found:.4f}, the live "
            f"model's was {live:.4f} (bound {LOSS_BOUND[recipe.model.dtype]}): what was exported is not what was trained; "
            "nothing was stored"
        )


def _asked(folder: Path, dataset: Path, recipe: Recipe) -> tuple[Any, int]:
    """The samples that the loss is of: those of an artifact's own records, else of the data set and the recipe."""
    manifest = folder / "manifest.json"
    own = folder / "recipe.yaml"
    return (
        Manifest.read(manifest if manifest.is_file() else dataset / "manifest.json").heldout,
        min(GATE_SAMPLES, (Recipe.from_yaml(own) if own.is_file() else recipe).evaluation.max_samples),
    )


def trained_folder(recipe: Recipe, trained: Path) -> Path:
    """The folder of the weights that training left or that an artifact has, as the recipe's method leaves them.

    Raises:
        ExportError: a file that belongs there is missing.
    """
    folder = loading.weights_folder(trained)
    config = "config.json" if recipe.method.name == "full" else "adapter_config.json"
    missing = [f"{folder.name}/{file}" for file in (config, "tokenizer_config.json") if not (folder / file).is_file()]
    if not list(folder.glob("*.safetensors")):
        missing.append(f"{folder.name}/*.safetensors")
    if missing:
        raise ExportError(f"{trained}: not a whole {recipe.method.name} export: no {', '.join(missing)}; train again")
    return folder


def _check_config(recipe: Recipe, folder: Path) -> None:
    """Dtype and head; config.json cannot be held against the files in what both have wrong."""
    origin = models_base.local_name(recipe.model, weights=False)
    config, base = _config(str(folder), None, recipe), _config(origin, recipe.model.revision, recipe)
    for name, found, wanted in (
        ("the recipe's dtype", str(config.dtype).removeprefix("torch."), recipe.model.dtype),
        ("the base model's model_type", config.model_type, base.model_type),
        ("the base model's tie_word_embeddings", _tied(config), _tied(base)),
    ):
        if found != wanted:
            raise ExportError(f"{folder.name}/config.json: says {found}; {name} is {wanted}; nothing was stored")


def check_base(recipe: Recipe, folder: Path) -> None:
    """Raises ExportError where an adapter's configuration names another base, or another commit of it, than the recipe."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    where, model = f"{folder.name}/adapter_config.json", recipe.model
    if (base := config.get("base_model_name_or_path")) != model.name_or_path:
        raise ExportError(f"{where}: its base is {base}, the recipe's is {model.name_or_path}; nothing was stored")
    # A branch is what it points to now: where it has moved since training, the evaluation would be another model's.
    wanted = loading.commit(model)
    if config.get("revision") != wanted:
        raise ExportError(
            f"{where}: trained on revision {config.get('revision')} of {model.name_or_path}, the recipe's is {wanted}; "
            "name the commit in model.revision; nothing was stored"
        )


def _check_tokenizer(folder: Path, dataset: Path) -> None:
    """The exported tokenizer is, file by file, the one that the data was prepared with, and works as that does."""
    stored = dataset / "tokenizer"
    for path in _files(stored):
        name = path.relative_to(stored)
        if not (folder / name).is_file():
            raise ExportError(f"{folder.name}/{name}: missing; the data set's tokenizer has it; nothing was stored")
        if (folder / name).read_bytes() != path.read_bytes():
            raise ExportError(f"{folder.name}/{name}: not the tokenizer that the data was prepared with; nothing was stored")
    exported, prepared = tokenizer(folder), tokenizer(stored)
    for what, mine, theirs in (
        ("the vocabulary", exported.get_vocab(), prepared.get_vocab()),
        ("the special tokens", exported.special_tokens_map, prepared.special_tokens_map),
        ("the chat template", exported.chat_template, prepared.chat_template),
        # Beside a config.json another class may be chosen than without one.
        ("the tokens of the fixed prompts", probe.tokenized(exported), probe.tokenized(prepared)),
    ):
        if mine != theirs:
            raise ExportError(
                f"{folder.name}/tokenizer_config.json: loaded from the export, {what} are not those that the data was prepared "
                "with; nothing was stored"
            )


def _check_manifest(recipe: Recipe, trained: Path, folder: Path) -> None:
    """Every file is the one that was written, byte for byte."""
    try:
        export = Export.read(trained / MANIFEST)
    except FileNotFoundError:
        raise ExportError(f"{MANIFEST}: missing, so the export was never finished; nothing was stored") from None
    except ValidationError as error:
        raise ExportError(f"{MANIFEST}: not a manifest ({error.error_count()} mistakes); nothing was stored") from None
    if export.base != recipe.model.name_or_path:
        raise ExportError(f"{MANIFEST}: made from {export.base}, the recipe's base is {recipe.model.name_or_path}")
    written = {file.sha256: file.file for file in export.files}
    for file in export.files:
        path, where = folder / file.file, f"{folder.name}/{file.file}"
        if not path.is_file():
            raise ExportError(f"{where}: stands in {MANIFEST} but is not there; nothing was stored")
        if (size := path.stat().st_size) != file.size:
            raise ExportError(f"{where}: has {size:,} bytes, {file.size:,} were written; nothing was stored")
        if (found := sha256_of(path)) != file.sha256:
            other = f"; it is what was written as {written[found]}" if found in written else ""
            raise ExportError(f"{where}: its content is not what was written{other}; nothing was stored")


def _files(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.rglob("*")) if path.is_file())


def _tied(config: Any) -> bool:
    """Whether the head's weights are the embedding's."""
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", getattr(config, "tie_word_embeddings", False)))


def _config(name: str, revision: str | None, recipe: Recipe) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=recipe.model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ExportError(f"{name}: its config.json cannot be read: {' '.join(str(error).split())}") from error


def tokenizer(folder: Path) -> Any:
    """The tokenizer of an exported folder; raises ExportError where it cannot be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise ExportError(
            f"{folder.name}: its tokenizer cannot be read ({' '.join(str(error).split())}); nothing was stored"
        ) from None
