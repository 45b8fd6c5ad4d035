"""Training, export, gate and reload of a tiny model of any type, through Flytune's own training loop on a
CPU."""

import shutil
from pathlib import Path
from typing import Any

from flytune.data import heldout_rows
from flytune.export import gate
from flytune.hardware import shape_named
from flytune.models import experts, loading, probe, scoring, sharded_loading
from flytune.recipe import Recipe
from flytune.records import Plan, TrainingResult
from flytune.selftest import tiny_model
from flytune.training import loop
from tests.support import packed_samples
from tests.support.model_types import tiny_config
from tests.support.stages import plan_for, write_dataset
from tests.support.tiny import tiny_recipe

STEPS = 3
MORE = 12
"""Steps of a type whose loss has not clearly fallen after STEPS: the warm-up and an adapter of 0 change
little."""
LOGIT_SCALES = {"logit_scale": 0.5, "logits_mup_width_multiplier": 2.0}
"""Scales of logits by the name of the field: a type's own is for a width of thousands, and leaves 64 nothing
to learn."""
FALL = 0.15
"""Smallest fall of the loss, in nats: those of two batches of an untrained model differ by up to 0.12."""


def inputs(folder: Path) -> tuple[Path, Path]:
    """Write a tokenizer and a prepared data set; return their folders."""
    tokenizer = tiny_model.train_tokenizer(tiny_model.SENTENCES, 384)
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    return folder / "tokenizer", write_dataset(folder / "dataset", folder / "tokenizer")


def write_base(model_type: str, tokenizer: Path, folder: Path) -> Path:
    """Write a random model of a type with a tokenizer, as a base model's folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(str(tokenizer))
    config = tiny_config(model_type, vocabulary=len(tokens))
    for name, scale in LOGIT_SCALES.items():
        if hasattr(config, name):
            setattr(config, name, scale)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(str(folder))
    tokens.save_pretrained(str(folder))
    return folder


def defaults(model_type: str) -> dict[str, Any]:
    """Return the entries of a model type's row that say which of the recipe's defaults it has
    (model_types.json)."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = tiny_config(model_type)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    has = []
    for attention in ("sdpa", "eager"):
        try:
            AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation=attention)
            has.append(attention)
        except ValueError as error:
            if "does not support an attention implementation" not in str(error):
                raise
    if getattr(kind, "_supports_flash_attn", False):
        has.append("flash_attention_2")
    return {"attention": has} | ({} if kind.supports_gradient_checkpointing else {"checkpointing": False})


def recipe_for(base: Path, method: str, **changes: Any) -> Recipe:
    """Return a recipe of a few steps for a base of any type, with the defaults that the type has."""
    from transformers import AutoConfig

    has = defaults(AutoConfig.from_pretrained(str(base)).model_type)
    adapter: Any = "full" if method == "full" else {"name": method, "r": 4, "lora_alpha": 8}
    named = {
        "method": adapter,
        "model.attn_implementation": has["attention"][0],
        "training.activation_checkpointing": has.get("checkpointing", True),
        "training.max_steps": STEPS,
        "training.learning_rate": 1e-3 if method == "full" else 2e-2,
        "checkpoints.folder": str(base.parent / f"checkpoints-{method}"),
        "checkpoints.save_steps": None,
    }
    return Recipe.model_validate(tiny_recipe(base, Path("pairs.jsonl"), named | changes))


def plan_of(recipe: Recipe) -> Plan:
    """Return the plan of one process, without the planner, which counts some types wrong."""
    one = {
        "shape": "cpu-1",
        "processes": 1,
        "world_size": 1,
        "global_batch_size": recipe.training.global_batch_size,
    }
    return plan_for(recipe).model_copy(
        update=one
        | {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": recipe.training.global_batch_size // 2,
        }
    )


def train(base: Path, dataset: Path, method: str, out: Path, **changes: Any) -> tuple[Recipe, TrainingResult]:
    """Train, export, and let the gate reload the export; raises what goes wrong on the way. `dataset` gets
    base's tokenizer."""
    from transformers import AutoTokenizer

    recipe = recipe_for(base, method, **changes)
    # With a config.json beside it, transformers chooses another class for some tokenizers.
    shutil.rmtree(dataset / "tokenizer")
    AutoTokenizer.from_pretrained(str(base)).save_pretrained(str(dataset / "tokenizer"))
    plan = plan_of(recipe)
    result = loop.fit(recipe, plan, shape_named(plan.shape), dataset, out)
    first, last = result.steps[0].loss, result.steps[-1].loss
    if not first - last >= FALL:
        if recipe.training.max_steps == MORE:
            raise AssertionError(
                f"the loss does not fall by {FALL} in {MORE} steps: {first:.4f}, then {last:.4f}"
            )
        shutil.rmtree(out)
        return train(base, dataset, method, out, **changes | {"training.max_steps": MORE})
    rows = heldout_rows(dataset, scoring.GATE_SAMPLES)
    gate.check(recipe, out, dataset, rows, lambda: loading.exported_model(recipe, out))
    return recipe, result


