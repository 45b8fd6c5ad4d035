"""Inputs from elsewhere: rows, prompts, tokenizers, models' configurations, prepared data, artifacts."""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import safetensors.numpy
from hypothesis import strategies as st
from pyarrow import parquet

from flytune import data
from flytune.adapters.loading import Adapter
from flytune.artifacts import catalog, fetch
from flytune.data import load_tokenizer
from flytune.errors import DataError, ExportError
from flytune.inference import prompts
from flytune.models import Generation, initial_adapter, read_geometry
from flytune.models.geometry import table_rows
from flytune.planning import planner
from flytune.recipe import Data, DataRequest, Model, Recipe
from flytune.records import StoredFile
from flytune.storage import Storage
from flytune.training.checkpoints.ledger import Checkpoint, Ledger
from tests.fuzz.decisions import check_recipe
from tests.fuzz.isolation import Wrong
from tests.fuzz.kinds import Samples, kind
from tests.fuzz.mutations import damaged, documents, json_bytes
from tests.support.damaged_rows import GOOD, expected_of_line, outcomes, sample_of
from tests.support.paths import ROOT

RELEASE = ROOT / "tests" / "support" / "releases" / "0.1.0"
_TOKENIZER = "tokenizer"


def _lines(rows: list[Any]) -> bytes:
    return b"\n".join(json_bytes(row) for row in rows)


def _table(rows: list[Any], write: Callable[[Any, Any], None]) -> bytes:
    out = io.BytesIO()
    write(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def _to_parquet(table: Any, out: Any) -> None:
    parquet.write_table(table, out, write_page_checksum=True)


def _to_arrow(table: Any, out: Any) -> None:
    with pyarrow.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


def _rows(samples: Samples) -> st.SearchStrategy[tuple[str, str, bytes]]:
    forms = st.sampled_from(sorted(GOOD))
    lines = forms.flatmap(
        lambda form: st.tuples(
            st.just(form),
            st.just("jsonl"),
            st.lists(documents(GOOD[form][0]), max_size=4).map(lambda rows: _lines([*rows, *GOOD[form]])),
        )
    )
    tables = st.tuples(forms, st.sampled_from(["parquet", "arrow"])).map(
        lambda one: (*one, _table(GOOD[one[0]], _to_parquet if one[1] == "parquet" else _to_arrow))
    )
    whole = forms.map(lambda form: (form, "json", json.dumps(GOOD[form]).encode()))
    return st.one_of(lines, tables, whole).flatmap(
        lambda one: st.tuples(st.just(one[0]), st.just(one[1]), damaged(one[2], often=0.8))
    )


@kind("rows", _rows)
def check_rows(samples: Samples, given: tuple[str, str, bytes], folder: Path) -> None:
    """Each row is read as it is there, or is named in an error; no other row is changed by it."""
    form, suffix, content = given
    file = folder / f"rows.{suffix}"
    file.write_bytes(content)
    tokenizer = load_tokenizer(Model(name_or_path=str(samples.tokenizer)), Data(path="unread"))
    found = list(outcomes(file, form, tokenizer))
    errors = [error for _, error in found if isinstance(error, DataError)]
    if suffix == "jsonl":
        told = dict(found)
        for number, line in enumerate(content.split(b"\n"), 1):
            wanted, outcome = expected_of_line(line, form, tokenizer), told.pop(f"{file}:{number}", None)
            if "" not in told and (not isinstance(outcome, DataError) if wanted is DataError else outcome != wanted):
                raise Wrong(f"line {number}: {outcome!r:.300} instead of {wanted!r:.300}")
    elif suffix in ("parquet", "arrow"):
        good = [sample_of(row, form, tokenizer) for row in GOOD[form]]
        read = [sample for _, sample in found if not isinstance(sample, DataError)]
        if suffix == "parquet" and any(sample not in good for sample in read):
            raise Wrong("a damaged page is read as if it were complete")
        if not errors and len(read) < len(good):
            raise Wrong(f"{len(good) - len(read)} rows are lost")
    if errors:
        raise errors[0]


_PROMPTS = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "a"}], "adapter": "one"}, {"prompt": "b", "id": 5}]


