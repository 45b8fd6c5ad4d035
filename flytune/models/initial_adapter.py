"""The adapter that a run starts from: checked against the recipe at plan time, loaded into the model at load
time."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flytune import patches
from flytune.errors import FlytuneError, RecipeError, TrainingError
from flytune.models import adapter_files
from flytune.recipe import Method, Recipe
from flytune.records.contents import CONTENTS, Contents
from flytune.sentences import counted
from flytune.storage import Storage

CONFIG, WEIGHTS = adapter_files.CONFIG, "adapter_model.safetensors"
# PEFT's settings of the adapters that Flytune trains; with other values there are parameters that a recipe
# cannot name.
_PLAIN = {"peft_type": "LORA", "bias": "none", "layers_to_transform": None}
_SAME = {
    "r": 0,
    "lora_alpha": 0,
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Fields that the recipe has too, with the value of a configuration without them."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def problems(recipe: Recipe) -> list[str]:
    """Return the reasons why the recipe cannot start from its method.adapter; reads adapter_config.json
    alone.

    If target_modules is a pattern (all-linear), the layers are compared when the adapter is loaded.
    """
    if not (address := recipe.method.adapter):
        return []
    try:
        config = _config(_storage(address, RecipeError))
    except FileNotFoundError:
        return [f"method.adapter: {address}: no {CONFIG} there; name the artifact of an adapter"]
    except RecipeError as error:
        return [str(error)]
    except ValueError as error:
        return [f"method.adapter: {address}: {CONFIG}: {error}; export the adapter again"]
    sentences = [
        f"method.{name}: {wanted!r}, but the adapter of method.adapter has {has!r}; write that"
        for name, absent in _SAME.items()
        if (has := config.get(name, absent)) != (wanted := getattr(recipe.method, name))
    ]
    wanted, has = recipe.method.target_modules, config.get("target_modules")
    if isinstance(wanted, list) and (not isinstance(has, list) or set(wanted) != set(has)):
        shown = sorted(has) if isinstance(has, list) else has
        sentences.append(
            f"method.target_modules: {sorted(wanted)}, but the adapter of method.adapter has {shown}"
        )
    if bool(config.get("target_parameters")) != recipe.method.experts:
        has = "adapts experts" if config.get("target_parameters") else "adapts no experts"
        sentences.append(
            f"method.experts: {recipe.method.experts}, but the adapter of method.adapter {has}; write that"
        )
    sentences += _table_problems(recipe, config)
    for name, plain in _PLAIN.items():
        if (value := config.get(name, plain)) != plain:
            sentences.append(
                f"method.adapter: {name} {value!r} in {CONFIG}; a run can start from plain LoRA adapters only"
            )
    return sentences + _base_problems(recipe, config)


def _table_problems(recipe: Recipe, config: dict[str, Any]) -> list[str]:
    """Compare the tables that are trained; the ids of tokens are compared when the adapter is loaded."""
    method, sentences = recipe.method, []
    complete, rows = config.get("modules_to_save") or [], _rows_of(config)
    if len(complete) != len(method.modules_to_save):
        sentences.append(
            f"method.modules_to_save: {method.modules_to_save}, but the adapter of method.adapter has "
            f"{complete}; write that"
        )
    wanted = recipe.model.extra_special_tokens or method.trainable_token_indices
    if rows and not wanted:
        sentences.append(
            "model.extra_special_tokens: none, but the adapter of method.adapter trains rows of "
            f"{', '.join(rows)}; write the tokens of its recipe.yaml, or method.trainable_token_indices"
        )
    if wanted and not rows and not complete:
        sentences.append(
            "model.extra_special_tokens: the adapter of method.adapter trains no rows of tokens; start from "
            "one that does, or from none"
        )
    return sentences


def _rows_of(config: dict[str, Any]) -> dict[str, list[int]]:
    """Return the ids of the tokens whose rows are trained, by table; PEFT takes a list for those of the
    embedding."""
    rows = config.get("trainable_token_indices") or {}
    return {"embed_tokens": rows} if isinstance(rows, list) else rows


def _base_problems(recipe: Recipe, config: dict[str, Any]) -> list[str]:
    base, revision = str(config.get("base_model_name_or_path") or ""), str(config.get("revision") or "")
    name = recipe.model.name_or_path
    # One of them may be the folder that the other was downloaded to: then only the last part can be compared.
    both_ids = _is_id(base) and _is_id(name)
    if base and base != name and (both_ids or _last(base) != _last(name)):
        return [
            f"model.name_or_path: {name}, but the adapter of method.adapter was trained on {base}; name that "
            "one"
        ]
    given = recipe.model.revision or ""
    if _COMMIT.fullmatch(revision) and _COMMIT.fullmatch(given) and revision != given:
        return [f"model.revision: {given}, but the adapter of method.adapter was trained on {revision}"]
    return []


def _is_id(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def load_weights(model: Any, method: Method) -> None:
    """Load the weights of method.adapter into the new adapter of a PEFT model that is not sharded yet, in
    each process.

    Raises:
        TrainingError: they are missing, truncated or not finite, or belong to other layers.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    where = f"method.adapter: {method.adapter}"
    _check_rows(model, method, where)
    try:
        storage = _storage(str(method.adapter), TrainingError)
        state = load(_verified(storage, WEIGHTS))
    except (FileNotFoundError, SafetensorError, ValueError) as error:
        raise TrainingError(f"{where}: {WEIGHTS} cannot be read; the run stops: {error}") from error
    parameters = adapter_files.trained(model)
    wrong = sorted(parameters.keys() ^ state.keys())
    wrong += [
        name for name in parameters.keys() & state.keys() if parameters[name].shape != state[name].shape
    ]
    if wrong:
        raise TrainingError(
            f"{where}: {wrong[0]} and {counted(len(wrong) - 1, 'other is', 'others are')} missing on one "
            "side, or have another shape: its layers are "
            "not those that method.target_modules names in this model; the run stops"
        )
    for name in sorted(state):
        if not state[name].is_floating_point() or not state[name].float().isfinite().all():
            raise TrainingError(
                f"{where}: {name} in {WEIGHTS} has values that are not finite, or no floating-point numbers; "
                "the run stops: start from another adapter"
            )
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    with torch.no_grad():
        for name, parameter in parameters.items():
            if not parameter.is_meta:
                parameter.copy_(state[name])
                continue
            # A table that is trained completely, of a model whose weights are read after it was sharded.
            value = torch.nn.Parameter(state[name].to(parameter.dtype))
            for live in names[id(parameter)]:
                place, _, last = live.rpartition(".")
                setattr(model.get_submodule(place), last, value)


