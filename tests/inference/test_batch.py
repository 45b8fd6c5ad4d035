"""Batch inference: for any parts and batches, the answers are those of a model to each prompt alone, in
order."""

import importlib
import json
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import torch
from flytekit.tools.translator import get_serializable
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from transformers import AutoTokenizer

from flytune.artifacts import catalog
from flytune.errors import DataError, ExportError, OutOfMemory, RecipeError
from flytune.hardware import load_shapes
from flytune.inference import batch, prompts
from flytune.models import Generation, loading
from flytune.models import generation as models_generation
from flytune.recipe import Recipe
from flytune.records import Contents
from tasks.infer import INFER
from tests.support.paths import ROOT
from tests.support.registration import SETTINGS
from tests.support.stages import write_dataset
from tests.support.store import stored
from workflows.infer import infer


@pytest.fixture(scope="module")
def store(base, tmp_path_factory):
    folder, dataset = (
        tmp_path_factory.mktemp("store"),
        write_dataset(tmp_path_factory.mktemp("dataset"), base),
    )
    stored(folder, base, dataset, "short", steps=5)
    stored(folder, base, dataset, "long", steps=30)
    stored(folder, base, dataset, "whole", "full", steps=20)
    return folder


def question(index):
    words = " and then" * (index * 7 % 11)
    return [{"role": "user", "content": f"Add{words} {index} and {index * 3}."}]


def rows(count=14):
    """Return chats and plain text of all lengths, for the artifact, an adapter and the base."""
    rows = []
    for index in range(count):
        row = {"id": f"q{index}", "adapter": (None, "long", "base")[index % 3]}
        rows.append(
            row | ({"messages": question(index)} if index % 4 else {"prompt": f"The sum of {index} and"})
        )
    return rows


