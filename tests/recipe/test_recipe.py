import json
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flytune.errors import RecipeError
from flytune.recipe import Recipe, json_schema
from tests.support.paths import ROOT
from tests.support.recipes import RECIPES, content, mistakes_of


@pytest.mark.parametrize(
    "address",
    [
        "https://me:pl4nted@host/rows.jsonl",
        "https://bucket.s3.amazonaws.com/rows.jsonl?X-Amz-Date=2026&X-Amz-Signature=pl4nted",
        "https://pl4nted@host/rows.jsonl",
    ],
)
def test_addresses_with_credentials_are_refused_and_not_shown(address):
    for recipe in (content(data={"path": address, "max_lngth": 1}), content(publish={"address": address})):
        said = mistakes_of(recipe)
        assert re.search(
            r"recipe r: 1 mistake\n  (data\.path|publish\.address): an address with credentials", said
        )
        assert "pl4nted" not in said
        with pytest.raises(RecipeError, match="an address with credentials"):
            Recipe.model_validate_json(json.dumps(recipe))


@pytest.mark.parametrize(
    "address",
    ["hf://owner/name", "s3://bucket/a:b/c@d", "https://host/rows.jsonl?part=1&author=x", "sftp://me@host/x"],
)
def test_other_addresses_are_not(address):
    assert Recipe.model_validate(content(publish={"address": address})).publish.address == address


