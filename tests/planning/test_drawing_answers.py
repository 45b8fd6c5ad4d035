"""Plans of answers that the model draws: memory, time, a larger batch, and what is not modelled."""

import dataclasses
import re

import pytest

from flytune.errors import RecipeError
from flytune.hardware import accelerator_named, shape_named
from flytune.models import config_json
from flytune.planning import candidates, choosing, drawn, planner
from flytune.records.plan import DRAW, EVALUATE, STEP
from flytune.sharding import ONE_PROCESS, route
from flytune.stages.calls import Call
from tests.support.plans import GEOMETRY, recipe_of
from training_estimates import config_sizes, decoding

GRPO = {"name": "grpo", "group_size": 8, "max_completion_length": 512}


def recipe(objective=GRPO, **changes):
    content = {
        "method": "lora",
        "sharding": "ddp",
        "hardware": {"shape": "a100-80gb-8"},
        "data": {"max_length": 1024},
    }
    data = {"dataset_name": "a/b"} | (changes.pop("data", None) or content["data"])
    training = {"learning_rate": 1e-5, "global_batch_size": 256, "max_steps": 100} | changes.pop(
        "training", {}
    )
    return recipe_of(**content | changes | {"objective": objective, "data": data, "training": training})


def fit_of(one, micro_batch=None, geometry=GEOMETRY):
    fits = candidates.each(one, shape_named(one.hardware.shape), geometry)
    return next(fit for fit in fits if micro_batch in (None, fit.workload.micro_batch))


def test_drawing_is_a_phase_of_its_own_and_part_of_a_step_s_time():
    fit = fit_of(recipe(), micro_batch=4)
    phases = fit.needs[0].phases
    # Keys and values, 32 layers, 8 heads of 128, 16 bits, 1,024 tokens of four answers; those of a layer
    # twice.
    assert phases[DRAW]["KV cache"] == 2 * (32 + 1) * 8 * 128 * 2 * 1024 * 4
    assert phases[DRAW]["weights"] == phases[STEP]["weights"]
    assert "KV cache" not in phases[STEP]
    # The live model answers held-out prompts, as many at a time as evaluation.batch_size says.
    assert phases[EVALUATE]["KV cache"] == phases[DRAW]["KV cache"] / 4 * fit.recipe.evaluation.batch_size
    plan = planner.plan_of(fit)
    assert plan.step_seconds["drawing"] == fit.time.drawing
    assert plan.hours[1] == pytest.approx(100 / 3600 * fit.time.seconds)
    assert not {"tokens_per_second", "hours", "price"} & {*plan.intervals}
    sft = fit_of(recipe({"name": "sft"}), micro_batch=4)
    assert DRAW not in sft.needs[0].phases
    assert fit.time.seconds - fit.time.drawing == pytest.approx(sft.time.seconds)


def test_a_teacher_beside_the_student_is_counted_in_memory_time_and_disk():
    teacher = config_json.shipped()["Qwen/Qwen2.5-7B-Instruct"]["config"]
    distill = {"name": "distill", "teacher_model_name_or_path": "Qwen/Qwen2.5-7B-Instruct"}
    drawing = {"on_policy": 0.5, "max_completion_length": 512}
    fit, off = (fit_of(recipe(distill | changes), 4) for changes in (drawing, {}))
    size = 2 * config_sizes.geometry(teacher, "a/b").parameters
    assert {parts["teacher"] for parts in fit.needs[0].phases.values()} == {size}
    [disk] = [need for need in fit.needs if need.resource == "disk"]
    assert {parts["teacher"] for parts in disk.phases.values()} == {size}
    assert "KV cache" not in fit.needs[0].phases[EVALUATE], "held-out answers are those of the data"
    assert fit.workload.decoding.answers == 256 / 8 / 2, "half of a process's rows"
    drawn_by = dataclasses.replace(fit.workload.decoding, teacher=None)
    alone = dataclasses.replace(fit.workload, decoding=drawn_by)
    a100 = accelerator_named("A100-80GB")
    scored, drawn_alone = (decoding.seconds(work, a100) for work in (fit.workload, alone))
    # Products of 16 answers of 1,024 tokens with the teacher's weights, at half of the data sheet's rate.
    assert 0.5 < (scored - drawn_alone) / (2 * size / 2 * 16 * 1024 / (0.5 * 312e12)) < 2
    assert fit.time.seconds - fit.time.drawing == pytest.approx(off.time.seconds)
    assert not any("objective.engine" in line for line in planner.plan_of(fit).reasons)


