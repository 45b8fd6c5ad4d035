"""Model types: the shipped table, and tiny instances that are trained, exported and reloaded."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import model_types as model_types_command
from flytune.models import adapter_targets, loading, model_types
from flytune.recipe import Recipe
from tests.support import ranks, trained_types, vision_models
from tests.support.model_types import MODEL_TYPES, NOT_BUILT, tiny_config
from tests.support.packed_samples import ATTENTIONS
from tests.support.tiny import tiny_recipe

FAST = ["gemma3", "gpt2", "llama", "mamba", "qwen3_moe", "deepseek_v3"]
"""A decoder with an image encoder, Conv1D layers, the common layout, no attention, fused experts, latent
attention."""
SLOW = [
    "apertus",
    "bamba",
    "bloom",
    "cohere2",
    "dbrx",
    "ernie4_5_moe",
    "exaone4",
    "falcon",
    "falcon_h1",
    "gemma2",
    "gemma3_text",
    "glm4",
    "glm4_moe",
    "gpt_bigcode",
    "gpt_neox",
    "gpt_oss",
    "granite",
    "helium",
    "jamba",
    "kimi_linear",
    "lfm2_moe",
    "minimax",
    "mistral",
    "mixtral",
    "nemotron_h",
    "olmo2",
    "olmoe",
    "opt",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "smollm3",
    "starcoder2",
    "granitemoe",
    "inkling_text",
    "llama4_text",
    "modernbert-decoder",
    "xlstm",
    "ctrl",
    "jetmoe",
    "gpt_neox_japanese",
    "openai-gpt",
]


def trainable(method: str) -> list[str]:
    return [name for name, row in model_types.table().items() if method not in row["problems"]]


def test_every_causal_language_model_of_transformers_has_a_row() -> None:
    import json

    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(model_types.table()) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) >= set(NOT_BUILT)
    # Another version needs `python -m benchmarks.model_types --write`.
    assert json.loads(model_types.FILE.read_text())["transformers"] == transformers.__version__


def test_vision_types_are_those_that_tests_train():
    without_row = {*vision_models.TYPES} - {*model_types.table()}
    assert sorted(without_row) == list(model_types.VISION_TYPES)


def test_rows_are_complete() -> None:
    for row in model_types.table().values():
        optional = {
            "untried",
            "attention",
            "checkpointing",
            "chunked_loss",
            "chunked_fields",
            "own_fields",
            "loss_fields",
        }
        optional |= {"experts"}
        assert row.keys() - optional == {"packing", "problems"}
        assert set(row["packing"]) <= set(ATTENTIONS)
        assert row["problems"].keys() <= {"packing", "full", "lora", "experts", "slices", "bfloat16"}
        assert "full" in row["problems"] or {*row["packing"]} <= {*row["attention"]}
        assert all(row["problems"].values())
        assert row["packing"] or "packing" in row["problems"]
    assert {*FAST, *SLOW} <= {*trainable("full")} & {*trainable("lora")}
    assert len({*FAST, *SLOW}) >= 40


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_table_has_the_attention_and_the_checkpointing_of_transformers(model_type: str) -> None:
    row = model_types.table()[model_type]
    assert trained_types.defaults(model_type) == {
        key: row[key] for key in ("attention", "checkpointing") if key in row
    }


def test_the_page_lists_what_the_table_has() -> None:
    page = model_types_command.PAGE.read_text(encoding="utf-8")
    start, end = model_types_command.MARKS
    assert page.partition(start)[2].partition(end)[0].strip() == model_types_command.summary()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("types")
    ranks.run(1, trained_types.inputs, folder)
    return folder


def full_and_lora(model_type: str, folder: Path) -> None:
    base = trained_types.write_base(model_type, folder / "tokenizer", folder / model_type)
    trained_types.check_causal(base)
    trained_types.check_sharded_loading(base)
    dataset = Path(shutil.copytree(folder / "dataset", folder / f"{model_type}-data"))
    for method in ("full", "lora"):
        trained_types.train(base, dataset, method, folder / f"{model_type}-{method}")


@pytest.mark.parametrize(
    "model_type", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
@pytest.mark.filterwarnings("ignore")
def test_a_tiny_instance_is_trained_exported_and_reloaded(model_type: str, prepared: Path) -> None:
    ranks.run(1, full_and_lora, model_type, prepared)


def sees_later_tokens(prepared: Path, folder: Path) -> str:
    base = trained_types.write_base("bert", prepared / "tokenizer", folder / "bert")
    try:
        trained_types.check_causal(base)
    except AssertionError as error:
        return str(error)
    return ""


def test_a_model_that_sees_later_tokens_is_found_and_refused(prepared: Path, tmp_path: Path) -> None:
    found = ranks.run(1, sees_later_tokens, prepared, tmp_path)
    assert found == "its predictions see later tokens: it is not a causal language model by its configuration"
    assert model_types.training_problem("bert", "full", False, False) == found
    assert model_types.training_problem("bert", "qlora", False, False) == found


def test_weights_drawn_on_the_cpu_are_read_in_slices_too(prepared: Path, tmp_path: Path) -> None:
    base = trained_types.write_base("diffllama", prepared / "tokenizer", tmp_path / "diffllama")
    trained_types.check_sharded_loading(base)


# Layers that all-linear adapts.


def adapted(model_type: str) -> set[str]:
    """Return the last two names of the layers that get an adapter."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    recipe = Recipe.model_validate(tiny_recipe(Path("base"), Path("rows.jsonl"), {"method": "lora"}))
    config: Any = loading.peft_config(recipe, model, added=[])
    made = get_peft_model(model, config)
    return {name for name, layer in made.base_model.model.named_modules() if hasattr(layer, "lora_A")}


