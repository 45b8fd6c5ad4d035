from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import throughput
from benchmarks.frameworks import COMPOSER, HF, LAYOUTS, TRANSFORMERS
from benchmarks.measured_runs import MeasuredRun, model
from benchmarks.published_models import as_run
from flytune.errors import RecipeError
from flytune.hardware import accelerator_named, load_accelerators, load_shapes
from flytune.planning.workloads import FLYTUNE
from training_estimates import Optimizer, Workload
from training_estimates.communication import communication_bytes, link_rate
from training_estimates.flops import flops, product_seconds
from training_estimates.step_time import likely, step

A100 = accelerator_named("A100-80GB")
LLAMA = Workload(
    geometry=model("Llama-2-7b"),
    method="full",
    layout=LAYOUTS["none"],
    gpus=1,
    nodes=1,
    gpu_memory_gib=80,
    weight_dtype="bfloat16",
    precision="pure",
    compute_dtype="bfloat16",
    optimizer=Optimizer("adamw"),
    sequence_length=4096,
    micro_batch=1,
    checkpointing="full",
    attention="flash",
    framework=replace(FLYTUNE, loss=HF),
)
LORA = replace(LLAMA, method="lora", lora_r=16, lora_targets=("q", "v"), precision="autocast")
PARTS = ("forward", "recomputation", "backward", "adapters", "kernels", "dequantization", "launching")
PARTS += ("communication", "offload", "optimizer", "data")

# Llama-2-7B by hand: 32 layers of 4 x 4096 x 4096 and 3 x 4096 x 11008; a head of 4096 x 32000; 4096 tokens.
LAYERS = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
HEAD = 4096 * 32000
TOKENS = 4096
# Scores and their product with the values, 2 x 2 x 4096 x 4096 a layer and token, half of them masked.
ATTENTION = 32 * 2 * 4096 * 4096 * TOKENS


def test_operations_of_llama_2_7b_by_hand():
    counts = flops(LLAMA)
    assert LAYERS == 6_476_005_376
    assert counts.forward == 2 * (LAYERS + HEAD) * TOKENS + ATTENTION
    # All but the last product of each layer; checkpointing with reentry computes that one too.
    assert counts.recomputation == 2 * (LAYERS - 32 * 4096 * 11008) * TOKENS + ATTENTION
    assert flops(replace(LLAMA, framework=TRANSFORMERS)).recomputation == 2 * LAYERS * TOKENS + ATTENTION
    assert counts.input_gradients == 2 * (LAYERS + HEAD) * TOKENS + 2.5 * ATTENTION
    assert counts.weight_gradients == 2 * (LAYERS + HEAD) * TOKENS
    assert counts.adapters == 0
    assert counts.needed == 6 * (LAYERS + HEAD) * TOKENS + 3 * ATTENTION


def test_lora_computes_no_gradients_of_frozen_weights():
    counts = flops(LORA)
    assert counts.weight_gradients == 0
    assert counts.input_gradients == flops(LLAMA).input_gradients
    # Two adapted layers of r x (4096 + 4096), 2 operations each, forward, again, and two gradients.
    assert counts.adapters == 32 * 2 * 16 * 8192 * 2 * 4 * TOKENS


def test_without_checkpointing_nothing_is_computed_again():
    bare = replace(LORA, checkpointing="none")
    assert flops(bare).recomputation == step(bare, A100).recomputation == 0
    assert flops(bare).adapters == flops(LORA).adapters * 3 / 4


def test_an_expert_sees_its_share_of_the_tokens():
    # Mixtral uses 2 of 8 experts: attention 2 x 4096 x (4096 + 1024), two experts of 3 x 4096 x 14336.
    mixtral = replace(LLAMA, geometry=model("Mixtral-8x7B"))
    met = 32 * (2 * 4096 * (4096 + 1024) + 2 * 3 * 4096 * 14336) + HEAD
    assert flops(mixtral).weight_gradients == pytest.approx(2 * met * TOKENS)


def test_a_trained_head_has_gradients_under_lora_too():
    assert flops(replace(LORA, lora_targets=("q", "head"))).weight_gradients == 2 * HEAD * TOKENS


