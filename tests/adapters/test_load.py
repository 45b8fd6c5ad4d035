"""Several adapters on one base, and combined ones: each computes the same as alone."""

import json
import shutil

import pytest
import torch

from flytune import cli
from flytune.adapters import combining, merging
from flytune.adapters import loading as adapters_loading
from flytune.artifacts import catalog
from flytune.artifacts.build import CONTENTS, Contents
from flytune.errors import ExportError
from flytune.models import loading, probe
from flytune.recipe import Recipe
from tests.support.full_disk import files_of_at_most
from tests.support.stages import copy_tree, seal, write_dataset
from tests.support.store import stored


@pytest.fixture(scope="module")
def store(base, tmp_path_factory):
    folder, dataset = (
        tmp_path_factory.mktemp("store"),
        write_dataset(tmp_path_factory.mktemp("dataset"), base),
    )
    for name, method, steps in (
        ("short", "lora", 4),
        ("long", "lora", 12),
        ("short4", "qlora", 4),
        ("long4", "qlora", 12),
    ):
        stored(folder, base, dataset, name, method, steps)
    stored(folder, base, dataset, "whole", "full", steps=2)
    return folder


@pytest.fixture(scope="module")
def prompts(base):
    from transformers import AutoTokenizer

    return probe.tokenized(AutoTokenizer.from_pretrained(base))


def logits(model, prompts):
    return torch.cat([found for _, found in probe.logits_of(model, prompts)])


def alone(folder, prompts):
    return logits(loading.exported_model(Recipe.from_yaml(folder / "recipe.yaml"), folder).eval(), prompts)


def deltas(model, name):
    return [
        module.get_delta_weight(name).detach()
        for _, module in model.get_base_model().named_modules()
        if hasattr(module, "get_delta_weight")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", "4"], ids=["lora", "qlora"])
def test_each_adapter_computes_what_it_computes_alone(store, prompts, suffix):
    model = adapters_loading.load({"a": store / f"short{suffix}", "b": str(store / f"long{suffix}")})
    for name, folder in (("b", f"long{suffix}"), ("a", f"short{suffix}"), ("b", f"long{suffix}")):
        model.set_adapter(name)
        assert torch.equal(logits(model, prompts), alone(store / folder, prompts)), name
    recipe = Recipe.from_yaml(store / f"short{suffix}" / "recipe.yaml")
    with model.disable_adapter():
        assert torch.equal(
            logits(model, prompts), logits(loading.base_model(recipe, "float32").eval(), prompts)
        )


def test_a_batch_may_mix_them(store):
    model = adapters_loading.load({"a": store / "short", "b": store / "long"})
    tokens = torch.tensor([[5, 6, 7, 8]] * 3)
    with torch.no_grad():
        mixed = model(input_ids=tokens, adapter_names=["b", "__base__", "a"]).logits
        said = model.generate(
            input_ids=tokens, adapter_names=["b", "__base__", "a"], max_new_tokens=4, do_sample=False
        )
        for row, name in ((0, "b"), (2, "a")):
            model.set_adapter(name)
            assert torch.allclose(mixed[row], model(input_ids=tokens[:1]).logits[0], atol=1e-5)
            assert (
                said[row].tolist()
                == model.generate(input_ids=tokens[:1], max_new_tokens=4, do_sample=False)[0].tolist()
            )
        with model.disable_adapter():
            assert torch.allclose(mixed[1], model(input_ids=tokens[:1]).logits[0], atol=1e-5)
    assert not torch.allclose(mixed[0], mixed[2], atol=1e-2)


def test_adapters_of_different_bases_are_not_put_onto_one(store, tmp_path):
    with pytest.raises(ExportError, match="different bases cannot share one; load them separately:") as error:
        adapters_loading.load({"a": store / "short", "b": store / "short4"})
    assert "b: " in str(error.value)
    assert "nf4_double, computing in float32" in str(error.value)
    other = shutil.copytree(store / "long", tmp_path / "other")
    config = other / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"revision": "0123abc"}))
    seal(other)
    with pytest.raises(ExportError, match="b: .* at revision 0123abc, float32"):
        adapters_loading.load({"a": store / "short", "b": other})


