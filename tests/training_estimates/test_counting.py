"""Parameters of every model type that transformers builds: counted within half a percent, or refused."""

import json
import math
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flytune.dryrun import confirm
from flytune.errors import DoesNotFit, RecipeError
from flytune.models import adapter_targets, config_json, tensor_headers
from flytune.planning import base_sizes, planner, workloads
from flytune.recipe import Model
from tests.support import model_hub
from tests.support.counted_models import adapters, built
from tests.support.json_server import look_at
from tests.support.model_types import MODEL_TYPES, tiny_config
from tests.support.paths import ROOT
from tests.support.plans import recipe_of
from training_estimates import config_sizes, counting, meta_model
from training_estimates.config_sizes import KINDS
from training_estimates.errors import SizesError
from training_estimates.tensor_counts import MAY_DIFFER

# Types that version 0.1.0 counted wrong, of those that transformers builds.
WRONG_BEFORE = (
    "ernie4_5_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gemma4_text",
    "qwen2_moe",
    "qwen3_next",
    "qwen3_5_text",
    "kimi_linear",
    "llama4_text",
    "granitemoehybrid",
    "falcon_h1",
    "lfm2",
    "apertus",
    "arcee",
    "bailing_hybrid",
)
BUILT = sorted({*KINDS} & {*MODEL_TYPES})
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10000.0,
    "architectures": ["LlamaForCausalLM"],
}


def parameters_of(model):
    return sum(parameter.numel() for parameter in model.parameters())