def test_narrow_products_are_slower():
    wide, narrow = product_seconds((8192, 8192, 8192), A100), product_seconds((8192, 512, 512), A100)
    assert 2 * 8192**3 / wide > 0.9 * 0.89 * 271.2e12
    assert 2 * 8192 * 512**2 / narrow < 0.7 * 0.89 * 271.2e12


@pytest.mark.parametrize(
    ("sharding", "micro", "once"),
    [
        # 6,738,415,616 parameters in 16 bits over 4 GPUs: three quarters of each part travel.
        ("ddp", 0, 2 * 2),
        ("zero1", 0, 2 * 2),
        ("zero2", 2, 2),
        ("zero3", 2 + 2 + 2, 0),
        ("fsdp1", 2 + 2 + 2, 0),
        ("fsdp1_grad_op", 2 + 2, 0),
        ("device_map", 0, 0),
    ],
)
def test_bytes_between_gpus(sharding, micro, once):
    workload = replace(LLAMA, layout=LAYOUTS[sharding], gpus=4, framework=TRANSFORMERS)
    assert communication_bytes(workload) == (0.75 * micro * 6_738_415_616, 0.75 * once * 6_738_415_616)


def test_gathered_weights_of_qlora_are_packed_and_only_adapters_are_reduced():
    qlora = replace(LORA, method="qlora", quantization="nf4", layout=LAYOUTS["fsdp2"], gpus=4)
    rest = 6_738_415_616 - LAYERS
    adapters = 32 * 2 * 16 * 8192
    assert communication_bytes(qlora)[0] == pytest.approx(
        0.75 * (2 * (0.5 * LAYERS + 2 * rest) + 4 * adapters)
    )


def test_behind_8_bit_layers_gradients_are_float32_products():
    four, eight = (
        step(replace(LORA, method="qlora", quantization=name, kbit_float32=True), A100)
        for name in ("nf4", "int8")
    )
    assert eight.forward == four.forward
    assert eight.backward > 5 * four.backward, "an A100's float32 rate is a fourteenth of its 16-bit rate"


def test_a_ring_over_nodes_is_as_fast_as_its_slowest_link():
    one = replace(LLAMA, layout=LAYOUTS["fsdp1"], gpus=8)
    assert link_rate(one, A100) == 0.8 * 300e9
    assert link_rate(replace(one, gpus=16, nodes=2), A100) == 0.8 * 50e9


def test_the_parts_of_a_step_add_up():
    for workload in (
        LLAMA,
        replace(LORA, layout=LAYOUTS["fsdp2"], gpus=8, offload="cpu", accumulation=3, micro_batch=2),
    ):
        found = step(workload, A100)
        assert found.seconds == pytest.approx(sum(getattr(found, part) for part in PARTS))
        assert all(getattr(found, part) >= 0 for part in (*PARTS, "hidden"))
        assert found.tokens == workload.accumulation * workload.tokens
        assert found.tokens_per_second == found.tokens / found.seconds
        assert found.utilization == pytest.approx(
            workload.accumulation * flops(workload).needed / found.seconds / 312e12
        )


def test_offload_moves_time_to_the_host():
    sharded = replace(LLAMA, layout=LAYOUTS["fsdp2"], gpus=8, nodes=1)
    there = step(replace(sharded, offload="cpu"), A100)
    assert there.hidden > step(sharded, A100).hidden
    slow = A100.model_copy(update={"pcie_gbs": 1})
    assert step(replace(sharded, offload="cpu"), slow).offload > 0 == step(sharded, slow).offload
    # 7 numbers of 2 bytes a parameter at 200 GB/s, for all eight GPUs of the node.
    assert there.optimizer == pytest.approx(6_738_415_616 * 14 / 200e9)
    assert step(replace(sharded, layout=LAYOUTS["zero3"], offload="nvme"), A100).optimizer > there.optimizer


def test_a_paged_optimizer_pays_only_where_its_states_do_not_fit():
    paged = replace(LLAMA, optimizer=Optimizer("paged", state_bytes=2, paged=True))
    assert step(paged, A100).optimizer < step(replace(paged, gpu_memory_gib=24), A100).optimizer / 5


def test_gpus_of_device_map_take_turns():
    four = step(replace(LLAMA, layout=LAYOUTS["device_map"], gpus=4), A100)
    assert four.tokens == step(LLAMA, A100).tokens // 4


