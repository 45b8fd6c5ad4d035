"""Real training of a tiny model, for every pair of method and sharding that the table allows."""

import json
import shutil

import pytest
from safetensors.numpy import load_file

from flytune import data
from flytune.data import heldout_rows
from flytune.export import gate, write
from flytune.export.tensors import verify
from flytune.hardware import shape_named
from flytune.models import loading, scoring, sharded_loading
from flytune.planning import planner
from flytune.recipe import Recipe
from flytune.records import TrainingResult
from flytune.sharding import SHARDINGS, pair_problem
from flytune.training import loop, step_log, trainer
from flytune.training.attempt_notes import Notes
from flytune.training.checkpoints import clear
from flytune.training.run_state import RunState
from tests.support import faults, ranks
from tests.support.process_kills import kill_once_saved
from tests.support.tiny import tiny_recipe
from tests.support.waiting import until

# Equal losses are those of one computation in another order of summation (float32).
SAME = 1e-5
SINGLE = {"none", "device_map"}


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def pairs():
    recipe = {"name": "r", "model": {"name_or_path": "a"}, "data": {"path": "b"}}
    recipe |= {"training": {"learning_rate": 1e-4, "global_batch_size": 4}}
    for method in ("full", "lora", "qlora"):
        for sharding in SHARDINGS:
            if pair_problem(Recipe.model_validate(recipe | {"method": method, "sharding": sharding})) is None:
                yield method, sharding


def recipe_for(inputs, method, sharding, **changes):
    method = method if method == "full" or isinstance(method, dict) else {"name": method, "lora_dropout": 0.0}
    changes = {"method": method, "sharding": sharding, "training.global_batch_size": 8} | changes
    changes |= {"hardware.shape": "cpu-1" if sharding in SINGLE else "cpu-2"}
    # So that the live model's held-out loss is that of the training's head, under every sharding.
    changes |= {"data.max_length": scoring.TILE + 1}
    return Recipe.model_validate(tiny_recipe(inputs / "tiny", inputs / "pairs.jsonl", changes))


def fit(recipe, inputs, out, die_at=None):
    """Run once; with `die_at`, every rank is killed when that step is logged."""
    if die_at:
        record = step_log.Recorder.record

        def record_and_die(self, step, epoch, logs):
            record(self, step, epoch, logs)
            if step == die_at:
                kill_once_saved(recipe, 2)

        step_log.Recorder.record = record_and_die
    plan = planner.make(recipe)
    return loop.fit(recipe, plan, shape_named(plan.shape), inputs / "dataset", out)


def fit_without_the_base(recipe, inputs, out):
    """Run once, without weights of the base model: the content of its files is still that of the
    checkpoint's."""

    def read(*_):
        raise AssertionError("the base model is read")

    sharded_loading._load_slot = read
    return fit(recipe, inputs, out)


def world(recipe):
    return planner.make(recipe).world_size


@pytest.fixture(scope="session")
def runs(inputs, tmp_path_factory):
    """Run each pair once, at its first use."""
    done = {}

    def run(method, sharding):
        if (method, sharding) not in done:
            out = tmp_path_factory.mktemp("run") / "trained"
            recipe = recipe_for(inputs, method, sharding)
            done[method, sharding] = recipe, ranks.run(world(recipe), fit, recipe, inputs, out), out
        return done[method, sharding]

    return run


def reloaded_loss(recipe, inputs, trained):
    rows = heldout_rows(inputs / "dataset", scoring.GATE_SAMPLES)
    model = gate.check(
        recipe, trained, inputs / "dataset", rows, lambda: loading.exported_model(recipe, trained)
    )
    nll, tokens = scoring.heldout_loss(model, rows, 0, batch_size=4)
    return float(nll.sum() / tokens.sum())


QUICK = {("full", "ddp"), ("full", "zero2"), ("lora", "fsdp"), ("qlora", "device_map")}


@pytest.mark.parametrize(
    ("method", "sharding"),
    # One of each method, and one of each kind of sharding.
    [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs()],
)
def test_every_pair_trains_as_one_process_does_and_its_export_is_what_was_trained(
    method, sharding, runs, inputs
):
    recipe, result, trained = runs(method, sharding)
    assert isinstance(result, TrainingResult)
    assert [step.step for step in result.steps] == [1, 2, 3]
    assert result == TrainingResult.read(trained / "training.json")
    single = "device_map" if method == "qlora" else "none"
    alone = runs(method, single)[1]
    assert [step.loss for step in result.steps] == pytest.approx(
        [step.loss for step in alone.steps], abs=SAME
    )
    assert result.tokens == alone.tokens
    # The model is trained: the last loss is below the first, on new samples.
    assert result.steps[-1].loss < result.steps[0].loss
    assert gate.check_files(recipe, trained, inputs / "dataset").is_dir()
    assert ranks.run(1, reloaded_loss, recipe, inputs, trained) == pytest.approx(
        result.heldout_loss, abs=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["qlora device_map", "full fsdp", "lora fsdp"])
