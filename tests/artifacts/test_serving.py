"""An artifact's folder is what vLLM, Text Generation Inference and llama.cpp's converters load.

None of the three is installed here: what each reads is taken from its source, named at each test (as of late
2026).
"""

import json
import re

import pytest

from flytune import data
from flytune.artifacts import build
from flytune.export import write
from flytune.hardware import shape_named
from flytune.models import probe
from flytune.planning import planner
from flytune.recipe import DataRequest, Recipe
from flytune.report import model_card
from flytune.training import loop
from tests.support import ranks
from tests.support.reports import metrics as made_up
from tests.support.tiny import tiny_base, tiny_recipe, write_pairs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A base in the form of transformers 4, with a generation config that transformers 5 does not save."""
    folder = tiny_base(tmp_path_factory.mktemp("base"))
    config = read(folder / "config.json")
    del config["rope_parameters"], config["dtype"]
    config |= {
        "rope_theta": 500000.0,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "transformers_version": "4.57.6",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 2, "temperature": 0.9, "top_p": 0.6})
    )
    tokenizer = read(folder / "tokenizer_config.json") | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def fit(recipe, plan, dataset, out):
    loop.fit(recipe, plan, shape_named(plan.shape), dataset, out)


@pytest.fixture(scope="module")
def artifacts(base, tmp_path_factory):
    """One trained model and one trained adapter, exported and stored as every run's are."""
    folder, found = tmp_path_factory.mktemp("artifacts"), {}
    for method in ("full", "lora"):
        changes = {
            "method": method,
            "model.dtype": "bfloat16",
            "training.max_steps": 1,
            "training.warmup_steps": 0,
            # An adapter that one step has moved further than bfloat16 rounds.
            "training.learning_rate": 0.1 if method == "lora" else 1e-3,
        }
        changes["checkpoints.save_steps"] = 1
        recipe = Recipe.model_validate(tiny_recipe(base, write_pairs(folder / "pairs.jsonl", 64), changes))
        plan, dataset = planner.make(recipe), folder / "dataset"
        if not dataset.exists():
            data.prepare(DataRequest(model=recipe.model, data=recipe.data, fingerprint="x"), dataset)
        ranks.run(1, fit, recipe, plan, dataset, folder / method)
        found[method] = build.store(
            recipe, plan, dataset, folder / method, made_up(), folder / f"{method}-artifact"
        )
    return found


@pytest.fixture
def model(artifacts):
    return artifacts["full"]


@pytest.fixture
def adapter(artifacts):
    return artifacts["lora"]


def read(path):
    return json.loads(path.read_text())


def tensors(folder):
    from safetensors import safe_open

    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            tensors |= {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 (it is no dictionary)
    return tensors


@pytest.mark.slow
def test_model_for_vllm_and_tgi(model):
    """Vllm/transformers_utils/config.py and model_executor/model_loader; text_generation_server/utils/hub.py
    and weights.py.

    Both take the class from config.json's architectures, *.safetensors (by the index, where there are
    several), the tokenizer by AutoTokenizer, and stop at generation_config.json's eos_token_id.
    """
    from transformers import AutoTokenizer

    config, generation = read(model / "config.json"), read(model / "generation_config.json")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    assert "auto_map" not in config
    assert generation["eos_token_id"] == config["eos_token_id"] == tokenizer.eos_token_id
    assert tokenizer.chat_template
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in model.iterdir()}
    stored = tensors(model)
    assert {tensor.get_dtype() for tensor in stored.values()} == {"BF16"}
    # Names as published, without prefixes of wrappers (FSDP, torch.compile, PEFT).
    assert all(re.match(r"(model\.(embed_tokens|layers\.\d+|norm)|lm_head)\.", name) for name in stored)
    assert stored.keys() >= {"model.embed_tokens.weight", "model.norm.weight"}
    assert not list(model.glob("*.bin"))


def test_the_files_keep_the_keys_of_the_base(artifacts, base):
    model = artifacts["full"]
    config, before = read(model / "config.json"), read(base / "config.json")
    assert {key: config[key] for key in before} == before | {"torch_dtype": "bfloat16"}
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert read(model / "generation_config.json") == read(base / "generation_config.json") | {
        "bos_token_id": 0,
        "pad_token_id": 3,
    }
    for folder in artifacts.values():
        assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        config, before = (read(one / "tokenizer_config.json") for one in (folder, base))
        assert {key: config[key] for key in before} == before


