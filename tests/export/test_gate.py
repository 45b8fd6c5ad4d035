"""The gate on real exports of a tiny model: undamaged ones pass, and each planted fault is refused by
name."""

import dataclasses
import json
import os
import shutil
import signal
from contextlib import nullcontext

import pytest
import torch

from flytune.data import heldout_rows
from flytune.errors import ExportError
from flytune.export import gate
from flytune.export import write as export_write
from flytune.export.folder import write_manifest
from flytune.export.tensors import verify
from flytune.hardware import shape_named
from flytune.models import loading, probe
from flytune.models.scoring import GATE_SAMPLES
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.training import loop
from flytune.training.attempt_notes import Notes
from flytune.training.run_state import RunState
from flytune.training.trainer import build
from tests.support import ranks
from tests.support.tiny import tiny_recipe

FULL = [(sharding, 600_000) for sharding in ("none", "zero3", "fsdp")]
LORA, QLORA = [("none", None), ("zero2", None)], [("device_map", None)]


def recipe_for(inputs, method, sharding, **changes):
    method = method if method == "full" else {"name": method, "lora_dropout": 0.0}
    shape = "cpu-1" if sharding in ("none", "device_map") else "cpu-2"
    changes = {"method": method, "sharding": sharding, "hardware.shape": shape, **changes}
    return Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))


def fit(recipe, inputs, out, max_file_bytes=None):
    if max_file_bytes:
        export_write.MAX_FILE_BYTES = max_file_bytes
    plan = planner.make(recipe)
    loop.fit(recipe, plan, shape_named(plan.shape), inputs / "dataset", out)


@pytest.fixture(scope="module")
def runs(inputs, tmp_path_factory):
    """A function that returns recipe and trained folder of a run, made at its first call; read-only."""
    done = {}

    def run(method, sharding, max_file_bytes=None, **changes):
        key = method, sharding, max_file_bytes, *changes.values()
        if key not in done:
            recipe, out = (
                recipe_for(inputs, method, sharding, **changes),
                tmp_path_factory.mktemp("run") / "trained",
            )
            ranks.run(planner.make(recipe).world_size, fit, recipe, inputs, out, max_file_bytes)
            done[key] = recipe, out
        return done[key]

    return run


@pytest.fixture
def copied(runs, tmp_path):
    def copy(*run, **changes):
        recipe, trained = runs(*run, **changes)
        return recipe, shutil.copytree(trained, tmp_path / "trained")

    return copy


def pass_the_gate(recipe, trained, inputs):
    rows = heldout_rows(inputs / "dataset", GATE_SAMPLES)
    gate.check(recipe, trained, inputs / "dataset", rows, lambda: loading.exported_model(recipe, trained))


@pytest.mark.parametrize(
    ("method", "sharding", "size"),
    [(method, *run) for method, them in (("full", FULL), ("lora", LORA), ("qlora", QLORA)) for run in them],
)
def test_an_undamaged_export_passes(method, sharding, size, runs, inputs):
    recipe, trained = runs(method, sharding, size)
    assert len(list(trained.rglob("*.safetensors"))) == (6 if method == "full" else 2), "with the probe"
    pass_the_gate(recipe, trained, inputs)


@pytest.mark.parametrize(("method", "sharding"), [("lora", "none"), ("qlora", "device_map")])
def test_a_reloaded_adapter_computes_as_the_live_model_did(method, sharding, runs, inputs, monkeypatch):
    # In the same arithmetic the answers are the same; without autocast they are 6e-3 and 9e-3 of their spread
    # apart.
    monkeypatch.setitem(gate.LOGIT_BOUND, "bfloat16", 1e-4)
    monkeypatch.setitem(gate.LOSS_BOUND, "bfloat16", 1e-5)
    pass_the_gate(*runs(method, sharding, **{"model.dtype": "bfloat16"}), inputs)


