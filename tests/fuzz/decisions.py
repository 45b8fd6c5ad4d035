"""Inputs that a person writes: recipes, DeepSpeed configurations, patterns of layers, grids."""

import copy
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from flytune.console import tables
from flytune.planning import planner, table
from flytune.recipe import Recipe, read_recipe
from flytune.recipe import inputs as recipe_inputs
from flytune.sharding import sharding_of
from flytune.sweeps import grid as grids
from tests.fuzz.isolation import Wrong
from tests.fuzz.kinds import Samples, kind
from tests.fuzz.mutations import (
    ENCODINGS,
    damaged,
    documents,
    json_bytes,
    places,
    scalars,
    value_at,
    with_equal_keys,
    with_unknown_key,
    yaml_bytes,
)
from tests.fuzz.oracles import dropped, llama_sizes, numbers, plain_json, shape_row
from tests.fuzz.plans import check_accepted, check_plan, texts
from tests.support.paths import ROOT


def _recipes(samples: Samples) -> st.SearchStrategy[bytes]:
    plain = [
        samples.recipe(),
        samples.recipe(
            method={"name": "lora", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
        ),
        samples.recipe(method="qlora", sharding="device_map"),
        samples.recipe(
            sharding={"name": "zero3", "offload": "cpu"}, hardware={"shape": "auto", "max_hours": 2}
        ),
    ]
    every = Recipe.model_validate(samples.recipe()).model_dump()
    numbers_of = [at for at in places(every) if type(value_at(every, at)) in (int, float)]
    absurd = st.tuples(
        st.sampled_from(numbers_of), st.sampled_from([10**15, 10**17, 1e100, 2**63, -1e15, True, False])
    )
    texts_of = [
        at
        for at in places(every)
        if isinstance(value_at(every, at), str) and all(isinstance(key, str) for key in at)
    ]
    control = st.tuples(st.sampled_from(texts_of), st.sampled_from(["a\x1b[31mb", "\x00", "a\x7f", "a\x08b"]))
    one_value = st.one_of(absurd, control).map(
        lambda one: yaml_bytes(_changed(every, {".".join(one[0]): one[1]}))
    )
    return st.one_of(*[texts([*plain, every])] * 3, one_value, with_unknown_key(every).map(yaml_bytes))


@kind("recipe", _recipes)
def check_recipe(samples: Samples, content: bytes, folder: Path) -> None:
    """A recipe that is accepted has all that was written, survives YAML and JSON, and is planned."""
    file = folder / "recipe.yaml"
    file.write_bytes(content)
    recipe = read_recipe(file)
    check_accepted(content, recipe.model_dump(), folder)
    if huge := [
        number for number in numbers(recipe.model_dump(exclude={"sharding"})) if not abs(number) <= 1e13
    ]:
        raise Wrong(f"{huge[0]:.3g} is accepted, which nobody means")
    dumped = recipe.model_dump()
    if any(
        re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", text)
        for at in places(dumped)
        if isinstance(text := value_at(dumped, at), str)
    ):
        raise Wrong("a control character is accepted")
    again = folder / "again.yaml"
    again.write_text(recipe.to_yaml(), encoding="utf-8")
    if Recipe.from_yaml(again) != recipe or Recipe.from_yaml(again).key() != recipe.key():
        raise Wrong("YAML reads back another recipe")
    if Recipe.model_validate_json(recipe.model_dump_json()) != recipe:
        raise Wrong("JSON reads back another recipe")
    made = planner.make(recipe, samples=20)
    if recipe.model.name_or_path == str(samples.base):
        check_plan(made, recipe, shape_row(made.shape), samples.config(), 20)
    table.show(made, tables.console())


def _deepspeed(samples: Samples) -> st.SearchStrategy[tuple[str, bytes]]:
    files = {
        path.name: json.loads(path.read_bytes())
        for path in sorted((ROOT / "deepspeed_configs").glob("*.json"))
    }

    def of(name: str) -> st.SearchStrategy[bytes]:
        text = documents(files[name]).map(json_bytes)
        parts = {"reduce_bucket_size": 12345678, "overlap_comm": False, "contiguous_gradients": False}
        own = st.sampled_from(
            [{"steps_per_print": 7}, *({f"zero_optimization.{key}": part} for key, part in parts.items())]
        )
        changed = own.map(lambda change: json_bytes(_changed(files[name], change)))
        return st.one_of(
            text.flatmap(lambda one: damaged(one, often=0.25)), text.flatmap(with_equal_keys), changed
        )

    return st.sampled_from(sorted(files)).flatmap(lambda name: st.tuples(st.just(name), of(name)))


def _changed(document: Any, changes: dict[str, Any]) -> Any:
    content = copy.deepcopy(document)
    for path, value in changes.items():
        *above, last = path.split(".")
        part = content
        for key in above:
            part = part[key]
        part[last] = value
    return content


@kind("deepspeed", _deepspeed)
def check_deepspeed(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """A DeepSpeed JSON of one's own is what the trainer gets, whole, and is planned."""
    name, content = given
    (folder / "own.json").write_bytes(content)
    sharding = {"name": name.partition("_")[0].removesuffix(".json"), "config": str(folder / "own.json")}
    written = samples.recipe(sharding=sharding, **{"hardware.shape": "cpu-2"})
    (folder / "recipe.yaml").write_text(json.dumps(written), encoding="utf-8")
    recipe = read_recipe(folder / "recipe.yaml")
    made = planner.make(recipe, samples=20)
    check_plan(made, recipe, shape_row("cpu-2"), samples.config(), 20)
    used = sharding_of(recipe).config()  # type: ignore[attr-defined]
    said = dropped(_written(plain_json(content)), used)
    if lost := next((one for one in said if "instead of 'auto'" not in one), None):
        raise Wrong(f"the trainer's configuration: {lost}")
    if Recipe.model_validate_json(recipe.model_dump_json()) != recipe:
        raise Wrong("JSON reads back another recipe")


def _written(value: Any) -> Any:
    """Return a configuration without what is left to the Trainer."""
    return (
        {key: _written(one) for key, one in value.items() if one != "auto"}
        if isinstance(value, dict)
        else value
    )


_PATTERNS = [
    "(.*)*x",
    "(a|a)*$",
    "([a-z]+)+!",
    "(.+)+\\1x",
    "(x+x+)+y",
    ".*.*.*.*.*.*.*.*.*.*.*.*!",
    "(?:(?:[a-z.0-9_]+)*)*!",
    "[",
    "(",
    "*",
    "a{999999999999}",
    "(" * 500,
    "((((a*)*)*)*)*b",
    "(?<=a+)b",
    "(?P<n>a)(?P<n>b)",
    "\\",
    "(?R)",
    "x" * 60_000,
    "",
    ".*q_proj",
    r".*\.(q|v)_proj",
    "model.layers.*",
    "(q|v)_proj",
    r".*\.self_attn\..*",
    "q_proj",
    "nowhere",
    ".*x_proj",
    r".*layers\.0\..*proj",
]
"""Regular expressions that are wrong, that backtrack, that match nothing, and that match some of a Llama's
layers."""


@kind(
    "patterns",
    lambda samples: st.tuples(
        st.sampled_from(["target_modules", "list", "rank_pattern", "alpha_pattern"]),
        st.sampled_from(_PATTERNS),
    ),
)
def check_patterns(samples: Samples, given: tuple[str, str], folder: Path) -> None:
    """A pattern is refused, or the adapter has the layers that Python's own matching finds, with their
    ranks."""
    field, pattern = given
    method: dict[str, Any] = {"name": "lora", "r": 8, "lora_alpha": 16}
    if field in ("target_modules", "list"):
        method["target_modules"] = [pattern] if field == "list" else pattern
    else:
        method[field] = {pattern: 4}
    recipe = Recipe.model_validate(samples.recipe(method=method))
    made = planner.make(recipe, samples=20)
    config = samples.config()
    layers = {
        f"model.layers.{number}.{name}": sum(sizes)
        for number in range(config["num_hidden_layers"])
        for name, sizes in llama_sizes(config).items()
    }
    found = set(_matching(pattern, field, list(layers)))
    if not found:
        raise Wrong(f"{field}: {pattern!r:.60} matches no layer, and is accepted")
    ranks = dict.fromkeys(found if field in ("target_modules", "list") else layers, 8)
    if field == "rank_pattern":
        ranks |= dict.fromkeys(found, 4)
    if made.trained_parameters != (wanted := sum(rank * layers[name] for name, rank in ranks.items())):
        raise Wrong(
            f"{field}: {pattern!r:.60}: {made.trained_parameters:,} parameters are trained, and {wanted:,} "
            "by hand"
        )


def _matching(pattern: str, field: str, layers: list[str]) -> Iterator[str]:
    """Yield the layers that a pattern means, as PEFT matches them; one that takes long, or is none, means
    none."""

    def give_up(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        for name in layers:
            if field == "list":
                is_one = name == pattern or name.endswith(f".{pattern}")
            elif field == "target_modules":
                is_one = pattern == "all-linear" or re.fullmatch(pattern, name) is not None
            else:
                is_one = re.match(rf"(.*\.)?({pattern})$", name) is not None
            if is_one:
                yield name
    except (TimeoutError, re.error, RecursionError, OverflowError):
        return
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@kind("inputs", lambda samples: st.tuples(st.sampled_from(["yaml", "json", "text"]), _inputs(samples)))
def check_inputs(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """A recipe of `pyflyte run` is read as `flytune plan` reads it, from a file or from the command line."""
    suffix, content = given
    file = folder / f"recipe.{suffix}"
    file.write_bytes(content)
    value = content.decode("utf-8", "surrogateescape") if suffix == "text" else str(file)
    recipe = Recipe.model_validate(recipe_inputs.content(value, "--recipe", Recipe))
    if suffix != "text" and recipe != Recipe.from_yaml(file):
        raise Wrong("`pyflyte run` reads another recipe")


def _inputs(samples: Samples) -> st.SearchStrategy[bytes]:
    text = json.dumps(samples.recipe()).encode()
    coded = st.sampled_from([text.decode().encode(name) for name in ENCODINGS])
    return st.one_of(coded, damaged(text), documents(samples.recipe()).map(json_bytes), _recipes(samples))


_FIELDS = [
    "training.learning_rate",
    "training.seed",
    "method",
    "method.r",
    "data.max_length",
    "name",
    "data",
    "sharding",
    "x.y",
    "",
]
_grids = st.one_of(
    st.dictionaries(
        st.sampled_from(_FIELDS[:5]),
        st.lists(st.sampled_from([1, 2, 3, 16, "lora"]), min_size=1, max_size=3, unique=True),
        max_size=2,
    ),
    st.dictionaries(
        st.one_of(
            st.sampled_from(_FIELDS),
            st.text(max_size=8),
            st.integers(),
            st.none(),
            st.sampled_from(["a." * 9999, "."]),
        ),
        st.one_of(
            scalars,
            st.lists(st.one_of(scalars, st.sampled_from([1e-3, 1e-4, "lora", "full", 1, 2])), max_size=4),
            st.integers(2, 2000).map(lambda count: list(range(1, count))),
        ),
        max_size=4,
    ),
    scalars,
)


_too_many = st.one_of(
    st.tuples(
        st.sampled_from(
            [{"training.seed": [1, 2, 3]}, {"method": ["full", "lora"], "training.seed": [1, 2]}]
        ),
        st.just(1),
    ),
    st.tuples(st.integers(23, 40).map(lambda count: {"training.seed": list(range(1, count))}), st.just(24)),
).map(lambda one: (one[0], [], one[1]))
"""Grids of valid values, some with more points than are allowed."""
_draws = st.one_of(
    _too_many,
    st.tuples(_grids, st.just([]), st.just(24)),
    st.tuples(st.just({}), st.lists(_grids, max_size=3), st.just(24)),
    st.tuples(_grids, st.one_of(st.lists(_grids, max_size=3), scalars), st.sampled_from([1, 24, 10**12])),
)


@kind("grid", lambda samples: _draws)
def check_grid(samples: Samples, given: tuple[Any, Any, int], folder: Path) -> None:
    """A grid that is accepted has a point for each combination, each with its values."""
    grid, changes, most = copy.deepcopy(given)
    recipe = Recipe.model_validate(samples.recipe())
    points = grids.draw(recipe, grid or {}, changes or [], min(most, 60))
    wanted = 1
    for values in (grid or {}).values():
        wanted *= len(values)
    if len(points.points) != (wanted if grid else len(changes)):
        raise Wrong(f"{len(points.points)} points")
    if len(points.points) > most:
        raise Wrong(f"{len(points.points)} points, each a fine-tune, and {most} are allowed")
    for point in points.points:
        for field, value in point.changes.items():
            found = grids.value_at(point.recipe, field)
            if isinstance(value, int | float) and isinstance(found, int | float) and found != value:
                raise Wrong(f"{field}: {value!r} became {found!r}")
    points.model_dump_json()