def test_what_cannot_be_loaded_says_why(store, tmp_path):
    with pytest.raises(
        ExportError, match="has no adapter; it is a complete model, which is loaded by itself"
    ):
        adapters_loading.load({"a": store / "whole"})
    for name in ("base", "a.b", ""):
        with pytest.raises(ExportError, match=f"'{name}' cannot be an adapter's name"):
            adapters_loading.load({name: store / "short"})
    with pytest.raises(ExportError, match="no adapter was given"):
        adapters_loading.load({})
    from safetensors.torch import load_file, save_file

    cut = shutil.copytree(store / "short", tmp_path / "cut")
    file = cut / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file, metadata={"format": "pt"})
    seal(cut)
    with pytest.raises(
        ExportError, match="adapter b on base model .*: cannot be loaded: Found missing adapter keys"
    ):
        adapters_loading.load({"a": store / "long", "b": cut})


def test_cat_is_the_sum_of_what_each_adds(store, prompts, tmp_path):
    made = combining.combine([store / "short", store / "long"], tmp_path / "both", [0.25, -0.5])
    assert made.r == 16
    model = adapters_loading.load({"a": store / "short", "b": store / "long", "both": tmp_path / "both"})
    for a, b, both in zip(*(deltas(model, name) for name in ("a", "b", "both")), strict=True):
        assert torch.allclose(both, 0.25 * a - 0.5 * b, atol=1e-6)
    one = combining.combine([store / "short", store / "long"], tmp_path / "one", [1, 0])
    assert [source.weight for source in one.sources] == [1, 0]
    assert torch.allclose(alone(tmp_path / "one", prompts), alone(store / "short", prompts), atol=1e-4)


def test_the_other_ways(store, tmp_path):
    both = [store / "short", store / "long"]
    made = {
        "svd": combining.combine(both, tmp_path / "svd", how="svd", r=16),
        "linear": combining.combine(both, tmp_path / "linear", how="linear"),
        "ties": combining.combine(both, tmp_path / "ties", how="ties", density=0.5),
        "dare": combining.combine(both, tmp_path / "dare", how="dare_linear_svd", density=0.5, seed=1),
        "again": combining.combine(both, tmp_path / "again", how="dare_linear_svd", density=0.5, seed=1),
    }
    assert [made[name].r for name in made] == [16, 8, 8, 8, 8]
    model = adapters_loading.load({"a": both[0], "b": both[1], **{name: tmp_path / name for name in made}})
    for a, b, svd in zip(*(deltas(model, name) for name in ("a", "b", "svd")), strict=True):
        assert torch.allclose(svd, a + b, atol=1e-5), "of the rank of both together it loses nothing"
    assert all(torch.equal(x, y) for x, y in zip(deltas(model, "dare"), deltas(model, "again"), strict=True))
    assert not torch.allclose(deltas(model, "ties")[0], deltas(model, "linear")[0])


def test_nothing_is_written_outside_of_what_is_combined(store, tmp_path):
    evil = copy_tree(store / "short", tmp_path / "evil")
    exported = json.loads((evil / "export.json").read_text())
    next(file for file in exported["files"] if file["file"] == "tokenizer.json")["file"] = "../stolen.json"
    (evil / "export.json").write_text(json.dumps(exported))
    seal(evil)
    (tmp_path / "stolen.json").write_text("{}")
    with pytest.raises(ExportError, match=r"the name '\.\./stolen\.json' leads out of its folder"):
        combining.combine([evil, store / "long"], tmp_path / "new" / "both")
    assert not list((tmp_path / "new").iterdir())


