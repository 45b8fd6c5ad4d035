"""What is written of a trained model has the keys and the spelling of the base's files; only what training
changed differs."""

import json

import pytest

from flytune.errors import FlytuneError
from flytune.models import published, tokenizers, trial
from flytune.recipe import Model
from flytune.selftest import tiny_model

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
# Rotary embeddings as transformers 4 writes them, and as it must find them where the base has the new form.
ROTARY = {
    "llama": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "qwen2": {"rope_theta": 1000000.0},
    "gemma3_text": {
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "gpt_neox": {"rotary_emb_base": 20000, "rotary_pct": 0.5},
    "phi3": {"rope_theta": 20000.0, "original_max_position_embeddings": 64, "rope_scaling": LONG},
    "stablelm": {"rope_theta": 20000, "partial_rotary_factor": 0.5},
    "gpt2": {},
}


def base_of(folder, content):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    return Model(name_or_path=str(folder), dtype="bfloat16")


def written(config, model, folder):
    folder.mkdir()
    published.write_config(config, model, "bfloat16", "Trained", folder)
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", ROTARY)
def test_the_bases_keys_stay_in_both_forms(kind, tmp_path):
    from transformers import AutoConfig

    old = {
        "model_type": kind,
        **SIZES,
        "torch_dtype": "float32",
        "pad_token_id": 0,
        "use_cache": True,
        "a": {"b": 1},
        **ROTARY[kind],
    }
    model = base_of(tmp_path / "old", old)
    live = AutoConfig.from_pretrained(model.name_or_path)
    live.use_cache, live.vocab_size, live.pad_token_id = False, 304, 7
    found = written(live, model, tmp_path / "written")
    changed = {"torch_dtype": "bfloat16", "vocab_size": 304, "pad_token_id": 7}
    assert {key: found[key] for key in old | changed} == old | changed
    assert found["architectures"] == ["Trained"]
    rotary = getattr(live, "rope_parameters", None)
    assert found.keys() - old.keys() <= {"dtype", "pad_token_id", "architectures", "rope_parameters"}
    assert json.dumps(found.get("rope_parameters")) == json.dumps(rotary)

    # A base that transformers 5 wrote is readable by version 4 too.
    live.save_pretrained(tmp_path / "new")
    new = json.loads((tmp_path / "new/config.json").read_text())
    assert not ROTARY[kind].keys() & {"rope_theta", "rope_scaling", "rotary_pct"} & new.keys()
    found = written(live, Model(name_or_path=str(tmp_path / "new"), dtype="bfloat16"), tmp_path / "from-new")
    assert {key: found[key] for key in ROTARY[kind]} == ROTARY[kind]
    assert found["dtype"] == found["torch_dtype"] == "bfloat16"
    assert getattr(AutoConfig.from_pretrained(tmp_path / "from-new"), "rope_parameters", None) == rotary


def test_a_changed_rotary_embedding_is_changed_in_both_forms(tmp_path):
    from transformers import AutoConfig

    model = base_of(tmp_path / "base", {"model_type": "llama", **SIZES, **ROTARY["llama"]})
    live = AutoConfig.from_pretrained(model.name_or_path)
    live.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 7000.0}
    found = written(live, model, tmp_path / "written")
    assert found["rope_parameters"] == live.rope_parameters
    assert found["rope_theta"] == 7000.0
    assert found["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


def test_a_head_and_its_labels_are_written(tmp_path):
    from transformers import AutoConfig

    model = base_of(tmp_path / "base", {"model_type": "llama", **SIZES, "num_labels": 3})
    found = written(AutoConfig.from_pretrained(model.name_or_path, num_labels=1), model, tmp_path / "written")
    assert (found["id2label"], found["label2id"], found["num_labels"]) == (
        {"0": "LABEL_0"},
        {"LABEL_0": 0},
        1,
    )


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "top_p": 0.6},
        {"top_k": 20},
        {"typical_p": 0.5, "do_sample": False},
        {"num_beams": 1, "early_stopping": True},
    ],
)
def test_a_base_whose_generation_config_transformers_does_not_save(sampling, tmp_path):
    from transformers import AutoModelForCausalLM

    base = tiny_model.write(tmp_path / "base", tiny_model.SENTENCES)
    content = {"bos_token_id": 0, "eos_token_id": [2, 0], **sampling}
    (base / "generation_config.json").write_text(json.dumps(content))
    model, recipe = AutoModelForCausalLM.from_pretrained(base), Model(name_or_path=str(base), dtype="float32")
    model.generation_config.pad_token_id = 3
    with pytest.raises(ValueError, match="Fix these issues"):
        model.save_pretrained(tmp_path / "checkpoint")
    trial.save_all(recipe, tokenizers.from_pretrained(str(base)))
    generation = model.generation_config
    published.make_savable(model)
    model.save_pretrained(tmp_path / "checkpoint")
    published.write_generation_config(generation, recipe, tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == content | {"pad_token_id": 3}
    saved = json.loads((tmp_path / "checkpoint/generation_config.json").read_text())
    assert (saved["eos_token_id"], saved["pad_token_id"]) == ([2, 0], 3)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("generation_config.json", "{", "its generation_config.json cannot be read"),
        (
            "generation_config.json",
            '{"eos_token_id": {"a": 1}}',
            "generation_config.json: eos_token_id: must be ids",
        ),
        ("config.json", '{"model_type": "llama", "vocab_size": "many"}', "its config.json cannot be saved"),
    ],
)
def test_what_could_not_be_saved_is_refused_before_the_data_is_prepared(file, content, said, tmp_path):
    base = tiny_model.write(tmp_path / "base", tiny_model.SENTENCES)
    tokenizer = tokenizers.from_pretrained(str(base))
    (base / file).write_text(content)
    with pytest.raises(FlytuneError, match=said):
        trial.save_all(Model(name_or_path=str(base), dtype="float32"), tokenizer)
