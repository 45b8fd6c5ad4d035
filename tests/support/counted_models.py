"""Models on the meta device, and the parameters of adapters on them: as a plan counts them, and as training
makes them."""

import json

from flytune.hardware import shape_named
from flytune.models import loading
from flytune.planning import workloads
from tests.support.model_types import tiny_config
from tests.support.plans import recipe_of
from training_estimates import counting, meta_model


def built(config):
    """Return a model on the meta device: of an encoder without a head, and of other types with theirs."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    kind = AutoModel if config.model_type in meta_model.ENCODERS else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config, **meta_model.ENCODERS.get(config.model_type, {}))


def adapters(kind, named, **method):
    """Return the parameters of adapters that the plan counts, and those that training makes."""
    import torch
    from peft import get_peft_model

    is_encoder = kind in meta_model.ENCODERS
    objective = {"name": "embed", "pooling": "mean"} if is_encoder else {"name": "sft"}
    method = {"name": "lora", "r": 4, "target_modules": named} | method
    recipe = recipe_of(method=method, objective=objective)
    found = counting.count(json.loads(tiny_config(kind).to_json_string()), None, kind)
    assert workloads.adapter_problems(recipe, found) == []
    model = built(tiny_config(kind))
    with torch.device("meta"):
        model = get_peft_model(model, loading.peft_config(recipe, model, []))
    work = workloads.workload(recipe, found, shape_named("a100-80gb-1"), 1, 1)
    return work.lora_parameters, sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