@kind(
    "prompts",
    lambda samples: (
        st.lists(st.sampled_from(_PROMPTS).flatmap(documents), min_size=1, max_size=4)
        .map(_lines)
        .flatmap(lambda text: damaged(text, often=0.3))
    ),
)
def check_prompts(samples: Samples, content: bytes, folder: Path) -> None:
    """Each prompt is in a part, once, as it was written."""
    (folder / "prompts.jsonl").write_bytes(content)
    parts = prompts.split(folder / "prompts.jsonl", 2, ["one"], Generation(), "m", folder / "out")
    read = [line["row"] for part in parts for line in prompts.read_part(folder / "out" / part.file)]
    wanted = [json.loads(line) for line in content.decode("utf-8-sig").split("\n") if line.strip()]
    if len(read) != len(wanted) or any(row not in wanted for row in read):
        raise Wrong(f"{len(read)} of {len(wanted)} prompts, or others")


def _copied(source: Path, folder: Path, name: str, content: bytes) -> Path:
    """Copy a folder by links, with another content of one file."""
    for path in source.rglob("*"):
        to = folder / path.relative_to(source)
        if path.is_file():
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def _file(path: Path) -> st.SearchStrategy[bytes]:
    """Draw the bytes of a file of JSON, or of any other one."""
    content = path.read_bytes()
    if path.suffix != ".json":
        return damaged(content)
    return documents(json.loads(content)).map(json_bytes).flatmap(lambda text: damaged(text, often=0.25))


def _files(folder: Path, names: list[str]) -> st.SearchStrategy[tuple[str, bytes]]:
    return st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), _file(folder / name)))