def header(tensors, dtype="BF16"):
    """Return a safetensors file of tensors with these shapes, with zeros."""
    width, at, table = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}, 0, {}
    for name, shape in tensors.items():
        shape, kind = shape if isinstance(shape[0], tuple | list) else (shape, dtype)
        size = math.prod(shape) * width[kind]
        table[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def folder_of(path, config, tensors=None):
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if tensors is not None:
        (path / "model.safetensors").write_bytes(header(tensors))
    return Model(name_or_path=str(path))


def stored(model):
    return {name: tuple(one.shape) for name, one in model.named_parameters()}


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setattr(meta_model, "is_installed", lambda: False)


@pytest.mark.parametrize("kind", sorted({*MODEL_TYPES, *meta_model.ENCODERS}))
def test_no_model_type_is_miscounted(kind, monkeypatch):
    config = tiny_config(kind)
    true = parameters_of(built(config))
    content = json.loads(config.to_json_string())
    try:
        found = counting.count(content, None, kind)
    except SizesError as refused:
        error = str(refused)
    else:
        error = None
        assert abs(found.parameters - true) <= MAY_DIFFER * true
        assert sum(linear.parameters for linear in found.linears) <= true
    if error:
        assert "builds no causal language model" in error
        assert content["model_type"] != kind, "a part of an image model, saved under another name"
    monkeypatch.setattr(meta_model, "is_installed", lambda: False)
    if kind in KINDS:
        assert counting.count(content, None, kind).parameters == pytest.approx(true, rel=MAY_DIFFER)
    else:
        with pytest.raises(
            SizesError, match="its safetensors are not at hand; name a folder or repository that has them"
        ):
            counting.count(content, None, kind)


@pytest.mark.parametrize(
    "kind", [*WRONG_BEFORE, "mixtral", "qwen3_moe", "minimax", "zaya", "gpt2", "phi3", "cohere"]
)
def test_headers_alone_are_counted_without_torch(kind, tmp_path, monkeypatch):
    """From files as transformers writes them, where torch is installed and where it is not."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(kind), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    true = parameters_of(model)
    for installed in (True, False):
        monkeypatch.setattr(meta_model, "is_installed", lambda installed=installed: installed)
        assert base_sizes.read_geometry(Model(name_or_path=str(tmp_path))).parameters == pytest.approx(
            true, rel=MAY_DIFFER
        )


VARIATIONS = {
    "as it is": {},
    "tied": {"tie_word_embeddings": True},
    "not tied": {"tie_word_embeddings": False},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "use_bias": {"use_bias": False},
    "one key head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 32},
    "qk_layernorm": {"qk_layernorm": True},
    "sparse": {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
}
DROPPED = ("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias")


@pytest.mark.parametrize("kind", BUILT)
def test_the_closed_form_is_right_for_each_setting_of_its_types(kind):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    plain = json.loads(tiny_config(kind).to_json_string())
    changed = [plain | change for change in VARIATIONS.values() if set(change) <= set(plain)]
    changed += [
        {key: value for key, value in plain.items() if key != dropped}
        for dropped in DROPPED
        if dropped in plain
    ]
    for content in changed:
        try:
            true = parameters_of(built(CONFIG_MAPPING[kind].from_dict(content)))
            found = config_sizes.geometry(content, kind)
        except (SizesError, ValueError):
            continue  # refused, or not built
        assert found.parameters == true, {
            key: content.get(key) for key in (*DROPPED, "qk_layernorm", "decoder_sparse_step")
        }


def test_deepseek_v3_is_not_17_billion(monkeypatch):
    found = counting.count(DEEPSEEK_V3, None, "deepseek-ai/DeepSeek-V3")
    assert found.parameters == pytest.approx(671.03e9, rel=1e-3)
    assert found.active_parameters + found.embedding_parameters == pytest.approx(37.6e9, rel=0.02), (
        "its report says 37B"
    )
    assert "latent attention" in found.unsupported
    monkeypatch.setattr(meta_model, "is_installed", lambda: False)
    with pytest.raises(
        SizesError, match="sizes of a 'deepseek_v3' do not follow from its config.json in closed form"
    ):
        counting.count(DEEPSEEK_V3, None, "deepseek-ai/DeepSeek-V3")


def test_heads_for_further_tokens_are_left_out_and_said(tmp_path, without_torch):
    tensors = stored(built(tiny_config("deepseek_v3")))
    config = json.loads(tiny_config("deepseek_v3").to_json_string())
    depth = config["num_hidden_layers"]
    plain = base_sizes.read_geometry(folder_of(tmp_path, config, tensors))
    config["num_nextn_predict_layers"] = 1
    more = tensors | {f"model.layers.{depth}.eh_proj.weight": (64, 128), "mtp.norm.weight": (64,)}
    found = base_sizes.read_geometry(folder_of(tmp_path, config, more))
    assert found.parameters == plain.parameters
    assert found.left_out == (
        "2 stored tensors of 8,256 parameters that transformers does not load "
        f"(model.layers.{depth}.eh_proj.weight ...)"
    )


def test_a_config_of_another_model_stops_the_plan_with_both_numbers(tmp_path, monkeypatch):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tensors = stored(built(CONFIG_MAPPING["llama"].from_dict(LLAMA)))
    true = base_sizes.read_geometry(folder_of(tmp_path, LLAMA, tensors)).parameters
    for change in (
        {"intermediate_size": 112},
        {"num_hidden_layers": 8},
        {"tie_word_embeddings": True, "vocab_size": 4096},
    ):
        with pytest.raises(
            RecipeError, match=rf"its parameters are {true:,} by the headers|by the headers .* and [\d,]+ by"
        ):
            base_sizes.read_geometry(folder_of(tmp_path, LLAMA | change, tensors))
    monkeypatch.setattr(meta_model, "is_installed", lambda: False)
    other = LLAMA | {"model_type": "of_its_own"}
    assert base_sizes.read_geometry(folder_of(tmp_path, other, tensors)).parameters == true
    for change, said in (
        ({"num_hidden_layers": 3}, "has 3 layers, and its files have 4"),
        ({"hidden_size": 96}, "hidden_size is 96 in its config.json, and 64 in"),
        ({"vocab_size": 256}, "vocab_size is 256 in its config.json, and 128 in"),
    ):
        with pytest.raises(RecipeError, match=said):
            base_sizes.read_geometry(folder_of(tmp_path, other | change, tensors))


def test_a_head_that_is_stored_though_tied_counts_once(tmp_path):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tied = LLAMA | {"tie_word_embeddings": True}
    tensors = stored(built(CONFIG_MAPPING["llama"].from_dict(tied)))
    without = base_sizes.read_geometry(folder_of(tmp_path, tied, tensors)).parameters
    assert (
        base_sizes.read_geometry(
            folder_of(tmp_path, tied, tensors | {"lm_head.weight": (128, 64)})
        ).parameters
        == without
    )
    old = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}
    assert base_sizes.read_geometry(folder_of(tmp_path, tied, old)).parameters == without


def test_quantized_files_are_counted_by_their_weights(tmp_path, without_torch):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tensors = stored(built(CONFIG_MAPPING["llama"].from_dict(LLAMA)))
    true = base_sizes.read_geometry(folder_of(tmp_path, LLAMA, tensors)).parameters
    eight, four = {}, {}
    for name, shape in tensors.items():
        eight[name] = four[name] = shape
        if "_proj" in name:
            eight |= {name: (shape, "F8_E4M3"), f"{name}_scale_inv": ((1, 1), "F32")}
            four |= {
                name: ((math.prod(shape) // 2, 1), "U8"),
                f"{name}.absmax": ((math.prod(shape) // 64,), "F32"),
            }
    for method, files in (("fp8", eight), ("bitsandbytes", four)):
        config = LLAMA | {"quantization_config": {"quant_method": method}}
        found = base_sizes.read_geometry(folder_of(tmp_path, config, files))
        assert (found.parameters, found.quantized) == (true, method)
    with pytest.raises(
        RecipeError, match="bitsandbytes weights are packed, and without torch and transformers not counted"
    ):
        base_sizes.read_geometry(folder_of(tmp_path, config | {"model_type": "of_its_own"}, four))


def test_an_index_names_the_files_of_a_model(tmp_path, without_torch):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    tensors = stored(built(CONFIG_MAPPING["llama"].from_dict(LLAMA)))
    model = folder_of(tmp_path, LLAMA, tensors)
    true = base_sizes.read_geometry(model).parameters
    (tmp_path / "model.safetensors").unlink()
    names = list(tensors)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in halves.items():
        (tmp_path / file).write_bytes(header({name: tensors[name] for name in part}))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {name: file for file, part in halves.items() for name in part}})
    )
    assert base_sizes.read_geometry(model).parameters == true
    found = tensor_headers.read(Model(name_or_path=f"file://{tmp_path}"))
    assert found == tensor_headers.read(model)
    assert base_sizes.read_geometry(Model(name_or_path=f"file://{tmp_path}")).parameters == true
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(
        RecipeError, match=r"1 of 2 files of model.safetensors.index.json are missing: b.safetensors"
    ):
        base_sizes.read_geometry(model)
    for text in (
        "[]",
        '{"weight_map": []}',
        '{"weight_map": {"a": "../x"}}',
        '{"weight_map": {}}',
        "{",
        "\xff",
    ):
        index.write_text(text, encoding="latin-1")
        with pytest.raises(RecipeError, match=r"not an index of safetensors files"):
            base_sizes.read_geometry(model)


def test_headers_are_read_from_the_hub(tmp_path, monkeypatch, without_torch):
    """Of a model whose config.json alone does not say its size, by ranged requests."""

    config = json.loads(tiny_config("deepseek_v3").to_json_string())
    (served := tmp_path / "served").mkdir()
    true = base_sizes.read_geometry(
        folder_of(served, config, stored(built(tiny_config("deepseek_v3"))))
    ).parameters
    with model_hub.serving(served) as hub:
        look_at(monkeypatch, hub.address, tmp_path / "cache")
        wanted = Model(name_or_path=model_hub.NAME)
        assert base_sizes.read_geometry(wanted).parameters == true
        assert hub.fetched("model.safetensors") == 0
        assert (
            sum(line.startswith("GET part of") and line.endswith("model.safetensors") for line in hub.asked)
            == 1
        ), hub.asked
        (served / "model.safetensors").unlink()
        with pytest.raises(RecipeError, match="its safetensors are not at hand"):
            base_sizes.read_geometry(wanted)
        (served / "model.safetensors").write_bytes(bytes(100))
        with pytest.raises(RecipeError, match=model_hub.NAME):
            base_sizes.read_geometry(wanted)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        bytes(8),
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 4) + b"{",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b'{"a": 1}',
        header({"a": (2, 2)})[:-1],
        struct.pack("<Q", 2) + b"{}",
        struct.pack("<Q", 62) + b'{"a": {"dtype": "F32", "shape": [1e3], "data_offsets": [0, 1]}}',
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path, content):
    model = folder_of(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(RecipeError, match=r"truncated|not a safetensors file|hold no tensor"):
        base_sizes.read_geometry(model)


ABSURD = [
    None,
    True,
    "x",
    "",
    [],
    [1],
    {},
    {"a": 1},
    0,
    -1,
    1.5,
    -(10**30),
    10**30,
    10**4000,
    float("nan"),
    float("inf"),
    [[]],
    "1",
]
NEEDED = {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "num_experts_per_tok",
}


def refused_or_positive(path, content):
    """Read a config.json; it has one clear RecipeError, or sizes. Return whether it was refused."""
    (path / "config.json").write_bytes(content)
    try:
        found = base_sizes.read_geometry(Model(name_or_path=str(path)))
    except RecipeError as refused:
        said = str(refused)
    else:
        assert found.parameters > 0
        return False
    assert said.startswith("model.name_or_path: ")
    assert len(said) < 700
    return True


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mpt", "gpt2", "deepseek_v3"])
def test_every_wrong_value_of_a_config_has_one_clear_error(kind, tmp_path):
    plain = LLAMA if kind == "llama" else json.loads(tiny_config(kind).to_json_string())
    assert not refused_or_positive(tmp_path, json.dumps(plain).encode())
    for key in plain:
        for value in ABSURD if kind == "llama" else ABSURD[::3]:
            refused = refused_or_positive(tmp_path, json.dumps(plain | {key: value}).encode())
            must = kind == "llama" and key in NEEDED
            assert refused or not must, f"{key}: {value!r:.50}"
        missing = refused_or_positive(
            tmp_path, json.dumps({name: plain[name] for name in plain if name != key}).encode()
        )
        assert missing or not (kind == "llama" and key in NEEDED), key


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[]", "is not an object"),
        (b"3", "is not an object"),
        (b'{"a": 1, "a": 2}', "twice"),
        (b"[" * 10**5, "nested deeper"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": "' + b"x" * 10_000_001 + b'"}', "more than the 10,000,000 that are read"),
        (b'{"model_type": "llama", "text_config": []}', r"text_config is \[\], not an object"),
        (b'{"model_type": 3}', "model_type is 3, not text"),
        (b'{"model_type": "' + b"x" * 10**6 + b'"}', "x"),
    ],
)
def test_a_config_that_is_no_object_in_json_is_refused(tmp_path, content, said):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(RecipeError, match=said) as caught:
        base_sizes.read_geometry(Model(name_or_path=str(tmp_path)))
    assert len(str(caught.value)) < 700
    assert config_json.table_rows(Model(name_or_path=str(tmp_path))) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150)
@given(
    change=st.dictionaries(
        st.sampled_from([*LLAMA, "text_config", "quantization_config", "num_experts"]), VALUES, max_size=3
    )
)
def test_any_config_is_counted_or_refused(tmp_path_factory, change):
    refused_or_positive(tmp_path_factory.mktemp("model"), json.dumps(LLAMA | change).encode())


ADAPTED = (
    "llama",
    "qwen3",
    "phi3",
    "phi",
    "gpt_neox",
    "starcoder2",
    "gemma2",
    "gpt2",
    "kimi_linear",
    "lfm2",
    "apertus",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("kind", sorted({*MODEL_TYPES, *meta_model.ENCODERS}))
def test_adapters_of_all_linear_are_counted_as_training_makes_them(kind):
    planned, true = adapters(kind, "all-linear")
    assert planned == true


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_of_a_list_are_counted_as_training_makes_them(kind):
    found = counting.count(json.loads(tiny_config(kind).to_json_string()), None, kind)
    planned, true = adapters(
        kind, [next(linear.path.rpartition(".")[2] for linear in found.linears if linear.adaptable)]
    )
    assert planned == true


def test_layers_in_whose_place_peft_adapts_experts_are_as_peft_has_them():
    from peft.utils import transformers_weight_conversion as conversion
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    found = {}
    for kind in MODEL_TYPES:
        pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(kind)
        if get_checkpoint_conversion_mapping(kind) is not None and conversion._MOE_FUSED_TARGETS.get(pattern):
            found[kind] = set(conversion._MOE_TARGET_MODULE_MAPPING[pattern])
    assert found == adapter_targets.FUSED_EXPERTS


def test_experts_that_are_stacked_get_no_adapter_and_are_not_quantized():
    content = json.loads(tiny_config("qwen2_moe").to_json_string())
    found = counting.count(content, None, "qwen2_moe")
    experts = [linear for linear in found.linears if not linear.quantizable]
    assert {expert.name for expert in experts} == {"gate_up", "down"}
    assert all(expert.share == content["num_experts_per_tok"] / content["num_experts"] for expert in experts)
    recipe = recipe_of(method={"name": "lora", "target_modules": ["experts.down_proj"]})
    assert "the experts of qwen2_moe are one parameter" in workloads.adapter_problems(recipe, found)[0]
    mamba = counting.count(json.loads(tiny_config("falcon_h1").to_json_string()), None, "falcon_h1")
    recipe = recipe_of(method={"name": "lora", "target_modules": ["out_proj"]})
    assert "PEFT adapts no out_proj of a falcon_h1" in workloads.adapter_problems(recipe, mamba)[0]
    recipe = recipe_of(method={"name": "lora", "target_modules": ["kv_b_proj"]})
    assert (
        "no linear layer of qwen2_moe has such a name; it has q_proj, k_proj"
        in workloads.adapter_problems(recipe, found)[0]
    )


def test_a_model_that_the_closed_form_does_not_know_is_refused_with_the_dry_run():
    # In 16 bits: no adapter is trained on its published fp8 weights.
    found = counting.count({**DEEPSEEK_V3, "quantization_config": None}, None, "deepseek-ai/DeepSeek-V3")
    recipe = recipe_of(method={"name": "lora"})
    with pytest.raises(RecipeError, match=r"does not know multi-head latent attention .*; name one shape"):
        planner.rank(recipe, "price", geometry=found)
    with pytest.raises(DoesNotFit, match=r"a100-80gb-1: 1250.8 GiB of GPU memory needed to load"):
        planner.make(recipe, geometry=found, trace=confirm.best_fit)
    small = counting.count(json.loads(tiny_config("deepseek_v3").to_json_string()), None, "tiny")
    on_cpu = planner.make(
        recipe_of(hardware={"shape": "cpu-1"}, model={"name_or_path": "a/b", "dtype": "float32"}),
        geometry=small,
    )
    assert any(
        "activations are rough: the closed form does not know multi-head" in reason
        for reason in on_cpu.reasons
    )


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (
            "mixtral",
            {"num_local_experts": 1, "num_experts_per_tok": 1},
            "num_local_experts is 1, which is not a number of exp",
        ),
        ("mixtral", {"num_local_experts": None}, "num_local_experts"),
        (
            "qwen3_moe",
            {"num_experts": 1, "num_local_experts": None, "num_experts_per_tok": 1},
            "num_experts is 1, which is not",
        ),
        (
            "qwen3_moe",
            {"decoder_sparse_step": 99},
            "mlp_only_layers and decoder_sparse_step leave no layer with experts",
        ),
    ],
)
def test_a_mixture_of_one_expert_is_refused_with_the_key_of_its_config(kind, changes, said):
    sizes = json.loads(tiny_config(kind).to_json_string()) | changes
    with pytest.raises(SizesError, match=rf"(\W|^){said}"):
        config_sizes.geometry({name: value for name, value in sizes.items() if value is not None}, kind)


def test_the_page_of_the_plan_lists_the_types_that_the_closed_form_counts():
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| config.json of gemma, "))
    listed = row.split("|")[1].strip().removeprefix("config.json of ").split(", ")
    assert listed == sorted(KINDS)