def test_bfloat16_exports_are_what_was_trained(pair, inputs, tmp_path):
    method, sharding = pair.split()
    recipe = recipe_for(inputs, method, sharding, **{"model.dtype": "bfloat16"})
    result = ranks.run(world(recipe), fit, recipe, inputs, tmp_path / "trained")
    assert result.steps[-1].loss < result.steps[0].loss
    # bfloat16 rounds differently where batches are padded otherwise.
    loss = ranks.run(1, reloaded_loss, recipe, inputs, tmp_path / "trained")
    assert loss == pytest.approx(result.heldout_loss, abs=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["lora fsdp", *slow("full none", "full zero3", "qlora device_map")])
def test_neftune_adds_noise_in_training_alone(pair, inputs, runs, tmp_path):
    method, sharding = pair.split()
    recipe = recipe_for(inputs, method, sharding, **{"training.neftune_noise_alpha": 30.0})
    noisy = ranks.run(world(recipe), fit, recipe, inputs, tmp_path / "noisy")
    first = runs(method, sharding)[1].steps[0].loss
    assert abs(noisy.steps[0].loss - first) > 1e-3
    # The export has no noise.
    loss = ranks.run(1, reloaded_loss, recipe, inputs, tmp_path / "noisy")
    assert loss == pytest.approx(noisy.heldout_loss, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pair", ["qlora device_map", "lora fsdp", *slow("full zero3", "lora ddp", "full fsdp")]
)
def test_activation_checkpointing_changes_no_loss(pair, inputs, tmp_path):
    method, sharding = pair.split()
    # With dropout: a layer that is computed again must drop the same.
    method = method if method == "full" else {"name": method, "lora_dropout": 0.3}
    kept, result = (
        ranks.run(world(recipe), fit, recipe, inputs, tmp_path / str(again))
        for again in (False, True)
        for recipe in [recipe_for(inputs, method, sharding, **{"training.activation_checkpointing": again})]
    )
    assert gate.check_files(
        recipe_for(inputs, method, sharding), tmp_path / "True", inputs / "dataset"
    ).is_dir()
    assert [step.loss for step in result.steps] == pytest.approx([step.loss for step in kept.steps], abs=SAME)
    assert result.heldout_loss == pytest.approx(kept.heldout_loss, abs=SAME)


