"""DeepSpeed configurations of a user's own: what is read, refused, filled in and planned."""

import json
from dataclasses import replace

import pytest

from flytune.errors import RecipeError
from flytune.planning import planner
from flytune.recipe import Recipe, named_files
from flytune.sharding import SHARDINGS, sharding_of
from flytune.sharding.deepspeed_config import DeepSpeedConfig, ZeroOptimization
from tests.support.paths import ROOT
from tests.support.plans import GEOMETRY, TRAINING
from tests.support.recipes import content
from training_estimates.layout import Layout

SHIPPED = sorted((ROOT / "deepspeed_configs").glob("*.json"))
ZERO3 = {"zero_optimization": {"stage": 3}}
LINEAR = {"warmup_type": "linear"}


def optimizer(kind="AdamW", **params):
    return ZERO3 | {"optimizer": {"type": kind, "params": params}}


def scheduler(kind, **params):
    return ZERO3 | {"scheduler": {"type": kind, "params": params}}


def recipe_of(config, name="zero3", **changes):
    own = content(sharding={"name": name, "config": config}) | changes
    return Recipe.model_validate(named_files.with_contents(own))


def problems(config, **changes):
    recipe = recipe_of(config, **changes)
    return sharding_of(recipe).problems()


def layout(config, name="zero3"):
    recipe = recipe_of(config, name)
    return sharding_of(recipe).layout


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_as_ones_own_is_planned_and_trained_as_the_shipped_one(path):
    name, _, offload = path.stem.partition("_")
    offload = {"": "none", "offload": "cpu"}.get(offload, offload)
    own = recipe_of(str(path), name)
    shipped = Recipe.model_validate(content(sharding={"name": name, "offload": offload}))
    assert own.sharding.offload == offload
    mine, theirs = sharding_of(own), sharding_of(shipped)
    assert mine.problems() == []
    assert mine.layout == theirs.layout
    assert mine.config() == theirs.config()


def test_the_file_becomes_part_of_the_recipe_and_of_its_key(tmp_path):
    file = tmp_path / "my.json"
    file.write_text(json.dumps(ZERO3))
    first = recipe_of(str(file))
    assert first.sharding.config == ZERO3
    assert (
        first.key()
        == recipe_of(ZERO3).key()
        != recipe_of(None).key()
        == Recipe.model_validate(content(sharding="zero3")).key()
    )
    assert Recipe.model_validate_json(first.model_dump_json()) == first
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "overlap_comm": False}}))
    assert recipe_of(str(file)).key() != first.key()
    copy = tmp_path / "recipe.yaml"
    copy.write_text(first.to_yaml())
    assert Recipe.from_yaml(copy) == first


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"bf16": 1, "bf16": 2}',
            r"sharding\.config: .*my.json: not JSON: the key 'bf16' is there twice, in columns 2 and 13",
        ),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' is there twice"),
        ('{"gradient_clipping": NaN}', "my.json: not JSON: NaN is not JSON; numbers are finite"),
        (
            "{ // comment\n}",
            "my.json: not JSON: Expecting property name enclosed in double quotes at column 3",
        ),
        ("[1]", r"must be a JSON object; found \[1\]"),
    ],
)
def test_only_strict_json_is_read(tmp_path, text, said):
    (tmp_path / "my.json").write_text(text)
    with pytest.raises(RecipeError, match=said):
        recipe_of(str(tmp_path / "my.json"))


OFFLOADS = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}