def test_models_without_such_layers_have_the_adapter_that_they_had() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    for model_type in ("llama", "qwen3_moe", "gpt2", "deepseek_v3"):
        with torch.device("meta"):
            assert adapter_targets.excluded(AutoModelForCausalLM.from_config(tiny_config(model_type))) is None


@pytest.mark.parametrize(
    "model_type", ["afmoe", "dbrx", "jetmoe", "longcat_flash", "zaya", "qwen2_moe", "deepseek_v32"]
)
@pytest.mark.filterwarnings("ignore")
def test_routers_gates_and_indexers_get_no_adapter(model_type: str) -> None:
    names = adapted(model_type)
    assert names
    assert not [
        name for name in names if "router" in name or "indexer" in name or name.endswith("shared_expert_gate")
    ]


@pytest.mark.filterwarnings("ignore")
def test_only_the_text_decoder_of_a_model_with_images_gets_an_adapter() -> None:
    names = adapted("gemma3")
    assert {name.split(".layers.")[0] for name in names} == {"model.language_model"}
    assert any(name.endswith("self_attn.q_proj") for name in names)


@pytest.mark.filterwarnings("ignore")
def test_mambas_output_projection_gets_no_adapter_as_peft_demands() -> None:
    assert {name.rpartition(".")[2] for name in adapted("mamba")} == {"in_proj", "x_proj"}


# The balance loss of mixtures of experts.


def mixtrals(folder: Path) -> None:
    """Write Mixtrals of equal weights with different coefficients of the balance loss."""
    import json

    for coefficient in (0.0, 0.5, 1.0):
        base = trained_types.write_base("mixtral", folder / "tokenizer", folder / f"mixtral-{coefficient}")
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"router_aux_loss_coef": coefficient}))


def losses_of(folder: Path, coefficient: float, processes: int, micro_batch: int) -> list[float]:
    base, out = folder / f"mixtral-{coefficient}", folder / f"mixtral-{coefficient}-{processes}-{micro_batch}"
    changes = {"training.global_batch_size": 8, "sharding": "none" if processes == 1 else "ddp"}
    return trained_types.losses(base, folder / "dataset", out, processes, micro_batch, changes)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_balance_loss_is_part_of_the_loss_and_is_the_same_on_two_processes(prepared: Path) -> None:
    ranks.run(1, mixtrals, prepared)
    without, half, whole = (
        ranks.run(1, losses_of, prepared, coefficient, 1, 2) for coefficient in (0.0, 0.5, 1.0)
    )
    added = whole[0] - without[0]
    # Of four experts of which each token takes two: 2 if all are used alike, at most 4 (Fedus et al. 2021).
    assert 1.9 < added < 4
    assert half[0] - without[0] == pytest.approx(added / 2, abs=1e-5)
    # Each micro batch has a balance loss of its own, so equal micro batches give equal losses.
    assert ranks.run(2, losses_of, prepared, 1.0, 2, 2) == pytest.approx(whole, abs=1e-5)
    assert ranks.run(1, losses_of, prepared, 1.0, 1, 4) != pytest.approx(whole, abs=1e-5)
