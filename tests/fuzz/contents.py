"""Inputs from elsewhere: rows, prompts, tokenizers, models' configurations, prepared data, artifacts."""

import csv
import io
import json
import math
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
from flytune.data import load_tokenizer
from flytune.errors import DataError, ExportError
from flytune.inference import prompts
from flytune.models import Generation, initial_adapter
from flytune.models.config_json import table_rows
from flytune.planning import planner
from flytune.planning.base_sizes import read_geometry
from flytune.recipe import Data, DataRequest, Model, Recipe
from tests.fuzz.artifacts import copied, files
from tests.fuzz.isolation import OF_FILE, Wrong
from tests.fuzz.kinds import Samples, kind
from tests.fuzz.mutations import damaged, documents, json_bytes, with_equal_keys
from tests.fuzz.oracles import plain_json, refuse_shown, shape_row
from tests.fuzz.plans import check_plan
from tests.support.damaged_rows import FLAT, GOOD, expected_of_line, fits, outcomes, plain_rows, sample_of

_TOKENIZER = "tokenizer"


def _lines(rows: list[Any]) -> bytes:
    return b"\n".join(json_bytes(row) for row in rows)


def _table(rows: list[Any], write: Callable[[Any, Any], None]) -> bytes:
    out = io.BytesIO()
    write(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def _csv(rows: list[dict[str, Any]]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def _to_parquet(table: Any, out: Any) -> None:
    # Damage to pages that are not compressed is found by their checksums alone.
    parquet.write_table(table, out, write_page_checksum=True, compression="none")


def _to_arrow(table: Any, out: Any) -> None:
    with pyarrow.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


_CURIOUS = [
    b'", "more": NaN, "x": "',
    b'", "more": 1e999, "x": "',
    b'", "more": ' + b"[" * 120 + b"]" * 120 + b', "x": "',
]
"""Texts that end a JSON string and go on with what JSON has not, or not so deep."""
_LONG = b"long"
"""Stands for two rows, the second of which has more bytes than a line may have, in columns that are not
read."""


def _two_rows(suffix: str) -> bytes:
    names = ["a", "b", "c", "d", "e"]
    rows = [
        {"text": "one"} | dict.fromkeys(names, ""),
        {"text": "two"} | dict.fromkeys(names, "x" * 4_200_000),
    ]
    if suffix == "csv":
        return "\n".join([",".join(["text", *names]), *(",".join(row.values()) for row in rows)]).encode()
    return _lines(rows) if suffix == "jsonl" else _table(rows, _to_parquet)


def _rows(samples: Samples) -> st.SearchStrategy[tuple[str, str, bytes]]:
    forms = st.sampled_from(sorted(GOOD))
    lines = forms.flatmap(
        lambda form: st.tuples(
            st.just(form),
            st.just("jsonl"),
            st.one_of(
                st.lists(documents(GOOD[form][0]), max_size=4).map(lambda rows: _lines([*rows, *GOOD[form]])),
                with_equal_keys(_lines(GOOD[form])),
            ),
        )
    )
    curious = st.tuples(st.sampled_from(["instruction", "messages"]), st.sampled_from(_CURIOUS)).map(
        lambda one: (one[0], "jsonl", _lines(GOOD[one[0]]).replace(b"say 0", one[1], 1))
    )
    tables = st.tuples(forms, st.sampled_from(["parquet", "arrow"])).map(
        lambda one: (*one, _table(GOOD[one[0]], _to_parquet if one[1] == "parquet" else _to_arrow))
    )
    whole = st.tuples(forms, st.sampled_from([None, 1])).map(
        lambda one: (one[0], "json", json.dumps(GOOD[one[0]], indent=one[1]).encode())
    )
    cells = st.sampled_from(FLAT).map(lambda form: (form, "csv", _csv(GOOD[form])))
    spoiled = st.one_of(lines, tables, whole, cells).flatmap(
        lambda one: st.tuples(st.just(one[0]), st.just(one[1]), damaged(one[2], often=0.8))
    )
    long = st.sampled_from(["jsonl", "csv", "parquet"]).map(lambda suffix: ("text", suffix, _LONG))
    return st.one_of(spoiled, spoiled, spoiled, curious, curious, long)


@kind("rows", _rows)
def check_rows(samples: Samples, given: tuple[str, str, bytes], folder: Path) -> None:
    """Each row is read as it is there, or is named in an error; no other row is changed by it."""
    form, suffix, content = given
    file = folder / f"rows.{suffix}"
    file.write_bytes(_two_rows(suffix) if content == _LONG else content)
    tokenizer = load_tokenizer(Model(name_or_path=str(samples.tokenizer)), Data(path="unread"))
    found = list(outcomes(file, form, tokenizer))
    errors = [error for _, error in found if isinstance(error, DataError)]
    if content == _LONG:
        read = [sample for _, sample in found if not isinstance(sample, DataError)]
        if read != [sample_of({"text": "one"}, form, tokenizer)]:
            raise Wrong(f"{len(read)} rows are read, and the first one alone is of a fair length")
    elif suffix == "jsonl":
        told = dict(found)
        for number, line in enumerate(content.split(b"\n"), 1):
            wanted, outcome = expected_of_line(line, form, tokenizer), told.pop(f"{file}:{number}", None)
            if "" not in told and (
                not isinstance(outcome, DataError) if wanted is DataError else outcome != wanted
            ):
                raise Wrong(f"line {number}: {outcome!r:.300} instead of {wanted!r:.300}")
    elif suffix in ("parquet", "arrow"):
        good = [sample_of(row, form, tokenizer) for row in GOOD[form]]
        read = [sample for _, sample in found if not isinstance(sample, DataError)]
        if suffix == "parquet" and any(sample not in good for sample in read):
            raise Wrong("a damaged page is read as if it were complete")
        if not errors and len(read) < len(good):
            raise Wrong(f"{len(good) - len(read)} rows are lost")
    else:
        read = [sample for _, sample in found if not isinstance(sample, DataError)]
        there = [
            sample_of(row, form, tokenizer)
            for row in plain_rows(content, suffix)
            if fits(row, form, tokenizer)
        ]
        if read != there[: len(read)] or (not errors and len(read) < len(there)):
            raise Wrong(f"{read!r:.300}, and the rows of the file are {there!r:.300}")
    if errors:
        raise errors[0]


_PROMPTS = [
    {"prompt": "a"},
    {"messages": [{"role": "user", "content": "a"}], "adapter": "one"},
    {"prompt": "b", "id": 5},
]


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


def _stored(content: bytes) -> int:
    """Return the numbers in the tensors of a safetensors file, by its header, which must be that of this
    file."""
    length = int.from_bytes(content[:8], "little")
    header = plain_json(content[8 : 8 + length])
    tensors = [one for name, one in header.items() if name != "__metadata__"]
    if len(content) < 8 + length + max(tensor["data_offsets"][1] for tensor in tensors):
        raise Wrong("the weights are cut off, and are planned")
    return sum(math.prod(tensor["shape"]) for tensor in tensors)


_SIZES = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
]


def _other_sizes(samples: Samples) -> st.SearchStrategy[tuple[str, bytes]]:
    """Draw a config.json that is right in itself, and has another size than the weights beside it."""
    return st.tuples(st.sampled_from(_SIZES), st.sampled_from([2, 3, 4])).map(
        lambda one: (
            "config.json",
            json_bytes(samples.config() | {one[0]: samples.config()[one[0]] * one[1]}),
        )
    )


@kind(
    "config",
    lambda samples: st.one_of(
        *[files(samples.base, ["config.json", "config.json", "model.safetensors"])] * 3, _other_sizes(samples)
    ),
)
def check_config(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """A model's config.json gives sizes that a plan is made with."""
    base = copied(samples.base, folder / "base", *given)
    recipe = Recipe.model_validate(samples.recipe(**{"model.name_or_path": str(base)}))
    geometry = read_geometry(recipe.model)
    table_rows(recipe.model)
    made = planner.make(recipe, geometry=geometry, samples=20)
    stored = _stored((base / "model.safetensors").read_bytes())
    if abs(made.total_parameters - stored) > 0.006 * stored:
        raise Wrong(f"{made.total_parameters:,} parameters are planned, and {stored:,} are in the file")
    config = plain_json((base / "config.json").read_bytes())
    if (
        config.get("model_type") == "llama"
        and not config.get("attention_bias")
        and not config.get("mlp_bias")
    ):
        check_plan(made, recipe, shape_row(made.shape), config, 20)


_DOUBLE = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
_WORDS = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 100}
_STEPS: list[dict[str, Any]] = [
    {"normalizer": {"type": "Sequence", "normalizers": [_DOUBLE] * 40}},
    {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": [_WORDS] * 2}] * 8,
        }
    },
]
"""Steps of a tokenizer that make a text of any length."""