def write(path, lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def said_alone(model, tokenizer, prompt, count, ends):
    """Return the answer to one prompt, by a plain call."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=ends,
            pad_token_id=0,
        )
    tokens = out[0, len(prompt) :].tolist()
    end = next((at for at, token in enumerate(tokens) if token in ends), None)
    reason = "stop" if end is not None else "length"
    return tokenizer.decode(tokens[:end], skip_special_tokens=True), len(prompt), len(tokens[:end]), reason


def expected(store, lines, more_ends=()):
    """Return the answer to each row of its model, loaded alone and given one prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(store / "short")
    models = {}
    for name, folder in ((None, "short"), ("long", "long")):
        recipe = Recipe.from_yaml(store / folder / "recipe.yaml")
        models[name] = loading.exported_model(recipe, store / folder).eval()
    models["base"] = loading.base_model(recipe, "float32").eval()
    found = []
    for line in lines:
        if "messages" in line:
            (message,) = line["messages"]
            text = f"<|im_start|>user\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"
        else:
            text = line["prompt"]
        ids = tokenizer(text)["input_ids"]
        ends = [tokenizer.eos_token_id, *more_ends]
        found.append(said_alone(models[line["adapter"]], tokenizer, ids, 12, ends))
    return found


def columns(answered):
    return [tuple(line[name] for name in prompts.ANSWERS[1:]) for line in answered]


def read(folder):
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def run(store, file, folder, shards=3, keep=None, **generation):
    """Run split, answer and join without Flyte."""
    generation = Generation(**{"max_new_tokens": 12, "batch_size": 4, **generation})
    artifacts = {"artifact": store / "short", "long": store / "long"}
    models = catalog.fingerprint({name: path / "artifact.json" for name, path in artifacts.items()})
    parts = prompts.split(file, shards, ["long"], generation, models, folder / "split")
    keep = str(keep or folder / "keep")
    answered = [folder / "answered" / part.file for part in parts]
    for part, out in zip(parts, answered, strict=True):
        if not batch.find_answers(part, keep, out):
            batch.answer_part(
                part, folder / "split" / part.file, store / "short", {"long": store / "long"}, keep, out
            )
    return parts, prompts.join(folder / "split", parts, answered, folder / "out")


@pytest.mark.slow
def test_batched_answers_are_those_of_one_prompt_alone_and_in_order(store, tmp_path, monkeypatch):
    # A model with so little training hardly ever ends an answer; a full stop ends it here.
    markers, stop = (
        models_generation.end_markers,
        AutoTokenizer.from_pretrained(store / "short").convert_tokens_to_ids("."),
    )
    monkeypatch.setattr(batch, "end_markers", lambda *arguments: [*markers(*arguments), stop])
    lines = rows()
    wanted = expected(store, lines, [stop])
    parts, summary = run(store, write(tmp_path / "prompts.jsonl", lines), tmp_path)
    found = read(tmp_path / "out")
    assert [part.rows for part in parts] == [5, 5, 4]
    assert [line["row"] for line in found] == list(range(14))
    assert [{name: line[name] for name in row} for line, row in zip(found, lines, strict=True)] == lines
    assert columns(found) == wanted
    assert len({answer for answer, *_ in wanted}) > 3
    assert {reason for *_, reason in wanted} == {"stop", "length"}, "both kinds of end were seen"
    assert summary.stopped == sum(reason == "stop" for *_, reason in wanted)
    assert (summary.rows, summary.bad) == (14, 0)
    assert summary.answer_tokens == sum(tokens for *_, tokens, _ in wanted)
    assert prompts.Summary.read(tmp_path / "out" / "inference.json") == summary
    listed = Contents.read(tmp_path / "out" / "artifact.json")
    assert (listed.kind, [file.file for file in listed.files]) == (
        "answers",
        ["answers.jsonl", "inference.json"],
    )
    run(store, tmp_path / "prompts.jsonl", tmp_path / "one", shards=1, batch_size=14)
    assert read(tmp_path / "one" / "out") == found


def test_a_complete_model_answers(store, base, tmp_path):
    loaded = batch.InferenceModel(store / "whole", {})
    asked = [
        {"row": {"prompt": "The sum is"}, "where": "x:1"},
        {"row": {"messages": question(1)}, "where": "x:2"},
    ]
    first, second = loaded.answers(asked, Generation(max_new_tokens=6))
    model = loaded.model
    tokenizer = loaded.formats["artifact"].tokenizer
    alone = said_alone(model, tokenizer, tokenizer("The sum is")["input_ids"], 6, [tokenizer.eos_token_id])
    assert (first.text, first.prompt_tokens, first.answer_tokens, first.finish_reason) == alone
    assert second.answer_tokens > 0
    with pytest.raises(ExportError, match="base: the artifact is a complete model, without its base"):
        loaded.answers([{"row": {"prompt": "x", "adapter": "base"}, "where": "x:1"}], Generation())
    with pytest.raises(
        ExportError, match="whole: a complete model; a: adapters need the base that they were trained on"
    ):
        batch.InferenceModel(store / "whole", {"a": store / "short"})


def test_parquet_comes_back_as_parquet(store, tmp_path):
    import pyarrow
    from pyarrow import parquet

    lines = rows(5)
    table = pyarrow.table(
        {name: [line.get(name) for line in lines] for name in ("id", "adapter", "messages", "prompt")}
    )
    parquet.write_table(table, tmp_path / "prompts.parquet")
    run(store, tmp_path / "prompts.parquet", tmp_path, shards=2)
    found = parquet.read_table(tmp_path / "out" / "answers.parquet").to_pylist()
    assert not (tmp_path / "out" / "answers.jsonl").exists()
    assert [line["id"] for line in found] == [f"q{index}" for index in range(5)]
    assert [line["messages"] for line in found] == [line.get("messages") for line in lines]
    assert columns(found) == expected(store, lines)


@pytest.mark.slow
def test_only_the_shard_that_failed_is_answered_again(store, tmp_path, monkeypatch):
    file, keep = write(tmp_path / "prompts.jsonl", rows(9)), tmp_path / "keep"
    answers, asked = batch.InferenceModel.answers, []

    def failing(self, lines, generation):
        asked.append([line["number"] for line in lines])
        if len(asked) == 2 and not (keep / "over").exists():
            raise OSError("the node is gone")
        return answers(self, lines, generation)

    monkeypatch.setattr(batch.InferenceModel, "answers", failing)
    with pytest.raises(OSError, match="the node is gone"):
        run(store, file, tmp_path / "first", keep=keep)
    assert len(list(keep.iterdir())) == 1
    (keep / "over").touch()
    parts, _ = run(store, file, tmp_path / "second", keep=keep)
    assert asked == [[0, 3, 6], [1, 4, 7], [1, 4, 7], [2, 5, 8]], "the first part was not asked again"
    run(store, file, tmp_path / "undisturbed")
    assert read(tmp_path / "second" / "out") == read(tmp_path / "undisturbed" / "out")
    del asked[:]
    run(store, file, tmp_path / "again", keep=keep)
    assert asked == []
    # One row changed, in the second part, and the file has another name and folder.
    lines = rows(9)
    lines[4]["messages"] = question(5)
    (tmp_path / "elsewhere").mkdir()
    run(store, write(tmp_path / "elsewhere" / "changed.jsonl", lines), tmp_path / "changed", keep=keep)
    assert asked == [[1, 4, 7]]
    prompts.remove_answers(parts, str(keep))
    assert not {prompts.answers_name(part) for part in parts} & {path.name for path in keep.iterdir()}


def test_keys_change_with_all_that_answers_depend_on(tmp_path):
    file = write(tmp_path / "prompts.jsonl", [{"prompt": "a"}, {"prompt": "b"}])

    def key(models="m", file=file, **generation):
        (part,) = prompts.split(file, 1, [], Generation(**generation), models, tmp_path / "split")
        return part.key

    other = write(tmp_path / "other.jsonl", [{"prompt": "a"}])
    assert len({key(), key(models="n"), key(max_new_tokens=3), key(seed=1), key(file=other)}) == 5
    assert key() == key() == key(file=write(tmp_path / "same.jsonl", [{"prompt": "a"}, {"prompt": "b"}]))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"prompts.jsonl:2: not JSON"),
        ({"text": "x"}, r"prompts.jsonl:2: neither prompt nor messages nor question; there are text"),
        ({"prompt": ""}, r"prompts.jsonl:2: prompt is empty"),
        ({"prompt": 3}, r"prompts.jsonl:2: prompt must be a string, found int 3"),
        (
            {"prompt": "x", "adapter": "lang"},
            r"prompts.jsonl:2: adapter 'lang': no adapter of that name; there are long, base",
        ),
        (
            {"prompt": "x", "answer": "y"},
            r"prompts.jsonl:2: column answer exists already, and the answers add one",
        ),
        ({"messages": []}, r"prompts.jsonl:2: messages must be a list"),
        (
            {"messages": [*question(1), {"role": "assistant", "content": "4"}]},
            r"prompts.jsonl:2: messages end with the assistant's turn, so there is nothing to answer",
        ),
    ],
)
def test_a_bad_row_is_reported_with_its_line_or_skipped(line, said, store, tmp_path):
    file = write(tmp_path / "prompts.jsonl", [{"prompt": "a"}, line, {"prompt": "b"}])
    with pytest.raises(DataError, match=said):
        prompts.split(file, 1, ["long"], Generation(), "m", tmp_path / "split")
    parts = prompts.split(file, 2, ["long"], Generation(max_bad_fraction=0.5), "m", tmp_path / "some")
    assert [part.rows for part in parts] == [2], "the second part would have had the bad row alone"
    with pytest.raises(DataError, match=r"1 of 3 rows is bad, more than max_bad_fraction 0.1 allows \(0\)"):
        prompts.split(file, 1, ["long"], Generation(max_bad_fraction=0.1), "m", tmp_path / "few")