def has_experts(base: Path) -> bool:
    """Return whether a base model has routed experts."""
    model = loading.base_model(recipe_for(base, "full"), "float32")
    return model.config.model_type in experts.REFUSED or bool(experts.fused(model))


def check_experts(base: Path, dataset: Path, out: Path) -> None:
    """Train adapters on experts, with Flytune's gate; raise AssertionError if PEFT alone reloads or merges
    another model."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    config = AutoModelForCausalLM.from_pretrained(base).config
    if why := experts.REFUSED.get(config.model_type):
        raise AssertionError(why)
    recipe, _ = train(base, dataset, "lora", out, **{"method.experts": True})
    live = probe.Answers.read(out / probe.PROBE)
    attention = recipe.model.attn_implementation
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation=attention)
    for name in ("reloads", "merges"):
        model = (
            PeftModel.from_pretrained(model, out / "adapter").eval()
            if name == "reloads"
            else model.merge_and_unload()
        )
        if (
            not probe.distance(live.logits, probe.ask(model, live.prompts).logits).max()
            <= gate.LOGIT_BOUND["float32"]
        ):
            raise AssertionError(f"PEFT alone {name} another model than was trained")


def check_causal(base: Path) -> None:
    """Raise AssertionError if the loss of a token depends on later tokens."""
    import torch

    recipe = recipe_for(base, "full")
    model = loading.base_model(recipe, "float32").double().eval()
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Large weights: what a token attends to must show in its logits.
            torch.nn.init.normal_(parameter, std=0.15)
    ids = torch.randint(4, 200, (1, 40))
    other = torch.cat([ids[:, :30], torch.randint(4, 200, (1, 10))], dim=1)
    mask = torch.ones_like(ids)
    with torch.no_grad(), packed_samples.double():
        first, second = (
            model(input_ids=each, attention_mask=mask, use_cache=False).logits for each in (ids, other)
        )
    if first.shape[:2] != ids.shape:
        raise AssertionError("it does not predict a token after each token")
    distance = float((first[:, :30] - second[:, :30]).abs().max())
    if packed_samples.EQUAL < distance < packed_samples.DIFFERENT:
        raise packed_samples.Undecided(
            f"{recipe.name}: its predictions differ by {distance:.1e} with other later tokens"
        )
    if not distance <= packed_samples.EQUAL:
        raise AssertionError(
            "its predictions see later tokens: it is not a causal language model by its configuration"
        )


def check_bfloat16(base: Path) -> None:
    """Raise what goes wrong in a forward and a backward pass in bfloat16, the default of model.dtype."""
    import torch

    ids = torch.randint(4, 120, (2, 24))
    for weights in ("float32", "bfloat16"):  # of a full fine-tune, and of a frozen base
        model = loading.base_model(recipe_for(base, "full", **{"model.dtype": "bfloat16"}), weights)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        logits.float().logsumexp(dim=-1).sum().backward()
        if not logits.isfinite().all():
            raise AssertionError("its logits are not finite in bfloat16")


def check_sharded_loading(base: Path) -> None:
    """Raise AssertionError if weights that are read in slices are not those that transformers loads."""
    import torch

    recipe = recipe_for(base, "full")
    expected = loading.base_model(recipe, "float32").state_dict()
    model = sharded_loading.meta_model(recipe.model, "float32")
    sharded_loading.load_weights(model, base)
    found = model.state_dict()
    if found.keys() != expected.keys():
        raise AssertionError(
            f"other tensors than transformers loads: {', '.join(sorted(found.keys() ^ expected.keys())[:3])}"
        )
    if wrong := [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]:
        raise AssertionError(f"other values than transformers loads: {', '.join(wrong[:3])}")


def losses(
    base: Path, dataset: Path, out: Path, world_size: int, micro_batch: int, changes: dict[str, Any]
) -> list[float]:
    """Return the losses of a full fine-tune's steps. Every process calls it."""
    recipe = recipe_for(base, "full", **changes)
    accumulation = recipe.training.global_batch_size // (micro_batch * world_size)
    sizes = {
        "processes": world_size,
        "world_size": world_size,
        "shape": "cpu-1" if world_size == 1 else "cpu-2",
    }
    sizes |= {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation}
    plan = plan_of(recipe).model_copy(update=sizes)
    return [step.loss for step in loop.fit(recipe, plan, shape_named(plan.shape), dataset, out).steps]
