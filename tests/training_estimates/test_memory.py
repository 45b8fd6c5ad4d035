import dataclasses

import pytest

from benchmarks import frameworks, gpu, measured_runs
from benchmarks.frameworks import LAYOUTS, TRANSFORMERS, TRANSFORMERS_4_45, with_loss
from benchmarks.measured_runs import model
from benchmarks.published_models import as_run, geometry
from flytune.planning.workloads import FLYTUNE
from training_estimates import Optimizer, Workload, activations, memory, model_states
from training_estimates.accelerators import workspace_bytes
from training_estimates.memory import GIB

MISTRAL = model("Mistral-7B")
PARAMETERS, HIDDEN, LAYERS, VOCABULARY = 7_241_732_096, 4096, 32, 32_000
ALL = ("q", "k", "v", "o", "gate", "up", "down")
FOREACH = Optimizer("adamw", implementation="foreach")


def workload(**changes):
    """Mistral-7B in pure bfloat16 on one GPU, a sample of 1,024 tokens, checkpointed."""
    settings = {
        "geometry": MISTRAL,
        "method": "full",
        "layout": LAYOUTS["none"],
        "gpus": 1,
        "nodes": 1,
        "gpu_memory_gib": 80.0,
        "weight_dtype": "bfloat16",
        "precision": "pure",
        "compute_dtype": "bfloat16",
        "optimizer": Optimizer("adamw"),
        "sequence_length": 1024,
        "micro_batch": 1,
        "checkpointing": "full",
        "attention": "flash",
        "framework": TRANSFORMERS,
    }
    return Workload(**settings | changes)


def lora(**changes):
    return workload(
        **{"method": "lora", "lora_r": 16, "lora_targets": ("q", "k", "v", "o"), "precision": "autocast"}
        | changes
    )


def steady(work):
    return memory.memory(work).phases["steady step"]


def test_the_update_of_a_full_fine_tune_in_16_bits_is_8_bytes_a_parameter_and_2_more_with_foreach():
    parts = steady(workload())
    assert parts["weights"] == 2 * PARAMETERS
    # Fused, the update takes nothing more; the first layer's backward has its activations instead.
    assert memory.memory(workload()).allocated == pytest.approx(8 * PARAMETERS, rel=0.01)
    assert memory.memory(workload(optimizer=FOREACH)).allocated == 10 * PARAMETERS
    assert steady(workload(optimizer=FOREACH))["step temporaries"] == 2 * PARAMETERS


def test_what_fsdp_trains_under_mixed_precision_is_float32_and_divided():
    parts = steady(workload(layout=LAYOUTS["fsdp1"], gpus=4, precision="policy", optimizer=FOREACH))
    quarter = PARAMETERS / 4
    assert parts == {
        "weights": 4 * quarter,
        "gradients": 4 * quarter,
        "optimizer": 8 * quarter,
        "step temporaries": 4 * quarter,
    }


def test_zero_divides_by_its_stage():
    one, two, three = (
        steady(workload(layout=LAYOUTS[f"zero{stage}"], gpus=8, optimizer=FOREACH)) for stage in (1, 2, 3)
    )
    assert one["weights"] == two["weights"] == 2 * PARAMETERS
    assert three["weights"] == 2 * PARAMETERS / 8
    assert one["gradients"] == 2 * PARAMETERS
    assert two["gradients"] == three["gradients"] == 2 * PARAMETERS / 8
    for parts in (one, two, three):
        assert parts["master copies"] == 4 * PARAMETERS / 8
        assert parts["optimizer"] == 8 * PARAMETERS / 8
    # Float32 gradients of the partition, and as much for foreach.
    assert two["step temporaries"] == 2 * 4 * PARAMETERS / 8


def test_offloaded_optimizer_states_are_not_on_the_gpu():
    parts = steady(workload(layout=LAYOUTS["zero3"], offload="cpu", gpus=8))
    assert "optimizer" not in parts
    assert "master copies" not in parts


def test_adapters_are_float32_beside_a_16_bit_base():
    parts = steady(lora())
    adapted = LAYERS * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024))
    assert parts["weights"] == 2 * PARAMETERS
    assert parts["adapters"] == 4 * adapted
    assert parts["optimizer"] == 8 * adapted


def test_ddp_copies_the_gradients_into_buckets():
    parts = steady(lora(layout=LAYOUTS["ddp"], gpus=2))
    assert parts["buckets"] == parts["adapters"]