def test_time_grows_with_tokens_and_falls_with_the_answers_that_are_drawn_at_a_time():
    short, long = (
        fit_of(recipe(GRPO | {"max_completion_length": tokens}), 4).time.drawing for tokens in (128, 512)
    )
    assert 3.5 < long / short < 4.5
    more = fit_of(recipe(GRPO | {"per_device_generation_batch_size": 32}), 4)
    assert more.workload.decoding.at_a_time == 32
    # Reading the weights and starting the kernels of a token take as long for 32 answers as for four.
    assert 5 < long / more.time.drawing <= 8
    (line,) = (
        line for line in planner.plan_of(fit_of(recipe(), 4)).reasons if "generation_batch_size" in line
    )
    assert re.match(
        r"objective.per_device_generation_batch_size: 32 would draw them in \S+ s, with \S+ of 79.2 GiB", line
    )


def test_a_token_reads_all_weights_and_sharded_ones_are_gathered_for_it():
    alone = fit_of(recipe(), 4).workload
    rate = accelerator_named("A100-80GB")
    passes = 32 / 4 * 511
    weights = 2 * (GEOMETRY.parameters - GEOMETRY.vocab_size * GEOMETRY.hidden_size) / (rate.memory_gbs * 1e9)
    assert decoding.seconds(alone, rate) > passes * weights
    sharded = fit_of(recipe(sharding="fsdp"), 4).workload
    gathered = passes * 7 / 8 * 2 * GEOMETRY.parameters / (rate.link_gbs * 1e9)
    assert decoding.seconds(sharded, rate) > max(gathered, decoding.seconds(alone, rate))


VLLM = GRPO | {"engine": "vllm"}
ALONE = {"sharding": "none", "hardware": {"shape": "a100-80gb-1"}}


def test_vllm_takes_its_share_of_memory_while_it_draws_and_sleeps_in_host_memory():
    own, served = (fit_of(recipe(one, **ALONE), 4) for one in (GRPO, VLLM))
    phases = served.needs[0].phases
    assert phases[DRAW]["vLLM"] == round(0.4 * served.workload.gpu_memory_gib * 2**30)
    assert "KV cache" not in phases[DRAW]
    assert not any("vLLM" in phases[phase] for phase in phases if phase != DRAW)
    assert phases[EVALUATE]["KV cache"] == own.needs[0].phases[EVALUATE]["KV cache"], "transformers' own"
    (host,) = (need for need in served.needs if need.resource == "host memory")
    assert host.phases[STEP]["vLLM"] > 2 * GEOMETRY.parameters
    elsewhere = GRPO | {"engine": {"name": "vllm", "address": "http://127.0.0.1:1"}}
    assert "vLLM" not in fit_of(recipe(elsewhere, **ALONE), 4).needs[0].phases[DRAW]


def test_vllm_on_a_cpu_does_not_sleep():
    model = {"name_or_path": "a/b", "dtype": "float32"}
    cpu = {"sharding": "none", "hardware": {"shape": "cpu-1"}, "model": model}
    one = recipe(VLLM, **cpu, training={"global_batch_size": 8})
    phases = fit_of(one, 1).needs[0].phases
    assert phases[STEP]["vLLM"] == phases[DRAW]["vLLM"] > 4 * GEOMETRY.parameters + 2**30
    assert "vLLM" not in phases["load"]


QWEN = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "hidden_act": "silu",
}
SMALL = {"vocab_size": 151936, "tie_word_embeddings": True}


def qwen(hidden, inner, layers, heads, key_heads, **changes):
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    return config_sizes.geometry(QWEN | sizes | changes, "a/b")