def test_the_exported_folder_holds_the_model_and_nothing_else(runs):
    for method, sharding in (("full", "zero3"), ("lora", "zero2")):
        _, _, trained = runs(method, sharding)
        files = {path.name for path in trained.rglob("*") if path.is_file()}
        assert "training.json" in files
        assert "tokenizer.json" in files
        assert not [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl"))]
        assert not files & {"optimizer.bin", "trainer_state.json", "scheduler.pt"}


def test_tied_weights_are_written_once(runs):
    from safetensors import safe_open

    for sharding in ("none", "zero2", "zero3", "fsdp"):
        with safe_open(
            str(runs("full", sharding)[2] / "model" / "model.safetensors"), framework="pt"
        ) as tensors:
            assert [name for name in tensors.keys() if "lm_head" in name] == []  # noqa: SIM118 (not a dict)


def built(recipe, plan, inputs):
    """Return the trainer of a run, before its first step."""
    return trainer.build(RunState.of(recipe, plan, shape_named(plan.shape), inputs / "dataset"), Notes())[0]


def dtypes_of(recipe, inputs):
    trained = built(recipe, planner.make(recipe), inputs)
    trained.train()
    return {
        str(parameter.dtype) for parameter in trained.model.parameters()
    }, trained.model.is_gradient_checkpointing


@pytest.mark.parametrize("sharding", ["none", "ddp", "fsdp"])
def test_trained_weights_are_float32_and_checkpointing_is_on_when_set(sharding, inputs, tmp_path):
    changes = {"model.dtype": "bfloat16", "training.max_steps": 1, "training.warmup_steps": 0}
    changes |= {"training.activation_checkpointing": True}
    recipe = recipe_for(inputs, "full", sharding, **changes)
    assert ranks.run(world(recipe), dtypes_of, recipe, inputs) == ({"torch.float32"}, True)


def test_a_full_fine_tune_keeps_float32_weights_and_exports_the_recipes_dtype(inputs, tmp_path):

    recipe = recipe_for(inputs, "full", "none", **{"model.dtype": "bfloat16", "training.learning_rate": 1e-5})
    result = ranks.run(1, fit, recipe, inputs, tmp_path / "trained")
    config = json.loads((tmp_path / "trained" / "model" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    # Steps of 1e-5 and less: most are below 1/256 of a weight, and would be lost in bfloat16.
    assert result.steps[-1].loss < result.steps[0].loss


@pytest.mark.journey
@pytest.mark.parametrize(
    "pair",
    ["qlora device_map", "full fsdp", "lora zero3", "full none", "full zero2", "lora fsdp", "qlora fsdp"],
)
def test_a_killed_run_resumes_from_its_last_checkpoint_bit_for_bit(pair, inputs, tmp_path):
    method, sharding = pair.split()
    changes = {
        "checkpoints.save_steps": 2,
        "training.max_steps": 4,
        "checkpoints.folder": str(tmp_path / "calm"),
    }
    changes |= {"training.activation_checkpointing": sharding == "fsdp"}
    calm = recipe_for(inputs, method, sharding, **changes)
    undisturbed = ranks.run(world(calm), fit, calm, inputs, tmp_path / "undisturbed")
    recipe = recipe_for(
        inputs, method, sharding, **(changes | {"checkpoints.folder": str(tmp_path / "checkpoints")})
    )
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(world(recipe), fit, recipe, inputs, tmp_path / "killed", 3)
    assert not (tmp_path / "killed").exists()
    resumed = ranks.run(world(recipe), fit, recipe, inputs, tmp_path / "resumed")
    assert resumed.resumed_from_step == 2
    assert [step.loss for step in resumed.steps] == [step.loss for step in undisturbed.steps]
    assert resumed.heldout_loss == undisturbed.heldout_loss
    # The killed process's data loader ends some seconds after it, and holds its folder until then.
    manifest = data.read_manifest(inputs / "dataset")
    until(
        lambda: clear(recipe, manifest, resumed) or not list((tmp_path / "checkpoints").rglob("*")),
        "no longer needed",
    )


@pytest.mark.slow
def test_adapters_with_fewer_rows_than_ranks(inputs, tmp_path):
    method = {"name": "lora", "r": 1, "lora_dropout": 0.0}
    alone = recipe_for(inputs, method, "none", **{"training.max_steps": 4})
    losses = [step.loss for step in ranks.run(1, fit, alone, inputs, tmp_path / "alone").steps]
    changes = {
        "checkpoints.save_steps": 2,
        "checkpoints.folder": str(tmp_path / "checkpoints"),
        "training.max_steps": 4,
    }
    recipe = recipe_for(inputs, method, "fsdp", **changes)
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(2, fit, recipe, inputs, tmp_path / "killed", 3)
    resumed = ranks.run(2, fit, recipe, inputs, tmp_path / "resumed")
    assert resumed.resumed_from_step == 2
    assert [step.loss for step in resumed.steps] == pytest.approx(losses, abs=SAME)


def waiting_gradients(recipe, inputs):
    """Count the parameters whose complete gradient is kept after a micro batch that is not the step's
    last."""
    plan = planner.make(recipe).model_copy(
        update={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    )
    trained = built(recipe, plan, inputs)
    step, found = trained.training_step, []

    def watched(model, *arguments, **named):
        loss = step(model, *arguments, **named)
        for module in model.modules():
            group = module._get_fsdp_state()._fsdp_param_group if hasattr(module, "_get_fsdp_state") else None
            found.extend(param for param in (group.fsdp_params if group else []) if is_waiting(param))
        return loss

    trained.training_step = watched
    trained.train()
    return len(found)


def is_waiting(param):
    whole = getattr(param, "_unsharded_param", None)
    return param.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_full_fsdp_reduces_gradients_after_every_micro_batch(method, inputs, tmp_path):
    recipe = recipe_for(inputs, method, "fsdp", **{"training.max_steps": 1, "training.warmup_steps": 0})
    found = ranks.run(2, waiting_gradients, recipe, inputs)
    # An adapter's gradients are small, and are reduced once a step.
    assert bool(found) == (method == "lora")


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_fsdp_resumes_without_reading_the_base_model_again(offload, inputs, tmp_path):
    changes = {"checkpoints.save_steps": 2, "training.max_steps": 4}
    recipe = recipe_for(
        inputs, "full", "fsdp", **changes, **{"checkpoints.folder": str(tmp_path / "checkpoints")}
    )
    recipe = Recipe.model_validate(recipe.model_dump() | {"sharding": {"name": "fsdp", "offload": offload}})
    with pytest.raises(ranks.RankFailed, match="the base model is read"):
        ranks.run(2, fit_without_the_base, recipe, inputs, tmp_path / "first")
    with pytest.raises(ranks.RankFailed, match="signal 9"):
        ranks.run(2, fit, recipe, inputs, tmp_path / "killed", 3)
    resumed = ranks.run(2, fit_without_the_base, recipe, inputs, tmp_path / "resumed")
    assert resumed.resumed_from_step == 2
    undisturbed = recipe_for(inputs, "full", "fsdp", **{"training.max_steps": 4})
    losses = [step.loss for step in ranks.run(2, fit, undisturbed, inputs, tmp_path / "undisturbed").steps]
    assert [step.loss for step in resumed.steps] == losses


@pytest.mark.slow
def test_large_exports_are_written_file_by_file(inputs, tmp_path):
    recipe = recipe_for(inputs, "full", "fsdp")
    ranks.run(2, fit_small_files, recipe, inputs, tmp_path / "trained")
    names = {path.name for path in (tmp_path / "trained" / "model").glob("*.safetensors*")}
    assert "model.safetensors.index.json" in names
    assert len(names) == 6, "the embedding, four layers, and the index"
    assert verify(tmp_path / "trained" / "model", recipe) == 38
    result = TrainingResult.read(tmp_path / "trained" / "training.json")
    loss = ranks.run(1, reloaded_loss, recipe, inputs, tmp_path / "trained")
    assert loss == pytest.approx(result.heldout_loss, abs=1e-4)


def fit_small_files(recipe, inputs, out):
    write.MAX_FILE_BYTES = 600_000
    return fit(recipe, inputs, out)


def fit_ruined(recipe, inputs, out):
    end_step = step_log.Recorder.end_step

    def ruined(self, *arguments):
        faults.ruin(self._trainer.model)
        return end_step(self, *arguments)

    step_log.Recorder.end_step = ruined
    return fit(recipe, inputs, out)


def test_a_nan_loss_ends_the_run(inputs, tmp_path):
    recipe = recipe_for(inputs, "full", "none")
    with pytest.raises(ranks.RankFailed, match="BadLoss: step 2: the loss is nan; the run does not continue"):
        ranks.run(1, fit_ruined, recipe, inputs, tmp_path / "trained")
    assert not (tmp_path / "trained").exists()


def wrong_world(recipe, inputs, out):
    plan = planner.make(recipe).model_copy(update={"world_size": 2})
    loop.fit(recipe, plan, shape_named(plan.shape), inputs / "dataset", out)


def test_a_wrong_number_of_processes_is_refused(inputs, tmp_path):
    with pytest.raises(ranks.RankFailed, match="rank 0: the plan is for 2 processes, 1 were started"):
        ranks.run(1, wrong_world, recipe_for(inputs, "full", "none"), inputs, tmp_path / "trained")


def unsharded(recipe, inputs, out):
    strategy = SHARDINGS[recipe.sharding.name]
    if recipe.sharding.name == "zero2":
        strategy.arguments = SHARDINGS["ddp"].arguments
    # Without the switch, and without our own `shard`, accelerate wraps the model in DDP.
    strategy.before_load = lambda self, device_type: None
    strategy.reads_slices = False
    strategy.shard = strategy.ready = lambda self, trainer: None
    fit(recipe, inputs, out)


@pytest.mark.parametrize(
    ("sharding", "message"),
    [("zero2", "DeepSpeed runs at stage 0"), ("fsdp", "the Trainer does not know of it")],
)
def test_a_sharding_that_did_not_take_effect_is_an_error(sharding, message, inputs, tmp_path):
    with pytest.raises(ranks.RankFailed, match=f"sharding {sharding} did not take effect: {message}"):
        ranks.run(2, unsharded, recipe_for(inputs, "full", sharding), inputs, tmp_path / "trained")


OWN = {
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": 5e4,
        "stage3_max_live_parameters": 1e5,
        "sub_group_size": 1e5,
        "stage3_param_persistence_threshold": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": False},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "steps_per_print": 2000,
}


def fit_noting_deepspeed(recipe, inputs, out):
    """Run once; return the result, and what DeepSpeed's engine made of its configuration."""
    noted, built = {}, trainer.trainer_class("sft")
    train = built.train

    def train_and_note(self, *args, **kwargs):
        ended, found = train(self, *args, **kwargs), self.model_wrapped._config
        zero = found.zero_config
        noted.update(
            stage=int(zero.stage),
            bucket=zero.reduce_bucket_size,
            overlap=zero.overlap_comm,
            live=zero.max_live_parameters,
        )
        noted.update(
            sub_group=zero.sub_group_size,
            optimizer=zero.offload_optimizer.device,
            parameters=zero.offload_param,
        )
        noted.update(
            threshold=zero.param_persistence_threshold, gathers=zero.gather_16bit_weights_on_model_save
        )
        noted.update(
            clipping=found.gradient_clipping, batch=found.train_batch_size, bf16=found.bfloat16_config.enabled
        )
        return ended

    built.train = train_and_note
    return fit(recipe, inputs, out), noted


@pytest.mark.slow
def test_a_deepspeed_configuration_of_ones_own_is_what_deepspeed_runs_with(inputs, runs, tmp_path):
    own = {"sharding": {"name": "zero3", "config": OWN}}
    recipe = Recipe.model_validate(recipe_for(inputs, "full", "zero3").model_dump() | own)
    result, noted = ranks.run(2, fit_noting_deepspeed, recipe, inputs, tmp_path / "trained")
    assert noted == {
        "stage": 3,
        "bucket": 50_000,
        "overlap": False,
        "live": 100_000,
        "sub_group": 100_000,
        "optimizer": "cpu",
        "parameters": None,
        "threshold": 10 * 128,
        "gathers": True,
        "clipping": 1.0,
        "batch": 8,
        "bf16": False,
    }
    alone = runs("full", "none")[1]
    assert [step.loss for step in result.steps] == pytest.approx(
        [step.loss for step in alone.steps], abs=SAME
    )
    assert gate.check_files(recipe, tmp_path / "trained", inputs / "dataset").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp", *slow("none", "ddp")])
def test_bfloat16_masters_are_trained_and_exported(sharding, inputs, tmp_path):
    """Weights, gradients and moments in bfloat16: half the bytes of a checkpoint, and a model that learns."""
    changes = {"model.dtype": "bfloat16", "training.master_dtype": "bfloat16", "checkpoints.save_steps": 3}
    changes |= {"checkpoints.folder": str(tmp_path / "kept")}
    sizes = {}
    for dtype in ("bfloat16", "float32"):
        recipe = recipe_for(inputs, "full", sharding, **changes | {"training.master_dtype": dtype})
        result = ranks.run(world(recipe), fit, recipe, inputs, tmp_path / dtype)
        assert result.steps[-1].loss < result.steps[0].loss
        (kept,) = (tmp_path / "kept").glob("*/3-*")
        sizes[dtype] = sum(path.stat().st_size for path in kept.rglob("*") if path.is_file())
        shutil.rmtree(tmp_path / "kept")
    assert sizes["bfloat16"] == pytest.approx(sizes["float32"] / 2, rel=0.1)


def first_values_of_peft(recipe):
    """Return the adapter that PEFT makes of a quantized base, without a trainer, by the names of an
    export."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, set_seed

    base = AutoModelForCausalLM.from_pretrained(
        recipe.model.name_or_path, dtype="float32", quantization_config=loading.quantization(recipe)
    )
    config = LoraConfig(r=recipe.method.r, target_modules="all-linear", task_type="CAUSAL_LM")
    set_seed(recipe.training.seed)
    adapted = get_peft_model(base, config)
    trained = [
        (name.replace(".default", ""), value.detach())
        for name, value in adapted.named_parameters()
        if value.requires_grad
    ]
    return {name: value.float().numpy() for name, value in trained}


def test_the_adapter_of_a_quantized_base_begins_as_peft_makes_it_and_is_not_rounded(inputs, tmp_path):
    # Steps so small that the export has the first values.
    changes = {"training.learning_rate": 1e-12, "training.weight_decay": 0.0}
    recipe = recipe_for(inputs, "qlora", "device_map", **changes)
    ranks.run(1, fit, recipe, inputs, tmp_path / "trained")
    wanted = ranks.run(1, first_values_of_peft, recipe)
    exported = load_file(tmp_path / "trained" / "adapter" / "adapter_model.safetensors")
    assert exported.keys() == wanted.keys()
    for name, values in exported.items():
        # bfloat16 has 8 bits: it would be off by up to 4e-3.
        assert values == pytest.approx(wanted[name], rel=1e-6, abs=1e-9), name