def test_a_prompt_that_is_too_long_is_reported_or_skipped(store, tmp_path):
    file = write(
        tmp_path / "prompts.jsonl",
        ["nope", {"prompt": "The sum " * 700}, {"prompt": "The sum is"}, {"prompt": "b"}],
    )
    with pytest.raises(DataError, match=r"2 of 4 rows are bad, more than max_bad_fraction 0.3 allows"):
        run(store, file, tmp_path / "few", shards=2, max_bad_fraction=0.3)
    _, summary = run(store, file, tmp_path / "some", shards=2, max_bad_fraction=0.5)
    assert (summary.rows, summary.bad) == (4, 2)
    assert [line["row"] for line in read(tmp_path / "some" / "out")] == [2, 3]
    bad = [
        json.loads(line) for line in (tmp_path / "some" / "out" / "bad_rows.jsonl").read_text().splitlines()
    ]
    assert [row["line"] for row in bad] == [1, 2]
    assert "are more than the model's context of 1,024" in bad[1]["reason"]
    write(file, [{"prompt": "The sum " * 700}])
    with pytest.raises(
        DataError,
        match=r"prompts.jsonl:1: [\d,]+ tokens and 12 of an answer \(max_new_tokens\) are more than",
    ):
        run(store, file, tmp_path / "none", shards=1)