def test_four_bits_are_of_the_linear_layers_alone():
    linear = LAYERS * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    rest = PARAMETERS - linear
    plain = steady(lora(method="qlora", quantization="nf4"))
    double = steady(lora(method="qlora", quantization="nf4_double"))
    wide = steady(lora(method="qlora", quantization="nf4_double", kbit_float32=True))
    assert plain["weights"] == pytest.approx(linear * 4.5 / 8 + 2 * rest)
    assert double["weights"] == pytest.approx(linear * 4.127 / 8 + 2 * rest, rel=1e-4)
    assert wide["weights"] - double["weights"] == pytest.approx(2 * rest)
    assert double["quantization"] == 2 * 4096 * 14336


def test_a_framework_may_quantize_the_head_and_keep_the_inputs_of_4_bit_layers():
    """As litgpt's QLoRA did: of phi-1.5 3.78e9 bytes are published, with 1,044 tokens."""
    run = next(one.workload for one in measured_runs.read()[0] if one.row == "403")
    geometry = run.geometry
    plain = dataclasses.replace(
        run, framework=dataclasses.replace(run.framework, quantizes_head=False, keeps_quantized_inputs=False)
    )
    head = geometry.vocab_size * geometry.hidden_size
    # Packed with its scales instead of 16 bits; and while its product is made, in float16 and in bfloat16.
    assert model_states.base_bytes(plain) - model_states.base_bytes(run) == pytest.approx(
        (2 - 0.5 - 1 / 16) * head
    )
    more, less = activations.count(run), activations.count(plain)
    assert more.loss - less.loss == 4 * head
    # One norm for both branches, attention's result, and that of the activation.
    assert more.kept - less.kept == 2 * 1044 * (2 * 2048 + 8192)
    assert memory.memory(run).allocated == pytest.approx(3.78e9, rel=0.05)


def test_8_bits_take_a_byte_and_a_scale_for_each_row_and_keep_their_inputs():
    linear = LAYERS * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    rows = LAYERS * (2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
    changes = {"method": "qlora", "kbit_float32": True, "checkpointing": "none"}
    four, eight = (lora(quantization=name, **changes) for name in ("fp4_double", "int8"))
    assert model_states.base_bytes(eight) == linear + 4 * rows + 4 * (PARAMETERS - linear)
    assert steady(eight)["quantization"] == 4 * 4096 * 14336, "dequantized to float32, as its input is"
    assert steady(four)["quantization"] == 2 * 4096 * 14336
    kept = activations.count(eight).kept - activations.count(four).kept
    assert kept == eight.tokens * (4 * (2 * 4096 + 14336) + 2 * 4096)


@pytest.mark.parametrize("sharding", ["fsdp2", "zero3"])
def test_scales_are_not_sharded(sharding):
    whole = {"method": "qlora", "quantization": "nf4"}
    alone, shared = (
        model_states.of(lora(**whole)),
        model_states.of(lora(**whole, layout=LAYOUTS[sharding], gpus=4)),
    )
    scales = model_states.scale_bytes(lora(**whole).geometry, "nf4")
    assert shared.resident["weights"] == pytest.approx((alone.resident["weights"] - scales) / 4 + scales)
    assert shared.resident["weights"] + shared.load == pytest.approx(alone.resident["weights"])


def test_at_the_loss_there_are_the_checkpoints_and_the_logits_of_all_tokens():
    work = lora(micro_batch=4, sequence_length=4096)
    tokens = 4 * 4096
    parts = steady(work)
    assert parts["activations"] == 2 * HIDDEN * LAYERS * tokens
    # 14 bytes a token and vocabulary entry; a float32 copy and the output of the last norm.
    assert parts["logits and loss"] == tokens * (14 * VOCABULARY + 6 * HIDDEN)
    # Published: 24.871 GiB (its adapters' inputs are float32, which another moment has).
    assert memory.memory(dataclasses.replace(work, optimizer=FOREACH)).allocated / GIB == pytest.approx(
        24.87, rel=0.01
    )


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({"framework": TRANSFORMERS_4_45}, 12),
        ({"framework": with_loss(TRANSFORMERS, "foak")}, 10),
        ({"framework": with_loss(TRANSFORMERS_4_45, "foak")}, 8),
        ({"framework": with_loss(frameworks.COMPOSER, "fp32_logits")}, 4),
        # A batch of one needs no copy to shift its labels by a token.
        ({"micro_batch": 1}, 10),
    ],
)
def test_losses_differ_by_the_code_that_makes_them(changes, each):
    work = lora(**{"micro_batch": 2} | changes)
    norm = (4 if work.framework.fused_kernels else 6) * HIDDEN
    assert activations.count(work).loss == work.tokens * (each * VOCABULARY + norm)


def test_a_chunked_loss_has_no_logits_of_all_tokens():
    work = lora(framework=FLYTUNE)
    # One tile of logits in 16 bits: 4,096 tokens at most, and all of this vocabulary.
    assert activations.count(work).loss == work.tokens * (4 * HIDDEN + 2 * VOCABULARY)
    assert (
        activations.count(lora(framework=FLYTUNE, micro_batch=8)).loss
        == 8192 * 4 * HIDDEN + 4096 * 2 * VOCABULARY
    )