def test_all_mistakes_are_reported_at_once_with_dotted_paths_and_suggestions(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(
        yaml.safe_dump(
            content(
                model={"name_or_path": "a", "dtyp": "bfloat16"},
                data={"path": "x", "max_length": -1},
                sharding="zro",
                training={"learning_rat": 2e-4, "global_batch_size": "many"},
                colour="blue",
            )
        )
    )
    with pytest.raises(RecipeError) as caught:
        Recipe.from_yaml(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: recipe r: 7 mistakes\n")
    assert "model.dtyp: unknown key; did you mean dtype?" in text
    assert "data.max_length: must be greater than 0; found -1" in text
    assert "sharding.name: must be 'none', 'ddp', 'zero1'" in text
    assert "training.learning_rat: unknown key; did you mean learning_rate?" in text
    assert "training.learning_rate: missing" in text
    assert "training.global_batch_size: must be an integer" in text
    assert "colour: unknown key; known are: name, description, model, data" in text


def test_yaml_that_is_no_recipe_is_an_error_of_ours(tmp_path):
    for name in (".hidden", *"abcdefg", "other"):
        (tmp_path / f"{name}.yaml").write_text("a: 1")
    with pytest.raises(
        RecipeError, match=r"no such file; there are: \S*other.yaml(, \S*/[a-g].yaml){4}, \.\.\.$"
    ):
        Recipe.from_yaml(tmp_path / "others.yaml")
    for text, said in (
        ("- 1", "a recipe is a mapping of sections"),
        ("a: [", "not YAML"),
        ("", "a recipe is a mapping"),
    ):
        (tmp_path / "r.yaml").write_text(text)
        with pytest.raises(RecipeError, match=said):
            Recipe.from_yaml(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not YAML: not UTF-8: byte 0xff at 0"):
        Recipe.from_yaml(tmp_path / "r.yaml")


def scaled(**scaling):
    return {"model": {"name_or_path": "base", "rope_scaling": scaling}}


TRAINING = {"learning_rate": 1e-4, "global_batch_size": 8}
QLORA_8 = {"name": "qlora", "load_in_8bit": True}
NO_EFFECT = "llm_int8_threshold: no effect without 8 bits (load_in_8bit); write load_in_8bit: true"
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
MSCALES = {"mscale": 1, "mscale_all_dim": 1}
LLAMA3 = YARN | {"rope_type": "llama3", "high_freq_factor": 4}
LONG = YARN | {"rope_type": "longrope", "long_factor": [2, 4]}
NAMES_A_SPLIT = "eval_split names a split of dataset_name"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": {}}, "data: give exactly one of path"),
        ({"data": {"path": "a", "dataset_name": "b/c"}}, "data: give exactly one of path"),
        ({"method": {"name": "full", "r": 8}}, "method: r: only for lora and qlora"),
        (
            {"method": {"name": "lora", "load_in_8bit": True}},
            "load_in_8bit: only for qlora, whose base is quantized; write",
        ),
        (scaled(rope_type="linear"), "model.rope_scaling.factor: missing"),
        (scaled(factor=4), "model.rope_scaling.rope_type: missing"),
        (
            scaled(rope_type="ntk", factor=4),
            "model.rope_scaling.rope_type: must be 'linear', 'dynamic', 'yarn', 'llama3' or 'longrope'",
        ),
        (scaled(rope_type="linear", factor=4, rope_theta=1), "model.rope_scaling.rope_theta: unknown key"),
        (scaled(rope_type="linear", factor=4, mscale=1), "mscale (of yarn): no effect with rope_type linear"),
        (scaled(rope_type="dynamic", factor=1), "factor: must be greater than 1"),
        (scaled(**YARN, mscale=1), "mscale and mscale_all_dim are read together only"),
        (scaled(**YARN, **MSCALES, attention_factor=1), "have no effect beside attention_factor"),
        (scaled(**YARN, beta_slow=40), "beta_fast 32 must be greater than beta_slow 40"),
        (scaled(**LLAMA3, low_freq_factor=4), "high_freq_factor 4 must be greater than low_freq_factor 4"),
        (scaled(**LONG, short_factor=[1]), "short_factor has 1 numbers and long_factor 2"),
        ({"method": {"name": "full", "bnb_4bit_quant_type": "fp4"}}, "bnb_4bit_quant_type: only for qlora"),
        ({"method": QLORA_8 | {"bnb_4bit_quant_type": "fp4"}}, "bnb_4bit_quant_type: no effect in 8 bits"),
        ({"method": {"name": "qlora", "llm_int8_threshold": 5.0}}, NO_EFFECT),
        (
            {"method": {"name": "qlora", "bnb_4bit_quant_type": "int4"}},
            "method.bnb_4bit_quant_type: must be 'nf4' or 'fp4'",
        ),
        (
            {"data": {"path": "x", "heldout_fraction": 0}, "evaluation": {"eval_steps": 5}},
            "evaluation.eval_steps: data.heldout_fraction: 0 leaves nothing to evaluate on; remove one of "
            "them",
        ),
        (
            {"evaluation": {"early_stopping_patience": 2}},
            "evaluation: early_stopping_patience counts evaluations of the live model, and there are none: "
            "set eval_steps",
        ),
        (
            {"evaluation": {"eval_steps": 5, "early_stopping_threshold": 0.1}},
            "evaluation: early_stopping_threshold has no effect alone; set early_stopping_patience too",
        ),
        (
            {"data": {"path": "x", "eval_split": "test"}},
            f"{NAMES_A_SPLIT}; for files and several sources use heldout_path",
        ),
        ({"data": {"sources": [{"dataset_name": "a/b"}], "eval_split": "test"}}, NAMES_A_SPLIT),
        (
            {"data": {"dataset_name": "a/b", "heldout_path": "y", "eval_split": "test"}},
            "eval_split and heldout_path both name the held-out data",
        ),
        (
            {"data": {"dataset_name": "a/b", "heldout_fraction": 0.1, "eval_split": "test"}},
            "eval_split and heldout_fraction both name the held-out data",
        ),
        (
            {"data": {"dataset_name": "a/b", "dataset_split": "test", "eval_split": "test"}},
            "eval_split 'test' must be another split than dataset_split",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, said):
    assert said in mistakes_of(content(**changes))


def test_held_out_data_is_a_share_a_file_or_a_split():
    def data(**changes):
        recipe = Recipe.model_validate(content(data=changes))
        assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
        return recipe.data

    assert not data(path="x", heldout_fraction=0).holds_out
    assert data(path="x", heldout_fraction=0, heldout_path="y").holds_out
    split = data(dataset_name="a/b", eval_split="test")
    assert (split.heldout_key, split.heldout_name) == ("data.eval_split", "a/b[test]")


def test_formats_of_a_quantized_base_survive_json_and_keep_the_keys_of_old_recipes():
    recipe = Recipe.model_validate(content(method=QLORA_8))
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    old = Recipe.model_validate(content(method="qlora"))
    assert (
        old.key()
        == Recipe.model_validate(content(method={"name": "qlora", "bnb_4bit_quant_type": "nf4"})).key()
    )
    assert old.key() != recipe.key()


def test_a_scaling_survives_json_and_is_part_of_the_key():
    plain, recipe = Recipe.model_validate(content()), Recipe.model_validate(content(**scaled(**YARN)))
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    other = content(**scaled(**YARN | {"factor": 2}))
    assert len({plain.key(), recipe.key(), Recipe.model_validate(other).key()}) == 3
    assert "rope_scaling" not in plain.model_dump_json()


def test_a_recipe_survives_yaml_and_json_and_is_frozen(tmp_path):
    recipe = Recipe.model_validate(content(method="lora"))
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert Recipe.from_yaml(tmp_path / "again.yaml") == recipe
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    with pytest.raises(ValueError, match="frozen"):
        recipe.name = "other"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda c: st.lists(c) | st.dictionaries(st.text(), c),
    )
)
def test_anything_else_is_a_recipe_error(junk):
    with pytest.raises(RecipeError):
        Recipe.model_validate(content(training=junk))
    with pytest.raises(RecipeError):
        Recipe.model_validate(junk)


@given(
    st.sampled_from(["learning_rate", "global_batch_size", "max_grad_norm", "warmup_steps"]),
    st.integers(0, 12),
)
def test_a_misspelt_key_is_recognised(key, position):
    position %= len(key)
    misspelt = key[:position] + key[position + 1 :]
    text = mistakes_of(content(training=TRAINING | {misspelt: 1}))
    assert f"training.{misspelt}: unknown key; did you mean {key}?" in text


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("training.gradient_accumulation_steps", "the planner computes it; write training.global_batch_size"),
        ("training.use_liger_loss", "write training.use_liger_kernel: norms, rotation and MLP are Liger's"),
        ("method.load_in_4bit", "write method: qlora; the weights of a 4-bit model have no gradients"),
        ("method.merge", "a run stores only the adapter"),
        ("method.llm_int8_enable_fp32_cpu_offload", "adapters of layers on the CPU would not be trained"),
        ("sharding.fsdp_config", "write sharding: NAME; the rest follows from it"),
        (
            "micro_batch_size",
            "write training.per_device_train_batch_size; training.global_batch_size is micro_batch_size x",
        ),
        ("save_steps", "it belongs in checkpoints"),
        ("lora_r", "write method.r"),
        ("warmup_ratio", "write training.warmup_steps; below 1 it is a share of all steps"),
        (
            "evals_per_epoch",
            "write evaluation.eval_steps; a share of all steps: 1 / (evals_per_epoch x num_train_epochs)",
        ),
        ("batch_size", "write training.global_batch_size; x GPUs"),
        ("zero_optimization", "write sharding: {name: zero3, config: FILE} with the JSON file"),
        ("tensor_parallel_size", "layers are not divided among GPUs"),
        ("training.label_smoothing", "it belongs in objective, with name: dpo"),
        ("seed", "it belongs in data or training"),
        ("weight", "it belongs in data.sources"),
    ],
)
def test_an_unknown_key_is_answered_with_its_place(key, said):
    section, _, name = key.rpartition(".")
    given = {"training": TRAINING, "method": {"name": "lora"}, "sharding": {"name": "ddp"}}
    changes = {section: given[section] | {name: True}} if section else {key: 2}
    assert f"{key}: unknown key; {said}" in mistakes_of(content(**changes))