def test_settings_that_cannot_be(tmp_path):
    with pytest.raises(RecipeError, match="generation: 2 mistakes") as error:
        Generation(max_new_token=3, temperature=-1)
    assert "max_new_token: unknown key; did you mean max_new_tokens?" in str(error.value)
    file = write(tmp_path / "prompts.jsonl", [{"prompt": "x"}])
    with pytest.raises(RecipeError, match="shards 0: must be 1 to 900"):
        prompts.split(file, 0, [], Generation(), "m", tmp_path / "out")
    with pytest.raises(DataError, match=r"prompts: empty.jsonl has no rows"):
        prompts.split(write(tmp_path / "empty.jsonl", []), 2, [], Generation(), "m", tmp_path / "out")


def test_rows_that_would_not_come_back_as_they_were(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "note": "x\\ud83d"}\n')
    with pytest.raises(
        DataError, match=r"prompts.jsonl:2: half of a surrogate pair \('\\ud83d'\), which is not a character"
    ):
        prompts.split(file, 1, [], Generation(), "m", tmp_path / "none")
    assert [
        part.rows
        for part in prompts.split(file, 1, [], Generation(max_bad_fraction=0.5), "m", tmp_path / "some")
    ] == [1]
    table = tmp_path / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"], "picture": [b"\x00\xff"]}), table)
    with pytest.raises(DataError, match=r"column picture has bytes, which JSON cannot store; remove it"):
        prompts.split(table, 1, [], Generation(), "m", tmp_path / "bytes")


def test_columns_that_parquet_cannot_hold(tmp_path):
    file = write(tmp_path / "answers.jsonl", [{"a": 1}, {"a": "x"}])
    with pytest.raises(
        DataError, match="Parquet cannot store these columns .* give the prompts as JSON Lines"
    ):
        prompts._to_parquet(file)


@pytest.mark.slow
def test_drawn_answers_follow_from_the_seed(store):
    model = batch.InferenceModel(store / "short", {})
    asked = [{"row": {"prompt": f"The sum of {index} and"}, "where": f"x:{index}"} for index in range(4)]
    first, again, other = (
        [answer.text for answer in model.answers(asked, Generation(temperature=1.5, top_p=0.95, seed=seed))]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_answers_end_at_the_template_s_marker_and_the_model_s_own(store):
    model = batch.InferenceModel(store / "short", {})
    tokenizer = model.formats["artifact"].tokenizer
    end, text = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    tokenizer.eos_token = "<|endoftext|>"
    model.model.generation_config = None
    assert models_generation.end_markers(tokenizer, model.model) == sorted([end, text])
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} words\n{% endfor %}"
    assert models_generation.end_markers(tokenizer, model.model) == [text]
    from transformers import GenerationConfig

    model.model.generation_config = GenerationConfig(eos_token_id=[7, 9])
    assert models_generation.end_markers(tokenizer, model.model) == sorted({text, 7, 9})


