"""Artifacts of others: damaged ones, and changed ones whose hashes fit, opened by all that opens one."""

import hashlib
import json
import os
import pickle
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy
import safetensors.numpy
import yaml
from huggingface_hub import constants
from hypothesis import strategies as st

from flytune import data
from flytune.adapters import combining, gguf, loading, merging
from flytune.artifacts import catalog, fetch, opening, reproduction
from flytune.errors import FlytuneError
from flytune.inference import batch
from flytune.models import base
from flytune.recipe import Model
from flytune.storage import Storage
from flytune.training.checkpoints.ledger import Checkpoint, Ledger
from tests.fuzz.isolation import OF_FILE, Wrong
from tests.fuzz.kinds import RELEASE, Samples, kind
from tests.fuzz.mutations import (
    damaged,
    documents,
    json_bytes,
    with_equal_keys,
    with_secret,
    with_unknown_key,
)
from tests.fuzz.oracles import files_of, plain_json, refuse_dropped, refuse_other_files, refuse_shown
from tests.fuzz.places import nothing_asked
from tests.support.paths import ROOT

ARTIFACT = RELEASE / "artifact"
_LIST = "artifact.json"
_STAND_IN = ROOT / "tests" / "support" / "stand_in_gguf_converter.py"


def copied(source: Path, folder: Path, name: str, content: bytes) -> Path:
    """Copy a folder, with another content of one file."""
    shutil.copytree(source, folder)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def file_bytes(path: Path) -> st.SearchStrategy[bytes]:
    """Draw the bytes of a file of JSON, or of any other one."""
    content = path.read_bytes()
    if path.suffix != ".json":
        return damaged(content)
    text = documents(json.loads(content)).map(json_bytes)
    return st.one_of(text.flatmap(lambda one: damaged(one, often=0.25)), text.flatmap(with_equal_keys))


def files(folder: Path, names: list[str]) -> st.SearchStrategy[tuple[str, bytes]]:
    """Draw the name of a file of a folder, and its bytes."""
    return st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), file_bytes(folder / name)))


def _names() -> list[str]:
    return sorted(str(path.relative_to(ARTIFACT)) for path in ARTIFACT.rglob("*") if path.is_file())


_CREDENTIAL = with_secret({"model": {"name_or_path": "base"}, "method": "lora", "name": "x"}).map(
    lambda recipe: ("recipe.yaml", yaml.safe_dump(recipe, default_flow_style=False).encode())
)
_ESCAPING = st.sampled_from(
    ["../out", "/etc/passwd", "a/../../out", "~/x", "a\\b", "s3://b/x", "x" * 300, ".."]
).map(lambda name: (_LIST, json_bytes({"files": [{"file": name, "size": 4, "sha256": "0" * 64}]})))


_KEEP = {"size": 4, "sha256": hashlib.sha256(b"keep").hexdigest()}
_TWICE = st.sampled_from([["README.md", "README.md"], ["a", "a/b"]]).map(
    lambda names: (_LIST, json_bytes({"files": [{"file": name, **_KEEP} for name in names]}))
)
"""Lists with a name twice, or with one that is the folder of another."""


