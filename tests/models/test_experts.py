"""Adapters and 4-bit weights of experts by PEFT and bitsandbytes themselves: the reasons of what is
refused."""

import copy

import pytest
import torch
from torch import nn

from flytune.adapters import merging
from flytune.errors import ExportError
from flytune.evaluation import expert_load
from flytune.models import adapter_targets, experts
from flytune.recipe import Method
from tests.support.model_types import tiny_config

IDS = torch.arange(4, 24).unsqueeze(0)


def built(model_type):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)


def adapted(model, **targets):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, **targets))


def gradients(model, part):
    """Return whether each adapter on a part of a model gets a gradient."""
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {
        name: one.grad is not None
        for name, one in model.named_parameters()
        if one.requires_grad and part in name
    }


def test_the_layer_that_peft_puts_around_dbrx_hides_its_experts():
    model = adapted(built("dbrx"), target_modules=["Wqkv"], target_parameters=["mlp.w1", "mlp.v1", "mlp.w2"])
    with pytest.raises(AttributeError, match="'ParamWrapper' object has no attribute 'v1'"):
        model(input_ids=IDS)
    assert "ParamWrapper has no attribute v1" in experts.REFUSED["dbrx"]


def in_4_bits(model):
    """Quantize the experts by bitsandbytes' own function; transformers quantizes linear layers alone."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for name in [name for name, module in model.named_modules() if hasattr(module, "gate_up_proj")]:
        for parameter in ("gate_up_proj", "down_proj"):
            if isinstance(getattr(model.get_submodule(name), parameter, None), nn.Parameter):
                replace_parameter_4bit(model.get_submodule(name), parameter)
    return model


def test_experts_in_4_bits_get_no_adapter_that_is_trained():
    from bitsandbytes.nn import Linear4bit
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    targets = {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    }
    model = built("qwen3_moe")
    names = set(experts.fused(model))
    replace_with_bnb_linear(model, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    assert isinstance(model.model.layers[0].self_attn.q_proj, Linear4bit)
    assert set(experts.fused(model)) == names, "as they were"

    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        assert gradients(adapted(in_4_bits(built("qwen3_moe")), **targets), ".experts.") == {}
    with pytest.warns(UserWarning, match="Could not find any LoRA parametrization"):
        found = gradients(in_4_bits(adapted(built("qwen3_moe"), **targets)), ".experts.")
    assert sum(found.values()) == len(found) / 2, "of adapters that were there before, half get no gradient"


class Listed(nn.Module):
    """Experts as modules of a list, as code of a model's own may have them."""

    def __init__(self, mlp, number):
        super().__init__()
        self.gate = nn.Linear(64, number, bias=False)
        self.experts = nn.ModuleList([mlp() for _ in range(number)])

    def forward(self, states):
        weights = self.gate(states).softmax(-1)
        chosen = weights.topk(2, -1).indices
        return sum(
            expert(states) * (weights[..., at] * (chosen == at).any(-1)).unsqueeze(-1)
            for at, expert in enumerate(self.experts)
        )


def with_lists():
    """Return a Llama whose MLPs are mixtures of four."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    model = built("llama")
    for layer in model.model.layers:
        layer.mlp = Listed(lambda: LlamaMLP(model.config), 4)
    return model


@pytest.mark.parametrize(("method", "targets"), [("qlora", "all-linear"), ("lora", ["q_proj"])])
def test_experts_that_are_layers_of_a_list_are_adapted_in_4_bits_too(method, targets):
    from bitsandbytes.nn import Linear4bit

    model = with_lists()
    for name in [name for name, _ in model.named_modules() if method == "qlora" and experts.is_listed(name)]:
        parent, leaf = name.rpartition(".")[::2]
        layer = model.get_submodule(name)
        if isinstance(layer, nn.Linear):
            packed = Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.float32
            )
            packed.load_state_dict(layer.state_dict())
            setattr(model.get_submodule(parent), leaf, packed.to("cpu"))
    given = Method(name=method, target_modules=targets, experts=method == "lora")
    found = gradients(adapted(model, **adapter_targets.fields(model, given)), "")
    assert all(found.values())
    assert sum(".experts." in name for name in found) == 2 * 4 * 3 * len(model.model.layers)
    assert not [name for name in found if ".mlp.gate." in name], "no router"


def test_experts_of_a_list_are_compared_one_by_one(tmp_path):
    made = with_lists()
    made = adapted(
        made, **adapter_targets.fields(made, Method(name="lora", target_modules=["q_proj"], experts=True))
    )
    names, before = experts.expert_names(made), experts.fingerprints(made)
    assert len(names) == 4 * 3 * 4
    with torch.no_grad():
        made.get_submodule("base_model.model.model.layers.2.mlp.experts.3.up_proj").lora_B["default"].weight[
            5, 1
        ] = 0.1
    changed = (experts.fingerprints(made) != before).any(dim=1).nonzero().flatten().tolist()
    assert [names[at] for at in changed] == ["model.layers.2.mlp.experts.3.up_proj"]
    up = next(
        one for one in expert_load.untrained(made) if one.parameter == "model.layers.2.mlp.experts.*.up_proj"
    )
    assert (up.experts, up.of) == ([0, 1, 2], 4)

    with_lists().save_pretrained(tmp_path / "base")
    with pytest.raises(
        ExportError, match=r"layers\.2\.mlp\.experts\.3\.up_proj\.weight: 0 of its adapter is in the merged"
    ):
        merging.check_experts(tmp_path / "base", with_lists(), made, "float32")
    copy.deepcopy(made).merge_and_unload().save_pretrained(tmp_path / "merged")
    assert merging.check_experts(tmp_path / "merged", with_lists(), made, "float32") == 4 * 3 * 4


@pytest.mark.parametrize(
    ("nested", "name"),
    [
        ("model.layers.0.mlp.experts", "model.layers.0.mlp.experts"),
        ("_orig_mod.model.layers.0.mlp.experts.base_layer", "model.layers.0.mlp.experts"),
        # Each parameter of a module that has an adapter is one more layer around it.
        ("model.layers.0.mlp.experts.base_layer.base_layer", "model.layers.0.mlp.experts"),
        (
            "model.layers.0.mlp.experts.base_layer.base_layer.gate_proj",
            "model.layers.0.mlp.experts.gate_proj",
        ),
        ("base_layers.0.my_base_layer", "base_layers.0.my_base_layer"),
    ],
)
def test_a_module_has_its_name_of_the_base_model_however_many_layers_are_around_it(nested, name):
    assert experts.base_name(nested) == name
