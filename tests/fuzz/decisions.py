"""Inputs that a person writes: recipes, shapes, accelerators, clusters, grids, arguments of commands."""

import contextlib
import copy
import io
import json
import os
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from flytune import cli, yaml_core
from flytune.console import tables
from flytune.errors import FlytuneError, RecipeError
from flytune.hardware import accelerators, load_cluster, load_shapes
from flytune.models import read_geometry
from flytune.planning import planner, table
from flytune.recipe import Recipe
from flytune.sweeps import grid as grids
from tests.fuzz.isolation import Wrong
from tests.fuzz.kinds import Samples, kind
from tests.fuzz.mutations import ENCODINGS, damaged, documents, json_bytes, scalars
from tests.support.paths import ROOT
from workflows import inputs

_SHIPPED = ROOT / "recipes"


def yaml_bytes(value: Any) -> bytes:
    """Return a value as YAML, whatever is in it; where PyYAML cannot, as JSON."""
    try:
        return yaml.dump(value, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, UnicodeError, RecursionError):
        return json.dumps(value, default=str).encode()


def _texts(valid: list[Any]) -> st.SearchStrategy[bytes]:
    """Draw the bytes of a YAML file: a mutated document, sometimes damaged as well."""
    return st.sampled_from(valid).flatmap(documents).map(yaml_bytes).flatmap(lambda text: damaged(text, often=0.25))


def _recipes(samples: Samples) -> st.SearchStrategy[bytes]:
    plain = [
        samples.recipe(),
        samples.recipe(method={"name": "lora", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}),
        samples.recipe(method="qlora", sharding="device_map"),
        samples.recipe(sharding={"name": "zero3", "offload": "cpu"}, hardware={"shape": "auto", "max_hours": 2}),
    ]
    every = Recipe.model_validate(samples.recipe()).model_dump()
    return _texts([*plain, every])


@kind("recipe", _recipes)
def check_recipe(samples: Samples, content: bytes, folder: Path) -> None:
    """A recipe that is accepted has all that was written, survives YAML and JSON, and is planned."""
    file = folder / "recipe.yaml"
    file.write_bytes(content)
    recipe = Recipe.from_yaml(file)
    written = yaml_core.load(content)
    if lost := [path for path in _leaves(written) if not _holds(recipe.model_dump(), path)]:
        raise Wrong(f"accepted without {lost[0]}")
    again = folder / "again.yaml"
    again.write_text(recipe.to_yaml(), encoding="utf-8")
    if Recipe.from_yaml(again) != recipe or Recipe.from_yaml(again).key() != recipe.key():
        raise Wrong("YAML reads back another recipe")
    if Recipe.model_validate_json(recipe.model_dump_json()) != recipe:
        raise Wrong("JSON reads back another recipe")
    _plan(recipe)


def _plan(recipe: Recipe, shapes: Any = None, geometry: Any = None) -> None:
    made = planner.make(recipe, shapes, geometry, samples=20)
    if type(made).model_validate_json(made.model_dump_json()) != made:
        raise Wrong("JSON reads back another plan")
    table.show(made, tables.console())


def _leaves(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of a recipe's own keys; `method: full` and tasks may be names alone."""
    if not isinstance(value, dict) or not value:
        return [at]
    return [path for key, item in value.items() for path in _leaves(item, (*at, key))]


def _holds(value: Any, path: tuple[Any, ...]) -> bool:
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def _rows_of(name: str) -> Any:
    return yaml_core.load((ROOT / name).read_bytes())


def _hardware(samples: Samples) -> st.SearchStrategy[tuple[str, bytes]]:
    names = ["shapes.yaml", "accelerators.yaml", "cluster.yaml"]
    cluster = {
        **_rows_of("cluster.yaml"),
        "volumes": [
            {"name": "a", "nfs": {"server": "10.0.0.2", "path": "/m"}, "mount_path": "/mnt/models", "read_gbs": 1.2},
            {"name": "b", "persistent_volume_claim": "c", "mount_path": "/mnt/b", "shapes": ["h100-8"], "light_tasks": False},
        ],
        "model_cache": "/mnt/models/hub",
        "store_read_gbs": 0.5,
    }
    shapes = _rows_of("shapes.yaml")
    valid = {"shapes.yaml": [shapes, shapes[:2] + shapes[-3:]], "accelerators.yaml": [_rows_of("accelerators.yaml")]}
    return st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), _texts(valid.get(name, [cluster]))))


