import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytune.cluster import folders
from flytune.errors import DoesNotFit, RecipeError
from flytune.hardware import load_cluster, shape_named
from flytune.hardware.shapes import GIB
from flytune.models import base as models_base
from flytune.models import config_json
from flytune.objectives.bound import BoundRecipe
from flytune.planning import base_sizes, candidates, planner, requirements
from flytune.recipe import Recipe
from flytune.records.plan import STEP
from flytune.sharding import ONE_PROCESS, SHARDINGS, pair_problem, route, sharding_of
from tests.support import recipes
from tests.support.json_server import look_at
from tests.support.paths import ROOT
from tests.support.plans import GEOMETRY, LLAMA_8B, SMALL, plan_of, recipe_of, shape_of
from tests.support.refusing_hub import refuse_connections
from training_estimates import config_sizes

BATCH = {"learning_rate": 1e-4, "global_batch_size": 8}


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 4096),
    st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
)
def test_the_global_batch_is_exactly_the_recipes_or_refused(nodes, processes, batch, sharding):
    # The ancestor divided by the micro batch alone, and so trained on 24 times the batch under 3 nodes of 8
    # GPUs.
    recipe = recipe_of(sharding=sharding, training=BATCH | {"global_batch_size": batch})
    shape = shape_of(nodes=nodes, processes=processes)
    found = candidates.best_fit(recipe, shape, config_sizes.geometry(SMALL, "a/b"))
    world = nodes * processes
    if world == 1 or batch % world:
        assert isinstance(found, str)
    else:
        plan = planner.plan_of(found)
        assert plan.per_device_train_batch_size * plan.gradient_accumulation_steps * plan.world_size == batch
        assert plan.world_size == world


def test_a_refusal_on_a_named_shape_shows_the_arithmetic_and_the_nearest_that_works():
    # Llama 2 70B on one node: the source says that it is possible, with states that are paged.
    name = "meta-llama/Llama-2-70b-chat-hf"
    one_node = recipe_of(
        model={"name_or_path": name, "revision": config_json.shipped()[name]["revision"]},
        sharding={"name": "fsdp", "offload": "cpu"},
        training={"learning_rate": 5e-5, "global_batch_size": 16, "per_device_train_batch_size": 1},
        hardware={"shape": "a100-80gb-8"},
    )
    with pytest.raises(DoesNotFit) as raised:
        planner.make(one_node)
    first, parts, offloaded, rest, nearest = str(raised.value).splitlines()[1:]
    assert re.match(
        r"  a100-80gb-8: \d+\.\d GiB of host memory missing: needs 10\d\d\.\d .*, has 972\.0, with micro "
        r"batch 1",
        first,
    )
    total, _, sizes = parts.strip().partition(" = ")
    assert float(total) == pytest.approx(
        sum(float(size.rpartition(" ")[2]) for size in sizes.split(" + ")), abs=0.2
    )
    assert (
        offloaded.strip()
        == "offloaded: 16.0 bytes x 68.98 billion trained parameters (weights, gradients, states)"
    )
    assert re.fullmatch(
        r" +the rest: GPU memory \d+\.\d of 79\.2, /dev/shm 1\.0 of 128\.0, disk \d+\.\d of 4000\.0", rest
    )
    assert nearest.startswith("  it would fit with ")