def test_offload_follows_the_configuration_and_may_not_contradict_it():
    assert recipe_of(OFFLOADS).sharding.offload == "cpu"
    with pytest.raises(RecipeError, match="offload: none, but config offloads to cpu; leave offload out"):
        Recipe.model_validate(content(sharding={"name": "zero3", "offload": "none", "config": OFFLOADS}))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"zero_optimization": {"stage": 2}},
            'zero_optimization.stage: 2, but the recipe has sharding: zero3; write "auto"',
        ),
        (
            ZERO3 | {"bf16": {"enabled": False}},
            "bf16.enabled: false, but the recipe has model.dtype: bfloat16",
        ),
        (ZERO3 | {"fp16": {"enabled": True}}, "fp16.enabled: true, but the recipe has model.dtype: bfloat16"),
        (
            ZERO3 | {"gradient_clipping": 0.5},
            "gradient_clipping: 0.5, but the recipe has training.max_grad_norm: 1",
        ),
        (
            ZERO3 | {"train_batch_size": 16},
            "train_batch_size: 16, but the recipe has training.global_batch_size: 8",
        ),
        (optimizer(lr=1e-3), "optimizer.params.lr: 0.001, but the recipe has training.learning_rate: 0.0002"),
        (
            optimizer(betas=[0.9, 0.95]),
            "[0.9, 0.95], but the recipe has training.adam_beta1 and training.adam_beta2: [0.9",
        ),
        (optimizer("Lamb"), "optimizer.type: Lamb, but the recipe's training.optim is adamw_torch_fused"),
        (optimizer(amsgrad=True), "optimizer.params.amsgrad: unknown"),
        (
            scheduler("WarmupLR", **LINEAR),
            "scheduler.type: WarmupLR, but the recipe has training.lr_scheduler_type: cosine",
        ),
        (scheduler("OneCycle"), "scheduler.type: OneCycle, but the recipe has training.lr_scheduler_type"),
        (
            scheduler("WarmupCosineLR", cos_min_ratio=0),
            "scheduler.params.warmup_type: log (log is DeepSpeed's default), but the recipe has "
            "training.warmup_steps: 0.03",
        ),
        (
            scheduler("WarmupCosineLR", **LINEAR),
            "cos_min_ratio: 0.0001 by default, but the recipe's schedule ends at 0; write",
        ),
        (ZERO3 | {"train_bath_size": 8}, "train_bath_size: unknown key; did you mean train_batch_size?"),
        (ZERO3 | {"amp": {"enabled": "auto"}}, "amp: unknown key; DeepSpeed 0.19 has removed it"),
        (ZERO3 | {"activation_checkpointing": {}}, "write training.activation_checkpointing"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_quantized_weights: unknown key; the plan does not count what it changes; remove it",
        ),
        ({"zero_optimization": {"stage": 3, "overlap_comm": "auto"}}, "zero_optimization.overlap_comm: "),
        (
            {"zero_optimization": {"stage": 3, "round_robin_gradients": 1}},
            "zero_optimization.round_robin_gradients: must be true or false; found 1",
        ),
        (
            {"zero_optimization": {"stage": 3, "round_robin_gradient": True}},
            "unknown key; did you mean round_robin_gradients?",
        ),
        (ZERO3 | {"aio": {"queue_depth": -1}}, "aio.queue_depth: must be 0 or greater; found -1"),
        ({"zero_optimization": {"stage": 3, "sub_group_size": "auto"}}, "zero_optimization.sub_group_size: "),
        (
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": True}},
            "must be an integer or 'auto'; found true",
        ),
        (
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": 1.5}},
            "zero_optimization.reduce_bucket_size: ",
        ),
        ({"bf16": {"enabled": True}}, "zero_optimization: missing"),
    ],
)
def test_what_contradicts_the_recipe_or_would_be_ignored_is_refused(config, said):
    found = problems(config)
    assert len([line for line in found if said in line]) >= 1, found
    assert all(line.startswith("sharding.config: ") for line in found)


KEPT_APART = {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}}


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        (
            optimizer(betas=[0.9, 0.95], eps=1e-6),
            {"training": TRAINING | {"adam_beta2": 0.95, "adam_epsilon": 1e-6}},
            [],
        ),
        (
            ZERO3,
            {"name": "fsdp"},
            ["fsdp reads no DeepSpeed configuration; remove it, or name zero1, zero2 or zero3"],
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            {"name": "zero2"},
            ["zero_optimization.offload_param: stage 2 ignores it"],
        ),
        (KEPT_APART, {}, []),
        (
            KEPT_APART,
            {"checkpoints": {"save_steps": 10}},
            ["false, but checkpoints.save_steps writes checkpoints"],
        ),
    ],
)
def test_what_the_rest_of_the_recipe_says_decides(config, changes, said):
    found = problems(config, **changes)
    assert len(found) == len(said)
    assert all(one in line for one, line in zip(said, found, strict=True))


def test_the_plan_refuses_it_with_all_mistakes():
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 2.0}
    with pytest.raises(
        RecipeError, match=r"2 mistakes\n.*stage: 2, but the recipe .*\n.*gradient_clipping: 2, but"
    ):
        planner.make(recipe_of(config), geometry=GEOMETRY)


def test_what_the_recipe_decides_is_filled_in_by_the_trainer():
    blocks = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "steps_per_print": 10}
    recipe = recipe_of({"zero_optimization": {"stage": 3, "sub_group_size": 1e9}} | blocks)
    config = sharding_of(recipe).config()
    assert config == {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 10**9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "steps_per_print": 10,
        **dict.fromkeys(
            (
                "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps",
                "train_batch_size",
                "gradient_clipping",
            ),
            "auto",
        ),
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_allow_untested_optimizer": True,
    }
    assert isinstance(config["zero_optimization"]["sub_group_size"], int)