def test_the_names_of_a_section_are_listed_once_and_only_a_near_one_is_guessed():
    text = mistakes_of(content(colour=1, shade=2, hue=3, objectiv="dpo"))
    assert text.count("known are: name, description, model, data") == 1
    assert "objectiv: unknown key; did you mean objective?" in text
    assert "hue: unknown key" in text


@pytest.mark.parametrize(
    ("save", "score", "said"),
    [
        (None, None, "there are none without checkpoints.save_steps and evaluation.eval_steps; set them"),
        (None, 5, "there are none without checkpoints.save_steps; set them"),
        (10, None, "there are none without evaluation.eval_steps; set them"),
        ("auto", 5, "which saves steps that are not scored; write save_steps: 5, as eval_steps"),
        (
            15,
            10,
            "save_steps 15 is neither a multiple nor a divisor of eval_steps 10: write the same for both",
        ),
        (
            "epoch",
            10,
            "save_steps epoch is neither a multiple nor a divisor of eval_steps 10: write the same for both",
        ),
        *(
            (*pair, None)
            for pair in ((10, 10), (20, 10), (10, 20), ("epoch", "epoch"), (1, "epoch"), ("epoch", 1))
        ),
    ],
)
def test_the_best_needs_a_checkpoint_of_each_scored_step(save, score, said):
    made = content(checkpoints={"save_steps": save, "export": "best"}, evaluation={"eval_steps": score})
    if said is None:
        Recipe.model_validate(made)
    else:
        assert re.search(f"checkpoints.export: best .*{said}", mistakes_of(made))