# A model that reads images has its sizes counted of its own files, which `make demo-images` writes.
RECIPES = [path for path in recipes.RECIPES if path.stem != "demo-images"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_planned_where_there_is_no_network(path, connections, tmp_path, monkeypatch):
    recipe = Recipe.from_yaml(path)
    # The headers are of the torch that PyPI has for Linux, whichever is installed here.
    monkeypatch.setattr(requirements, "_has_cpu_build", lambda: False)
    # Where the demo's models were not made yet.
    monkeypatch.chdir(tmp_path)
    plan = planner.make(recipe)
    assert not connections
    assert plan.verdict in ("fits", "tight")
    assert all(need.margin_bytes >= 0 for need in plan.needs)
    assert folders.problems(recipe, load_cluster(), recipe.hardware.shape, uploaded=False) == []
    if plan.tokens_per_second:
        low, rate, high = plan.tokens_per_second
        assert 0 < low < rate < high
        tokens = (
            recipe.training.global_batch_size
            * recipe.data.max_length
            * BoundRecipe(recipe).row_kind.sequences
        )
        assert sum(plan.step_seconds.values()) == pytest.approx(tokens / rate, rel=1e-6)
    assert bool(plan.tokens_per_second) == (plan.accelerator != "cpu")
    header = path.read_text().partition("\nname:")[0]
    assert re.search(rf"# Hardware:.*\b{plan.shape}(?![\w-])", header), "the header names the planned shape"
    assert f"\n# Planned:  {plan.headline}.\n" in header, "the header says the planned peak and price"


FALCON = config_sizes.geometry(SMALL, "a/b").model_copy(update={"model_type": "falcon"})
QUANTIZED = SMALL | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
MASTERS = BATCH | {"master_dtype": "bfloat16"}
TWO_NODES = {"shape": "a100-80gb-8x2"}


@pytest.mark.parametrize(
    ("geometry", "changes", "said"),
    [
        (
            SMALL,
            {"sharding": "device_map"},
            "method full with sharding device_map: .*nearest that works: fsdp",
        ),
        (
            SMALL,
            {"method": "lora", "sharding": "device_map"},
            "lora with sharding device_map: .*nearest that works: fsdp",
        ),
        (
            SMALL,
            {"sharding": {"name": "zero2", "offload": "nvme"}},
            "offload nvme with zero2: .*nearest that does: zero3",
        ),
        (
            SMALL,
            {"method": "qlora", "sharding": "device_map", "hardware": TWO_NODES},
            "device_map is one process on one node, and the shape has 2 nodes",
        ),
        (
            SMALL,
            {
                "sharding": "fsdp",
                "hardware": TWO_NODES,
                "training": BATCH | {"global_batch_size": 16},
                "checkpoints": {"save_steps": 10, "folder": ".checkpoints"},
            },
            "checkpoints.folder .checkpoints is another folder on each of 2 nodes; name one",
        ),
        (
            SMALL,
            {"training": BATCH | {"router_aux_loss_coef": 0.01}},
            "router_aux_loss_coef: llama has no experts",
        ),
        (QUANTIZED, {}, r"method: full, but the weights of .* are quantized \(bitsandbytes\)"),
        *(
            (
                SMALL | {"quantization_config": {"quant_method": method}},
                {"method": name},
                rf"method: {name}, but the weights of .* are quantized \({method}\): .* only those of "
                r"bitsandbytes train an adapter",
            )
            for method in ("gptq", "awq", "fp8", "compressed-tensors", "mxfp4")
            for name in ("lora", "qlora")
        ),
        (
            FALCON,
            {"data": {"path": "x", "packing": True}},
            "data.packing: falcon with sdpa: packed samples see each other",
        ),
        (
            LLAMA_8B,
            {"model": {"name_or_path": "a/b", "dtype": "float16"}},
            "model.dtype: float16, but a/b was trained in bfl",
        ),
        (SMALL, {"hardware": {"shape": "t4-1"}}, "T4 does not compute in bfloat16"),
        (
            SMALL,
            {
                "model": {
                    "name_or_path": "a/b",
                    "dtype": "float32",
                    "attn_implementation": "flash_attention_2",
                }
            },
            "FlashAttention computes in 16 bits",
        ),
        (
            SMALL,
            {"hardware": {"shape": "tpu"}},
            "hardware.shape: tpu: no such row in shapes.yaml; there are cpu-1",
        ),
        (
            SMALL,
            {"hardware": {"accelerator": "H100", "max_price_per_hour": 1}},
            "no row of shapes.yaml has accelerator H100, max_price_per_hour 1",
        ),
        (
            SMALL,
            {
                "sharding": "ddp",
                "training": BATCH | {"global_batch_size": 12},
                "hardware": {"shape": "h100-8"},
            },
            "global_batch_size 12 is not a multiple of its 8 processes; 8 or 16 would be",
        ),
        (
            SMALL,
            {"sharding": "zero2", "training": MASTERS},
            "training.master_dtype: bfloat16: DeepSpeed keeps float32 master copies of 16-bit weights; leave "
            "it out",
        ),
        (
            SMALL,
            {"method": "lora", "training": MASTERS},
            "bfloat16: the adapters of lora are float32, and take little memory",
        ),
        (
            SMALL,
            {"training": MASTERS, "model": {"name_or_path": "a/b", "dtype": "float32"}},
            r"weights that compute in float32 \(model.dtype\) would be rounded to another dtype",
        ),
        (
            SMALL,
            {"data": {"path": "x.jsonl", "revision": "v2"}},
            "data.revision: only data sets on the hub have one; remove it, or name one in dataset_name",
        ),
        (
            SMALL,
            {"data": {"sources": [{"path": "x.jsonl", "dataset_config": "en"}]}},
            r"data.sources\[0\].dataset_config: only data sets on the hub have one",
        ),
        (
            SMALL,
            {"method": "full", "model": {"name_or_path": "a/b", "vision": "train"}},
            "model.vision: train: nothing reads images without data.images: true",
        ),
    ],
)
def test_what_no_machine_can_do_is_refused_with_the_nearest_that_can(geometry, changes, said):
    geometry = config_sizes.geometry(geometry, "a/b") if isinstance(geometry, dict) else geometry
    with pytest.raises((RecipeError, DoesNotFit), match=said):
        planner.make(recipe_of(**changes), geometry=geometry)


def test_each_method_has_the_shardings_that_were_promised():
    works = {
        method: {name for name in SHARDINGS if pair_problem(recipe_of(method=method, sharding=name)) is None}
        for method in ("full", "lora", "qlora")
    }
    assert works["full"] == works["lora"] == {"none", "ddp", "zero1", "zero2", "zero3", "fsdp"}
    assert works["qlora"] == set(SHARDINGS)


@pytest.mark.parametrize(
    ("sharding", "optim", "said"),
    [
        (
            "zero2",
            "paged_adamw_8bit",
            "DeepSpeed flattens the parameters that it partitions, and the embedding's states",
        ),
        ("fsdp", "paged_adamw_8bit", "FSDP2 shards no 8-bit optimizer states"),
        (
            "zero3",
            "adafactor",
            "DeepSpeed flattens the parameters that it partitions, and Adafactor's states",
        ),
        ("fsdp", "adafactor", "transformers' Adafactor keeps plain states"),
        (
            "fsdp cpu",
            "paged_adamw_32bit",
            "states that are offloaded are never on the GPU, and have nothing to be paged from",
        ),
        (
            "zero2 cpu",
            "paged_adamw_32bit",
            "states that are offloaded are never on the GPU, and have nothing to be paged from",
        ),
        ("zero2 cpu", "lion_32bit", "DeepSpeed updates offloaded states with its own AdamW"),
        ("zero2 cpu", "sgd", "DeepSpeed updates offloaded states with its own AdamW"),
    ],
)
def test_optimizers_are_refused_where_they_do_not_work(sharding, optim, said):
    name, _, offload = sharding.partition(" ")
    with pytest.raises(
        RecipeError, match=f"training.optim: {optim} with sharding {name}: {said}.*; use auto"
    ):
        plan_of(sharding={"name": name, "offload": offload or "none"}, training=BATCH | {"optim": optim})


def test_qlora_pages_its_states_where_they_are_not_sharded():
    chosen = [
        sharding_of(recipe_of(method="qlora", sharding=name)).optimizer for name in ("ddp", "zero2", "fsdp")
    ]
    assert chosen == ["paged_adamw_8bit", "adamw_torch_fused", "adamw_torch_fused"]


def test_8_bit_bases_are_refused_where_they_are_not_sharded():
    works = set()
    for name in SHARDINGS:
        problem = pair_problem(recipe_of(method={"name": "qlora", "load_in_8bit": True}, sharding=name))
        if problem is None:
            works.add(name)
        else:
            assert f"method.load_in_8bit with sharding {name}: " in problem
            assert "and 8 bits with none, ddp, zero1, zero2, device_map" in problem
    assert works == {"none", "ddp", "zero1", "zero2", "device_map"}


def test_checkpoints_on_the_disk():
    def copies(folder, save_steps=10, **changes):
        kept = {"save_steps": save_steps, "folder": folder} | changes
        return recipe_of(checkpoints=kept, evaluation={"eval_steps": 10}).checkpoints.copies_on_disk

    assert [
        copies(".checkpoints"),
        copies("/mnt/x"),
        copies("s3://x"),
        copies("s3://x", None),
        copies(None),
    ] == [3, 0, 1, 0, 1]
    assert [copies(folder, export="best") for folder in (".checkpoints", "/mnt/x", "s3://x")] == [4, 0, 1]
    for folder in (None, "/mnt/checkpoints", "s3://bucket/checkpoints"):
        seen = {"save_steps": 10, "folder": folder}
        assert (
            plan_of(
                sharding="fsdp",
                hardware=TWO_NODES,
                training=BATCH | {"global_batch_size": 16},
                checkpoints=seen,
            ).nodes
            == 2
        )


def test_what_is_offloaded_to_nvme_and_checkpoints_count_on_the_disk():
    recipe = recipe_of(
        sharding={"name": "zero3", "offload": "nvme"}, checkpoints={"save_steps": 10, "folder": "x"}
    )
    shape = shape_of(nodes=1, processes=8, nvme=True, disk_gib=400, memory_gib=256)
    said = candidates.best_fit(recipe, shape.model_copy(update={"nvme": False}), GEOMETRY)
    assert said == "zero3 offloads to NVMe, and the shape's disk is none"
    said = candidates.best_fit(recipe, shape, GEOMETRY)
    assert said.startswith(
        "18.8 GiB of disk missing: needs 418.8 (export; most of it checkpoints, 269.2), has 400.0"
    )


def test_a_micro_batch_on_a_cpu_leaves_memory_for_the_rest_of_the_machine():
    smollm = config_json.shipped()[".demo/models/smollm2-135m-instruct"]["config"]
    base = {"method": "lora", "sharding": "none", "model": {"name_or_path": "a/b", "dtype": "float32"}}
    base |= {"data": {"path": "x", "max_length": 256}, "hardware": {"shape": "cpu-1"}}
    training = {"learning_rate": 1e-4, "global_batch_size": 8, "activation_checkpointing": False}
    plan = plan_of(smollm, training=training, **base)
    assert plan.per_device_train_batch_size == 2
    assert plan.memory.peak_bytes < 4e9
    assert plan.memory.phases[STEP]["activations"] < candidates.CPU_ACTIVATIONS_GIB * GIB
    asked = plan_of(smollm, training=training | {"per_device_train_batch_size": 8}, **base)
    assert asked.per_device_train_batch_size == 8
    longer = plan_of(smollm, training=training, **base | {"data": {"path": "x", "max_length": 2048}})
    assert longer.per_device_train_batch_size == 1


def test_device_map_takes_one_process_on_eight_gpus():
    recipe = recipe_of(method="qlora", sharding="device_map", hardware={"shape": "a100-80gb-8"})
    plan = planner.make(recipe, geometry=config_sizes.geometry(SMALL, "a/b"))
    assert (plan.world_size, plan.processes) == (1, 1)
    assert route(plan) == "a100-80gb-8" + ONE_PROCESS
    arguments = sharding_of(recipe).load_arguments(plan, shape_named("a100-80gb-8"))
    assert set(arguments["max_memory"]) == set(range(8))
    table = plan.memory.phases[plan.memory.peak_phase]
    # What is not weights stays free, and a tenth of the GPU.
    assert arguments["max_memory"][0] + sum(table.values()) - table["weights"] == round(
        0.9 * plan.memory.available_bytes
    )


def test_what_does_not_fit_is_told_shape_by_shape_with_the_change_that_would():
    with pytest.raises(DoesNotFit) as caught:
        plan_of(LLAMA_8B, sharding="none")
    text = str(caught.value)
    assert re.search(
        r"  a10g-1: \d+\.\d GiB of GPU memory missing: needs \d+\.\d \(steady step; most of it optimizer, "
        r"59\.8\)",
        text,
    )
    assert "  h100-8: none is one process, and the shape has 8" in text
    assert "  it would fit with sharding: fsdp (on a10g-8, $16.29 an hour)" in text


def test_auto_takes_the_cheapest_gpu_and_cpus_only_when_asked():
    assert (
        plan_of(sharding="none").shape
        == plan_of(sharding="none", hardware={"max_price_per_hour": 0.81}).shape
        == "l4-1"
    )
    assert plan_of(sharding="none", hardware={"accelerator": "cpu"}).shape == "cpu-1"
    assert plan_of(sharding="zero2", hardware={"accelerator": "cpu"}).shape == "cpu-2"


def test_a_model_that_cannot_be_read_is_told_apart(tmp_path, hub):
    def said(name):
        with pytest.raises(RecipeError) as caught:
            base_sizes.read_geometry(recipe_of(model={"name_or_path": name}).model)
        return str(caught.value)

    assert "no such folder" in said(str(tmp_path / "none"))
    assert "no such folder" in said("./none")
    assert "no such folder, and the hub cannot be reached" in said("owner/unknown")
    (tmp_path / "model.gguf").touch()
    assert "the folder has no config.json; it holds model.gguf" in said(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in said(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    assert "builds no causal language model of the type 't5'" in said(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "does not say hidden_size" in said(str(tmp_path))


@pytest.fixture
def connections(monkeypatch, tmp_path):
    """The addresses that are connected to; each refuses."""
    return refuse_connections(monkeypatch, tmp_path / "cache")


def test_one_refused_connection_is_enough_and_the_error_says_how_to_go_on(connections):
    with pytest.raises(RecipeError) as caught:
        base_sizes.read_geometry(recipe_of(model={"name_or_path": "owner/unknown"}).model)
    assert connections == [("hub.invalid", 443)]
    said = str(caught.value)
    assert (
        "owner/unknown: no such folder, and the hub cannot be reached (no answer from https://hub.invalid); "
        "name a" in said
    )
    assert "config.json" in said
    assert "HF_HUB_OFFLINE=1" in said
    assert models_base.commit_of(recipe_of(model={"name_or_path": "owner/unknown"}).model) is None
    assert len(connections) == 2, "a commit is not waited for either"


def test_a_shipped_config_holds_for_its_revision_alone(connections):
    name = "meta-llama/Llama-3.1-8B-Instruct"
    pinned = config_json.shipped()[name]["revision"]
    assert (
        base_sizes.read_geometry(recipe_of(model={"name_or_path": name, "revision": pinned}).model).parameters
        == 8_030_261_248
    )
    assert not connections
    with pytest.raises(
        RecipeError, match=f"write model.revision: {pinned}, whose sizes Flytune has; or name a folder"
    ):
        base_sizes.read_geometry(recipe_of(model={"name_or_path": name, "revision": "f" * 40}).model)
    assert len(connections) == 1


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("NousResearch/Llama-3.2-1B", 1_235_814_400),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen3-4B-Instruct-2507", 4_022_468_096),
        ("mistralai/Mixtral-8x7B-v0.1", 46_702_792_704),
        ("google/gemma-2-2b", 2_614_341_888),
        ("microsoft/phi-2", 2_779_683_840),
        ("TinyLlama/TinyLlama_v1.1", 1_100_048_384),
    ],
)
def test_a_known_name_is_counted_as_published_while_the_hub_does_not_answer(
    name, parameters, connections, caplog
):
    base_sizes._warn_once.cache_clear()
    found = base_sizes.read_geometry(recipe_of(model={"name_or_path": name}).model)
    assert found.parameters == parameters, "the size that the hub shows"
    assert connections
    base_sizes.layer_counter(recipe_of(model={"name_or_path": name}).model)
    base_sizes.read_geometry(recipe_of(model={"name_or_path": name}).model)
    said = "the hub did not answer; its sizes are those that Flytune knows of this name"
    assert caplog.text.count(said) == 1


@pytest.mark.parametrize("architectures", [3, "LlamaForSequenceClassification", {"a": 1}, [3]])
def test_a_config_that_lists_no_architectures_is_that_of_no_classifier(architectures, tmp_path):
    known = json.loads((ROOT / "flytune/models/known_models.json").read_text())["models"][0]["config"]
    (tmp_path / "config.json").write_text(json.dumps(known | {"architectures": architectures}))
    geometry = base_sizes.read_geometry(recipe_of(model={"name_or_path": str(tmp_path)}).model)
    assert geometry.own_labels is None


def test_every_known_model_is_counted():
    rows = json.loads((ROOT / "flytune/models/known_models.json").read_text())["models"]
    assert all(config_sizes.geometry(row["config"], row["names"][0]).parameters for row in rows)
    names = [name for row in rows for name in row["names"]]
    assert len(names) == len(set(names))


def test_behind_a_proxy_it_is_the_proxy_that_is_tried(connections, monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    assert not models_base.hub_answers()
    monkeypatch.setenv("no_proxy", "hub.invalid")
    assert not models_base.hub_answers()
    assert connections == [("proxy.invalid", 3128), ("hub.invalid", 443)]


def test_every_shipped_config_says_where_it_is_from_and_is_a_recipes():
    named = {(recipe.model.name_or_path, recipe.model.revision) for recipe in map(Recipe.from_yaml, RECIPES)}
    assert {(name, entry["revision"]) for name, entry in config_json.shipped().items()} == named
    assert all(entry["source"] for entry in config_json.shipped().values())


def test_a_gated_and_an_unknown_model_say_what_to_do(answering_hub, monkeypatch, tmp_path):
    look_at(monkeypatch, answering_hub, tmp_path)
    for token, name, said in (
        ("", "owner/closed", "gated on the hub, and no HF_TOKEN is set; ask for access"),
        ("hf_x", "owner/closed", "the token's account has not been granted access"),
        ("", "owner/unknown", "no such repository on the hub"),
    ):
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(RecipeError, match=said) as caught:
            base_sizes.read_geometry(recipe_of(model={"name_or_path": name}).model)
        assert "hf_x" not in str(caught.value)


def test_the_machine_that_evaluates_must_hold_the_model(caplog):
    from flytune.planning import stage_shapes

    recipe = Recipe.from_yaml(RECIPES[0].parent / "llama-3.3-70b-qlora-fsdp.yaml")
    geometry = base_sizes.read_geometry(recipe.model)
    plan = planner.make(recipe, geometry=geometry)

    def on(name, **changes):
        section = recipe.evaluation.model_copy(update={"shape": name})
        return stage_shapes.evaluation_shape(
            recipe.model_copy(update={"evaluation": section, **changes}), plan, geometry
        )

    assert stage_shapes.evaluation_shape(recipe, plan, geometry).name == plan.shape
    told = (
        r"evaluation: one node of l4-1 has 19\.8 GiB for weights, and the model takes 40\.7; write "
        r"evaluation\.shape: a"
    )
    with pytest.raises(DoesNotFit, match=told):
        on("l4-1")
    # In 16 bits, part of it may be in host memory; a warning says so.
    lora = recipe.method.model_copy(update={"name": "lora"})
    assert on("a10g-8", method=lora).name == "a10g-8"
    assert not caplog.text
    assert on("t4-8", method=lora).name == "t4-8"
    assert re.search(
        r"131\.\d GiB of weights on one node of t4-8, .* the rest is in host memory", caplog.text
    )


def test_a_schedule_that_does_not_fit_into_the_run_is_refused_once_the_samples_are_known():
    training = BATCH | {"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 0}
    recipe = recipe_of(training=training | {"lr_scheduler_kwargs": {"num_decay_steps": 100}})
    assert planner.make(recipe, geometry=config_sizes.geometry(SMALL, "a/b")).steps is None
    with pytest.raises(
        RecipeError,
        match=r"training.lr_scheduler_kwargs: 0 steps of warm-up \+ 100 of decay, and the run has 10",
    ):
        planner.make(recipe, geometry=config_sizes.geometry(SMALL, "a/b"), samples=80)


def test_an_attention_that_stores_its_scores_is_planned_as_one():
    changes = {"method": "lora", "hardware": {"shape": "a100-80gb-1"}}
    sdpa, eager = (
        plan_of(LLAMA_8B, model={"name_or_path": "a/b", "attn_implementation": name}, **changes)
        for name in ("sdpa", "eager")
    )
    memory = [plan.needs[0].phases[STEP]["activations"] for plan in (sdpa, eager)]
    assert memory[1] > memory[0]
    assert eager.tokens_per_second < sdpa.tokens_per_second
    assert "eager stores the scores of each pair of tokens" in " ".join(eager.reasons)
    assert "stores the scores" not in " ".join(sdpa.reasons)