def test_a_combined_adapter_is_an_artifact(store, prompts, tmp_path):
    made = combining.combine([store / "short4", store / "long4"], tmp_path / "new" / "both")
    out = tmp_path / "new" / "both"
    assert combining.Combination.read(out / "combination.json") == made
    assert [source.name for source in made.sources] == ["short4", "long4"]
    recipe = Recipe.from_yaml(out / "recipe.yaml")
    assert recipe.description == "combined by cat: 1 x short4 + 1 x long4"
    assert (recipe.method.name, recipe.method.r, recipe.method.lora_alpha) == ("qlora", 16, 16)
    files = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert {stored.file for stored in Contents.read(out / CONTENTS).files} == files - {CONTENTS}
    assert "tokenizer.json" in files
    assert [path.name for path in out.parent.iterdir()] == ["both"]
    assert merging.merge(out, tmp_path / "merged").candidates[0].divergence < 1e-7
    (entry,) = catalog.list_artifacts(str(out))
    assert entry.made_from == [str(store / "short4"), str(store / "long4")]
    assert entry.problems == []


@pytest.mark.parametrize(
    ("wishes", "said"),
    [
        ({"weights": [1.0]}, "1 weight for 2 adapters; give one for each"),
        ({"how": "sum"}, "sum: unknown; known are cat, linear"),
        ({"r": 4}, r"r 4: only svd and \*_svd take a rank; that of cat follows from the adapters"),
        ({"how": "ties"}, "density None with ties: ties and dare need the share of values to keep"),
        ({"density": 0.5}, "density 0.5 with cat"),
        ({"how": "ties", "density": 1.5}, r"density 1.5: the share of values to keep must be in \(0, 1\]"),
    ],
)
def test_arguments_that_do_not_go_together(store, tmp_path, wishes, said):
    with pytest.raises(ExportError, match=said):
        combining.combine([store / "short", store / "long"], tmp_path / "out", **wishes)
    assert not (tmp_path / "out").exists()


def test_what_peft_cannot_combine_is_refused_with_its_reason(store, tmp_path):
    combining.combine([store / "short", store / "long"], tmp_path / "r16")
    with pytest.raises(
        ExportError, match="cannot combine these adapters by linear: All adapters must have the same r value"
    ):
        combining.combine([store / "short", tmp_path / "r16"], tmp_path / "out", how="linear")
    assert combining.combine([store / "short", tmp_path / "r16"], tmp_path / "svd", how="svd").r == 16
    with pytest.raises(ExportError, match="out: exists already|svd: exists already"):
        combining.combine([store / "short", store / "long"], tmp_path / "svd")
    with pytest.raises(ExportError, match="1 adapter cannot be combined"):
        combining.combine([store / "short"], tmp_path / "out")
    dora = shutil.copytree(store / "long", tmp_path / "dora")
    config = dora / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    seal(dora)
    with pytest.raises(
        ExportError, match="dora: its adapter has use_dora, which PEFT does not combine correctly"
    ):
        combining.combine([store / "short", dora], tmp_path / "out")


def test_the_command_combines(store, tmp_path, capsys):
    command = [
        "combine",
        str(tmp_path / "both"),
        str(store / "short"),
        str(store / "long"),
        "--weights",
        "0.7",
        "0.3",
    ]
    assert cli.main(command) == 0
    assert (
        "both: 0.7 x short (r 8) + 0.3 x long (r 8), combined by cat, r 16; not evaluated"
        in capsys.readouterr().out
    )
    assert cli.main(command) == 1
    assert "exists already" in capsys.readouterr().err
    assert (
        cli.main([*command[:1], str(tmp_path / "b"), *command[2:4], "--how", "svd", "--rank", "4", "--json"])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["r"] == 4


def test_combining_on_a_full_disk_ends_with_one_error_and_leaves_nothing(store, tmp_path, capsys):
    with files_of_at_most(20_000):
        assert cli.main(["combine", str(tmp_path / "both"), str(store / "short"), str(store / "long")]) == 1
    error = capsys.readouterr().err
    assert "File too large" in error
    assert "make room" in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