def test_a_token_of_vllm_takes_what_was_published():
    models = [
        qwen(896, 4864, 24, 14, 2, **SMALL),
        qwen(1536, 8960, 28, 12, 2, **SMALL),
        qwen(5120, 13824, 48, 40, 8),
        qwen(5120, 27648, 64, 40, 8),
    ]
    rate, (low, high) = accelerator_named("A100-80GB"), decoding.VLLM_BAND
    work = fit_of(recipe(VLLM, **ALONE), 4).workload
    for model, (parameters, speed) in zip(models, decoding.VLLM_SPEEDS.items(), strict=True):
        assert model.parameters == pytest.approx(parameters, rel=0.01)
        # Half of the 2,048 tokens that were drawn.
        seconds = decoding.vllm_token_seconds(dataclasses.replace(work, geometry=model), rate, 1, 1024)
        assert low <= 1 / speed / seconds <= high


def test_a_plan_says_which_engine_is_cheaper_where_both_can_run():
    (line,) = (line for line in planner.plan_of(fit_of(recipe(**ALONE), 4)).reasons if "engine: vllm" in line)
    assert re.match(
        r"objective.engine: vllm would be cheaper: \S+ s of drawing, and \$\S+ a step instead of", line
    )
    reasons = planner.plan_of(fit_of(recipe(VLLM, **ALONE), 4)).reasons
    (line,) = (line for line in reasons if "engine: transformers" in line)
    assert line.startswith("objective.engine: transformers would be dearer: ")
    assert [line for line in reasons if "fitted to published speeds of one answer at a time" in line]
    # No server has the quantized base.
    reasons = planner.plan_of(fit_of(recipe(**ALONE | {"method": "qlora"}), 4)).reasons
    assert not [line for line in reasons if "engine: vllm" in line]


def test_a_plan_says_from_which_length_of_answers_on_vllm_is_faster():
    def drawing(tokens, engine):
        longest = {"max_completion_length": tokens, "engine": engine}
        return fit_of(recipe(GRPO | longest), 4).time.drawing

    reasons = planner.plan_of(fit_of(recipe(), 4)).reasons
    (tokens,) = (
        int(length)
        for line in reasons
        for length in re.findall(r"vLLM is faster where answers have (\d+) tokens or more", line)
    )
    assert drawing(tokens, "vllm") < drawing(tokens, "transformers")
    assert drawing(tokens - 1, "vllm") >= drawing(tokens - 1, "transformers")


def test_each_gpu_has_a_server_whose_part_of_it_holds_the_model_and_an_answer():
    alone, together = (fit_of(recipe(VLLM, **layout), 4) for layout in (ALONE, {}))
    hosts = [
        next(need for need in fit.needs if need.resource == "host memory").phases[STEP]["vLLM"]
        for fit in (alone, together)
    ]
    assert hosts[1] == pytest.approx(8 * hosts[0])
    part = alone.needs[-1]
    assert part.resource == "vLLM's GPU memory"
    assert part.available_bytes == round(0.4 * alone.workload.gpu_memory_gib * 2**30)
    assert part.phases == {
        DRAW: {
            "weights": pytest.approx(2 * GEOMETRY.parameters),
            "activations": round(1.26 * 2**30),
            "KV cache": round(decoding.cache_bytes(alone.workload, 1, alone.workload.sequence_length)),
        }
    }
    engine = {"name": "vllm", "gpu_memory_utilization": 0.05}
    refusal = candidates.best_fit(
        recipe(GRPO | {"engine": engine}, **ALONE), shape_named("a100-80gb-1"), GEOMETRY
    )
    assert "of vLLM's GPU memory missing" in refusal
    assert "raise objective.engine.gpu_memory_utilization" in refusal


def with_own(gpus, sharding="ddp", **changes):
    return recipe(GRPO | {"engine": {"name": "vllm", "gpus": gpus}}, sharding=sharding, **changes)


