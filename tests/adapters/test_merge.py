"""Merging of a tiny model's adapters, with the real 4-bit format: the written model is the measured one."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from flytune import cli
from flytune.adapters import loading as adapters_loading
from flytune.adapters import merging
from flytune.errors import ExportError
from flytune.models import loading, probe
from tests.support.full_disk import files_of_at_most
from tests.support.stages import recipe_for, seal, write_artifact, write_dataset, write_trained


@pytest.fixture(scope="module")
def artifacts(base, tmp_path_factory):
    """Artifacts with recipe and adapter, by method; trained enough to differ from their base."""
    dataset = write_dataset(tmp_path_factory.mktemp("dataset"), base)
    artifacts = {}
    for method in ("lora", "qlora", "full"):
        recipe = recipe_for(base, method, **{"model.dtype": "float32"})
        folder = write_artifact(tmp_path_factory.mktemp(method), recipe, dataset, steps=12)
        artifacts[method] = recipe, folder
    return artifacts


def reloaded(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompts = probe.tokenized(AutoTokenizer.from_pretrained(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model, torch.cat([logits for _, logits in probe.logits_of(model, prompts)])


def trained_logits(recipe, artifact):
    from transformers import AutoTokenizer

    prompts = probe.tokenized(AutoTokenizer.from_pretrained(artifact))
    return torch.cat(
        [logits for _, logits in probe.logits_of(loading.exported_model(recipe, artifact), prompts)]
    )


def test_a_lora_adapter_merges_into_its_base(artifacts, tmp_path):
    recipe, artifact = artifacts["lora"]
    made = merging.merge(artifact, tmp_path / "merged")
    (candidate,) = made.candidates
    assert candidate.onto == "the base's weights"
    assert 0 <= candidate.divergence < 1e-8
    assert candidate.agreement == 1
    _, logits = reloaded(tmp_path / "merged")
    assert probe.distance(trained_logits(recipe, artifact), logits).max() < 1e-4
    config, base = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "merged", Path(made.base))
    )
    # Both forms of the rotary embedding and of the dtype; all else as the base has it.
    assert config == base | {"rope_theta": base["rope_parameters"]["rope_theta"], "torch_dtype": "float32"}


@pytest.mark.parametrize(("bits", "bound"), [(4, 1e-8), (8, 1e-3)])
def test_an_adapter_on_a_base_that_was_published_in_few_bits_is_merged_into_its_dequantized_weights(
    base, tmp_path, bits, bound
):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    format_ = (
        BitsAndBytesConfig(load_in_8bit=True)
        if bits == 8
        else BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    )
    quantized = tmp_path / "quantized"
    AutoModelForCausalLM.from_pretrained(
        base, quantization_config=format_, dtype=torch.float32
    ).save_pretrained(quantized)
    AutoTokenizer.from_pretrained(base).save_pretrained(quantized)
    recipe = recipe_for(quantized, "lora", **{"model.dtype": "float32"})
    artifact = write_artifact(tmp_path / "artifact", recipe, write_dataset(tmp_path / "data", base), steps=4)
    (candidate,) = merging.merge(artifact, tmp_path / "merged").candidates
    assert candidate.onto == f"dequantized {bits}-bit weights"
    assert 0 <= candidate.divergence < bound
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    _, logits = reloaded(tmp_path / "merged")
    if bits == 4:  # 8-bit layers round what goes in too
        assert probe.distance(trained_logits(recipe, artifact), logits).max() < 1e-4


def test_a_qlora_adapter_merges_onto_the_weights_that_it_was_trained_on(artifacts, tmp_path):
    recipe, artifact = artifacts["qlora"]
    made = merging.merge(artifact, tmp_path / "merged")
    kept, other = made.candidates
    assert kept.onto == "dequantized 4-bit weights"
    assert other.onto == "16-bit weights"
    assert kept.divergence < 1e-8 < 1e-5 < other.divergence
    model, logits = reloaded(tmp_path / "merged")
    assert not hasattr(model, "quantization_method"), "no 4-bit model any more"
    # The written model is the measured one.
    divergence = probe.divergence(trained_logits(recipe, artifact), logits)
    assert float(divergence.mean()) == pytest.approx(kept.divergence, abs=1e-9)


def test_an_adapter_on_an_8_bit_base_is_merged_the_nearer_way(base, tmp_path):
    dataset = write_dataset(tmp_path / "dataset", base)
    changes = {"model.dtype": "float32", "sharding": "device_map"}
    recipe = recipe_for(base, {"name": "qlora", "load_in_8bit": True}, **changes)
    artifact = write_artifact(tmp_path / "artifact", recipe, dataset, steps=30)
    made = merging.merge(artifact, tmp_path / "merged")
    assert {candidate.onto for candidate in made.candidates} == {
        "16-bit weights",
        "dequantized 8-bit weights",
    }
    kept, other = made.candidates
    assert 0 < kept.divergence <= other.divergence < 1e-3, "8-bit layers round their inputs too"
    model, logits = reloaded(tmp_path / "merged")
    assert not hasattr(model, "quantization_method"), "no 8-bit model any more"
    expected = trained_logits(recipe, artifact)
    divergence = probe.divergence(expected, logits)
    assert float(divergence.mean()) == pytest.approx(kept.divergence, abs=1e-9)
    served = adapters_loading.load({"a": artifact})
    prompts = probe.tokenized(AutoTokenizer.from_pretrained(artifact))
    assert torch.equal(torch.cat([found for _, found in probe.logits_of(served, prompts)]), expected)


def test_the_merged_folder_is_complete(artifacts, base, tmp_path):
    made = merging.merge(artifacts["qlora"][1], tmp_path / "new" / "merged")
    files = {path.name for path in (tmp_path / "new" / "merged").iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "merge.json",
    } <= files
    assert not [name for name in files if name.startswith("adapter")]
    assert merging.Merge.read(tmp_path / "new" / "merged" / "merge.json") == made
    config = json.loads((tmp_path / "new" / "merged" / "config.json").read_text())
    assert config["dtype"] == made.dtype == "float32", "the base's"
    assert "quantization_config" not in config
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["merged"]


def test_the_dtype_is_the_bases_whatever_was_computed_in(base, artifacts, tmp_path):
    import shutil

    from transformers import AutoModelForCausalLM

    half = shutil.copytree(base, tmp_path / "half")
    AutoModelForCausalLM.from_pretrained(half, dtype="bfloat16").save_pretrained(half)
    recipe, artifact = artifacts["lora"]
    artifact = shutil.copytree(artifact, tmp_path / "artifact")
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"name_or_path": str(half)})})
    (artifact / "recipe.yaml").write_text(recipe.to_yaml())
    config = artifact / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(half)}))
    seal(artifact)
    assert merging.merge(artifact, tmp_path / "merged").dtype == "bfloat16"
    assert reloaded(tmp_path / "merged")[0].dtype == torch.bfloat16


def test_the_dtype_of_the_merged_weights_can_be_another(artifacts, tmp_path):
    made = merging.merge(artifacts["lora"][1], tmp_path / "merged", dtype="bfloat16")
    assert made.dtype == "bfloat16"
    assert reloaded(tmp_path / "merged")[0].dtype == torch.bfloat16


def test_the_other_way_is_kept_where_it_is_nearer(artifacts, tmp_path, monkeypatch):
    measured = merging._measured

    def turned(onto, *arguments):
        far = onto == "dequantized 4-bit weights"
        return measured(onto, *arguments).model_copy(update={"divergence": 1.0 if far else 0.5})

    monkeypatch.setattr(merging, "_measured", turned)
    recipe, artifact = artifacts["qlora"]
    made = merging.merge(artifact, tmp_path / "merged")
    assert made.candidates[0].onto == "16-bit weights"
    onto_dequantized = merging._merged(
        recipe, loading.exported_model(recipe, artifact), "dequantized 4-bit weights", recipe.model.dtype
    )
    onto_16_bit = merging._merged(
        recipe, loading.exported_model(recipe, artifact), "16-bit weights", recipe.model.dtype
    )
    written = reloaded(tmp_path / "merged")[0].model.layers[0].mlp.up_proj.weight
    assert torch.equal(written, onto_16_bit.model.layers[0].mlp.up_proj.weight)
    assert not torch.equal(written, onto_dequantized.model.layers[0].mlp.up_proj.weight)


def test_4_bit_layers_without_an_adapter_are_merged_as_they_were(base, tmp_path):
    dataset = write_dataset(tmp_path / "dataset", base)
    recipe = recipe_for(base, "qlora", **{"model.dtype": "float32"})
    folder = write_trained(tmp_path / "trained", recipe, dataset, steps=1)
    trained = loading.exported_model(recipe, folder)
    layer = trained.get_base_model().model.layers[0].mlp
    layer.up_proj = layer.up_proj.base_layer
    names = {name: delta is None for name, _, delta, _ in merging._layers(trained)}
    assert len(names) == 28
    assert [name for name, bare in names.items() if bare] == ["model.layers.0.mlp.up_proj"]


def test_nothing_is_overwritten(artifacts, tmp_path):
    (tmp_path / "merged").mkdir()
    with pytest.raises(
        ExportError, match="merged: exists already; a merged model is written into a new folder"
    ):
        merging.merge(artifacts["lora"][1], tmp_path / "merged")
    assert not list((tmp_path / "merged").iterdir())


def test_a_complete_model_has_nothing_to_merge(artifacts, tmp_path):
    with pytest.raises(ExportError, match="has no adapter; it is a complete model, which needs no merging"):
        merging.merge(artifacts["full"][1], tmp_path / "merged")


def test_a_head_that_is_the_embedding_is_not_merged(artifacts):
    recipe, artifact = artifacts["lora"]
    trained = loading.exported_model(recipe, artifact)
    layers = [("lm_head", trained.get_base_model().lm_head, torch.zeros(1), None)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "_layers", lambda trained: layers)
        with pytest.raises(
            ExportError,
            match="lm_head: the adapter changes it alone, but head and embedding are one tensor: use the "
            "adapter unmerged",
        ):
            merging._merged(recipe, trained, "the base's weights", recipe.model.dtype)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_a_full_disk_ends_with_one_error_and_leaves_nothing(method, artifacts, tmp_path, capsys):
    with files_of_at_most(100_000):
        assert cli.main(["merge", str(artifacts[method][1]), "--out", str(tmp_path / "merged")]) == 1
    error = capsys.readouterr().err
    assert "File too large" in error
    assert "make room" in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_both(artifacts, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["merge", str(artifacts["qlora"][1]), "--out", str(tmp_path / "merged")]) == 0
    said = capsys.readouterr().out
    assert "dequantized 4-bit weights" in said
    assert "16-bit weights" in said.replace("dequantized 4-bit weights", "")
    assert said.count("kept") == 1
    assert cli.main(["merge", str(artifacts["qlora"][1]), "--out", str(tmp_path / "merged")]) == 1
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["merge", str(artifacts["lora"][1]), "--out", str(tmp_path / "lora"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"][0]["onto"] == "the base's weights"
