"""Verification of endpoints, of a stand-in for vLLM and llama.cpp's server: yes to the trained model, and to
nothing else."""

import copy
import datetime
import shutil
from dataclasses import replace

import pytest

from flytune import cli
from flytune.errors import ExportError, RecipeError
from flytune.models import probe
from flytune.serving import Verification, endpoint, verify
from tests.support.model_server import ModelServer, started
from tests.support.spoiled import change
from tests.support.stages import seal

DIALECTS = ("vllm", "llama.cpp")


@pytest.fixture(params=DIALECTS)
def server(request, trained):
    """Provide a server of the trained model."""
    served = ModelServer(request.param, {"ours": trained.models["trained"]}, trained.tokenizer)
    with started(served):
        yield served


@pytest.fixture
def artifact(trained, tmp_path):
    """Provide an artifact that may be changed."""
    return shutil.copytree(trained.folder, tmp_path / "artifact")


def test_the_trained_model_is_served(server, trained, capsys):
    result = verify(server.address, trained.folder)
    assert result.is_served
    assert (result.server, result.model, result.artifact) == (server.dialect, "ours", "ours")
    assert (result.tokenizer, result.chat, result.problems, result.doubts) == ("equal", "equal", [], [])
    assert result.difference < 1e-4
    assert result.agreement == 1
    assert cli.main(["verify", server.address, str(trained.folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{server.address}: ours is ours (largest difference ")
    assert " nats (bound " in text
    assert text.endswith("16 of 16 next tokens equal)\n")
    assert " nats per token (bound 0.5)" in verify(server.address, trained.folder, bound=0.5).sentence
    assert cli.main(["verify", f"{server.address}/v1/", str(trained.folder), "--json"]) == 0
    assert Verification.parse(capsys.readouterr().out) == result


def test_prompts_are_asked_one_by_one(server, trained):
    verify(server.address, trained.folder)
    prompts = [content["prompt"] for path, content in server.asked if "completion" in path]
    assert prompts == probe.Answers.read(trained.folder / probe.PROBE).prompts


def test_a_likeliest_token_may_be_part_of_a_character(server, trained):
    (part,) = trained.tokenizer("\N{GRINNING FACE}", add_special_tokens=False)["input_ids"][:1]
    assert trained.tokenizer.decode([part]) == "\N{REPLACEMENT CHARACTER}"
    server.shown = lambda tokens: {part: -0.1, **tokens}
    assert endpoint.connect(server.address).next_tokens([1, 2])[part] == -0.1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "base",
            "it answers as the base does: the adapter is not applied; load it, and ask for its name",
        ),
        ("halved", "it answers as the adapter does at some 0.5 of its scale: lora_alpha or r is another"),
        (
            "doubled",
            "it answers as the adapter does at a larger scale: lora_alpha or r is another, or is not read",
        ),
        ("quantized", "it is near to the trained model, but not equal: a quantized build, another dtype"),
        ("other", "it answers as another model does: another adapter, another revision"),
    ],
)
def test_another_model_is_named(server, trained, fault, words, capsys):
    server.models = {"ours": trained.models[fault]}
    assert cli.main(["verify", server.address, str(trained.folder)]) == 1
    assert f"{server.address}: ours is not ours: {words}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "words", "chat"),
    [
        ("other_tokenizer", "it makes other tokens of texts: another tokenizer", "other"),
        ("other_template", "it makes another prompt of a chat: another chat template", "other"),
    ],
)
def test_another_tokenizer_or_template_is_named(server, trained, fault, words, chat):
    server.tokenizer = getattr(trained, fault)
    result = verify(server.address, trained.folder)
    assert (result.is_served, result.problems, result.chat) == (False, [words], chat)
    assert result.difference < 1e-4


@pytest.mark.parametrize(("shift", "chat"), [(-1, "equal"), (1, "equal"), (3, "other")])
def test_the_date_in_a_prompt_may_be_that_of_another_time_zone(server, trained, artifact, shift, chat):
    begin = "{{ '<|im_start|>assistant"
    dated = trained.tokenizer.chat_template.replace(begin, f"DATE{begin}")
    assert "DATE" in dated
    day = datetime.date.today() + datetime.timedelta(days=shift)
    server.tokenizer = copy.deepcopy(trained.tokenizer)
    server.tokenizer.chat_template = dated.replace("DATE", str(day))
    (artifact / "chat_template.jinja").write_text(dated.replace("DATE", "{{ strftime_now('%Y-%m-%d') }}"))
    assert verify(server.address, seal(artifact)).chat == chat