def test_the_schema_in_the_repository_is_current():
    kept = (ROOT / "recipes" / "recipe.schema.json").read_text()
    assert kept == json_schema(), "run `make schema`"


@pytest.fixture(scope="module")
def schema():
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(json_schema()))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_agree_with_the_schema_and_say_how_to_run_them(path, schema):
    text = path.read_text()
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n")
    assert [title for title in ("# Run:", "# Hardware:", "# Measured:") if title not in text] == []
    recipe = yaml.safe_load(text)
    recipe["training"]["learning_rate"] = float(recipe["training"]["learning_rate"])
    schema.validate(recipe)
    assert not schema.is_valid(recipe | {"colour": "blue"})


@pytest.mark.parametrize(
    ("section", "value", "reason"),
    [
        ("training.max_steps", True, "training.max_steps: must be an integer; found true"),
        ("data.weight", True, "data.weight: unknown key"),
        ("data.heldout_fraction", False, "data.heldout_fraction: must be a number; found false"),
        ("training.learning_rate", float("inf"), "training.learning_rate: numbers must be finite; found inf"),
        ("training.max_grad_norm", float("nan"), "training.max_grad_norm: numbers must be finite; found nan"),
        ("training.hang_minutes", 1e-300, "1 mistake\n  training.hang_minutes: 1e-300 is smaller than any"),
        ("data.max_length", 10**300, "data.max_length: "),
        ("data.max_length", 10**12, "data.max_length: must be 16,777,216 or less"),
        ("data.sources", [{"path": "a", "weight": 1e12}], "data.sources[0].weight: must be 1,000 or less"),
        (
            "data.sources",
            [{"path": "a", "max_samples": True}],
            "data.sources[0].max_samples: must be an integer; found true",
        ),
    ],
)
def test_numbers_that_nobody_means_are_refused(section, value, reason):
    section, name = section.split(".")
    base = {"training": TRAINING, "data": {} if name == "sources" else {"path": "x"}}
    assert reason in mistakes_of(content(**{section: base[section] | {name: value}}))


def test_true_stays_true_where_it_is_meant_and_strange_paths_are_errors_of_ours(tmp_path):
    assert (
        Recipe.model_validate(
            content(data={"path": "x", "packing": True, "add_bos_token": True})
        ).data.packing
        is True
    )
    for path in ("x" * 5000, "a\0b", str(tmp_path)):
        with pytest.raises(RecipeError, match="cannot be read"):
            Recipe.from_yaml(path)