@kind("hardware", _hardware)
def check_hardware(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """A file of hardware that is accepted is one that recipes are planned with."""
    name, content = given
    file = folder / name
    file.write_bytes(content)
    geometry = read_geometry(Recipe.model_validate(samples.recipe()).model)
    recipes = [
        Recipe.model_validate(samples.recipe(**{"hardware": hardware, "sharding": sharding, "training.global_batch_size": 64}))
        for hardware, sharding in (
            ({"shape": "cpu-1"}, "none"),
            ({"shape": "auto", "accelerator": "H100"}, "none"),
            ({"shape": "auto", "accelerator": "H100"}, "fsdp"),
        )
    ]
    shapes, cluster = None, None
    if name == "shapes.yaml":
        shapes = load_shapes(file)
    elif name == "accelerators.yaml":
        found = accelerators.load_accelerators(file)
        accelerators.load_accelerators = lambda *path: found  # type: ignore[assignment]  # in this process alone
    else:
        cluster = load_cluster(file)
        cluster.check_shapes({shape.name for shape in load_shapes()})
    for recipe in recipes:
        with contextlib.suppress(FlytuneError):
            made = planner.make(recipe, shapes, geometry, samples=20, cluster=cluster)
            table.show(made, tables.console())


@kind("inputs", lambda samples: st.tuples(st.sampled_from(["yaml", "json", "text"]), _inputs(samples)))
def check_inputs(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """A recipe of `pyflyte run` is read as `flytune plan` reads it, from a file or from the command line."""
    suffix, content = given
    file = folder / f"recipe.{suffix}"
    file.write_bytes(content)
    value = content.decode("utf-8", "surrogateescape") if suffix == "text" else str(file)
    recipe = Recipe.model_validate(inputs._content(value, "--recipe", Recipe))
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
        st.one_of(st.sampled_from(_FIELDS), st.text(max_size=8), st.integers(), st.none(), st.sampled_from(["a." * 9999, "."])),
        st.one_of(
            scalars,
            st.lists(st.one_of(scalars, st.sampled_from([1e-3, 1e-4, "lora", "full", 1, 2])), max_size=4),
            st.integers(2, 2000).map(lambda count: list(range(1, count))),
        ),
        max_size=4,
    ),
    scalars,
)


_draws = st.one_of(
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
    for point in points.points:
        for field, value in point.changes.items():
            found = grids.value_at(point.recipe, field)
            if isinstance(value, int | float) and isinstance(found, int | float) and found != value:
                raise Wrong(f"{field}: {value!r} became {found!r}")
    points.model_dump_json()


_PLACES = ["new", "new/deep/page", "recipe.yaml", "full", "empty", "file", "link", "dangling", "file/x", "", "/dev/null",
           "x" * 300,
           "a/" * 2400, "\udcff", "own.html", ".", "..", "s3://b/x", "full/keep.txt"]  # fmt: skip
_NUMBERS = ["0", "-1", "1", "3", str(10**12 + 1), str(10**400), "1e400", "nan", "", "x", "inf"]
_SOURCES = [
    "recipe.yaml",
    "full",
    "empty",
    "file",
    "nowhere",
    "",
    "/dev/zero",
    "BASE",
    "foo://x",
    "hf://x",
    "x" * 5000,
    "dangling",
]
_place, _number, _source = map(st.sampled_from, (_PLACES, _NUMBERS, _SOURCES))


def _line(*parts: Any) -> st.SearchStrategy[list[str]]:
    """Draw the arguments of a command: texts are themselves."""
    return st.tuples(*(st.just(part) if isinstance(part, str) else part for part in parts)).map(list)


_commands = st.one_of(
    _line("xray", _source, "--out", _place, "--rows", _number),
    _line("xray", "recipe.yaml", _place.map("--out={}".format)),
    _line("plan", _source, "--samples", _number),
    _line("plan", "recipe.yaml", "--shape", _source),
    _line(st.sampled_from(["merge", "gguf", "reproduce"]), _source, _place.map("--out={}".format)),
    _line("fetch", _source, _place),
    _line("combine", _place, _source, _source, "--weights", _number, _number),
    _line("combine", _place, _source, _source, st.sampled_from(["--rank", "--density", "--seed", "--how"]), _number),
    _line(st.sampled_from(["calibrate", "adapters", "accepted", "doctor"]), _source),
    _line("accepted", _source, "--rollback", "--reason", st.sampled_from(["[/x]", "\x1b[31m", ""])),
    _line("selftest", "--pairs", st.sampled_from(["full/x", ",,", "x" * 5000]), _place.map("--keep={}".format)),
    st.lists(st.sampled_from(["plan", "--json", "xray", "--", "-h", "schema", "\x00", "--out", "x"]), max_size=4),
)


@kind("command", lambda samples: _commands)
def check_command(samples: Samples, given: list[str], folder: Path) -> None:
    """A command ends with 0 to 3 and words, without a traceback, and replaces no file."""
    recipe = Recipe.model_validate(samples.recipe())
    (folder / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
    for name in ("full", "empty"):
        (folder / name).mkdir()
    (folder / "full" / "keep.txt").write_text("keep", encoding="utf-8")
    (folder / "file").write_text("keep", encoding="utf-8")
    (folder / "own.html").write_text("", encoding="utf-8")
    (folder / "link").symlink_to(folder / "file")
    (folder / "dangling").symlink_to(folder / "nowhere-at-all")
    kept = {name: (folder / name).read_bytes() for name in ("recipe.yaml", "file", "full/keep.txt")}
    os.chdir(folder)
    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            code = cli.main([str(samples.base) if one == "BASE" else one for one in given])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
    if changed := [name for name, content in kept.items() if (folder / name).read_bytes() != content]:
        raise Wrong(f"replaced {changed[0]}")
    if (
        code not in (0, 1, 2, 3)
        or "Traceback (most" in said.getvalue()
        or (code and not (said.getvalue() + out.getvalue()).strip())
    ):
        raise Wrong(f"exit code {code}: {said.getvalue()[-1500:]}")
    if code:
        raise RecipeError(f"exit code {code}: {said.getvalue()[-300:]}")