@pytest.mark.parametrize(
    ("sizes", "method", "batch", "loaded", "first", "allocated"),
    [
        ("135M", "full", (8, 1024), None, 2.07, 2.65),
        ("1B", "full", (4, 2048), 6.98, 18.48, 19.69),
        ("1B", "full", (1, 8192), 6.98, 18.48, 19.70),
        ("3B", "full", (2, 2048), 18.02, 47.94, 49.51),
        ("1B", "lora", (4, 2048), 2.44, 4.33, 4.42),
        ("3B", "lora", (1, 8192), 6.19, 9.16, 9.34),
        ("8B", "lora", (4, 2048), 15.26, 19.81, 20.12),
        ("135M", "qlora", (8, 1024), None, 1.16, 1.16),
        ("1B", "qlora", (4, 2048), 2.04, 4.42, 4.43),
        ("3B", "qlora", (4, 2048), 3.73, 7.66, 7.68),
        ("8B", "qlora", (4, 2048), 8.53, 14.84, 14.88),
    ],
)
def test_peaks_are_those_of_an_h200(sizes, method, batch, loaded, first, allocated):
    """Peaks in GiB of loading, of the first and of a steady step, as torch counted them
    (docs/measured/gpu.md)."""
    changes = {
        "attention": "sdpa",
        "framework": FLYTUNE,
        "precision": "autocast",
        "geometry": geometry(gpu.MODELS[sizes], sizes),
        "workspaces": workspace_bytes("GH100"),
    }
    changes |= {"micro_batch": batch[0], "sequence_length": batch[1], "adapter_dropout": False}
    if method == "full":
        found = memory.memory(workload(weight_dtype="float32", **changes))
    else:
        if method == "qlora":
            paged = Optimizer("paged_adamw_8bit", state_bytes=2.0, paged=True)
            changes |= {"quantization": "nf4_double", "kbit_float32": True, "optimizer": paged}
        found = memory.memory(workload(method=method, lora_r=16, lora_targets=ALL, **changes))
    assert loaded is None or sum(found.phases["load"].values()) / GIB == pytest.approx(loaded, rel=0.025)
    assert sum(found.phases["first step"].values()) / GIB == pytest.approx(first, rel=0.025)
    assert found.allocated / GIB == pytest.approx(allocated, rel=0.025)


def test_workspaces_of_a_gpu_that_is_not_known_are_the_larger_ones():
    assert [workspace_bytes(chip) / 2**20 for chip in ("GA100", "GH100", None)] == [16.25, 64, 64]


def test_a_layer_at_work_by_hand():
    """Adapters: q, k, v, o under autocast, fused norms, h = 4096, keys of h / 4, an MLP of 3.5 h: in units of
    h."""
    found = activations.count(lora(framework=with_loss(TRANSFORMERS, "liger")))
    norms, attention, mlp, adapters = 2 * 2, 2 * (1 + 1 + 0.5), 2 * 3 * 3.5, 4 * (2 + 1)
    assert found.kept == 1024 * HIDDEN * (norms + attention + mlp + adapters)
    # Gradients of the MLP's three intermediates, of the residual stream and of what the norm gave.
    assert found.working == 1024 * HIDDEN * (2 * 3 * 3.5 + 2 + 2)


def test_attention_that_keeps_its_scores_grows_with_the_square():
    flash, eager = (activations.count(lora(attention=name)) for name in ("flash", "eager"))
    repeated = 2 * 2 * (4096 - 1024)
    # The softmax in float32 and in 16 bits.
    assert eager.kept - flash.kept == 1024 * (6 * 32 * 1024 + repeated)


def test_without_checkpoints_every_layer_keeps_its_own():
    every, one = (
        activations.count(workload(checkpointing="none", micro_batch=8)),
        steady(workload(checkpointing="none", micro_batch=8)),
    )
    assert one["activations"] >= LAYERS * every.kept


def test_an_optimizer_in_backward_holds_no_gradients_at_once():
    parts = steady(workload(optimizer=Optimizer("adamw", in_backward=True)))
    assert parts.get("gradients", 0) <= 2 * PARAMETERS / LAYERS + 2 * VOCABULARY * HIDDEN


def test_frozen_units_of_fsdp1_keep_what_fsdp2_does_not():
    """LoRA of 70B takes 72 to 80 GB a GPU under FSDP1 and a reentrant checkpoint, and far less under
    FSDP2."""
    published = {
        "geometry": model("Llama-2-70b"),
        "gpus": 8,
        "lora_r": 8,
        "lora_targets": ALL,
        "micro_batch": 8,
    }
    published |= {"sequence_length": 2048}
    older = memory.memory(as_run(lora(layout=LAYOUTS["fsdp1"], **published)))
    newer = memory.memory(lora(layout=LAYOUTS["fsdp2"], framework=FLYTUNE, **published))
    assert 72e9 < older.allocated < 80e9
    assert newer.allocated < 60e9