def test_few_tokens_wait_for_the_cpu():
    small = replace(LORA, sequence_length=64)
    assert step(small, A100).launching > 0 == step(replace(LORA, micro_batch=4), A100).launching


workloads = st.builds(
    lambda base, length, micro, times, checkpointing: replace(
        base, sequence_length=length, micro_batch=micro, accumulation=times, checkpointing=checkpointing
    ),
    st.sampled_from(
        [LLAMA, LORA, replace(LORA, method="qlora", quantization="nf4_double", kbit_float32=True)]
    ),
    st.sampled_from([128, 512, 2048, 8192]),
    st.integers(1, 16),
    st.integers(1, 8),
    st.sampled_from(["none", "full"]),
)
gpus = st.sampled_from(sorted(load_accelerators()))


@settings(max_examples=60)
@given(workloads, gpus)
def test_larger_batches_take_longer_and_are_no_less_efficient(workload, name):
    gpu = accelerator_named(name)
    for more in (
        replace(workload, micro_batch=workload.micro_batch + 1),
        replace(workload, accumulation=workload.accumulation + 1),
    ):
        assert step(more, gpu).seconds > step(workload, gpu).seconds
        assert step(more, gpu).tokens_per_second >= step(workload, gpu).tokens_per_second * (1 - 1e-9)
    assert (
        step(replace(workload, sequence_length=2 * workload.sequence_length), gpu).seconds
        > step(workload, gpu).seconds
    )


@settings(max_examples=60)
@given(
    workloads,
    gpus,
    st.sampled_from([LAYOUTS[name] for name in ("ddp", "zero2", "fsdp1", "fsdp2")]),
    st.integers(2, 64),
)
def test_more_gpus_never_slow_the_computing_of_one(workload, name, layout, count):
    gpu = accelerator_named(name)
    alone, together = step(workload, gpu), step(replace(workload, layout=layout, gpus=count), gpu)
    assert together.computing <= alone.computing * (1 + 1e-9)
    if layout.shards_optimizer:
        # DeepSpeed keeps float32 beside 16-bit weights, so that two GPUs may hold as many bytes as one did.
        assert together.optimizer <= alone.optimizer * (1 if layout.fsdp else 2) + 1e-12


@settings(max_examples=60)
@given(workloads, gpus)
def test_recomputing_and_training_all_weights_cost_time(workload, name):
    gpu = accelerator_named(name)
    bare, again = (step(replace(workload, checkpointing=way), gpu) for way in ("none", "full"))
    assert bare.seconds <= again.seconds
    full = step(replace(workload, method="full", quantization="none", kbit_float32=False), gpu)
    assert full.backward >= step(workload, gpu).backward


def test_copies_to_the_host_cost_what_exceeds_the_computation():
    found = step(replace(LLAMA, checkpointing="offloaded"), A100)
    assert found.offload == 0 < found.hidden, "the GPU copies while it computes"
    slow = step(replace(LLAMA, checkpointing="offloaded"), A100.model_copy(update={"pcie_gbs": 1}))
    assert slow.offload == pytest.approx(32 * found.hidden - slow.computing)


def test_without_prefetch_the_gathers_of_backward_are_waited_for():
    sharded = replace(LLAMA, layout=LAYOUTS["fsdp1"], gpus=8)
    waits = step(replace(sharded, framework=replace(sharded.framework, prefetches=False)), A100)
    # Of three equal parts of the bytes, one waits, instead of costing what hidden communication costs.
    assert waits.communication > step(sharded, A100).communication
    assert waits.hidden + waits.communication == pytest.approx(
        step(sharded, A100).hidden + step(sharded, A100).communication
    )


@settings(max_examples=60)
@given(workloads, st.floats(1, 4))
def test_a_faster_gpu_is_faster(workload, times):
    rates = {
        name: times * getattr(A100, name)
        for name in type(A100).model_fields
        if name.endswith(("gbs", "tflops"))
    }
    assert step(workload, A100.model_copy(update=rates)).seconds <= step(workload, A100).seconds * (1 + 1e-9)


def test_the_likely_range_holds_what_is_told():
    widths = []
    for workload in (LLAMA, replace(LLAMA, sequence_length=512)):
        found = step(workload, A100)
        low, high = likely(workload, found)
        assert low < found.tokens_per_second < high
        widths.append((high - low) / found.tokens_per_second)
    assert widths[0] < widths[1], "few tokens are estimated less precisely"


