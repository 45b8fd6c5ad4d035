"""The slice reader: what it puts into every process is what from_pretrained puts into one."""

import json

import pytest

from flytune.errors import RecipeError, TrainingError
from flytune.models import sharded_loading
from flytune.recipe import Model
from tests.support import ranks

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPERTS = {"num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# name: (model type, config, dtype on disk, dtype in memory, bytes of a file at most)
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": False}, "bfloat16", "float32", "20KB"),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, "float32", "bfloat16", "1GB"),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}, "float32", "float32", "20KB"),
    "qwen2": ("qwen2", {}, "bfloat16", "bfloat16", "10KB"),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, "bfloat16", "float32", "1GB"),
    "gemma3": ("gemma3_text", {"sliding_window": 16}, "bfloat16", "bfloat16", "20KB"),
    "gpt2": (
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
        "float32",
        "float32",
        "20KB",
    ),
    "mixtral": ("mixtral", EXPERTS, "bfloat16", "float32", "10KB"),
    "qwen3-moe": ("qwen3_moe", EXPERTS, "float32", "float32", "10KB"),
    "qwen3-heads": ("qwen3", {"num_key_value_heads": 4}, "float32", "float32", "1GB"),
    # A persistent buffer; others' dtype.
    "glm4-moe": (
        "glm4_moe",
        EXPERTS | {"n_routed_experts": 3, "first_k_dense_replace": 1},
        "bfloat16",
        "bfloat16",
        "20KB",
    ),
    # Keeps parameters and persistent buffers in float32 whatever dtype is asked for.
    "ernie-moe": (
        "ernie4_5_moe",
        EXPERTS | {"moe_num_experts": 3, "moe_k": 2},
        "float32",
        "bfloat16",
        "20KB",
    ),
}


def saved(folder, name):
    """A model of random weights and biases, as save_pretrained writes it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes, dtype, _, size = MODELS[name]
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **SIZES | changes)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder / name, max_shard_size=size)
    return folder / name


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Provide the folder of each of MODELS, built on first use."""
    root = tmp_path_factory.mktemp("models")
    return lambda name: root / name if (root / name).is_dir() else saved(root, name)


