"""Images of rows from elsewhere: files of all kinds, damaged and too large, and names of files elsewhere."""

import base64
import hashlib
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st
from PIL import Image

from flytune.data import image_rows
from flytune.errors import DataError
from tests.fuzz.isolation import Wrong
from tests.fuzz.kinds import Samples, kind
from tests.fuzz.mutations import damaged

_MOST = 900
"""Value of data.max_pixels."""
_LARGEST = 100_000_000
"""Pixels of the largest image that docs/images.md allows."""
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "PPM")
_SUFFIXES = ("png", "jpg", "gif", "txt", "svg")
_SECRET = (250, 10, 120)
"""Color of the image that is not below the data's folder."""
_OUTSIDE = ("../secret.png", "{secret}", "file://{secret}", "a/../../secret.png", "zip://a.png::{secret}")
_ADDRESSES = (
    "https://127.0.0.1:9/a.png",
    "simplecache::https://127.0.0.1:9/a.png",
    "ftp://127.0.0.1:9/a.png",
)
_ODD: tuple[Any, ...] = (3, None, "", [], {}, {"path": None}, {"url": {"url": 5}}, [["a"]], "\x00", ".")
_PIPE = "pipe.png"


class _Given(NamedTuple):
    """A row's image and the file that it may name."""

    image: Any
    content: bytes
    is_valid: bool
    """True if the content is an image that is read as it is."""


def _picture(form: str, size: tuple[int, int] = (40, 30)) -> bytes:
    buffer = io.BytesIO()
    Image.radial_gradient("L").resize(size).convert("RGB").save(buffer, form)
    return buffer.getvalue()


_PICTURES = {form: _picture(form) for form in _FORMATS}


def _animated() -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("P", (8, 8), number) for number in range(3)]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


def _bomb(width: int, height: int) -> bytes:
    """Return a PNG of black and white pixels, whose file is a thousand times smaller than they are."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((width + 7) // 8 + 1) * height, 9)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


_BOMBS = [_animated(), _bomb(12_000, 9_000), _bomb(1_000_000, 110)]


def _images(samples: Samples) -> st.SearchStrategy[_Given]:
    forms = st.sampled_from(sorted(_PICTURES))
    names = st.sampled_from(_SUFFIXES).map("a.{}".format)
    whole = st.tuples(names, forms).map(lambda one: _Given(one[0], _PICTURES[one[1]], True))
    spoiled = st.tuples(names, forms.flatmap(lambda form: damaged(_PICTURES[form]))).map(
        lambda one: _Given(*one, False)
    )
    bombs = st.tuples(names, st.sampled_from(_BOMBS)).map(lambda one: _Given(*one, False))
    texts = forms.map(lambda form: base64.b64encode(_PICTURES[form]))
    encoded = texts.flatmap(lambda text: damaged(text, often=0.7)).map(
        lambda text: _Given(f"data:image/png;base64,{text.decode('latin-1')}", b"", False)
    )
    inside = forms.flatmap(lambda form: damaged(_PICTURES[form])).map(
        lambda content: _Given({"bytes": content, "path": "../secret.png"}, b"", False)
    )
    named = st.sampled_from([*_OUTSIDE, *_ADDRESSES, *_ODD, _PIPE]).map(lambda name: _Given(name, b"", False))
    return st.one_of(whole, spoiled, spoiled, bombs, encoded, inside, named, named)


@kind("images", _images)
def check_images(samples: Samples, given: _Given, folder: Path) -> None:
    """An image is read within the limits, from below the data's folder, and stored as it is; or refused."""
    data, out, secret = folder / "data", folder / "out", folder / "secret.png"
    data.mkdir()
    Image.new("RGB", (20, 20), _SECRET).save(secret)
    os.mkfifo(data / _PIPE)
    image = given.image
    if isinstance(image, str):
        image = image.replace("{secret}", str(secret))
    if given.content:
        (data / given.image).write_bytes(given.content)
    row = {"messages": [{"role": "user", "content": "See <image>"}], "images": [image]}
    try:
        marked, pictures = image_rows.read(row, {}, str(data / "rows.jsonl"), _MOST, out, "rows.jsonl:1")
    except DataError:
        if given.is_valid:
            raise Wrong("an image that is whole is refused") from None
        raise
    if len(pictures) != marked["messages"][0]["content"].count("\U0010ff7f"):
        raise Wrong(f"{len(pictures)} images, and other places for them")
    for digest, picture in pictures:
        content = (out / "images" / digest).read_bytes()
        if hashlib.sha256(content).hexdigest() != digest or (given.content and content != given.content):
            raise Wrong("the file is not stored as it is")
        with Image.open(io.BytesIO(content)) as opened:
            if opened.width * opened.height > _LARGEST:
                raise Wrong(f"{opened.width} x {opened.height} pixels are read")
        if picture.mode != "RGB" or not 0 < picture.width * picture.height <= _MOST:
            raise Wrong(f"a picture of {picture.size} in {picture.mode}")
        if picture.getpixel((0, 0)) == _SECRET:
            raise Wrong("an image is read that is not below the data's folder")
        if getattr(opened, "n_frames", 1) > 1 and opened.format != "MPO":
            raise Wrong("one frame of several is read")