@pytest.mark.parametrize(
    ("method", "sharding"), [("full", "fsdp"), ("full", "none"), ("lora", "none"), ("lora", "zero3")]
)
def test_a_scaling_that_is_not_in_the_export_shows_beyond_the_positions_of_the_base(
    method, sharding, inputs, tmp_path
):
    base = shutil.copytree(inputs / "tiny", tmp_path / "base")
    content = json.loads((base / "config.json").read_text()) | {"max_position_embeddings": 64}
    (base / "config.json").write_text(json.dumps(content))
    # Shorter prompts have the base's own frequencies.
    scaling = {"rope_type": "dynamic", "factor": 8}
    changes = {"model.name_or_path": str(base), "model.rope_scaling": scaling, "evaluation.max_samples": 1}
    recipe = recipe_for(inputs, method, sharding, **changes)
    out = tmp_path / "trained"
    ranks.run(planner.make(recipe).world_size, fit, recipe, inputs, out, None)
    assert len(probe.Answers.read(out / probe.PROBE).long_ids) == 112
    pass_the_gate(recipe, out, inputs)
    rows = heldout_rows(inputs / "dataset", 1)
    lost = recipe_for(inputs, method, sharding, **changes | {"model.rope_scaling": None})
    copy = shutil.copytree(out, tmp_path / "copy")
    if method == "full":
        content = {name: value for name, value in content.items() if not name.startswith("rope")}
        (copy / "model/config.json").write_text(json.dumps(content))
    with pytest.raises(ExportError, match=r"after 112 tokens, .* model\.rope_scaling is not in what"):
        gate.check(recipe, out, inputs / "dataset", rows, lambda: loading.exported_model(lost, copy))


# Planted faults: each takes the folder of the export, and returns how the gate must name it.


def tensors_of(file, change):
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    name = change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return name


def shard(folder, number):
    return folder / f"model-{number:05}-of-00005.safetensors"


def in_layer_1(folder, change):
    def changed(tensors):
        name = "model.layers.1.self_attn.q_proj.weight"
        tensors[name] = change(tensors[name])
        return name

    return f"model-00002-of-00005.safetensors: {tensors_of(shard(folder, 2), changed)}: "


def empty_tensor(folder):
    return in_layer_1(folder, lambda tensor: tensor[:0].clone()) + r"empty, found shape \[0, 128\]"


def not_a_number(folder):
    said = "128 of 16,384 .* not finite"
    return in_layer_1(folder, lambda tensor: tensor.index_fill(0, torch.tensor(3), float("nan"))) + said


def all_zero_tensor(folder):
    return in_layer_1(folder, torch.zeros_like) + "all zero, so it was never trained or never gathered"


def wrong_shape(folder):
    return (
        in_layer_1(folder, lambda tensor: tensor[:64].clone())
        + r"expected shape \[128, 128\], found \[64, 128\]"
    )


def wrong_dtype(folder):
    return in_layer_1(folder, lambda tensor: tensor.half()) + "is float16, expected float32"


def zeroed_adapter(folder):
    def zero(tensors):
        names = [name for name in tensors if "lora_B" in name]
        for name in names:
            tensors[name].zero_()
        return ""

    tensors_of(folder / "adapter_model.safetensors", zero)
    return "adapter_model.safetensors: .*lora_B.weight: all zero, so it was never trained"


def half_an_adapter(folder):
    def lose(tensors):
        return tensors.pop(name := next(name for name in tensors if "lora_A" in name)) is None or name

    return (
        f"{tensors_of(folder / 'adapter_model.safetensors', lose)}: expected by the configuration, found "
        "in no file"
    )


def swapped_shards(folder):
    first, second, aside = shard(folder, 2), shard(folder, 4), folder.parent / "aside"
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return f"{first.name}: model.layers.3.* says that it is in {second.name}"


def missing_file(folder):
    shard(folder, 3).unlink()
    return "model-00003-of-00005.safetensors: listed in model.safetensors.index.json but missing"


def truncated_shard(folder):
    shard(folder, 3).write_bytes(shard(folder, 3).read_bytes()[:-1000])
    return "model-00003-of-00005.safetensors: cut short or damaged"


def stale_tokenizer(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    (one, two) = (name for name in ("a", "b"))
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(content))
    return f"{folder.name}/tokenizer.json: not the tokenizer that the data was prepared with"