def sharded(model, shape=None):
    """`model`, divided over all processes (over the last dimension of a mesh of `shape`): layer by layer, the
    rest together."""
    import torch.distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = shape or (torch.distributed.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in getattr(base.base_model, "layers", None) or base.base_model.h:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def assert_equal(model, reference):
    """The same names, dtypes and values, parameters and buffers; tied alike."""
    import torch

    for kind in ("named_parameters", "named_buffers"):
        ours = {sharded_loading._WRAPPERS.sub("", name): tensor for name, tensor in getattr(model, kind)()}
        theirs = {
            sharded_loading._WRAPPERS.sub("", name): tensor for name, tensor in getattr(reference, kind)()
        }
        assert list(ours) == list(theirs)
        for name, tensor in theirs.items():
            got = whole(ours[name])
            assert got.dtype == tensor.dtype, name
            assert torch.equal(got, tensor), name


def logits(model):
    import torch

    with torch.no_grad():
        return model(input_ids=torch.arange(24).reshape(2, 12)).logits


def built(folder, dtype):
    return sharded_loading.meta_model(Model(name_or_path=str(folder), attn_implementation="eager"), dtype)


def loaded(folder, dtype):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def join():
    import torch.distributed

    torch.distributed.init_process_group("gloo")


def compare(folder, dtype, shape=None):
    """Return the conversions used, ours and from_pretrained's, once both models are equal in all visible
    properties."""
    import torch

    join()
    reference, model = loaded(folder, dtype), built(folder, dtype)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {
        parameter.dtype for parameter in reference.parameters()
    }
    # Frozen: FSDP trains no mixture of dtypes.
    sharded(model.requires_grad_(False), shape)
    sharded_loading.load_weights(model, folder)
    assert_equal(model, reference)
    assert torch.equal(logits(model), logits(reference))
    assert_equal(model, reference)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == bool(
        reference.all_tied_weights_keys
    )
    assert model.generation_config.to_dict() == reference.generation_config.to_dict()
    assert not any(parameter.requires_grad for parameter in model.parameters())
    return [str(transform) for transform in model._weight_conversions], [
        str(t) for t in reference._weight_conversions
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_hold_what_from_pretrained_loads(folders, name):
    ours, theirs = ranks.run(2, compare, folders(name), MODELS[name][3])
    assert ours == theirs


@pytest.mark.parametrize(
    ("name", "world_size", "shape"), [("mixtral", 5, None), ("llama-tied", 3, None), ("qwen2", 4, (2, 2))]
)
def test_uneven_empty_and_replicated_shards(folders, name, world_size, shape):
    """Two of five ranks hold no expert of three; 61 rows do not divide by three; replicas of shards."""
    ranks.run(world_size, compare, folders(name), MODELS[name][3], shape)


def test_one_process_without_shards(folders):
    model = built(folders("llama"), "float32")
    sharded_loading.load_weights(model, folders("llama"))
    assert_equal(model, loaded(folders("llama"), "float32"))
    assert all(parameter.requires_grad for parameter in model.parameters())


def trained(model, steps=3):
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        ids = torch.arange(24).reshape(2, 12) + step
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def trains_alike(folder):
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    join()
    model, reference = built(folder, "float32"), loaded(folder, "float32")
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    sharded_loading.load_weights(sharded(model), folder)
    ours, theirs = dict(trained(model).named_parameters()), dict(trained(reference).named_parameters())
    for name, tensor in ours.items():
        torch.testing.assert_close(
            whole(tensor), theirs[sharded_loading._WRAPPERS.sub("", name)], rtol=1e-4, atol=1e-5
        )


def test_what_was_filled_trains_under_checkpoint_wrappers(folders):
    ranks.run(2, trains_alike, folders("qwen3"))


def adapts_alike(folder, config):
    import peft
    import torch

    join()
    torch.manual_seed(3)
    reference = peft.get_peft_model(loaded(folder, "bfloat16"), peft.LoraConfig(**config))
    after = torch.rand(1)
    torch.manual_seed(3)
    with sharded_loading.real_adapters():
        model = peft.get_peft_model(built(folder, "bfloat16"), peft.LoraConfig(**config))
    assert torch.equal(torch.rand(1), after)
    sharded_loading.load_weights(sharded(model), folder)
    assert_equal(model, reference)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in reference.parameters()]
    assert torch.equal(logits(model), logits(reference))


@pytest.mark.parametrize(
    "extra", [{}, {"modules_to_save": ["lm_head"]}], ids=["adapters", "and-a-saved-module"]
)
def test_adapters_are_left_alone_and_what_they_stand_on_is_read(folders, extra):
    """Rank 1: the second process holds no row of lora_A."""
    config = {
        "r": 1,
        "target_modules": "all-linear",
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
        **extra,
    }
    ranks.run(2, adapts_alike, folders("llama"), config)


def shards_by_accelerate(folder, lora):
    from types import SimpleNamespace

    import peft
    import torch
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model

    join()
    reference, model = loaded(folder, "bfloat16"), built(folder, "bfloat16")
    if lora:
        config = peft.LoraConfig(
            r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
        )
        torch.manual_seed(3)
        reference = peft.get_peft_model(reference, config)
        torch.manual_seed(3)
        with sharded_loading.real_adapters():
            model = peft.get_peft_model(model, config)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
    )
    # What the functions read of an Accelerator, which does not shard on a CPU without being told.
    state = SimpleNamespace(fsdp_plugin=plugin)
    accelerator = SimpleNamespace(
        state=state, mixed_precision="bf16", is_main_process=False, device=torch.device("cpu")
    )
    model = fsdp2_prepare_model(accelerator, fsdp2_apply_ac(accelerator, model))
    sharded_loading.load_weights(model, folder)
    # accelerate makes what is trained float32.
    for parameter in reference.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    assert_equal(model, reference)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(logits(model), logits(reference))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_tied_model_that_accelerate_has_checkpointed_and_sharded(folders, lora):
    ranks.run(2, shards_by_accelerate, folders("qwen3"), lora)


def test_real_adapters_leaves_modules_as_they_were():
    import torch

    original = torch.nn.Module.to
    with sharded_loading.real_adapters():
        assert torch.nn.Linear(1, 1).to("meta", torch.bfloat16).weight.device.type == "cpu"
    assert torch.nn.Module.to is original


