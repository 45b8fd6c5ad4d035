"""Images in rows: every form that people have is the same sample, and what cannot be trained on is named."""

import base64
import hashlib
from contextlib import nullcontext

import pytest
from PIL import Image

from flytune import data
from flytune.data.image_rows import content_of, extracted
from flytune.errors import DataError, RecipeError
from flytune.models import chat_templates, images, tokenizers
from flytune.models.chat_templates import IMAGE
from flytune.models.scoring import IGNORED
from flytune.recipe import Data, DataRequest, Model, Recipe
from tests.support import vision_models
from tests.support.tiny import tiny_recipe, write_rows

ANSWER = {"role": "assistant", "content": "Paris"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    for number, name in enumerate(("a.png", "b.png")):
        Image.new("RGB", (40, 40 + 16 * number), (90 * number, 30, 60)).save(folder / name)
    Image.new("RGB", (3000, 1)).save(folder / "thin.png")
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A function that returns the folder of a tiny model of a type."""
    made = {}

    def base(model_type):
        if model_type not in made:
            made[model_type] = vision_models.write(tmp_path_factory.mktemp(model_type), model_type)
        return made[model_type]

    return base


def asked(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def text(words):
    return {"type": "text", "text": words}


def prepared(base, folder, out, *rows, **changes):
    section = {
        "path": str(write_rows(folder / "rows.jsonl", rows)),
        "images": True,
        "heldout_fraction": 0,
        "max_length": 512,
    }
    request = DataRequest(
        model=Model(name_or_path=str(base)),
        data=Data.model_validate(section | changes),
        fingerprint="x",
        row_kind="image_answers",
    )
    return data.prepare(request, out)


FORMS = {
    "path": lambda folder: asked(text("See "), {"type": "image", "image": "a.png"}, text("What?")),
    "absolute path": lambda folder: asked(
        text("See "), {"type": "image", "image": f"{folder}/b/../a.png"}, text("What?")
    ),
    "address": lambda folder: asked(
        text("See "), {"type": "image", "path": f"file://{folder}/a.png"}, text("What?")
    ),
    "data url": lambda folder: asked(
        text("See "),
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + encoded(folder / "a.png")}},
        text("What?"),
    ),
    "base64": lambda folder: {**word(), "images": [encoded(folder / "a.png")]},
    "a word": lambda folder: {**word(), "image": "a.png"},
    "a part without an image": lambda folder: {
        **asked(text("See "), {"type": "image"}, text("What?")),
        "images": ["a.png"],
    },
    "a struct of datasets": lambda folder: {**word(), "image": {"bytes": None, "path": "a.png"}},
    "sharegpt": lambda folder: {
        "conversations": [
            {"from": "human", "value": "See <image>What?"},
            {"from": "gpt", "value": "Paris"},
        ],
        "images": ["a.png"],
    },
    "a question": lambda folder: {"instruction": "See <image>What?", "output": "Paris", "image": "a.png"},
    "an input": lambda folder: {
        **{"instruction": "", "input": "See <image>What?"},
        **{"output": "Paris", "image": "a.png"},
    },
    "another data url": lambda folder: {
        **word(),
        "image": "data:;charset=binary;base64," + encoded(folder / "a.png"),
    },
    "a hash": lambda folder: {**word(), "image": hashed(folder)},
    "another column": lambda folder: {**word(), "photo": "a.png"},
}


def word():
    return {"messages": [{"role": "user", "content": "See <image>What?"}, ANSWER]}


def hashed(folder):
    """Return the name of a copy that is as long as a text in base64, and has its letters."""
    content = (folder / "a.png").read_bytes()
    name = hashlib.sha256(content).hexdigest()
    (folder / name).write_bytes(content)
    return name


def encoded(file):
    return base64.b64encode(file.read_bytes()).decode()


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_same_sample(form, folder, bases, tmp_path):
    base = bases("qwen2_5_vl")
    columns = {"columns": {"images": "photo"}} if form == "another column" else {}
    prepared(base, folder, tmp_path / "one", FORMS["path"](folder))
    prepared(base, folder, tmp_path / "other", FORMS[form](folder), **columns)
    (one,), (other,) = (data.load(tmp_path / name, "train") for name in ("one", "other"))
    assert other == one
    assert one[images.COLUMN] == hashlib.sha256((folder / "a.png").read_bytes()).hexdigest()
    assert (tmp_path / "other" / images.FOLDER / one[images.COLUMN]).read_bytes() == (
        folder / "a.png"
    ).read_bytes()


def test_images_that_nothing_stands_for_come_before_the_first_question():
    row, found = extracted(
        {**word(), "images": ["a.png"]}
        | {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What?"},
                ANSWER,
            ]
        },
        {},
        "x",
    )
    assert row["messages"][1]["content"] == f"{IMAGE}What?"
    assert found == ["a.png"]
    row, found = extracted({"instruction": "What?", "output": "Paris", "images": ["a", "b"]}, {}, "x")
    assert (row["instruction"], found) == (f"{IMAGE}{IMAGE}What?", ["a", "b"])


def test_images_come_before_the_first_question_whatever_its_columns_are_called():
    turns = [{"speaker": "human", "text": "What?"}, {"speaker": "gpt", "text": "Paris"}]
    columns = {"conversations": "dialog", "from": "speaker", "value": "text"}
    row, _ = extracted({"dialog": turns, "images": ["a"]}, columns, "x")
    assert row["dialog"][0] == {"speaker": "human", "text": f"{IMAGE}What?"}


def test_images_stand_in_the_turns_before_a_question_too():
    asked_before = {
        "history": [["See <image>", "Yes."]],
        "instruction": "Now <image>",
        "input": "and <image>",
    }
    row, found = extracted({**asked_before, "images": ["a", "b", "c"]}, {}, "x")
    assert row["history"] == [[f"See {IMAGE}", "Yes."]]
    assert (row["instruction"], row["input"]) == (f"Now {IMAGE}", f"and {IMAGE}")
    assert found == ["a", "b", "c"]


def test_images_of_parts_and_of_the_column_keep_their_order():
    parts = [{"type": "image"}, {"type": "image", "image": "b"}, {"type": "image"}]
    assert extracted({**asked(*parts), "images": ["a", "c"]}, {}, "x")[1] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**word(), "images": ["a.png", "b.png"]}, "2 images in the column, and 1 place"),
        ({**asked({"type": "image"}), "images": []}, "0 images in the column, and 1 place"),
        (asked({"type": "image", "image": "missing.png"}), r"missing\.png: no such image"),
        (asked({"type": "image", "image": "rows.jsonl"}), "cannot be read as an image"),
        (asked({"type": "image", "image": "https://x.org/a.png"}), "not read from the web"),
        (asked({"type": "image", "image": "data:image/png;base64,ä"}), "an image is not base64"),
        (asked({"type": "image", "image": 3}), "must be a path, an address, bytes or base64, found int"),
        (asked({"type": "video", "video": "a.mp4"}), "video and audio cannot be trained on"),
        (asked(text("a \U0010ff7f")), "U\\+10FF7F"),
        ({**asked(text("the token <|image_pad|>")), "image": "a.png"}, "row's own text may not have it"),
        ({"prompt": "a <image>", "completion": "b", "image": "a.png"}, "only chats"),
        ({"text": "a", "image": "a.png"}, "no question that they belong to"),
        (
            {"messages": [{"role": "user", "content": None}, ANSWER], "image": "a.png"},
            "rows.jsonl:1: has images, and the question that they belong to has no content",
        ),
        (
            {"messages": [{"role": "user"}, ANSWER], "image": "a.png"},
            "rows.jsonl:1: has images, and the question that they belong to has no content",
        ),
        (
            {**word(), "image": "x" * 300},
            "rows.jsonl:1: the image's name 'xxx.* longer than 1024 bytes, or 255",
        ),
        (
            {**word(), "image": "thin.png"},
            r"rows.jsonl:1: the model's processor refuses an image \(3,000 x 1 pixels\): absolute aspect",
        ),
    ],
)
def test_a_row_that_cannot_be_trained_on_says_why(row, reason, folder, bases, tmp_path):
    with pytest.raises(DataError, match=reason):
        prepared(bases("qwen2_5_vl"), folder, tmp_path / "out", row)


def test_a_row_of_text_has_no_image_s_token_where_special_tokens_of_rows_are_kept(folder, bases, tmp_path):
    row = asked(text("the token <|image_pad|>"))
    kept = {"split_special_tokens": True, "contract": "warn"}  # one row of one has a special token
    as_text = prepared(bases("qwen2_5_vl"), folder, tmp_path / "text", row, **kept)
    assert as_text.train.samples == 1
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*the row's own text"):
        prepared(bases("qwen2_5_vl"), folder, tmp_path / "token", row, split_special_tokens=False)


OUTSIDE = ["/etc/passwd", "../a.png", "b/../../a.png", "file:///etc/passwd", "simplecache::s3://b/a.png"]


@pytest.mark.parametrize("pattern", ["rows.jsonl", "*.jsonl", "", "../[1]/rows.jsonl"])
def test_images_are_below_the_folder_of_a_file_a_pattern_or_a_folder(pattern, tmp_path):
    folder = tmp_path / "[1]"
    folder.mkdir()
    (folder / "rows.jsonl").write_text("")
    (folder / "a.png").write_bytes(b"content")
    if pattern == "*.jsonl":
        folder = folder.rename(tmp_path / "plain")
    assert content_of("./a.png", f"{folder}/{pattern}", "x") == b"content"


@pytest.mark.parametrize("name", [*OUTSIDE, "ftp://host/a.png", "zip://a.png::/x.zip"])
def test_rows_name_nothing_outside_of_their_folder(name, folder):
    with pytest.raises(DataError, match="not below the data's address"):
        content_of(name, "s3://bucket/data/rows.jsonl", "x")
    with pytest.raises(DataError, match="not below the data's folder"):
        content_of(name, str(folder / "rows.jsonl"), "x")
    with pytest.raises(DataError, match="has its images in its rows"):
        content_of(name, None, "x")


def test_samples_about_different_images_are_different(folder, bases, tmp_path):
    Image.new("RGB", (40, 40), (7, 7, 7)).save(folder / "c.png")  # as many tokens as a.png
    rows = [asked({"type": "image", "image": name}, text("What?")) for name in ("a.png", "c.png", "a.png")]
    manifest = prepared(bases("qwen2_5_vl"), folder, tmp_path / "out", *rows, deduplicate=True)
    assert (manifest.train.samples, manifest.duplicates) == (2, 1)
    faults = {check.name for check in data.contract.stored(tmp_path / "out").faults}
    assert not faults & {"duplicates", "near duplicates"}


def test_a_sample_that_is_too_long_is_left_out_and_none_is_cut(folder, bases, tmp_path):
    rows = [asked({"type": "image", "image": name}, text("What?")) for name in ("a.png", "b.png")]
    lengths = []
    for number, row in enumerate(rows):
        prepared(bases("qwen2_5_vl"), folder, tmp_path / str(number), row)
        lengths.append(len(data.load(tmp_path / str(number), "train")[0]["input_ids"]))
    assert lengths[0] < lengths[1]
    manifest = prepared(bases("qwen2_5_vl"), folder, tmp_path / "out", *rows, max_length=lengths[0])
    assert (manifest.train.samples, manifest.dropped_too_long, manifest.truncated) == (1, 1, 0)


@pytest.mark.parametrize(
    "model_type",
    [
        name if name in ("qwen2_5_vl", "smolvlm") else pytest.param(name, marks=pytest.mark.slow)
        for name in vision_models.TYPES
    ],
)
def test_tokens_are_those_of_the_processor_and_only_answers_are_trained(model_type, folder, bases, tmp_path):
    base = bases(model_type)
    row = {
        "messages": [
            {"role": "user", "content": [text("What?"), {"type": "image", "image": "a.png"}]},
            ANSWER,
            {"role": "user", "content": [{"type": "image", "image": "b.png"}, text("And this one?")]},
            {"role": "assistant", "content": [text("The sea.")]},
        ]
    }
    prepared(base, folder, tmp_path / "out", row)
    (sample,) = data.load(tmp_path / "out", "train")
    tokenizer = tokenizers.load(base)
    processor = images.Processor(str(base), None, tokenizer)._processor
    in_parts = [
        {
            **message,
            "content": [text(message["content"])]
            if isinstance(message["content"], str)
            else [{"type": part["type"], "text": part.get("text")} for part in message["content"]],
        }
        for message in row["messages"]
    ]
    pictures = [Image.open(folder / name).convert("RGB") for name in ("a.png", "b.png")]
    rendered = tokenizer.apply_chat_template(in_parts, tokenize=False)
    assert sample["input_ids"] == list(processor(text=[rendered], images=[pictures])["input_ids"][0])
    trained = [
        token for token, label in zip(sample["input_ids"], sample["labels"], strict=True) if label != IGNORED
    ]
    answers = [answer.strip() for answer in tokenizer.decode(trained).split("<|im_end|>")]
    assert answers == ["Paris", "The sea.", ""]
    assert not set(trained) & set(processor.image_token_ids)


def test_what_cannot_have_images_says_so_in_the_recipe(folder, bases):
    def refused(**changes):
        with pytest.raises(RecipeError) as error:
            Recipe.model_validate(tiny_recipe(bases("qwen2_5_vl"), folder / "rows.jsonl", changes))
        return str(error.value)

    assert "data.images: objective: dpo trains text alone" in refused(
        **{"data.images": True, "objective": {"name": "dpo"}}
    )
    assert "packing: samples with images are not packed" in refused(
        **{"data.images": True, "data.packing": True}
    )
    assert "max_pixels: only for data.images: true" in refused(**{"data.max_pixels": 100})


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "smolvlm"])
def test_a_question_of_text_is_in_what_its_template_renders(model_type, bases):
    tokenizer = tokenizers.load(bases(model_type))
    chat = [{"role": "user", "content": "Where is Paris?"}]
    for process in (nullcontext, chat_templates.in_process):
        with process():
            assert "Where is Paris?" in tokenizer.apply_chat_template(chat, tokenize=False)