def stale_template(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return f"{folder.name}/chat_template.jinja: not the tokenizer"


def no_template(folder):
    (folder / "chat_template.jinja").unlink()
    return f"{folder.name}/chat_template.jinja: missing; the data set's tokenizer has it"


def changed_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def wrong_base_revision(folder):
    changed_json(folder / "adapter_config.json", revision="0" * 40)
    return f"adapter/adapter_config.json: trained on revision {'0' * 40} of .*tiny, the recipe's is None"


def wrong_base(folder):
    changed_json(folder / "adapter_config.json", base_model_name_or_path="another/model")
    return "adapter/adapter_config.json: its base is another/model, the recipe's is .*tiny"


def untied_head(folder):
    """Write the tied head a second time, next to the embedding."""
    embedding = "model.embed_tokens.weight"

    def write_twice(tensors):
        tensors["lm_head.weight"] = tensors[embedding] + 1
        return ""

    tensors_of(shard(folder, 1), write_twice)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    changed_json(index, weight_map=weight_map | {"lm_head.weight": shard(folder, 1).name})
    return "model: lm_head.weight: it is tied to another one .tie_word_embeddings"


def untied_configuration(folder):
    changed_json(folder / "config.json", tie_word_embeddings=False)
    return "model/config.json: says False; the base model's tie_word_embeddings is True"


def dtype_of_the_configuration(folder):
    changed_json(folder / "config.json", dtype="bfloat16")
    return "model/config.json: says bfloat16; the recipe's dtype is float32"


def two_layers_swapped(folder):
    """Swap two layers: all names, shapes and hashes are right, but the answers are not."""
    from safetensors.torch import load_file, save_file

    one, two = load_file(shard(folder, 2)), load_file(shard(folder, 3))
    for name in one:
        other = name.replace("layers.1", "layers.2")
        one[name], two[other] = two[other], one[name]
    save_file(one, shard(folder, 2), metadata={"format": "pt"})
    save_file(two, shard(folder, 3), metadata={"format": "pt"})
    return "trained: to '.*' the exported model's logits are .* of their spread away from the live model's"


OF_FULL = [
    empty_tensor,
    not_a_number,
    all_zero_tensor,
    wrong_shape,
    wrong_dtype,
    swapped_shards,
    missing_file,
    truncated_shard,
]
OF_FULL += [
    untied_head,
    untied_configuration,
    dtype_of_the_configuration,
    stale_tokenizer,
    stale_template,
    no_template,
]
OF_FULL += [two_layers_swapped]
OF_ADAPTERS = [zeroed_adapter, half_an_adapter, wrong_base_revision, wrong_base, stale_tokenizer]


@pytest.mark.parametrize(
    ("method", "sharding", "size", "fault"),
    [("full", "fsdp", 600_000, fault) for fault in OF_FULL]
    + [("lora", "none", None, fault) for fault in OF_ADAPTERS]
    + [("qlora", "device_map", None, fault) for fault in OF_ADAPTERS],
)
def test_a_planted_fault_is_caught_by_name(method, sharding, size, fault, copied, inputs):
    recipe, trained = copied(method, sharding, size)
    folder = trained / ("model" if method == "full" else "adapter")
    said = fault(folder)
    # The manifest agrees, as after a faulty exporter.
    write_manifest(recipe, folder, None)
    with pytest.raises(ExportError, match=f"{said}.*; nothing was stored"):
        pass_the_gate(recipe, trained, inputs)


def flipped_bit(folder):
    file = shard(folder, 4)
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    return "model/model-00004-of-00005.safetensors: its content is not what was written; nothing was stored"


def exchanged_with_the_index(folder):
    said = swapped_shards(folder)
    index = folder / "model.safetensors.index.json"
    names = {shard(folder, 2).name: shard(folder, 4).name, shard(folder, 4).name: shard(folder, 2).name}
    weight_map = {
        name: names.get(file, file) for name, file in json.loads(index.read_text())["weight_map"].items()
    }
    changed_json(index, weight_map=weight_map)
    return (
        said.split(":")[0] + ": (its content is not what was written; it is .*model-00004|has [0-9,]+ bytes)"
    )


def added_byte(folder):
    (folder / "generation_config.json").write_bytes((folder / "generation_config.json").read_bytes() + b"\n")
    return "model/generation_config.json: has .* bytes, .* were written"


def lost_file(folder):
    (folder / "generation_config.json").unlink()
    return "model/generation_config.json: listed in export.json but missing"


def no_manifest(folder):
    (folder.parent / "export.json").unlink()
    return "export.json: missing, so the export was never finished"


def no_manifest_at_all(folder):
    (folder.parent / "export.json").write_text("{}")
    return "export.json: not a manifest .[0-9] mistakes"


def test_another_format_of_the_base_is_refused(runs, inputs):
    recipe, trained = runs("qlora", "device_map")
    other = recipe.model_copy(update={"method": recipe.method.model_copy(update={"load_in_8bit": True})})
    with pytest.raises(
        ExportError, match="export.json: trained on nf4_double weights of the base, the recipe's are int8"
    ):
        gate.check_files(other, trained, inputs / "dataset")


@pytest.mark.parametrize(
    "fault", [flipped_bit, exchanged_with_the_index, added_byte, lost_file, no_manifest, no_manifest_at_all]
)
def test_what_changed_after_the_export_is_caught_by_its_hash(fault, copied, inputs):
    recipe, trained = copied("full", "fsdp", 600_000)
    with pytest.raises(ExportError, match=fault(trained / "model")):
        gate.check_files(recipe, trained, inputs / "dataset")


def test_a_bias_that_its_base_has_all_zero_may_stay_so(tmp_path):
    from safetensors.torch import save_file

    from flytune.export import tensors
    from flytune.recipe import Model

    save_file({"a.bias": torch.zeros(2), "b.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    excused = tensors._zero_in_base({"a.bias": "x", "b.bias": "x"}, Model(name_or_path=str(tmp_path)))
    assert excused == {"a.bias"}
    with pytest.raises(ExportError, match="x: b.bias: all zero"):
        tensors._check_zeros({"a.bias": "x", "b.bias": "x"}, excused)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (lambda logits: torch.full_like(logits, float("nan")), "logits are nan of their spread away"),
        (
            lambda logits: logits.roll(1, dims=0),
            "16 of 16 prompts are beyond it.*what was exported is not what was trained",
        ),
        (lambda logits: logits[:, 1:], "the live model answered from 4[0-9]* outputs, the exported one from"),
    ],
)
def test_other_answers(changed, said, runs, inputs, monkeypatch):
    recipe, trained = runs("lora", "none", None)
    live = probe.Answers.read(trained / probe.PROBE)
    found = dataclasses.replace(live, logits=changed(live.logits))
    monkeypatch.setattr(probe, "ask", lambda model, prompts: found)
    with pytest.raises(ExportError, match=said):
        pass_the_gate(recipe, trained, inputs)
    monkeypatch.setattr(probe, "ask", lambda model, prompts: dataclasses.replace(live, loss=live.loss + 0.01))
    with pytest.raises(ExportError, match="loss on the 16 fixed prompts is 0.01 nats away"):
        pass_the_gate(recipe, trained, inputs)


def test_an_adapter_names_the_commit_of_its_base(inputs, tmp_path, monkeypatch):
    """The hub's cache has two commits, and the branch points to the first."""
    from huggingface_hub import constants

    one, two, cache = "1" * 40, "2" * 40, tmp_path / "models--someone--tiny"
    for commit in (one, two):
        shutil.copytree(inputs / "tiny", cache / "snapshots" / commit)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(one)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "adapter"
    folder.mkdir()
    for trained_on, named, said in (
        (one, one, None),
        (two, two, None),
        (one, None, None),
        (
            two,
            None,
            f"trained on revision {two} of someone/tiny, the recipe's is {one}; name the commit in "
            "model.revision",
        ),
        (one, two, f"trained on revision {one} of someone/tiny, the recipe's is {two}"),
        (None, two, f"trained on revision None of someone/tiny, the recipe's is {two}"),
    ):
        config = {"base_model_name_or_path": "someone/tiny", "revision": trained_on, "lora_alpha": 16}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        recipe = recipe_for(
            inputs, "lora", "none", **{"model.name_or_path": "someone/tiny", "model.revision": named}
        )
        with nullcontext() if said is None else pytest.raises(ExportError, match=said):
            gate.check_base(recipe, folder)


def crash_and_continue(recipe, inputs, out, words):
    """Interrupt an export in its fourth file, export the same live trainer again, and return the files
    written again."""
    plan = planner.make(recipe)
    trainer, _ = build(RunState.of(recipe, plan, shape_named(plan.shape), inputs / "dataset"), Notes())
    save, saved = export_write._save, []

    def dying(state, file):
        if file.name.startswith("model-00004"):
            file.with_name(file.name + ".tmp").write_bytes(b"half")
            raise OSError("No space left on device")
        return save(state, file)

    def noted(state, file):
        saved.append(file.name[:11])
        return save(state, file)

    def write(weights):
        export_write.write(
            trainer, recipe, inputs / "dataset" / "tokenizer", out, weights, max_file_bytes=600_000
        )

    found = []
    for first, second in words:
        export_write._save, saved = dying, []
        with pytest.raises(OSError, match="No space left"):
            write(first)
        export_write._save = noted
        write(second)
        found.append(saved)
        gate.check_files(recipe, out, inputs / "dataset")
        shutil.rmtree(out / "model")
    return found


def test_an_interrupted_export_continues_with_the_same_weights_only(inputs, tmp_path):
    recipe = recipe_for(inputs, "full", "none")
    everything = [f"model-0000{number}" for number in range(1, 6)]
    found = ranks.run(
        1, crash_and_continue, recipe, inputs, tmp_path, [("one", "one"), ("one", "two"), ("one", None)]
    )
    assert found == [everything[3:], everything, everything]


def fit_and_die_in_file_4(recipe, inputs, out):
    save = export_write._save

    def dying(state, file):
        if file.name.startswith("model-00004"):
            os.kill(os.getpid(), signal.SIGKILL)
        return save(state, file)

    export_write._save = dying
    fit(recipe, inputs, out, 600_000)


def test_a_run_that_was_killed_in_its_export_writes_only_what_is_missing(inputs, tmp_path):
    changes = {"checkpoints.save_steps": 3, "checkpoints.folder": str(tmp_path / "checkpoints")}
    recipe, out = recipe_for(inputs, "full", "zero2", **changes), tmp_path / "trained"
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(2, fit_and_die_in_file_4, recipe, inputs, out)
    written = {path.name: path.stat().st_mtime_ns for path in (out / "model").glob("*.safetensors")}
    assert len(written) == 3
    ranks.run(2, fit, recipe, inputs, out, 600_000)
    now = {path.name: path.stat().st_mtime_ns for path in (out / "model").glob("*.safetensors")}
    assert len(now) == 5
    assert now | written == now
    pass_the_gate(recipe, out, inputs)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
FAMILIES = {
    "llama": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "qwen2": {"num_key_value_heads": 1},
    "mixtral": {"num_key_value_heads": 1, "num_local_experts": 2},
    "qwen3_moe": {"num_key_value_heads": 1, "num_experts": 2, "moe_intermediate_size": 8, "head_dim": 8},
    "gemma2": {"num_key_value_heads": 1, "head_dim": 8},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "gpt_neox": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layouts_of_other_families(family, inputs, tmp_path):
    """Zero biases as in the base, fused experts that are stored one by one, an untied head."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **(SMALL | FAMILIES[family])), dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "base")
    files = shutil.copytree(tmp_path / "base", tmp_path / "model")
    changes = {"model.name_or_path": str(tmp_path / "base"), "model.dtype": "bfloat16"}
    recipe = recipe_for(inputs, "full", "none", **changes)
    assert verify(files, recipe) > 10

    def lose(tensors):
        return (
            tensors.pop(name := next(name for name in sorted(tensors) if "layers.1" in name)) is None or name
        )

    lost = tensors_of(files / "model.safetensors", lose)
    of_experts = r"is made of tensors .*: 2 expected by the configuration, found 1"
    said = of_experts if ".experts." in lost else f"{lost}: expected by the configuration, found in no file"
    with pytest.raises(ExportError, match=f"{said}; nothing was stored"):
        verify(files, recipe)