def test_qlora_of_70b_fits_on_eight_gpus_of_16_gb():
    work = lora(
        method="qlora",
        quantization="nf4_double",
        geometry=model("Llama-2-70b"),
        gpus=8,
        layout=LAYOUTS["fsdp2"],
        framework=FLYTUNE,
    )
    assert memory.memory(work).needed < 14 * GIB


def test_7b_in_full_fits_on_24_gpus_of_16_gb_with_offload():
    work = workload(geometry=model("Llama-2-7b"), layout=LAYOUTS["zero3"], offload="cpu", gpus=24, nodes=3)
    assert memory.memory(work).needed < 14 * GIB


def test_405b_on_64_gpus_is_within_a_tenth_of_what_was_published():
    work = workload(
        geometry=model("Llama-3.1-405B"),
        layout=LAYOUTS["fsdp2"],
        offload="cpu",
        gpus=64,
        nodes=8,
        precision="policy",
    )
    work = dataclasses.replace(work, framework=frameworks.TORCH, sequence_length=4096)
    assert memory.memory(work).allocated == pytest.approx(52.9e9, rel=0.1)


def test_a_phase_before_the_first_update_has_no_optimizer_states():
    phases = memory.memory(workload(micro_batch=16, sequence_length=4096)).phases
    assert list(phases) == ["load", "first step", "steady step", "evaluate", "save", "export"]
    assert "optimizer" not in phases["load"]
    assert sum(phases["first step"].values()) < sum(phases["steady step"].values())


def test_reserved_is_between_what_is_allocated_and_the_gpu():
    for micro_batch in (1, 4, 16, 64):
        table = memory.memory(lora(micro_batch=micro_batch, sequence_length=4096))
        reserved = table.reserved(80 * GIB)
        assert reserved >= table.allocated
        assert reserved <= 80 * GIB or reserved == table.allocated
        assert table.on_device(80 * GIB) == reserved + 0.55 * GIB


def test_rows_of_other_lengths_need_segments_of_their_own_unless_segments_grow():
    fixed = lora(framework=TRANSFORMERS, sequence_length=1024)
    varied = dataclasses.replace(fixed, variable_length=True)
    grows = dataclasses.replace(varied, framework=dataclasses.replace(TRANSFORMERS, expandable_segments=True))
    logits = 4 * 1024 * VOCABULARY
    assert memory.memory(varied).held - memory.memory(grows).held == memory.CACHED_LENGTHS * logits
    assert memory.memory(varied).needed == memory.memory(fixed).needed, (
        "the allocator gives back what is cached"
    )
    assert FLYTUNE.expandable_segments


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_every_pair_has_a_table_that_grows_with_the_batch(layout, method):
    needs = []
    for micro_batch in (1, 2, 8):
        quantization = "nf4_double" if method == "qlora" else "none"
        changes = {
            "layout": layout,
            "gpus": 1 if layout == LAYOUTS["none"] else 8,
            "micro_batch": micro_batch,
        }
        make = workload if method == "full" else lora
        table = memory.memory(make(method=method, quantization=quantization, **changes))
        assert all(size > 0 for parts in table.phases.values() for size in parts.values())
        needs.append(table.needed)
    assert needs == sorted(needs)


def test_a_head_is_adapted_or_fully_trained():
    adapted, whole = lora(lora_targets=("lora_head",)), lora(lora_targets=("head", "embedding"))
    assert adapted.trained == 16 * (HIDDEN + VOCABULARY)
    assert whole.trained == 2 * HIDDEN * VOCABULARY


def test_sizes_under_other_names():
    mpt = {
        "model_type": "mpt",
        "d_model": 768,
        "n_layers": 12,
        "n_heads": 12,
        "vocab_size": 50368,
        "max_seq_len": 2048,
    }
    sizes = geometry(mpt, "mpt")
    assert (sizes.hidden_size, sizes.intermediate_size, sizes.gated, sizes.tie_word_embeddings) == (
        768,
        3072,
        False,
        True,
    )
    slopes = geometry(mpt | {"attn_config": {"alibi": True}}, "mpt")
    assert sizes.parameters - slopes.parameters == 2048 * 768
    mixtral = model("Mixtral-8x7B")
    assert (mixtral.experts, mixtral.experts_per_token) == (8, 2)
    assert sum(linear.count for linear in mixtral.linears) == 32 * (4 + 3 * 8)
