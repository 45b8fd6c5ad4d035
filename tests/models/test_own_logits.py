"""The loss of the model's own logits, and the table's choice between it and TRL's chunked loss."""

import pytest
import torch

from flytune.models import model_types, own_logits
from tests.support import model_losses
from tests.support.model_types import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")

ALWAYS = [
    "modernbert-decoder",
    "recurrent_gemma",
    "xlstm",
    "inkling_text",
    "llama4_text",
    "granitemoe",
    "doge",
]
UNUSUAL = [
    # Fields that TRL reads, and the model does not.
    ("llama", {"final_logit_softcapping": 0.5}, "logits"),
    ("llama", {"logit_scale": 0.3}, "logits"),
    ("qwen3", {"logits_scaling": 8.0}, "logits"),
    ("gpt2", {"lm_head_multiplier": 2.0}, "logits"),
    ("mpt", {"logit_scale": 0.3}, "logits"),
    ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logits"),
    # A factor of its own, hidden from TRL by another.
    ("granite", {"logits_scaling": 8.0, "logit_scale": 1.0}, "logits"),
    # More rows of the head than tokens.
    ("inkling2_text", {"vocab_size": 256}, "logits"),
    # A balance loss that TRL would compute of what is not there.
    ("deepseek_v3", {"output_router_logits": True}, "logits"),
    # Fields that both read.
    ("gemma2", {"final_logit_softcapping": 2.0}, "chunked"),
    ("gemma2", {"final_logit_softcapping": None}, "chunked"),
    ("granite", {"logits_scaling": 8.0}, "chunked"),
    ("hyperclovax", {"logits_scaling": 0.2}, "chunked"),
    ("minicpm3", {"dim_model_base": 16}, "chunked"),
    ("falcon_h1", {"lm_head_multiplier": 0.1}, "chunked"),
    ("cohere", {"logit_scale": 0.5, "tie_word_embeddings": False}, "chunked"),
    ("codegen", {"tie_word_embeddings": True}, "chunked"),
    ("phi", {"tie_word_embeddings": True}, "chunked"),
]


def config_of(model_type, changes):
    config = tiny_config(model_type)
    for name, value in changes.items():
        setattr(config.get_text_config(), name, value)
    return config


@pytest.mark.parametrize("model_type", ALWAYS)
def test_types_whose_head_trl_does_not_know_have_the_loss_of_their_logits(model_type):
    config = tiny_config(model_type)
    assert model_losses.kind_of(model_losses.losses(config)) == "logits"
    assert model_types.own_logits(config.to_dict(), trust_remote_code=False) == f"the head of {model_type}"


@pytest.mark.parametrize(("model_type", "changes", "own"), UNUSUAL)
def test_the_loss_of_an_unusual_configuration_is_the_models_own(model_type, changes, own):
    config = config_of(model_type, changes)
    assert model_losses.kind_of(model_losses.losses(config)) == own
    why = model_types.own_logits(config.to_dict(), trust_remote_code=False)
    assert (why is None) == (own == "chunked")


def test_the_reason_names_the_field_and_its_value():
    def said(model_type, **fields):
        return model_types.own_logits({"model_type": model_type} | fields, trust_remote_code=True)

    assert said("llama", text_config={"logit_scale": 0.3}) == "logit_scale: 0.3"
    assert said("gemma2", final_logit_softcapping=0.0) == "final_logit_softcapping: 0.0"
    assert said("gemma2", final_logit_softcapping=30) is None
    assert (
        said("llama", auto_map={"AutoModelForCausalLM": "own.Model"})
        == "code of the model's own, whose head no test has run"
    )
    assert said("unheard_of") == "model type 'unheard_of', whose head no test has run"
    assert said("x" * 500).endswith("..., whose head no test has run")


def test_a_term_of_the_loss_that_is_not_trained_is_a_problem():
    assert model_types.loss_problem({"model_type": "bamba", "z_loss_coefficient": 0.0}, False) is None
    assert model_types.loss_problem({"model_type": "bamba", "z_loss_coefficient": 1e-4}, False) == (
        "its config.json has z_loss_coefficient: 0.0001, with which the loss of a bamba has a term that is "
        "not trained here; write 0.0 in a copy of the model"
    )
    assert model_types.loss_problem({"model_type": "jetmoe", "output_router_logits": True}, False)


def built(model_type="llama"):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=0.5)
    return model


def test_results_and_gradients_are_those_of_trls_head(monkeypatch):
    from trl.trainer.utils import add_fused_lm_head

    monkeypatch.setattr(own_logits, "TOKENS", 7)  # several tiles, the last one shorter
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    ids = torch.randint(4, 120, (3, 20), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :5] = labels[1, 9:] = -100
    found, gradients = [], []
    for add in (add_fused_lm_head, own_logits._add_own):
        model = built()
        add(model, outputs=outputs)
        result = model(input_ids=ids, labels=labels, fused_lm_head=True)
        result.loss.backward()
        found.append(result)
        gradients.append([parameter.grad for parameter in model.parameters()])
    first, second = found
    for name in (*outputs, "loss", "label_mask"):
        torch.testing.assert_close(
            getattr(second, name), getattr(first, name), rtol=1e-4, atol=1e-5, check_dtype=False
        )
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_an_adapter_on_the_head_is_trained():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        built(), LoraConfig(r=2, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    )
    base = model.get_base_model()
    assert own_logits.reason(base, trust_remote_code=False) == "an adapter on the head"
    own_logits.add_head(base)
    ids = torch.arange(4, 24).unsqueeze(0)
    model(input_ids=ids, labels=ids, fused_lm_head=True).loss.backward()
    assert model.get_output_embeddings().lora_B["default"].weight.grad.abs().max() > 0


def test_a_quantized_head_is_run_as_the_model_runs_it():
    from bitsandbytes.nn import Linear4bit

    model = built()
    model.set_output_embeddings(Linear4bit(64, 128, bias=False))
    assert own_logits.reason(model, trust_remote_code=False) == "a head that is not a plain matrix"


def entries(model_type):
    """Return the part of a type's row that says how its loss is computed."""
    row = model_types.table()[model_type]
    return {
        key: row[key] for key in ("chunked_loss", "chunked_fields", "own_fields", "loss_fields") if key in row
    }


TRAINED = [name for name, row in model_types.table().items() if "full" not in row["problems"]]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", TRAINED)
def test_the_table_has_what_every_field_of_a_configuration_does_to_the_loss(model_type):
    assert model_losses.row(model_type) == entries(model_type)
