"""Artifacts of somebody else with one thing spoiled and hashes that fit: all that reads one refuses it in
words, or uses it."""

import random
import shutil
from pathlib import Path

import pytest

from flytune import data
from flytune.adapters import combining, gguf, merging
from flytune.artifacts import build, catalog, lineage, publish, reproduction
from flytune.artifacts.publish import hub
from flytune.errors import FlytuneError
from flytune.inference import batch
from flytune.models import Generation, initial_adapter, loading
from flytune.planning import calibration, planner
from flytune.recipe import DataRequest, Model, Recipe
from flytune.records import Contents
from flytune.records.contents import CONTENTS
from tests.fuzz.isolation import problem_of
from tests.support import spoiled
from tests.support.paths import ROOT
from tests.support.reports import metrics as made_up
from tests.support.stages import plan_for, recipe_for, write_trained
from tests.support.tiny import tiny_recipe

RELEASE = ROOT / "tests/support/releases/0.1.0"
CONVERTER = str(ROOT / "tests/support/stand_in_gguf_converter.py")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the artifact of an adapter, the one of a complete model, and their base and data."""
    place = tmp_path_factory.mktemp("place")
    shutil.copytree(RELEASE / "base", place / "base")
    shutil.copyfile(RELEASE / "data.jsonl", place / "data.jsonl")
    shutil.copytree(RELEASE / "artifact", place / "lora")
    loading.import_libraries()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        recipe = recipe_for(Path("base"), "full", **{"data.path": "data.jsonl"})
        trained = write_trained(place / "trained", recipe, RELEASE / "dataset", steps=2)
        build.store(recipe, plan_for(recipe), RELEASE / "dataset", trained, made_up(), place / "full")
    return place


def recipe(**changes):
    return Recipe.model_validate(tiny_recipe(Path("base"), Path("data.jsonl"), changes))


def answers(artifact):
    rows = [
        {"where": "x:1", "row": {"messages": [{"role": "user", "content": "a b"}]}},
        {"where": "x:2", "row": {"prompt": "a"}},
    ]
    batch.InferenceModel(artifact, {}).answers(rows, Generation(max_new_tokens=2))


def card(artifact, out):
    class Repository:
        name, api = "owner/name", None

    out.mkdir()
    hub._files(artifact, Contents.read(artifact / CONTENTS), recipe(), Repository, "x", out, {})


def prepare(artifact, out):
    request = DataRequest.of(recipe(**{"model.name_or_path": str(artifact), "data.max_length": 192}), "x")
    data.prepare(request, out, processes=1)


def train_from(artifact):
    model = recipe(**{"model.name_or_path": str(artifact)})
    planner.make(model)
    lineage.of_base(model.model)
    loading.base_model(model, "float32")


def start_from(artifact):
    from peft import get_peft_model

    method = {"name": "lora", "r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "adapter": str(artifact)}
    adapted = recipe(method=method)
    assert adapted.method.adapter
    planner.make(adapted)
    model = loading.base_model(adapted, "float32")
    initial_adapter.load_weights(get_peft_model(model, loading.peft_config(adapted, model)), adapted.method)


READERS = {
    "merge": lambda artifact, out, good: merging.merge(artifact, out),
    "gguf": lambda artifact, out, good: gguf.convert(artifact, out, converter=CONVERTER),
    "combine": lambda artifact, out, good: combining.combine([good, artifact], out),
    "infer": lambda artifact, out, good: answers(artifact),
    "list": lambda artifact, out, good: [
        problem for one in catalog.list_artifacts(str(artifact)) for problem in one.problems
    ],
    "reproduce": lambda artifact, out, good: reproduction.write_recipe(reproduction.recipe_of(artifact), out),
    "compare": lambda artifact, out, good: (
        reproduction.compare(artifact, good),
        reproduction.compare(good, artifact),
    ),
    "publish": lambda artifact, out, good: publish.publish(
        artifact, str(out), publish.published_name(artifact, recipe())
    ),
    "card": lambda artifact, out, good: card(artifact, out),
    "base": lambda artifact, out, good: train_from(artifact),
    "prepare": lambda artifact, out, good: prepare(artifact, out),
    "adapter": lambda artifact, out, good: start_from(artifact),
    "lineage": lambda artifact, out, good: lineage.of_base(Model(name_or_path=str(artifact))),
    "calibrate": lambda artifact, out, good: calibration.factors(calibration.found([artifact])),
}
WEIGHTS = "merge combine infer compare base adapter list"
TEXT = "merge infer base prepare"
RECORDS = "list reproduce compare publish card lineage calibrate"


def failures(artifact, folder, readers):
    """Return what is no success and no error for users, of each of these readers; `refused` has the errors
    for users."""
    found, refused = [], {}
    good = Path("lora")
    for number, name in enumerate(readers.split()):
        try:
            s = READERS[name](artifact, folder / f"out{number}", good)
            texts = s if name == "list" else []
        except FlytuneError as error:
            refused[name] = str(error)
            texts = [str(error)]
        except Exception as error:  # noqa: BLE001 (what this test looks for)
            found.append(f"{name}: {type(error).__name__}: {error!s:.300}")
            continue
        found += [
            f"{name}: {problem}: {text:.300}" for text in texts if (problem := problem_of(f"x: {text}"))
        ]
    return found, refused


def check(place, kind, name, readers, cases, folder, monkeypatch):
    monkeypatch.chdir(place)
    wrong = []
    for number, (said, content) in enumerate(cases):
        work = folder / str(number)
        work.mkdir()
        found, _ = failures(spoiled.spoil(place / kind, work / "one", name, content), work, readers)
        wrong += [f"{name}: {said}: {one}" for one in found]
        shutil.rmtree(work)
    assert "\n".join(wrong) == ""


LORA, FULL = ("lora", "adapter_config.json"), ("full", "config.json")
TOKENIZER, CONFIG = ("lora", "tokenizer.json"), ("lora", "tokenizer_config.json")
# Kind of artifact and file; what is spoiled: a dotted key, a name of spoiled.TEXTS or bytes; its value; who
# refuses it.
SPOILED = [
    (*LORA, "peft_type", spoiled.MISSING, "merge combine infer"),
    (*LORA, "peft_type", None, "merge combine infer adapter"),
    *(
        (*LORA, "peft_type", name, "merge combine infer adapter")
        for name in ("IA3", "PROMPT_TUNING", "lora", "no such type")
    ),
    (*LORA, "task_type", "SEQ_2_SEQ_LM", ""),
    (*LORA, "r", spoiled.MISSING, "merge combine"),
    *((*LORA, "r", value, "merge combine infer adapter") for value in (None, 0, -1, 1.5, True, "2", 10**12)),
    *(
        (*LORA, "lora_alpha", value, "merge combine infer adapter")
        for value in (None, "4", -1, True, 10**300)
    ),
    *((*LORA, "target_modules", value, "merge infer") for value in ([], ["nowhere"], [5], "(", {"a": 5})),
    *(
        (*LORA, "target_modules", value, "merge combine infer")
        for value in (None, spoiled.MISSING, ["q_proj"])
    ),
    (*LORA, "lora_alpha", spoiled.MISSING, "merge combine infer adapter"),
    *((*LORA, "alpha_pattern", value, "") for value in (None, [], {"q_proj": -1}, {"q_proj": 4})),
    *((*LORA, "arrow_config", value, "") for value in ({}, [], "", 0, {"a": 5})),
    *(
        (*LORA, "trainable_token_indices", value, "merge infer")
        for value in ([10**8], [-1], {"embed_tokens": [10**8]})
    ),
    (*LORA, "trainable_token_indices", {"nowhere": [1]}, "merge infer"),
    *((*LORA, "modules_to_save", value, "merge infer") for value in (["lm_head"], [5])),
    (*LORA, "modules_to_save", ["nowhere"], ""),
    *((*LORA, "bias", value, "") for value in ("all", "no such bias")),
    *(
        (*LORA, "init_lora_weights", value, "")
        for value in ("loftq", "eva", "corda", "olora", "no such way", "pissa_niter_9")
    ),
    *((*LORA, "layers_to_transform", value, "") for value in ([99], [-1], ["x"], 0)),
    (*LORA, "exclude_modules", ["q_proj"], "merge combine infer"),
    *((*LORA, "revision", value, "merge") for value in (5, "a" * 40)),
    *((*LORA, "base_model_name_or_path", value, "merge") for value in (None, 5, "another")),
    *((*LORA, "peft_version", value, "") for value in (None, 5, "99.0")),
    *((*LORA, "use_dora", value, "merge") for value in (True, "x", None)),
    (*LORA, "a_field_of_tomorrow", 1, "merge combine infer adapter"),
    *((*LORA, text, None, "merge combine infer adapter") for text in spoiled.TEXTS if text != "an object"),
    *((*TOKENIZER, text, None, "merge infer") for text in spoiled.TEXTS),
    *((*TOKENIZER, key, spoiled.MISSING, "merge infer") for key in ("model", "model.vocab", "model.merges")),
    (*TOKENIZER, "model.type", spoiled.MISSING, ""),
    *(
        (*TOKENIZER, key, None, "")
        for key in ("added_tokens", "pre_tokenizer", "decoder", "post_processor", "normalizer")
    ),
    *((*TOKENIZER, key, {"type": "Nothing"}, "merge infer") for key in ("model", "pre_tokenizer", "decoder")),
    (*TOKENIZER, "model.vocab", {"a": 10**12}, "merge infer"),
    (*TOKENIZER, "model.vocab", {"a": -1}, "merge infer"),
    (*TOKENIZER, "added_tokens.0.id", 10**8, ""),
    *((*CONFIG, text, None, "merge infer") for text in spoiled.TEXTS if text != "an object"),
    *((*CONFIG, "chat_template", value, "") for value in (5, ["x"], "{% for", [{"name": "default"}])),
    *(
        (*CONFIG, "tokenizer_class", value, "")
        for value in (None, 5, "Nothing", "T5Tokenizer", "WhisperTokenizer")
    ),
    *((*CONFIG, "eos_token", value, "") for value in (None, 5, [], {"a": 5}, "no such token")),
    *((*CONFIG, "added_tokens_decoder", value, "") for value in (5, {"x": {"content": "y"}}, {"5": "x"})),
    *((*CONFIG, "extra_special_tokens", value, "") for value in (5, [5], {"a": 5}, {"a": "b"})),
    *((*CONFIG, "model_max_length", value, "") for value in (None, "x", -1, 1)),
    *((*CONFIG, "padding_side", value, "") for value in (5, "above")),
    (*CONFIG, "auto_map", {"AutoTokenizer": ["code.X", None]}, "merge infer"),
    ("lora", "chat_template.jinja", b"{{ '\\ud800' }}", None, "merge infer"),
    ("lora", "chat_template.jinja", b"{% for a in range(99999999999) %}{% endfor %}", None, "merge infer"),
    ("lora", "chat_template.jinja", b"\xff\xfe", None, "merge infer"),
    *((*FULL, text, None, "base infer") for text in spoiled.TEXTS),
    *(
        (*FULL, "model_type", value, "base infer")
        for value in (spoiled.MISSING, None, 5, "nothing", "t5", "whisper")
    ),
    *((*FULL, "hidden_size", value, "base infer") for value in (None, 0, -1, 7, "x", True, 10**12)),
    *((*FULL, "num_attention_heads", value, "base infer") for value in (None, 0, -1, 7, "x")),
    *((*FULL, "attention_dropout", value, "infer") for value in ("x", [], {})),
    *((*FULL, "attention_bias", value, "infer") for value in ("x", 5, [])),
    *((*FULL, "bos_token_id", value, "infer") for value in ("x", 1.5, [])),
    *((*FULL, "rope_parameters", value, "infer") for value in (5, "x", {"rope_type": "nothing"})),
    *((*FULL, "hidden_act", value, "infer") for value in (5, "nothing")),
    *((*FULL, "dtype", value, "") for value in (5, "nothing", "int8")),
    *(
        (*FULL, "quantization_config", value, "base")
        for value in ({"quant_method": "nothing"}, {"load_in_4bit": True})
    ),
    *((*FULL, "layer_types", value, "infer") for value in (["nothing"], 5)),
    *(("full", "generation_config.json", "eos_token_id", value, "infer") for value in ("x", -5, ["x"])),
    *(("full", "generation_config.json", text, None, "") for text in spoiled.TEXTS),
    *(
        ("lora", "recipe.yaml", key, spoiled.MISSING, "merge reproduce lineage")
        for key in ("model", "data", "method")
    ),
    *(("lora", "recipe.yaml", text, None, "merge reproduce lineage") for text in spoiled.TEXTS),
    *(
        ("lora", name, text, None, "card")
        for name in ("plan.json", "metrics.json", "training.json")
        for text in spoiled.TEXTS
    ),
    ("lora", "plan.json", "needs", [], "card"),
    ("lora", "plan.json", "needs.0.phases", {}, "card"),
    ("lora", "plan.json", None, None, "card reproduce"),
    ("lora", "metrics.json", "tuned", 5, "card"),
    ("lora", "training.json", "steps.0.loss", "x", "card compare"),
    *(("lora", "comparison.json", text, None, "calibrate") for text in spoiled.TEXTS),
    *(("lora", "manifest.json", text, None, "card compare lineage") for text in spoiled.TEXTS),
    *(("lora", "export.json", text, None, "merge lineage") for text in spoiled.TEXTS),
    *(("lora", "lineage.json", text, None, "card lineage") for text in spoiled.TEXTS),
    *(("lora", "steps.jsonl", text, None, "") for text in spoiled.TEXTS),
]
USERS = {
    "adapter_config.json": WEIGHTS,
    "config.json": WEIGHTS + " prepare",
    "generation_config.json": "infer base gguf",
    "tokenizer.json": TEXT,
    "tokenizer_config.json": TEXT + " gguf",
    "chat_template.jinja": TEXT,
    "recipe.yaml": RECORDS + " merge infer",
    "export.json": RECORDS + " merge combine",
}
"""Readers of a file; of the others, those of RECORDS."""


def content(artifact, name, what, value):
    """Return the spoiled content of a file."""
    if isinstance(what, bytes):
        return what
    if what is None or what in spoiled.TEXTS:
        return spoiled.TEXTS.get(what)
    return spoiled.with_values((artifact / name).read_bytes(), {what: value}, name.endswith(".yaml"))


def called(row):
    kind, name, what, value, _ = row
    said = (
        "missing"
        if value is spoiled.MISSING
        else ""
        if value is None and what in spoiled.TEXTS
        else f"{value!r:.30}"
    )
    return f"{kind} {name} {what!s:.30} {said}".strip()


FILES = sorted({row[:2] for row in SPOILED})


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), FILES)
def test_each_spoiled_file_is_refused_in_words_or_used(place, kind, name, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    wrong = []
    for number, row in enumerate(row for row in SPOILED if row[:2] == (kind, name)):
        work = tmp_path / str(number)
        work.mkdir()
        artifact = spoiled.spoil(place / kind, work / "one", name, content(place / kind, *row[1:4]))
        found, refused = failures(artifact, work, USERS.get(name, RECORDS))
        found += [f"{user}: not refused" for user in row[4].split() if user not in refused]
        wrong += [f"{called(row)}: {one}" for one in found]
        shutil.rmtree(work)
    assert "\n".join(wrong) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [("lora", "adapter_model.safetensors"), ("full", "model.safetensors")]
)
def test_spoiled_tensors_are_refused_in_words(place, kind, name, tmp_path, monkeypatch):
    cases = list(spoiled.tensor_files((place / kind / name).read_bytes()))
    check(place, kind, name, WEIGHTS, [*cases, ("missing", None)], tmp_path, monkeypatch)


MOST = 20
"""Cases of a file in one run."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "depth", "readers"),
    [
        ("lora", "adapter_config.json", 1, WEIGHTS),
        ("lora", "tokenizer_config.json", 2, TEXT),
        ("lora", "tokenizer.json", 2, TEXT),
        ("lora", "recipe.yaml", 3, RECORDS + " merge"),
        ("full", "config.json", 2, "infer base prepare"),
        ("full", "generation_config.json", 1, "infer base"),
        *(
            ("lora", f"{one}.json", 3, RECORDS)
            for one in ("manifest", "export", "metrics", "training", "plan", "comparison")
        ),
    ],
)
def test_values_of_all_fields(place, kind, name, depth, readers, tmp_path, monkeypatch):
    cases = list(spoiled.every_value((place / kind / name).read_bytes(), depth, name.endswith(".yaml")))
    # Some of them in each run: all take hours.
    drawn = random.Random(f"{kind}/{name}").sample(cases, min(MOST, len(cases)))
    check(place, kind, name, readers, drawn, tmp_path, monkeypatch)
