"""Layers that a recipe names for its adapter (target_modules, rank_pattern, alpha_pattern), matched as PEFT
does.

PEFT ignores a name in a list, and a pattern of a rank, that no layer matches: the adapter is smaller than the
recipe says.

`all-linear` has a list of its own: layers that it adapts, and those that it leaves without an adapter.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flytune.errors import RecipeError
from flytune.models import experts, heads
from flytune.models.experts import REFUSED, fused, is_listed, suffixes
from flytune.recipe import Method, Recipe
from training_estimates.meta_model import ENCODERS, decoder_of
from training_estimates.sizes import is_fused_name

_FIXED = (
    r"(?:.*\.)?(?:[^.]*router[^.]*|gate|indexer|encoder_attn|cross_attn|crossattention)\..*|"
    r"(?:.*\.)?(?:[^.]*router|gate|shared_expert_gate|dt_proj)"
)
"""Routers (in code of a model's own, a linear layer `gate`) and gates of shared experts choose experts: an
adapter on them changes which experts a sample trains. Indexers of sparse attention choose tokens, without a
gradient, and no text reaches the attention to an encoder or to images. Mamba layers read dt_proj's weight and
not its result (modeling_mamba, modeling_jamba): an adapter there changes nothing."""
MAMBA = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}
"""Model types whose out_proj PEFT refuses (peft 0.21, tuners_utils._check_lora_target_modules_mamba): their
kernels read its weight, not its result."""

_LINEAR_NAMES, _MIXTRAL_NAMES = (
    frozenset({"gate", "gate_proj", "up_proj", "down_proj"}),
    frozenset({"gate", "w1", "w2", "w3"}),
)
FUSED_EXPERTS = {
    **dict.fromkeys(
        (
            "afmoe",
            "beam",
            "cohere2_moe",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "dots1",
            "ernie4_5_moe",
            "exaone_moe",
            "flex_olmo",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "hunyuan_v1_moe",
            "longcat_flash",
            "mellum",
            "olmoe",
            "qwen3_moe",
            "qwen3_next",
            "solar_open",
        ),
        _LINEAR_NAMES,
    ),
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral"), _MIXTRAL_NAMES),
}
"""Names of layers, by model type, in whose place PEFT would adapt the tensor of all experts and the router.

For model types whose experts transformers 5 keeps in one tensor, PEFT 0.21 (transformers_weight_conversion)
reads `all-linear` as it was in transformers 4: it adapts that tensor and the router, in place of all layers
of those names, and fails with a lora_dropout. Here such names have no adapter, unless method.target_modules
names them.
"""


def is_left_out(model_type: str, decoder: str | None, module: str) -> bool:
    """Return whether `all-linear` leaves a linear layer without an adapter, by its name in the model.

    Args:
        decoder: name of the text decoder in a model of several parts (decoder_of); None if there is one part.
    """
    leaf = module.rpartition(".")[2]
    if decoder and not module.startswith(f"{decoder}."):
        return True
    if re.fullmatch(_FIXED, module) or leaf in FUSED_EXPERTS.get(model_type, ()):
        return True
    return leaf == "out_proj" and model_type in MAMBA


def fields(model: Any, method: Method) -> dict[str, Any]:
    """Return the fields of PEFT's LoraConfig that name what an adapter changes: target_modules,
    target_parameters ..."""
    if method.is_all_linear:
        chosen = _all_linear(model)
    else:
        named = method.target_modules
        if isinstance(named, str) and _type_of(model) in FUSED_EXPERTS:
            # PEFT would take the last parts of the names that match, and adapt them in all layers.
            named = [name for name in _linear_layers(model) if re.fullmatch(named, name)]
        chosen = {"target_modules": named if isinstance(named, str) else list(named)}
        if of_head := _encoder_head(model):
            chosen["exclude_modules"] = of_head
    if not method.experts:
        return chosen
    targets = chosen["target_modules"]
    if not method.is_all_linear and (
        listed := [name for name in _linear_layers(model) if experts.is_listed(name)]
    ):
        ends = "|".join(map(re.escape, listed))
        chosen["target_modules"] = (
            f"(?:{targets})|(?:{ends})" if isinstance(targets, str) else [*targets, *listed]
        )
    return chosen | {"target_parameters": experts.suffixes(experts.fused(model)) or None}


def _all_linear(model: Any) -> dict[str, Any]:
    names = FUSED_EXPERTS.get(_type_of(model), frozenset())
    linear = _linear_layers(model)
    if names:
        leaves = {name.rpartition(".")[2] for name in linear if not re.fullmatch(_FIXED, name)}
        return {"target_modules": sorted(leaves - names), "exclude_modules": excluded(model)}
    return {"target_modules": "all-linear", "exclude_modules": excluded(model)}


def excluded(model: Any) -> str | None:
    """Return the regular expression for PEFT's exclude_modules with `all-linear`; None if no linear layer
    matches it.

    Left out are routers, the indexers of sparse attention, Mamba's out_proj where PEFT refuses it, and in a
    model of text and images or sound all that is not of its text decoder: samples of text alone give those
    layers no gradient.
    """
    parts = [_FIXED]
    if _type_of(model) in MAMBA:
        parts.append(r"(?:.*\.)?out_proj")
    if decoder := decoder_of(model):
        parts.append(rf"(?!{re.escape(decoder)}\.).*")
    of_head = _encoder_head(model)
    if of_head:
        parts.append("|".join(map(re.escape, of_head)))
    pattern = re.compile("|".join(parts))
    names = FUSED_EXPERTS.get(_type_of(model), frozenset())
    # PEFT refuses a pattern that leaves out none of the layers that it would adapt.
    adapted = [name for name in _linear_layers(model) if name.rpartition(".")[2] not in names]
    return pattern.pattern if any(pattern.fullmatch(name) for name in [*adapted, *of_head]) else None


def _linear_layers(model: Any) -> list[str]:
    """Return the names of the layers that PEFT takes for linear, without the head."""
    import torch
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings() or getattr(model, "score", None)
    left_out = {*_encoder_head(model)}
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear | Conv1D) and layer is not head and name not in left_out
    ]


def _encoder_head(model: Any) -> list[str]:
    """Return the names of the linear layers of an encoder's head of classes; none of other models, whose head
    PEFT knows."""
    import torch

    if _type_of(model) not in ENCODERS or not heads.has_score(model):
        return []
    modules = {*heads.modules_of(model)}
    return [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and modules & {*name.split(".")}
    ]


def _type_of(model: Any) -> str:
    return str(getattr(model.config, "model_type", None))


MOST_SHOWN = 3
"""Wrong names of a list that a message shows."""
NEAR = 0.82
"""Least likeness of a name that was meant (difflib): q_prj and v_porj are near, kv_b_proj is not."""
_WORD = re.compile(r"[A-Za-z_]\w*")
_SCORE = "score"
"""Head of a reward model."""


@dataclass(frozen=True)
class Modules:
    """A model's modules, by their names, as far as they are known."""

    model_type: str
    linear: list[str]
    """Linear layers, without the head."""
    embedding: str = ""
    head: str = ""
    experts: list[str] = field(default_factory=list)
    """Parameters with a matrix for each routed expert, which method.experts adapts."""
    others: list[str] = field(default_factory=list)
    """Modules that PEFT gives no adapter: containers, norms, experts."""
    decoder: str | None = None
    """Name of the text decoder in a model of several parts; None if there is one part."""

    def adapted(self, method: Method) -> list[str]:
        """Return those that get an adapter."""
        is_adapted = matcher(method, self.model_type, self.decoder)
        return [name for name in (*self.linear, *self.experts, *self.tables(method)) if is_adapted(name)]

    def tables(self, method: Method) -> list[str]:
        """Return the names of embedding and head where method.target_modules can name them: not where all of
        it is trained."""
        tables = {"embed_tokens": self.embedding, "lm_head": self.head}
        able = (
            []
            if method.is_all_linear
            else [name for key, name in tables.items() if key not in method.modules_to_save]
        )
        return [name for name in able if name]


def matcher(method: Method, model_type: str, decoder: str | None) -> Callable[[str], bool]:
    """Return the function that says of a name whether a recipe adapts it: of a linear layer, or of a layer's
    experts.

    PEFT (tuners/tuners_utils.py, check_target_module_exists): a regular expression matches a module's whole
    name, a name in a list its end.
    """
    is_named = _by_target_modules(method, model_type, decoder)

    def is_adapted(name: str) -> bool:
        if is_fused_name(name):
            return method.experts
        return (method.experts and is_listed(name)) or is_named(name)

    return is_adapted


def _by_target_modules(method: Method, model_type: str, decoder: str | None) -> Callable[[str], bool]:
    named = method.target_modules
    if method.is_all_linear:
        return lambda name: not is_left_out(model_type, decoder, name)
    if isinstance(named, str):
        pattern = re.compile(named)
        return lambda name: pattern.fullmatch(name) is not None
    names = frozenset(named)
    return lambda name: any(end in names for end in _ends(name))


def rank_of(method: Method) -> Callable[[str], int]:
    """Return the function that says the rank of an adapted layer by its name.

    PEFT (utils/other.py, get_pattern_key) takes the first of method.rank_pattern that the end of a module's
    name matches.
    """
    patterns = [(_ending(key), rank) for key, rank in method.rank_pattern.items()]
    return lambda name: next((rank for pattern, rank in patterns if pattern.match(name)), method.r)


def problems(recipe: Recipe, modules: Modules) -> list[str]:
    """Return what is wrong with the names of layers in a recipe for a model of those modules, a sentence
    each."""
    method = recipe.method
    adapted = modules.adapted(method)
    problems = [*_targets(method, modules), *_experts(method, modules)]
    by_row = recipe.model.extra_special_tokens or method.trainable_token_indices
    if modules.embedding in adapted and by_row:
        problems.append(
            f"method.target_modules: {modules.embedding}: rows of it are trained for added tokens "
            "(model.extra_special_tokens, method.trainable_token_indices), and it cannot have an adapter "
            "too; remove it"
        )
    if modules.head and modules.head in adapted:
        problems.append(
            f"method.target_modules: {modules.head}: the loss reads the head's weight and not its results, "
            "so that an adapter on it would never be trained; remove it, or train the head completely "
            "(method.modules_to_save: [lm_head])"
        )
    if not problems:
        problems += _patterns("rank_pattern", method.rank_pattern, adapted, modules)
        problems += _patterns("alpha_pattern", method.alpha_pattern, adapted, modules)
    return problems


def check(recipe: Recipe, model: Any) -> None:
    """Check the names of layers with the modules of the model that was loaded.

    Raises:
        RecipeError: one of them matches no layer.
    """
    if wrong := problems(recipe, _modules_of(model)):
        raise RecipeError.of(f"recipe {recipe.name}", wrong)


def _modules_of(model: Any) -> Modules:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    # Layers of bitsandbytes are subclasses of nn.Linear.
    able = nn.Linear | Conv1D | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.MultiheadAttention
    tables = [model.get_input_embeddings(), model.get_output_embeddings() or getattr(model, _SCORE, None)]
    names = {id(module): name for name, module in model.named_modules()}
    kinds = {
        name: isinstance(layer, able)
        for name, layer in model.named_modules()
        if name and all(layer is not t for t in tables)
    }
    return Modules(
        str(model.config.model_type),
        [name for name, is_able in kinds.items() if is_able],
        embedding=names.get(id(tables[0]), ""),
        head=names.get(id(tables[1]), ""),
        experts=list(fused(model)),
        others=[name for name, is_able in kinds.items() if not is_able],
        decoder=decoder_of(model),
    )


def _targets(method: Method, modules: Modules) -> Iterator[str]:
    """Yield what is wrong with method.target_modules."""
    able = [name for name in (*modules.linear, modules.embedding, modules.head) if name]
    named = method.target_modules
    if method.is_all_linear:
        return
    problems = _listed(named, able, modules) if isinstance(named, list) else _matched(named, able, modules)
    for problem in problems:
        yield f"method.target_modules: {problem}"


def _listed(named: list[str], able: list[str], modules: Modules) -> Iterator[str]:
    """Yield what is wrong with a list of names; `able` are the modules that PEFT can adapt."""
    if not named:
        yield f"[]: names no layer; write all-linear, or names: {_leaves(modules)}"
    known = {end for name in able for end in _ends(name)}
    others = {end for name in modules.others for end in _ends(name)}
    wrong = [name for name in dict.fromkeys(named) if name not in known]
    for name in wrong[:MOST_SHOWN]:
        if name in others:
            advice = "; for experts write experts: true" if modules.experts else ""
            yield f"{name}: no layer, or an expert or a router; name layers: {_leaves(modules)}{advice}"
        else:
            yield f"{name}: {_unknown([name], modules)}"
    ambiguous = [name for name in named if name in known and name in others]
    if ambiguous:
        other = next(name for name in modules.others if ambiguous[0] in _ends(name))
        yield (
            f"{ambiguous[0]}: {other} has the name too, and PEFT can give it no adapter; write the names "
            "with more of what comes before, or a regular expression of whole names"
        )
    if len(wrong) > MOST_SHOWN:
        yield f"{len(wrong) - MOST_SHOWN} more names that no layer has"


def _matched(expression: str, able: list[str], modules: Modules) -> Iterator[str]:
    """Yield what is wrong with a regular expression; `able` are the modules that PEFT can adapt."""
    pattern = re.compile(expression)
    if not any(pattern.fullmatch(name) for name in able):
        is_end = any(expression in _ends(name) for name in able)
        advice = f"; for layers of that name write [{expression}]" if is_end else ""
        yield (
            f"{expression}: a regular expression of whole names, and "
            f"{_unknown(_WORD.findall(expression), modules)}{advice}"
        )
        return
    for alternative, variant in alternatives(expression):
        if not any(variant.fullmatch(name) for name in able):
            yield f"{alternative} in {expression}: {_unknown(_WORD.findall(alternative), modules)}"
    others = [name for name in modules.others if pattern.fullmatch(name)]
    if others:
        yield (
            f"{expression}: matches {others[0]} too, to which PEFT can give no adapter; let it match "
            f"{_leaves(modules)} alone"
        )


def _experts(method: Method, modules: Modules) -> Iterator[str]:
    if not method.experts:
        return
    if why := REFUSED.get(modules.model_type):
        yield f"method.experts: {modules.model_type}: {why}; leave it out"
    elif not modules.experts and not any(map(is_listed, modules.linear)):
        yield f"method.experts: {modules.model_type} has no routed experts; leave it out"


def _patterns(name: str, patterns: dict[str, int], adapted: list[str], modules: Modules) -> Iterator[str]:
    """Yield what is wrong with the keys of a pattern; `adapted` are names of the layers that have an
    adapter."""
    if not patterns:
        return  # a refused plan tries hundreds of recipes
    wrong, left = 0, list(adapted)
    ends = {end for layer in adapted for end in _ends(layer)}
    experts = [layer for layer in adapted if is_fused_name(layer)]
    for key in patterns:
        where, pattern = f"method.{name}: {key}", _ending(key)
        is_own = [bool(pattern.match(layer)) for layer in left]
        left = [layer for layer, mine in zip(left, is_own, strict=True) if not mine]
        problem = ""
        if not any(is_own):
            if key in ends or any(pattern.match(layer) for layer in adapted):
                problem = (
                    "a pattern before it has all layers that it matches; PEFT takes the first; put it "
                    "first, or remove it"
                )
            elif bare := next(
                (layer for layer in (*modules.linear, modules.embedding) if pattern.match(layer)), None
            ):
                problem = (
                    f"matches {bare}, which has no adapter; add it to method.target_modules, or "
                    "remove the pattern"
                )
            else:
                problem = _unknown(_WORD.findall(key), modules, experts)
        elif key not in ends:
            for alternative, variant in alternatives(key, r"(.*\.)?({})"):
                if not any(variant.fullmatch(layer) for layer in adapted):
                    problem = f"{alternative} in it: {_unknown(_WORD.findall(alternative), modules, experts)}"
        if problem:
            wrong += 1
            if wrong > MOST_SHOWN:
                return
            yield f"{where}: {problem}"


def alternatives(pattern: str, around: str = "{}") -> Iterator[tuple[str, re.Pattern[str]]]:
    """Yield each alternative of a regular expression (`a`, `b` of `x(a|b)`), with the expression that has it
    alone there.

    Args:
        around: the text that the expression is put into.
    """
    for start, end, places in _groups(pattern):
        for first, last in places:
            if first == last or len(places) < 2:
                continue
            try:
                alone = re.compile(around.format(pattern[:start] + pattern[first:last] + pattern[end:]))
            except re.error:
                continue  # it refers to a group of another alternative
            yield pattern[first:last], alone


def _groups(pattern: str) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
    """Yield the contents of each group of a regular expression, and of all of it: start, end, those of its
    alternatives."""
    opened: list[list[int]] = [[0]]
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif char == "[":
            at += 2 if pattern[at + 1 : at + 2] == "^" else 1
            # A bracket that comes first is a character of the set.
            at += 1
            while at < len(pattern) and pattern[at] != "]":
                at += 2 if pattern[at] == "\\" else 1
        elif char == "(":
            prefix = re.match(r"\(\?(?:P<\w+>|<?[=!]|[aiLmsux-]*:|>)?", pattern[at:])
            opened.append([at + (prefix.end() if prefix else 1)])
            at = opened[-1][0] - 1
        elif char == "|":
            opened[-1].append(at + 1)
        elif char == ")" and len(opened) > 1:
            starts = opened.pop()
            yield starts[0], at, list(zip(starts, [start - 1 for start in starts[1:]] + [at], strict=True))
        at += 1
    starts = opened[0]
    yield (
        0,
        len(pattern),
        list(zip(starts, [start - 1 for start in starts[1:]] + [len(pattern)], strict=True)),
    )


def _unknown(words: list[str], modules: Modules, experts: Sequence[str] = ()) -> str:
    """Return the end of a message about words that no layer has in its name: the nearest names, or all.

    Args:
        experts: names of the adapted parameters of experts, which are meant too.
    """
    names = {name.rpartition(".")[2] for name in (*modules.linear, modules.embedding, *experts) if name}
    parts = {part for name in (*modules.linear, *experts) for part in name.split(".")}
    dotted = [word for word in words if "." in word]
    names |= {
        end
        for name in modules.linear
        for end in _ends(name)
        for word in dotted
        if end.count(".") == word.count(".")
    }
    near = [
        match
        for word in words
        if word not in parts
        for match in difflib.get_close_matches(word, sorted(names), 2, NEAR)
    ]
    meant = f"did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
    return (
        f"no linear layer of {modules.model_type} has such a name; {meant}it has {_leaves(modules, experts)}"
    )


def _leaves(modules: Modules, experts: Sequence[str] = ()) -> str:
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in modules.linear)
    return ", ".join([*leaves, *suffixes(experts)]) or "none"


def _ends(name: str) -> Iterator[str]:
    """Yield a module's name, and its ends after each dot."""
    yield name
    while "." in name:
        name = name.partition(".")[2]
        yield name


def _ending(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")