@kind("config", lambda samples: _files(samples.base, ["config.json"]))
def check_config(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """A model's config.json gives sizes that a plan is made with."""
    base = _copied(samples.base, folder / "base", *given)
    recipe = Recipe.model_validate(samples.recipe(**{"model.name_or_path": str(base)}))
    geometry = read_geometry(recipe.model)
    table_rows(recipe.model)
    planner.make(recipe, geometry=geometry, samples=20)


@kind("tokenizer", lambda samples: _files(samples.base, ["tokenizer.json", "tokenizer_config.json"]))
def check_tokenizer(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """Data is prepared with a tokenizer, all of whose tokens the model has."""
    base = _copied(samples.base, folder / "base", *given)
    recipe = Recipe.model_validate(samples.recipe(**{"model.name_or_path": str(base)}))
    request = DataRequest(model=recipe.model, data=recipe.data, fingerprint="x")
    manifest = data.prepare(request, folder / "dataset", processes=1)
    if manifest.train.samples + manifest.heldout.samples != 20:
        raise Wrong(f"{manifest.train.samples + manifest.heldout.samples} of 20 samples")


def _deepspeed(samples: Samples) -> st.SearchStrategy[tuple[str, bytes]]:
    return _files(ROOT / "deepspeed_configs", sorted(path.name for path in (ROOT / "deepspeed_configs").glob("*.json")))


@kind("deepspeed", _deepspeed)
def check_deepspeed(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """A DeepSpeed JSON goes into the recipe, whole, and is planned."""
    name, content = given
    (folder / "own.json").write_bytes(content)
    sharding = {"name": name.partition("_")[0].removesuffix(".json"), "config": str(folder / "own.json")}
    recipe = samples.recipe(sharding=sharding, method="lora", **{"hardware.shape": "cpu-2"})
    check_recipe(samples, json.dumps(recipe).encode(), folder)


def _artifact_files() -> list[str]:
    return sorted(str(path.relative_to(RELEASE / "artifact")) for path in (RELEASE / "artifact").rglob("*") if path.is_file())


@kind("artifact", lambda samples: _files(RELEASE / "artifact", [*_artifact_files(), *["artifact.json"] * 8]))
def check_artifact(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """An artifact is listed, fetched and opened; what is fetched is what was published."""
    name, content = given
    store = _copied(RELEASE / "artifact", folder / "store" / "one", name, content)
    changed = content != (RELEASE / "artifact" / name).read_bytes()
    listed = catalog.list_artifacts(str(folder / "store"))
    if len(listed) != 1:
        raise Wrong(f"{len(listed)} artifacts are listed")
    os.environ["HF_HOME"] = str(folder / "home")
    reader = fetch.Reader(lambda file: (store / file).read_bytes(), lambda file, to: shutil.copyfile(store / file, to))
    fetch.fetch(str(store), folder / "fetched", reader)
    if changed and name != "artifact.json":
        raise Wrong(f"{name} is fetched although it was changed")


@kind(
    "adapter",
    lambda samples: st.one_of(
        st.tuples(
            st.just(initial_adapter.CONFIG),
            documents(_ADAPTER).map(json_bytes).flatmap(lambda text: damaged(text, often=0.25)),
        ),
        st.tuples(st.just(initial_adapter.WEIGHTS), damaged(_adapter_weights(samples.base), often=0.9)),
    ),
)
def check_adapter(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """An adapter that a recipe trains further is compared with the recipe before anything is allocated, and loaded as it is."""
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / initial_adapter.CONFIG).write_bytes(json_bytes(_ADAPTER))
    (adapter / initial_adapter.WEIGHTS).write_bytes(_adapter_weights(samples.base))
    (adapter / given[0]).write_bytes(given[1])
    method = {"name": "lora", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "adapter": str(adapter)}
    recipe = Recipe.model_validate(samples.recipe(method=method))
    planner.make(recipe, samples=20)
    with suppress(ExportError):
        # Refused without artifact.json, whatever the files are.
        (adapter / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        _ = Adapter.of(adapter).base
    if given[0] == initial_adapter.WEIGHTS:
        model = _new_adapter(samples.base)
        initial_adapter.load_weights(model, recipe.method)
        stored, loaded = safetensors.numpy.load(given[1]), safetensors.numpy.load(_weights_of(model))
        if any(not (loaded[name] == stored[name]).all() for name in loaded):
            raise Wrong("the model has other weights than the file")


@cache
def _new_adapter(base: Path) -> Any:
    """Return the base model with a new adapter; each check loads its weights into the same."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)


def _weights_of(model: Any) -> bytes:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    return save(get_peft_model_state_dict(model))


@cache
def _adapter_weights(base: Path) -> bytes:
    return _weights_of(_new_adapter(base))


_ADAPTER = {
    "base_model_name_or_path": "tiny", "peft_type": "LORA", "r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "bias": "none",
    "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "use_dora": False, "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {}, "modules_to_save": None, "fan_in_fan_out": False, "init_lora_weights": True,
}  # fmt: skip


@kind(
    "dataset", lambda samples: _files(RELEASE / "dataset", sorted(path.name for path in (RELEASE / "dataset").glob("*.json")))
)
def check_dataset(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """The manifest of prepared data is read, or refused."""
    data.read_manifest(_copied(RELEASE / "dataset", folder / "dataset", *given))


def _checkpoint() -> Checkpoint:
    file = StoredFile(file="model/weights.bin", size=4, sha256=hashlib.sha256(b"keep").hexdigest())
    fields: dict[str, Any] = {"attempt": "0001-abcdef", "decisions": "x", "sharding": "none", "world_size": 1, "flytune": "0"}
    return Checkpoint(step=3, files=[file], **fields)


def _manifests(samples: Samples) -> st.SearchStrategy[tuple[bool, Any]]:
    content = json.loads(_checkpoint().sealed().model_dump_json())
    names = st.sampled_from(
        ["../out", "/etc/passwd", "a/../../out", "~/x", "model", "a\\b", "s3://b/x", "x" * 300, "manifest.json"]
    )
    escaping = names.map(lambda name: content | {"files": [content["files"][0] | {"file": name}]})
    return st.tuples(st.booleans(), st.one_of(escaping, documents(content)))


@kind("checkpoint", _manifests)
def check_checkpoint(samples: Samples, given: tuple[bool, Any], folder: Path) -> None:
    """A checkpoint's manifest is used as it was written, or not at all; no file outside of its folder changes."""
    is_sealed, content = given
    store = folder / "checkpoints"
    (store / "3-0001-abcdef" / "model").mkdir(parents=True)
    (store / "3-0001-abcdef" / "model" / "weights.bin").write_bytes(b"keep")
    (folder / "out").write_bytes(b"keep")
    (store / "out").write_bytes(b"keep")
    if is_sealed:  # by somebody who can write the digest too
        with suppress(ValueError):
            content = json.loads(Checkpoint.model_validate(content).sealed().model_dump_json())
    (store / "3-0001-abcdef" / "manifest.json").write_bytes(json_bytes(content))
    ledger = Ledger(Storage(str(store)), limit=1)
    for one in ledger.checkpoints():
        if one.folder != "3-0001-abcdef":
            raise Wrong(f"the checkpoint of {one.folder!r:.60}")
        ledger.link(one, folder / "linked" / "inside")
        if not ledger.fault(one) and any(file.sha256 != hashlib.sha256(b"keep").hexdigest() for file in one.files):
            raise Wrong("a file that is not the listed one")
    ledger.begin()
    ledger.clear()
    outside = [folder / "out", store / "out"]
    if any(not path.is_file() or path.read_bytes() != b"keep" for path in outside) or (folder / "linked" / "out").exists():
        raise Wrong("files outside of the checkpoint were changed")