def test_gpus_that_draw_alone_take_memory_and_time_from_no_gpu_that_trains():
    shared, own = fit_of(recipe(VLLM), 4), fit_of(with_own(4), 4)
    plan = planner.plan_of(own)
    assert (plan.processes, plan.world_size, plan.gradient_accumulation_steps) == (4, 4, 16)
    assert plan.price_per_hour == planner.plan_of(shared).price_per_hour
    assert plan.tokens_per_second[1] == pytest.approx(4 * own.time.tokens_per_second)
    assert "vLLM" not in own.needs[0].phases[DRAW]
    hosts = [
        next(need for need in fit.needs if need.resource == "host memory").phases[STEP]["vLLM"]
        for fit in (shared, own)
    ]
    # A process each, and no weights that sleep.
    assert hosts[1] == pytest.approx(hosts[0] / 2 - 4 * 2 * GEOMETRY.parameters)
    part = own.needs[-1]
    assert part.resource == "vLLM's GPU memory"
    assert part.available_bytes == round(0.9 * own.workload.gpu_memory_gib * 2**30)
    assert part.phases == shared.needs[-1].phases
    (line,) = (line for line in plan.reasons if line.startswith("drawing: "))
    assert "draws 64 answers a process and step, on 4 of a node's 8 GPUs, 64 each; " in line
    (line,) = (line for line in plan.reasons if line.startswith("objective.engine.gpus: 0, "))
    assert re.match(r".* would be cheaper: \S+ s of drawing, and \$\S+ a step instead of \$\S+$", line)


def test_fewer_servers_draw_longer():
    own = [fit_of(with_own(gpus, training={"global_batch_size": 224}), 1) for gpus in (1, 4, 6)]
    assert [fit.workload.decoding.served for fit in own] == [224, 56, 38]
    a100 = accelerator_named("A100-80GB")
    times = [decoding._seconds_of_vllm(fit.workload, a100) for fit in own]
    assert times[0] > times[1] > times[2]


@pytest.mark.parametrize(
    ("gpus", "changes", "said"),
    [
        (8, {}, "objective.engine.gpus: 8: a node has 8 GPUs, of which none would train; lower it"),
        (1, {"hardware": {"shape": "cpu-2"}}, "objective.engine.gpus: 1: the shape has none; leave it out"),
        (7, {}, "objective.engine.gpus leaves 1 of 8 GPUs to train: ddp needs two processes or more"),
        (1, {}, "leaves 7 of 8 GPUs to train: global_batch_size 256 is not a multiple of its 7 "),
    ],
)
def test_rows_without_gpus_for_both_are_refused(gpus, changes, said):
    one = with_own(gpus, **changes)
    assert said in candidates.best_fit(one, shape_named(one.hardware.shape), GEOMETRY)


def test_a_plan_that_chooses_the_sharding_says_what_the_able_ones_lack():
    one = with_own(1, "auto")
    ways, row = choosing.layouts(one, GEOMETRY), shape_named("a100-80gb-8")
    assert "not a multiple of its 7 processes" in choosing.best_layout(ways, row, GEOMETRY)


def test_one_gpu_that_trains_beside_others_is_one_process_without_ranks():
    plan = planner.plan_of(fit_of(with_own(7, "none"), 4))
    assert (plan.processes, route(plan)) == (1, "a100-80gb-8" + ONE_PROCESS)
    several = planner.plan_of(fit_of(with_own(4), 4))
    assert route(several) == "a100-80gb-8"
    call = Call(print, None, {"plan": several}, shape_named(several.shape), processes=8)
    assert call._ranks() == 4


def test_answers_that_do_not_fit_the_memory_are_refused_although_their_training_fits():
    one = recipe(
        GRPO | {"max_completion_length": 8000, "per_device_generation_batch_size": 64},
        data={"max_length": 8192},
        training={"global_batch_size": 512, "per_device_train_batch_size": 1},
    )
    said = candidates.best_fit(one, shape_named("a100-80gb-8"), GEOMETRY)
    assert "draw answers; most of it KV cache" in said
    section = one.objective.model_copy(update={"per_device_generation_batch_size": 1})
    fit = candidates.best_fit(
        one.model_copy(update={"objective": section}), shape_named("a100-80gb-8"), GEOMETRY
    )
    assert fit.fits


def test_what_is_not_modelled_is_refused_by_name(tmp_path):
    unknown = GEOMETRY.model_copy(update={"unsupported": "linear attention"})
    with pytest.raises(RecipeError, match="caches keys and values, .* are not modelled for linear attention"):
        planner.make(recipe(), geometry=unknown, trace=lambda *_: "never asked")
    with pytest.raises(RecipeError, match="are drawn by the model, and their lengths are not in the data"):
        drawn.lengths(tmp_path, recipe())