def test_a_batch_that_does_not_fit_says_what_to_do(store, monkeypatch):
    model = batch.InferenceModel(store / "short", {})

    def full(**inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(model.model, "generate", full)
    with pytest.raises(OutOfMemory, match="batch_size 8: 1 prompt of 3 tokens and their answers do not fit"):
        models_generation.answer(
            model.model, model.formats["artifact"].tokenizer, [[5, 6, 7]], Generation(), [2]
        )


def test_chats_are_asked_as_they_were_trained(store, base, tmp_path):
    model = batch.InferenceModel(store / "short", {})
    form = model.formats["artifact"]
    plain = form.tokens({"messages": question(1)}, "x:1")
    named = batch.PromptFormat(form.tokenizer, prompts.Columns(system_prompt="Be brief."), form.ends).tokens(
        {"messages": question(1)}, "x:1"
    )
    assert form.tokenizer.decode(named).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user"
    )
    assert named[-len(plain) :] == plain
    form.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(DataError, match=r"x:1: the chat template refuses these messages \(user\): no"):
        form.tokens({"messages": question(1)}, "x:1")
    form.tokenizer.chat_template = None
    with pytest.raises(
        DataError, match="x:1: a chat, but the model's tokenizer has no chat template; give a prompt"
    ):
        form.tokens({"messages": question(1)}, "x:1")


def test_a_text_to_continue_begins_as_in_training_and_does_not_end(base):
    from tokenizers.processors import TemplateProcessing

    form = batch.PromptFormat(AutoTokenizer.from_pretrained(base), prompts.Columns(), [])
    begin, end = form.tokenizer.bos_token, form.tokenizer.eos_token
    numbers = [form.tokenizer.convert_tokens_to_ids(token) for token in (begin, end)]
    plain = form.tokens({"prompt": "The sum"}, "x:1")
    form.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=list(zip((begin, end), numbers, strict=True))
    )
    assert form.tokens({"prompt": "The sum"}, "x:1") == [numbers[0], *plain]
    without = batch.PromptFormat(form.tokenizer, prompts.Columns(add_bos_token=False), form.ends)
    assert without.tokens({"prompt": "The sum"}, "x:1") == plain


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_the_workflow_continues_after_a_shard_that_failed(store, tmp_path, monkeypatch):
    lines, asked, answers = rows(7), [], batch.InferenceModel.answers

    def failing(self, lines, generation):
        asked.append([line["number"] for line in lines])
        if len(asked) == 2:
            raise OSError("the node is gone")
        return answers(self, lines, generation)

    def execution():
        return infer(
            artifact=FlyteDirectory(str(store / "short")),
            prompts=FlyteFile(str(write(tmp_path / "prompts.jsonl", lines))),
            adapters={"long": FlyteDirectory(str(store / "long"))},
            shape="cpu-1",
            shards=2,
            generation=Generation(max_new_tokens=12, batch_size=4),
            scratch_folder=str(tmp_path / "keep"),
        )

    monkeypatch.setattr(batch.InferenceModel, "answers", failing)
    with pytest.raises(OSError, match="the node is gone"):
        execution()
    found = execution()
    assert asked == [[0, 2, 4, 6], [1, 3, 5], [1, 3, 5]]
    assert columns(read(Path(found.download() if found.remote_source else found.path))) == expected(
        store, lines
    )
    assert list((tmp_path / "keep").iterdir()) == []


def test_each_shape_is_a_map_task_that_the_workflow_routes_to():
    entities = OrderedDict()
    get_serializable(entities, SETTINGS, infer)
    names = {entity.name for entity in entities if hasattr(entity, "name")}
    for shape in load_shapes():
        task = INFER[shape.name]
        assert task.name in names
        template = get_serializable(OrderedDict(), SETTINGS, task).template.to_flyte_idl()
        pod = template.k8s_pod.pod_spec
        assert dict(pod["containers"][0]["resources"]["limits"])["memory"] == f"{shape.memory_gib}Gi"
        command = task.get_command(SETTINGS)
        module, name = command[command.index("task-module") + 1], command[command.index("task-name") + 1]
        assert getattr(importlib.import_module(module), name) is task.python_function_task
        assert (
            command[command.index("vars") + 1]
            == "adapters,artifact,base,folder,scratch_folder,trust_remote_code"
        )


@pytest.mark.slow
def test_cpu_pods_deal_out_and_join_without_torch():
    code = "import sys, tasks.infer; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"
    assert os.environ.get("HF_HUB_OFFLINE")