def test_a_quantized_build_is_bounded_in_nats_per_token(server, trained):
    server.models = {"ours": trained.models["quantized"]}
    result = verify(server.address, trained.folder, bound=1.0)
    assert result.is_served
    assert 0 < result.divergence < 1.0
    assert result.bound == 1.0
    assert result.agreement < 1 or result.difference > 0.01
    tighter = verify(server.address, trained.folder, bound=result.divergence / 2)
    assert tighter.problems == ["it is further from the trained model than the bound"]
    server.models = {"ours": trained.models["base"]}
    assert not verify(server.address, trained.folder, bound=1e9).is_served
    with pytest.raises(RecipeError, match="bound nan: must be above 0"):
        verify(server.address, trained.folder, bound=float("nan"))


def test_the_runs_own_name_is_asked_for_beside_the_base(server, trained):
    server.models = {"base": trained.models["base"], "ours": trained.models["trained"]}
    assert verify(server.address, trained.folder).is_served
    assert not verify(server.address, trained.folder, model="base").is_served


def test_a_server_without_tokenize_leaves_doubts(server, trained):
    server.has_tokenize = False
    result = verify(server.address, trained.folder)
    assert result.is_served
    assert result.doubts == [
        "its tokenizer is not known: the server has no /tokenize",
        "its chat template is not known",
    ]


def test_fewer_next_tokens_are_asked_of_a_server_that_lists_no_more(trained):
    served = ModelServer("vllm", {"ours": trained.models["trained"]}, trained.tokenizer, most=5)
    with started(served):
        assert verify(served.address, trained.folder).is_served
    assert [content["logprobs"] for path, content in served.asked if "completions" in path][:3] == [20, 5, 5]


def test_a_token_that_the_model_does_not_have_is_another_model(server, trained):
    server.shown = lambda tokens: {token + 10**6: value for token, value in tokens.items()}
    assert not verify(server.address, trained.folder).is_served


def test_an_adapter_that_has_learned_little_is_told_from_its_base_only_if_it_is(server, trained, artifact):
    answers = probe.Answers.read(artifact / probe.PROBE)
    near = replace(answers, base=answers.logits.half(), scaled=answers.logits.half())
    near.write(artifact / probe.PROBE)
    result = verify(server.address, seal(artifact))
    assert result.is_served
    assert result.doubts[0].startswith("the base's own answers are as near (0.00")


def test_a_record_without_the_base_is_compared_too(server, trained, artifact):
    answers = probe.Answers.read(artifact / probe.PROBE)
    replace(answers, base=None, scaled=None).write(artifact / probe.PROBE)
    seal(artifact)
    assert verify(server.address, artifact).is_served
    server.models = {"ours": trained.models["base"]}
    result = verify(server.address, artifact)
    assert (result.is_served, len(result.problems)) == (False, 1)
    assert "as the base does" not in result.problems[0]


def test_weights_are_neither_read_nor_fetched(server, trained, artifact, tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (artifact / "adapter_model.safetensors").unlink()
    assert verify(server.address, artifact).is_served
    memory = fsspec.filesystem("memory")
    memory.put(str(artifact), "/served", recursive=True)
    assert verify(server.address, "memory://served").is_served
    memory.rm("/served", recursive=True)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"logits": None}, "damaged"),
        ({"lengths": "zero"}, "its tensors are not the answers of a model"),
        ({"logits": "nan"}, "its tensors are not the answers of a model"),
        ({"scaled": None}, "its tensors are not the answers of a model"),
        ({"base": "short"}, "its tensors are not the answers of a model"),
    ],
)
def test_a_damaged_record_is_refused(server, artifact, tensors, words):
    spoilt = vars(probe.Answers.read(artifact / probe.PROBE)).copy()
    changes = {"zero": lambda value: value * 0, "nan": lambda value: value * float("nan")}
    changes |= {"short": lambda value: value[:, :5].contiguous(), None: lambda value: None}
    for name, change_to in tensors.items():
        spoilt[name] = changes[change_to](spoilt[name])
    probe.Answers(**spoilt).write(artifact / probe.PROBE)
    with pytest.raises(ExportError, match=f"probe.safetensors: {words}"):
        verify(server.address, seal(artifact))


def test_what_has_no_record_or_no_words_is_refused(server, artifact):
    (artifact / probe.PROBE).unlink()
    with pytest.raises(ExportError, match="no gate/probe.safetensors, the answers of the trained model"):
        verify(server.address, seal(artifact))
    with (artifact / "recipe.yaml").open("a") as recipe:
        recipe.write("objective: {name: reward}\n")
    with pytest.raises(ExportError, match="objective: reward"):
        verify(server.address, seal(artifact))


def test_a_tokenizer_with_code_needs_consent(server, artifact):
    change(artifact / "tokenizer_config.json", auto_map={"AutoTokenizer": ["x.y", None]})
    with pytest.raises(ExportError, match="--trust-remote-code"):
        verify(server.address, seal(artifact))