def test_it_is_read_into_the_layout():
    zero = {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": 1e8,
        "stage3_max_live_parameters": 1e7,
        "sub_group_size": 5e8,
        "stage3_param_persistence_threshold": 1000,
        "offload_optimizer": {"device": "nvme"},
        "offload_param": {"device": "cpu"},
    }
    assert layout({"zero_optimization": zero}) == replace(
        SHARDINGS["zero3"].estimated_as,
        overlaps=False,
        bucket=10**8,
        live=10**7,
        sub_group=5 * 10**8,
        persistent=1000,
        parameters_on="cpu",
        optimizer_buffers=4,
    )
    # DeepSpeed's own defaults, which the shipped configurations replace.
    assert layout({"zero_optimization": {"stage": 2}}, "zero2") == replace(
        SHARDINGS["zero2"].estimated_as, overlaps=False, bucket=500_000_000
    )


def planned(config, **changes):
    recipe = recipe_of(config, hardware={"shape": "a100-80gb-8"}, **{"training": TRAINING} | changes)
    return planner.make(recipe, geometry=GEOMETRY)


def at_step(plan, resource=0):
    return plan.needs[resource].phases["steady step"]


def test_the_plan_counts_buckets_gathered_parameters_and_offload():
    auto = planned({"zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 2e8}})
    assert at_step(auto)["buckets"] == 2 * 2 * 2e8
    single = planned({"zero_optimization": {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 1e8}})
    assert at_step(single)["buckets"] == 2 * 1e8
    assert single.step_seconds["communication"] > auto.step_seconds["communication"]
    optimizer = planned({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})
    assert "optimizer" not in at_step(optimizer)
    assert at_step(optimizer)["weights"] == at_step(auto)["weights"]
    # 16-bit gradients, master copies and two moments of all parameters are on the one node.
    assert at_step(optimizer, 1)["offloaded"] == pytest.approx(14 * optimizer.total_parameters, rel=1e-6)
    assert any(
        line.startswith("sharding.config: stage 3, buckets of 500,000,000") for line in optimizer.reasons
    )
    assert any(line.endswith("optimizer offloaded to cpu") for line in optimizer.reasons)


def test_a_number_of_samples_is_the_plans_or_refused():
    fixed = ZERO3 | {"train_micro_batch_size_per_gpu": 1}
    assert planned(fixed).per_device_train_batch_size == 1
    with pytest.raises(
        Exception, match=r"sharding\.config has train_micro_batch_size_per_gpu: 3, and the plan \d"
    ):
        planned(ZERO3 | {"train_micro_batch_size_per_gpu": 3})
    (line,) = problems(fixed, training=TRAINING | {"auto_find_batch_size": True})
    assert (
        "train_micro_batch_size_per_gpu: a number, but training.auto_find_batch_size may halve the batch"
        in line
    )


def test_an_nvme_path_that_no_pod_has_is_refused():
    nvme = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"}}
    with pytest.raises(Exception, match=r"nvme_path /local_nvme, which no pod has; leave it out"):
        planned({"zero_optimization": nvme})
    nvme["offload_optimizer"]["nvme_path"] = "/tmp/nvme"
    plan = planned({"zero_optimization": nvme})
    # In each of eight processes four buffers in float32, each of a sub group's 1e9 elements.
    assert plan.needs[1].phases["steady step"]["offload buffers"] == 8 * 4 * 4 * 10**9
    assert "offloaded" in plan.needs[3].phases["steady step"]


def test_all_keys_of_deepspeeds_stages_are_known_or_refused_with_a_reason_and_defaults_are_deepspeeds():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    pairs = (
        (DeepSpeedZeroConfig, ZeroOptimization),
        (DeepSpeedZeroOffloadParamConfig, ZeroOptimization.model_fields["offload_param"].annotation),
        (DeepSpeedZeroOffloadOptimizerConfig, ZeroOptimization.model_fields["offload_optimizer"].annotation),
    )
    for upstream, own in pairs:
        theirs = {field.alias or name: field for name, field in upstream.model_fields.items()}
        assert set(own.model_fields) <= set(theirs)
        assert set(theirs) - set(own.model_fields) <= set(DeepSpeedConfig.elsewhere)
        filled = {"stage", "offload_param", "offload_optimizer", "stage3_gather_16bit_weights_on_model_save"}
        for name in set(own.__annotations__) - filled:
            assert own.model_fields[name].default == theirs[name].default, name
        # Nothing here reads the others: DeepSpeed has their defaults.
        for name in set(own.model_fields) - set(own.__annotations__):
            assert theirs[name].annotation in (int, bool), name


def test_layouts_have_the_defaults_of_the_shipped_configurations():
    assert layout(str(ROOT / "deepspeed_configs/zero2.json"), "zero2") == SHARDINGS["zero2"].estimated_as
    assert Layout(name="x").bucket == 200_000_000