def _tokenizers(samples: Samples) -> st.SearchStrategy[tuple[str, bytes]]:
    def changed(name: str, values: list[dict[str, Any]]) -> st.SearchStrategy[tuple[str, bytes]]:
        content = json.loads((samples.base / name).read_bytes())
        return st.sampled_from(values).map(lambda one: (name, json_bytes(content | one)))

    any_ = files(samples.base, ["tokenizer.json", "tokenizer_config.json"])
    named = [{"fast_tokenizer_files": [f"../other/tokenizer.{number}.0.0.json"]} for number in (3, 4)]
    return st.one_of(
        any_, any_, any_, changed("tokenizer.json", _STEPS), changed("tokenizer_config.json", named)
    )


@kind("tokenizer", _tokenizers)
def check_tokenizer(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """Data is prepared with a tokenizer, all of whose tokens the model has."""
    base = copied(samples.base, folder / "base", *given)
    other = json.loads((samples.base / "tokenizer.json").read_bytes())
    other["added_tokens"].append(other["added_tokens"][0] | {"id": 10**4, "content": OF_FILE})
    (folder / "other").mkdir()
    for version in (3, 4):
        (folder / "other" / f"tokenizer.{version}.0.0.json").write_bytes(json_bytes(other))
    recipe = Recipe.model_validate(samples.recipe(**{"model.name_or_path": str(base)}))
    request = DataRequest(model=recipe.model, data=recipe.data, fingerprint="x")
    manifest = data.prepare(request, folder / "dataset", processes=1)
    if manifest.train.samples + manifest.heldout.samples != 20:
        raise Wrong(f"{manifest.train.samples + manifest.heldout.samples} of 20 samples")
    refuse_shown(folder=folder, but=("other/",))


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
    """An adapter that a recipe trains further is compared with the recipe before anything is allocated, and
    loaded as it is."""
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / initial_adapter.CONFIG).write_bytes(json_bytes(_ADAPTER))
    (adapter / initial_adapter.WEIGHTS).write_bytes(_adapter_weights(samples.base))
    (adapter / given[0]).write_bytes(given[1])
    method = {
        "name": "lora",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "adapter": str(adapter),
    }
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
    "base_model_name_or_path": "tiny",
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "init_lora_weights": True,
}
