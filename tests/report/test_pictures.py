"""Pictures on a page: each before the tokens that stand for it, reduced, and nothing that is fetched."""

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from flytune import data
from flytune.data.contract import CONTRACT, Contract
from flytune.models import images
from flytune.recipe import DataRequest, Recipe
from flytune.report import pictures, xray
from tests.support import vision_models
from tests.support.reports import Tags
from tests.support.vision_rows import content

EVIL = '"><script>alert(1)</script>'


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared rows: one about two images, of which one is large, and one about none."""
    folder = tmp_path_factory.mktemp("pictures")
    base = vision_models.write(folder / "base", "smolvlm")
    Image.new("RGB", (600, 300), (200, 20, 20)).save(folder / "wide.png")
    Image.new("RGB", (40, 40), (20, 20, 200)).save(folder / "small.png")
    parts = [
        {"type": "image", "image": "wide.png"},
        {"type": "image", "image": "small.png"},
        {"type": "text", "text": f"Which colors? {EVIL}"},
    ]
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "Red."}]}
        for asked in (parts, "Say red.")
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"data.heldout_fraction": 0, "data.contract": "warn"}
    recipe = Recipe.model_validate(content(base, folder / "rows.jsonl", **changes))
    data.prepare(DataRequest.of(recipe, "x"), folder / "dataset")
    xray.page(folder / "dataset", recipe, folder / "page.html")
    return folder / "dataset"


def test_the_x_ray_shows_each_image_before_its_tokens(dataset: Path) -> None:
    page = (dataset.parent / "page.html").read_text(encoding="utf-8")
    tags = Tags(page)
    assert tags.open == []
    assert tags.all("script") == []
    shown = tags.all("img")
    (sample,) = [row for row in data.load(dataset, "train") if row[images.COLUMN]]
    processor = data.shards.stored_images(dataset).processor
    tokens = sum(token in processor.token_ids for token in sample["input_ids"])
    captions = [image["alt"] for image in shown[:2]]
    assert captions[0].startswith("image 1: 600 x 300 pixels, ")
    assert captions[1].startswith("image 2: 40 x 40 pixels, ")
    assert sum(int(caption.split()[-2]) for caption in captions) == tokens
    colors = []
    for image in shown[:2]:
        kind, _, encoded = image["src"].partition(",")
        assert kind == "data:image/jpeg;base64"
        with Image.open(io.BytesIO(base64.b64decode(encoded))) as picture:
            assert max(picture.size) <= pictures.SIDE
            colors.append(picture.getpixel((5, 5)))
    assert [max(range(3), key=color.__getitem__) for color in colors] == [0, 2]
    places = [page.index(text) for text in (captions[0], "&lt;image&gt;\u00a0x\u00a0", captions[1])]
    assert places == sorted(places)


def test_only_so_many_images_of_a_sample_are_on_the_page(dataset: Path, monkeypatch) -> None:
    monkeypatch.setattr(pictures, "MOST", 1)
    (sample,) = [row for row in data.load(dataset, "train") if row[images.COLUMN]]
    first, second = pictures.Pictures(dataset).of_sample(sample[images.COLUMN])
    assert first.source
    assert not second.source
    assert second.caption.startswith("image 2: ")


def test_the_contract_has_counts_and_sizes(dataset: Path) -> None:
    (check,) = [check for check in Contract.read(dataset / CONTRACT).checks if check.name == "images"]
    assert check.found.startswith(f"2 images, of {(600 * 300 + 40 * 40) // 2:,} pixels and ")
    assert "1 of 2 samples has none" in check.found