def test_every_gpu_shape_of_the_cluster_has_its_figures():
    for shape in load_shapes():
        if shape.is_gpu:
            assert accelerator_named(shape.accelerator).tflops > 0


def test_an_unknown_accelerator_is_named():
    said = r"accelerators\.yaml: no row B300, so the time of a step cannot be estimated; add its"
    with pytest.raises(RecipeError, match=said):
        accelerator_named("B300")


def test_a_row_that_stands_twice_or_lacks_a_figure_is_told(tmp_path: Path):
    row = (
        "{name: X, chip: X, tflops: 1, float32_tflops: 1, memory_gbs: 1, link_gbs: 1, pcie_gbs: 1, "
        "network_gbs: 1, "
    )
    row += "matmul_tflops: 1, attention_tflops: 1}"
    twice, short = tmp_path / "twice.yaml", tmp_path / "short.yaml"
    twice.write_text(f"- {row}\n- {row}\n")
    short.write_text("- {name: X, chip: X, tflops: 0}\n")
    with pytest.raises(RecipeError, match="X: each name must be unique"):
        load_accelerators(twice)
    with pytest.raises(RecipeError, match=r"accelerators\[0\]\.memory_gbs"):
        load_accelerators(short)


def measured(row: str, **changes) -> MeasuredRun:
    run = MeasuredRun(
        row=row,
        source="a source",
        quality="A",
        model="Llama-2-7b",
        workload=LLAMA,
        gpu="A100-80",
        gpu_memory_gib=80,
        allocated_gib=None,
        reserved_gib=None,
        reserved_on_device=False,
        tokens_per_second=3000.0,
        step_seconds=None,
        outcome="ok",
        note="",
        quote="",
    )
    return replace(run, **changes)


def test_the_benchmark_leaves_out_what_it_cannot_tell_and_says_so():
    runs = [
        measured("1"),
        measured("2", tokens_per_second=None),
        measured("3", workload=None),
        measured("4", gpu="TPU"),
    ]
    rows, unknown = throughput.estimated(runs)
    assert [row.run.row for row in rows] == ["1"]
    assert [run.row for run in unknown] == ["4"]
    assert rows[0].error == pytest.approx(step(LLAMA, A100).tokens_per_second / 3000 - 1)


def test_the_benchmark_reads_the_network_of_the_source():
    found = throughput.accelerator(
        measured("1", note="A100 with 1600 Gbps between nodes", gpu="A100-80(SXM)")
    )
    assert found.network_gbs == 200.0
    assert found.memory_gbs == A100.memory_gbs


def test_a_third_of_the_rows_is_held_out():
    assert 0.3 < sum(throughput.held_out(str(row)) for row in range(3000)) / 3000 < 0.37


def test_published_throughputs_are_met():
    # Rows of llm-foundry's and fms-acceleration's tables: tokens a second of one GPU.
    mpt = as_run(
        replace(
            LLAMA,
            geometry=model("mpt-7b"),
            layout=LAYOUTS["fsdp1"],
            gpus=8,
            weight_dtype="float32",
            precision="policy",
            sequence_length=2048,
            micro_batch=6,
            checkpointing="none",
            framework=COMPOSER,
        )
    )
    assert step(mpt, A100).tokens_per_second == pytest.approx(4641, rel=0.1)
    assert step(mpt, accelerator_named("H100")).tokens_per_second == pytest.approx(10643, rel=0.1)
    mistral = replace(LLAMA, geometry=model("Mistral-7B"), micro_batch=4, framework=TRANSFORMERS)
    mistral = replace(mistral, optimizer=Optimizer("adamw_torch", implementation="foreach"))
    assert step(mistral, A100).tokens_per_second == pytest.approx(3063, rel=0.1)


def test_a_row_that_is_told_badly_has_a_reason_or_says_that_it_has_none():
    rows, _ = throughput.estimated(
        [measured("1", note="wall time includes eval"), measured("2", workload=LORA)]
    )
    assert rows[0].reason == "wall time of the whole run, with evaluations and saves in it"
    assert rows[1].reason == "not explained"
    assert throughput.worst(rows, 1).row_count == 1
    assert throughput.errors(rows, "all").row_count == 3, "a line a method, and one for all"