def rewritten(source, target, change):
    """A copy of the model in `source`, its tensors as `change` makes them, in one file."""
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {
        name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    save_file(change(tensors), target / "model.safetensors", {"format": "pt"})
    return target


def test_names_without_the_prefix_of_the_base_model(folders, tmp_path):
    """Save as a base model without a head: layers.0..., not model.layers.0..."""
    folder = rewritten(
        folders("llama-tied"),
        tmp_path / "base",
        lambda all_: {name.removeprefix("model."): all_[name] for name in all_},
    )
    ranks.run(2, compare, folder, "float32")


def fused(tensors):
    """q, k and v as one matrix, side by side along the rows."""
    import torch

    for layer in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
        tensors[f"{layer}.qkv.weight"] = torch.cat(
            [tensors.pop(f"{layer}.{part}_proj.weight") for part in "qkv"]
        )
    return tensors


def compare_fused(folder, dtype):
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, WeightConverter

    targets = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    converter = WeightConverter("self_attn.qkv.weight", targets, operations=[Chunk(dim=0)])
    register_checkpoint_conversion_mapping("qwen3", [converter])
    compare(folder, dtype)


def test_one_tensor_that_becomes_three_parameters(folders, tmp_path):
    """Sliced after it was divided: a process's rows of the fused matrix are not its rows of q, k and v."""
    ranks.run(2, compare_fused, rewritten(folders("qwen3-heads"), tmp_path / "fused", fused), "float32")


def twice(change):
    return lambda tensors: tensors | {"lm_head.weight": change(tensors["model.embed_tokens.weight"])}


def test_a_tied_parameter_that_is_stored_twice(folders, tmp_path):
    folder = rewritten(folders("llama-tied"), tmp_path / "equal", twice(lambda tensor: tensor.clone()))
    ranks.run(2, compare, folder, "float32")
    folder = rewritten(folders("llama-tied"), tmp_path / "unequal", twice(lambda tensor: tensor + 1))
    with pytest.raises(
        TrainingError,
        match=r"embed_tokens.weight and lm_head.weight: one parameter by config.json, two values",
    ):
        sharded_loading.load_weights(built(folder, "float32"), folder)


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def test_what_is_wrong_with_the_files_is_said(folders, tmp_path):
    source = folders("llama")
    model = built(source, "float32")

    def refused(folder, message):
        with pytest.raises(TrainingError, match=message):
            sharded_loading.load_weights(model, folder)

    refused(tmp_path, r"has neither model.safetensors nor model.safetensors.index.json; found no weights")
    (tmp_path / "pytorch_model.bin").touch()
    refused(tmp_path, r"found only pytorch_model.bin, which must be converted first")
    refused(
        rewritten(source, tmp_path / "less", without("model.norm.weight")),
        r"^model.norm.weight: in no file of .*less; config",
    )
    other = rewritten(
        source, tmp_path / "other", lambda all_: all_ | {"model.norm.weight": all_["model.norm.weight"][:5]}
    )
    refused(
        other,
        r"model.safetensors: model.norm.weight has the shape \[5\], and the model's model.norm.weight \[32\]",
    )
    cut = rewritten(source, tmp_path / "cut", dict) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    refused(
        cut.parent,
        r"cut/model.safetensors: truncated, or not a safetensors file \(.*\); download or export the model "
        r"again",
    )
    cut.unlink()
    index = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (cut.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(cut.parent, r"cut/model-1.safetensors: no such file; download")
    rewritten(source, tmp_path / "wrong", without("model.norm.weight"))
    (tmp_path / "wrong" / "model.safetensors").rename(cut.parent / "model-1.safetensors")
    refused(
        cut.parent, r"model-1.safetensors: has no model.norm.weight, which model.safetensors.index.json lists"
    )


def test_a_conversion_that_fails_names_the_parameter(folders, tmp_path):
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    folder = rewritten(folders("mixtral"), tmp_path / "ragged", lambda all_: all_ | {name: all_[name][:5]})
    with pytest.raises(
        TrainingError,
        match=r"transformers cannot build model.layers.0.mlp.experts.gate_up_proj from .*w1.weight.* set "
        r"sharding to",
    ):
        sharded_loading.load_weights(built(folder, "float32"), folder)
    folder = rewritten(
        folders("mixtral"),
        tmp_path / "fewer",
        lambda all_: {key: all_[key] for key in all_ if ".2.w" not in key},
    )
    with pytest.raises(TrainingError, match=r"has the shape \[2, 96, 32\], and not \[3, 96, 32\]"):
        sharded_loading.load_weights(built(folder, "float32"), folder)


def test_weights_that_are_quantized_already_are_refused(folders, tmp_path):
    folder = rewritten(folders("llama"), tmp_path / "fp8", dict)
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "fp8"}
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        RecipeError, match=r"its weights are quantized \(fp8\), and fsdp reads 16- or 32-bit weights only"
    ):
        built(folder, "float32")