def test_adapter_for_vllm(artifacts, adapter):
    """Vllm/lora/peft_helper.py (PEFTHelper) and vllm/lora/lora_model.py (LoRAModel.from_local_checkpoint).

    r, lora_alpha and target_modules are required; modules_to_save and DoRA are refused; all tensors are
    lora_A or lora_B of linear layers below base_model.model.
    """
    config = read(adapter / "adapter_config.json")
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert isinstance(config["r"], int)
    assert config["lora_alpha"]
    assert config["target_modules"]
    assert config["modules_to_save"] is None
    assert not config["use_dora"]
    assert config["bias"] == "none"
    linear = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
    pattern = rf"base_model\.model\.model\.layers\.\d+\.(?:self_attn|mlp)\.(?:{linear})\.lora_([AB])\.weight"
    stored = tensors(adapter)
    for name, tensor in stored.items():
        match = re.fullmatch(pattern, name)
        assert match, name
        assert tensor.get_shape()[0 if match[1] == "A" else 1] == config["r"]
    assert sum("lora_A" in name for name in stored) * 2 == len(stored)


def test_adapter_for_tgi(adapter):
    """text_generation_server/adapters/lora.py: PEFT's LoraConfig; base_model.model.NAME.lora_A.weight, as for
    vLLM."""
    from peft import LoraConfig

    config = LoraConfig.from_pretrained(str(adapter))
    assert config.base_model_name_or_path
    assert not config.use_rslora
    assert not config.fan_in_fan_out


def test_the_cards_rank_is_one_that_vllm_takes(artifacts):
    """MaxLoRARanks in vllm/config/lora.py."""
    text = (artifacts["lora"] / "README.md").read_text()
    rank = int(re.findall(r"--max-lora-rank (\d+)", text)[0])
    assert rank in model_card.VLLM_RANKS
    assert rank >= Recipe.from_yaml(artifacts["lora"] / "recipe.yaml").method.r


def test_the_record_of_an_adapters_answers_has_its_base_and_half_its_scale(artifacts, base):
    """`flytune verify` names a server that has forgotten the adapter or its scale by them."""
    import torch
    from peft import PeftModel
    from peft.helpers import rescale_adapter_scale
    from transformers import AutoModelForCausalLM

    assert probe.Answers.read(artifacts["full"] / probe.PROBE).base is None
    recorded = probe.Answers.read(artifacts["lora"] / probe.PROBE)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    alone = probe.ask(model, recorded.prompts).logits
    assert float(probe.distance(alone, recorded.base.float()).max()) < 0.02
    tuned = PeftModel.from_pretrained(model, artifacts["lora"]).eval()
    with rescale_adapter_scale(tuned, probe.HALF):
        halved = probe.ask(tuned, recorded.prompts).logits
    # Nearer to the adapter at half its scale than to the base or to the whole of it.
    distance = float(probe.distance(halved, recorded.scaled.float()).mean())
    for other in (recorded.base, recorded.logits):
        assert distance < 0.5 * float(probe.distance(halved, other.float()).mean())


def gguf_names(layers):
    import gguf

    return gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)


def test_model_for_llama_cpp(model):
    """convert_hf_to_gguf.py: load_hparams, map_tensor_name and set_vocab of ModelBase, by the gguf package
    they use."""
    import gguf

    config = read(model / "config.json")
    names = gguf_names(config["num_hidden_layers"])
    mapped = {name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in tensors(model)}
    assert None not in mapped.values()
    assert len(set(mapped.values())) == len(mapped)
    assert {"token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"} <= set(
        mapped.values()
    )
    vocabulary = gguf.SpecialVocab(model, load_merges=True)
    assert vocabulary.merges
    assert vocabulary.special_token_ids["eos"] == config["eos_token_id"]
    assert "<|im_start|>" in vocabulary.chat_template
    for needed in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "rms_norm_eps",
    ):
        assert config[needed]


def test_adapter_for_llama_cpp(adapter, base):
    """convert_lora_to_gguf.py: get_base_tensor_name, and only lora_A and lora_B; lora_alpha of
    adapter_config.json."""
    names = gguf_names(read(base / "config.json")["num_hidden_layers"])
    for name in tensors(adapter):
        linear = re.sub(r"\.lora_[AB]\.weight$", ".weight", name.removeprefix("base_model.model."))
        assert names.get_name(linear, try_suffixes=(".weight",)), name
    assert float(read(adapter / "adapter_config.json")["lora_alpha"])


def test_a_model_written_as_gguf_answers_as_its_folder(model, tmp_path):
    """Write a Llama's tensors as the converter does, with the gguf package: its names, its order of queries
    and keys."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM

    config, file = read(model / "config.json"), tmp_path / "model.gguf"
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    names, writer = gguf_names(config["num_hidden_layers"]), gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(loaded.config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in loaded.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if found := [count for part, count in heads.items() if part in name]:
            # llama.cpp turns neighbouring pairs; transformers, the two halves of a head.
            tensor = tensor.view(found[0], 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.allclose(again(tokens).logits, loaded(tokens).logits, atol=1e-5)


def test_files_of_weights_are_5_gb_at_most():
    assert write.MAX_FILE_BYTES <= 5 * 10**9