@kind(
    "artifact",
    lambda samples: st.one_of(
        files(ARTIFACT, _names()), files(ARTIFACT, [_LIST]), _ESCAPING, _TWICE, _CREDENTIAL
    ),
)
def check_artifact(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """An artifact is listed, fetched and opened; what is fetched is what was published."""
    name, content = given
    (folder / "store").mkdir()
    store = copied(ARTIFACT, folder / "store" / "one", name, content)
    changed = content != (ARTIFACT / name).read_bytes()
    os.environ["HF_HOME"] = str(folder / "home")
    listed = catalog.list_artifacts(str(folder / "store"))
    if len(listed) != 1:
        raise Wrong(f"{len(listed)} artifacts are listed")
    refuse_shown(listed[0].model_dump_json())
    if name == _LIST and _has_twice(content) and not listed[0].problems:
        raise Wrong("a list with a name twice is listed without a problem")
    if (
        changed
        and not listed[0].problems
        and name in ("recipe.yaml", "manifest.json", "metrics.json", "adapter_config.json")
    ):
        raise Wrong(f"{name} was changed, and is listed without a problem")
    asked: list[str] = []

    def get(file: str, to: str) -> None:
        asked.append(file)
        if not Path(to).resolve().is_relative_to((folder / "fetched").resolve()):
            raise Wrong(f"{to} is written, which is outside")
        shutil.copyfile(store / file, to)

    fetch.fetch(str(store), folder / "fetched", fetch.Reader(lambda file: (store / file).read_bytes(), get))
    if changed and name != _LIST:
        raise Wrong(f"{name} is fetched although it was changed")
    contents = plain_json((folder / "fetched" / _LIST).read_bytes())
    refuse_other_files(folder / "fetched", contents["files"], but=(_LIST,))
    if asked != [content["file"] for content in contents["files"]]:
        raise Wrong(f"{len(asked)} of {len(contents['files'])} files are fetched")


def _has_twice(content: bytes) -> bool:
    try:
        names = [load["file"] for load in json.loads(content)["files"]]
        is_folder = any(other.startswith(f"{name}/") for name in names for other in names)
        return is_folder or len({*names}) < len(names)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


_CODE = "import pathlib\npathlib.Path({!r}).write_text('run')\n"
_CONFIG = json.loads((ARTIFACT / "adapter_config.json").read_bytes())
_RECIPE = yaml.safe_load((ARTIFACT / "recipe.yaml").read_bytes())
_SLOW = ["(.*)*x", "(a|a)*$", "(.+)+\\1x", "[", "a{999999999999}", "(?<=a+)b", "(" * 500]


def _sealed(samples: Samples) -> st.SearchStrategy[tuple[str, str, str, bytes]]:
    config = st.sampled_from(
        [
            *(
                {name: pattern}
                for name in ("target_modules", "exclude_modules", "layers_pattern")
                for pattern in _SLOW
            ),
            *({name: {pattern: 2}} for name in ("rank_pattern", "alpha_pattern") for pattern in _SLOW),
            *({"peft_type": kind_} for kind_ in (None, "IA3", "LOHA", "PROMPT_TUNING", "x", 5)),
            {"trainable_token_indices": [10**8]},
            {"trainable_token_indices": {"embed_tokens": [10**8]}},
            {"r": 10**9},
            {"modules_to_save": ["lm_head"]},
            {"modules_to_save": ["nowhere"]},
            {"task_type": "SEQ_CLS"},
            {"lora_alpha": 1e300},
            {"layers_to_transform": [99]},
            {"auto_mapping": {"base_model_class": "os", "parent_library": "os"}},
            {"use_dora": True},
            {"target_modules": None},
            {"target_modules": []},
            {"bias": "all"},
            {"fan_in_fan_out": True},
        ]
    ).map(lambda change: json_bytes(_CONFIG | change))
    bases = st.sampled_from(["https://localhost:9/m", _STORED, "ftp://localhost:9/m"]).map(
        lambda base: yaml.safe_dump(_RECIPE | {"model": _RECIPE["model"] | {"name_or_path": base}}).encode()
    )
    fields = [
        "sharding.config",
        "data.chat_template",
        "method.adapter",
        "data.path",
        "evaluation.include_path",
    ]
    recipe = st.sampled_from(fields).map(lambda field: yaml.safe_dump(_naming(field)).encode())
    code = ("tokenizer_config.json", json_bytes({"auto_map": {"AutoTokenizer": ["code.X", None]}}))
    judged = {
        "name": "grpo",
        "rewards": [{"name": "own", "code": "def own(completion, **columns):\n    return 1\n"}],
    }
    placed = judged | {"rewards": ["exact_answer"], "engine": {"name": "vllm", "python": "/tmp/theirs"}}
    objectives = st.sampled_from([judged, placed]).map(
        lambda one: ("recipe.yaml", yaml.safe_dump(_RECIPE | {"objective": one}).encode())
    )
    tokenizer = st.sampled_from([{}, {"chat_template": 5}, {"chat_template": "{{ 'a' * 300000000 }}"}])
    drawn = st.one_of(
        st.tuples(
            st.just("adapter_config.json"), st.one_of(config, file_bytes(ARTIFACT / "adapter_config.json"))
        ),
        st.tuples(
            st.just("recipe.yaml"),
            st.one_of(recipe, documents(_RECIPE).map(lambda one: yaml.dump(one).encode())),
        ),
        st.tuples(st.just("tokenizer_config.json"), tokenizer.map(json_bytes)),
        st.tuples(
            st.just("tokenizer.json"), st.one_of(st.just(b"{}"), file_bytes(ARTIFACT / "tokenizer.json"))
        ),
        st.tuples(st.just("chat_template.jinja"), st.just(b"{% for a in range(99999999999) %}{% endfor %}")),
        st.tuples(st.just("pytorch_model.bin"), st.just(pickle.dumps(_Runs()))),
        files(
            ARTIFACT,
            [
                "adapter_model.safetensors",
                *(f"{one}.json" for one in ("export", "manifest", "plan", "training")),
            ],
        ),
        st.tuples(st.just("README.md"), st.just(b"another text")),
    )
    openers = st.sampled_from([*sorted(_OPENERS), "merge", "load"])
    seals = st.sampled_from(["sealed", "sealed", "changed", "unlisted", "link"])
    led = st.tuples(
        st.sampled_from(["merge", "combine"]),
        st.sampled_from(["folder", "hidden"]),
        st.just(("README.md", b"x")),
    )
    ranks = st.sampled_from([{"r": 9000}, {"rank_pattern": {"q_proj": 9000}}]).map(
        lambda one: json_bytes(_CONFIG | one)
    )
    whole = st.one_of(
        *[st.tuples(openers, seals, drawn)] * 4,
        led,
        st.tuples(st.sampled_from(_LOADERS), st.just("sealed"), st.tuples(st.just("recipe.yaml"), bases)),
        st.tuples(st.just("adapter"), st.just("sealed"), st.tuples(st.just("adapter_config.json"), ranks)),
        st.tuples(st.sampled_from(_LOADERS), st.sampled_from(["sealed", "sealed", "changed"]), st.just(code)),
        st.tuples(st.just("reproduce"), st.just("sealed"), objectives),
    )
    return whole.map(lambda one: (*one[:2], *one[2]))


def _naming(field: str) -> dict[str, Any]:
    """Return the artifact's recipe with the path of a secret file of this machine in a field."""
    section, _, name = field.partition(".")
    changed: dict[str, Any] = dict(_RECIPE[section]) if isinstance(_RECIPE.get(section), dict) else {}
    if section == "sharding":
        changed = {"name": "zero2"}
    return _RECIPE | {section: changed | {name: "SECRET"}}


class _Runs:
    """An object whose unpickling leaves a file."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("code-has-run",)


def _answers(artifact: Path, out: Path) -> None:
    # As in a cluster's pods.
    model = batch.InferenceModel(artifact, {}, opening.Consent(base_at_address=True))
    row = {"where": "x:1", "row": {"messages": [{"role": "user", "content": "a"}]}}
    model.formats["artifact"].tokens(row["row"], "x:1")


_OPENERS = {
    "merge": lambda artifact, out: merging.merge(artifact, out),
    "combine": lambda artifact, out: combining.combine([artifact, ARTIFACT], out),
    "gguf": lambda artifact, out: gguf.convert(artifact, out, converter=str(_STAND_IN)),
    "load": lambda artifact, out: loading.load({"one": artifact}),
    "adapter": lambda artifact, out: loading.Adapter.of(artifact),
    "infer": _answers,
    "reproduce": lambda artifact, out: reproduction.write_recipe(reproduction.recipe_of(artifact), out),
    "base": lambda artifact, out: base.local_name(Model(name_or_path=str(artifact))),
    "compare": lambda artifact, out: reproduction.compare(artifact, ARTIFACT),
}
"""What opens an artifact, and writes."""

_LOADERS = ("merge", "combine", "gguf", "load", "infer")
"""Openers that give an artifact's files to libraries that run the code of auto_map; the others read lists and
sizes alone."""
_STORED = "memory://bucket/model"
"""Address of a storage that has the base; an artifact may name one to `infer` alone, which runs in pods."""


@kind("sealed", _sealed, share=0.4)
def check_sealed(samples: Samples, given: tuple[str, str, str, bytes], folder: Path) -> None:
    """A changed artifact whose hashes fit is refused, or used as what it says; it runs nothing and reads no
    other file."""
    opener, seal, name, content = given
    shutil.copytree(RELEASE / "base", folder / "base")
    (folder / "secret.json").write_text(json.dumps({"private_key": OF_FILE}), encoding="utf-8")
    artifact = copied(
        ARTIFACT, folder / "artifact", name, content.replace(b"SECRET", str(folder / "secret.json").encode())
    )
    (artifact / "code.py").write_text(_CODE.format(str(folder / "code-has-run")), encoding="utf-8")
    if seal == "folder":
        (folder / "elsewhere").mkdir()
        (artifact / "additional_chat_templates").symlink_to(folder / "elsewhere")
    if seal == "hidden":  # what export.json lists alone is no file of the artifact
        (artifact / ".notes").symlink_to(folder / "secret.json")
        exported = json.loads((artifact / "export.json").read_bytes())
        exported["files"].append({"file": ".notes"})
        (artifact / "export.json").write_bytes(json_bytes(exported))
    for listing in ("export.json", _LIST) if seal in ("sealed", "link", "folder", "hidden") else ():
        reseal(artifact, listing, but=(".notes",) if listing == _LIST else ())
    if seal == "link":
        (artifact / name).rename(folder / "elsewhere")
        (artifact / name).symlink_to(folder / "elsewhere")
    if seal in ("changed", "unlisted"):
        (artifact / "code.py").unlink()
    if seal == "unlisted":
        shutil.copyfile(
            ARTIFACT / name if (ARTIFACT / name).exists() else ARTIFACT / "plan.json", artifact / name
        )
        (artifact / "processor_config.json").write_text("{}", encoding="utf-8")
    is_other = seal in ("unlisted", "link", "folder", "hidden") or (
        seal == "changed" and files_of(artifact) != files_of(ARTIFACT)
    )
    constants.HF_HUB_CACHE = str(folder / "hub")
    fsspec.filesystem("memory").put(str(folder / "base"), _STORED, recursive=True)
    os.chdir(folder)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    refused: FlytuneError | None = None
    with nothing_asked():
        try:
            _OPENERS[opener](artifact, folder / "out")
        except FlytuneError as error:
            refused = error
    if (folder / "code-has-run").exists():
        raise Wrong("code of the artifact has run")
    refuse_shown(folder=folder, but=("secret.json", "artifact/", "elsewhere"))
    named = seal == "sealed" and f"name_or_path: {_STORED}\n".encode() in content
    if refused is not None:
        raise Wrong(f"a base in a storage is not read: {refused}") if named and opener == "infer" else refused
    if named and opener in _LOADERS and opener != "infer":
        raise Wrong("an artifact that names a base at an address is opened")
    if is_other:
        raise Wrong(f"an artifact with {name} that is {seal} is opened")
    if b'"auto_map"' in content and seal == "sealed" and opener in _LOADERS:
        raise Wrong("an artifact that names code is opened without consent")
    if b"def own" in content and opener == "reproduce":
        raise Wrong("a recipe whose rewards are code is written for a second run without consent")
    if b"/tmp/theirs" in content and opener == "reproduce":
        raise Wrong("a recipe that names a program is written for a second run without consent")
    if seal == "sealed" and opener in ("adapter", *_LOADERS) and _rank(artifact) > 8:  # its tensors have 2
        raise Wrong(f"an adapter of rank {_rank(artifact)} is read, and its tensors have another one")
    if opener == "combine":
        refuse_other_files(
            folder / "out", plain_json((folder / "out" / _LIST).read_bytes())["files"], but=(_LIST,)
        )
    if opener == "merge":
        listed = plain_json((folder / "out" / "merge.json").read_bytes())["files"]
        refuse_other_files(folder / "out", listed, but=("merge.json",))
        _check_merged(artifact, folder)


def _rank(artifact: Path) -> int:
    """Return the largest rank that adapter_config.json names."""
    config = json.loads((artifact / "adapter_config.json").read_bytes())
    return max(config.get("r", 8), *(config.get("rank_pattern") or {"": 0}).values())


def reseal(artifact: Path, name: str, but: tuple[str, ...] = ()) -> None:
    """Write the sizes and hashes of the files that are there into a list of them; artifact.json gets all
    files."""
    try:
        content = json.loads((artifact / name).read_bytes())
        listed = {one["file"] for one in content["files"]}
    except (ValueError, KeyError, TypeError):
        return
    found = files_of(artifact)
    names = sorted(set(found) - {_LIST, *but}) if name == _LIST else [one for one in found if one in listed]
    content["files"] = [{"file": name, "size": found[name][0], "sha256": found[name][1]} for name in names]
    (artifact / name).write_bytes(json_bytes(content))


def _check_merged(artifact: Path, folder: Path) -> None:
    """Compare merged weights with the base's plus B A alpha / r, for a plain adapter."""
    config = json.loads((artifact / "adapter_config.json").read_bytes())
    if any(
        config.get(name)
        for name in (
            "rank_pattern",
            "alpha_pattern",
            "use_dora",
            "use_rslora",
            "fan_in_fan_out",
            "modules_to_save",
        )
    ):
        return
    adapter = safetensors.numpy.load_file(artifact / "adapter_model.safetensors")
    base = safetensors.numpy.load_file(folder / "base" / "model.safetensors")
    merged = safetensors.numpy.load_file(folder / "out" / "model.safetensors")
    scale = config.get("lora_alpha", 8) / config.get("r", 8)
    for key, first in adapter.items():
        if not key.endswith(".lora_A.weight"):
            continue
        name = key.removeprefix("base_model.model.").replace(".lora_A", "")
        wanted = base[name] + scale * adapter[key.replace("lora_A", "lora_B")] @ first
        if not numpy.allclose(
            merged[name], wanted, rtol=1e-3, atol=1e-4 * max(1.0, float(numpy.abs(wanted).max()))
        ):
            raise Wrong(f"{name}: the merged weights are not the base's with the adapter")


_MANIFEST = RELEASE / "dataset" / "manifest.json"


@kind(
    "dataset",
    lambda samples: st.one_of(
        files(_MANIFEST.parent, [_MANIFEST.name]),
        with_unknown_key(json.loads(_MANIFEST.read_bytes())).map(
            lambda content: (_MANIFEST.name, json_bytes(content))
        ),
    ),
)
def check_dataset(samples: Samples, given: tuple[str, bytes], folder: Path) -> None:
    """The manifest of prepared data is read as it is written, or refused; so are the samples that it
    lists."""
    name, content = given
    manifest = data.read_manifest(copied(RELEASE / "dataset", folder / "dataset", name, content))
    refuse_dropped(plain_json(content), json.loads(manifest.model_dump_json()), name)
    os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
    for split in ("train", "heldout"):
        loaded, there = data.load(folder / "dataset", split), files_of(folder / "dataset" / split)
        listed = {
            shard.file.removeprefix(f"{split}/"): shard.sha256 for shard in getattr(manifest, split).shards
        }
        if {one: sha256 for one, (_, sha256) in there.items()} != listed or not len(loaded):
            raise Wrong(
                f"{split}: {len(loaded)} samples are loaded of {sorted(listed)}, and there are "
                f"{sorted(there)}"
            )


def _checkpoint() -> Checkpoint:
    stored = {"file": "model/weights.bin", "size": 4, "sha256": hashlib.sha256(b"keep").hexdigest()}
    fields: dict[str, Any] = {
        "attempt": "0001-abcdef",
        "decisions": "x",
        "sharding": "none",
        "world_size": 1,
        "flytune": "0",
    }
    return Checkpoint.model_validate({"step": 3, "files": [stored], **fields})


_WHOLE = json.loads(_checkpoint().sealed().model_dump_json())
"""A complete manifest with its digest, which is made before a protection is removed."""


def _manifests(samples: Samples) -> st.SearchStrategy[tuple[bool, Any]]:
    content = _WHOLE
    names = st.sampled_from(
        [
            "../out",
            "/etc/passwd",
            "a/../../out",
            "~/x",
            "model",
            "a\\b",
            "s3://b/x",
            "x" * 300,
            "manifest.json",
        ]
    )
    escaping = names.map(lambda name: content | {"files": [content["files"][0] | {"file": name}]})
    other = st.just(content | {"files": [content["files"][0] | {"sha256": "0" * 64}]})
    return st.tuples(st.booleans(), st.one_of(escaping, documents(content), other, st.just(content)))


@kind("checkpoint", _manifests)
def check_checkpoint(samples: Samples, given: tuple[bool, Any], folder: Path) -> None:
    """A checkpoint's manifest is used as it was written, or not at all; no file outside of its folder
    changes."""
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
    found = ledger.checkpoints()
    if not found and content == _WHOLE:
        raise Wrong("a complete checkpoint is not found")
    for one in found:
        if one.folder != "3-0001-abcdef":
            raise Wrong(f"the checkpoint of {one.folder!r:.60}")
        read = json.loads(one.model_dump_json())
        refuse_dropped(content, read, "manifest.json")
        if read != _WHOLE and read["digest"] == _WHOLE["digest"]:
            raise Wrong("a manifest that was changed after it was written is used")
        ledger.link(one, folder / "linked" / "inside")
        if not ledger.fault(one) and any(
            file.sha256 != hashlib.sha256(b"keep").hexdigest() for file in one.files
        ):
            raise Wrong("a file that is not the listed one")
    ledger.begin()
    ledger.clear()
    outside = [folder / "out", store / "out"]
    if (
        any(not path.is_file() or path.read_bytes() != b"keep" for path in outside)
        or (folder / "linked" / "out").exists()
    ):
        raise Wrong("files outside of the checkpoint were changed")