def weights_sha256(method: Method) -> str:
    """Return the SHA-256 of the weights of method.adapter; empty without one.

    Raises:
        RecipeError: they cannot be read.
    """
    if not method.adapter:
        return ""
    try:
        return hashlib.sha256(_verified(_storage(method.adapter, RecipeError), WEIGHTS)).hexdigest()
    except (FileNotFoundError, ValueError) as error:
        raise RecipeError(
            f"method.adapter: {method.adapter}: {WEIGHTS}: {error}; export the adapter again"
        ) from error


def _check_rows(model: Any, method: Method, where: str) -> None:
    rows = getattr(model, "peft_config", {}).get("default")
    wanted = sorted(map(sorted, (getattr(rows, "trainable_token_indices", None) or {}).values()))
    if not wanted:
        return
    try:
        config = _config(_storage(str(method.adapter), TrainingError))
    except (FileNotFoundError, ValueError) as error:
        raise TrainingError(f"{where}: {CONFIG} cannot be read; the run stops: {error}") from error
    if (has := sorted(map(sorted, _rows_of(config).values()))) != wanted:
        raise TrainingError(
            f"{where}: it trains the rows of tokens {has[0] if has else []}, and this run those of "
            f"{wanted[0]}; write the same model.extra_special_tokens and method.trainable_token_indices; the "
            "run stops"
        )


def _config(storage: Storage) -> dict[str, Any]:
    return adapter_files.read(_verified(storage, CONFIG))


def _verified(storage: Storage, name: str) -> bytes:
    """Return the content of a file, which is the one that artifact.json lists if there is one: other tools
    write none.

    Raises:
        ValueError: it is not what was written, or the artifact does not list it.
        FileNotFoundError: there is no such file.
    """
    content = storage.read(name)
    try:
        contents = Contents.parse(storage.read(CONTENTS))
    except FileNotFoundError:
        return content
    contents.check(name, len(content), hashlib.sha256(content).hexdigest())
    return content


def _storage(address: str, error: type[FlytuneError]) -> Storage:
    return Storage(address, "method.adapter", error=error, retry=False)


@contextmanager
def recorded_first_values(trl_module: str) -> Iterator[dict[str, Any]]:
    """Record the adapter of a quantized base that the trainer of TRL's module `trl_module` makes within the
    block.

    Yields: by name, each trained parameter as PEFT makes it, before TRL rounds it to bfloat16; empty for
    other bases.
    """
    patch, recorded = patches.trl.NEW_ADAPTERS[trl_module], dict[str, Any]()
    make = patch.current()

    def make_and_record(model: Any, *args: Any, **kwargs: Any) -> Any:
        adapted = make(model, *args, **kwargs)
        if getattr(model, "hf_quantizer", None) is not None:
            recorded.update(
                (name, value.data) for name, value in adapted.named_parameters() if value.requires_grad
            )
        return adapted

    with patch.replaced(make_and_record):
        yield recorded
