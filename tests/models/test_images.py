"""Image files as a model sees them: upright, in RGB, of at most so many pixels; or refused, in a sentence."""

import io
import struct
import zlib

import pytest
from PIL import Image

from flytune.errors import DataError, PreparedDataError
from flytune.models import images


def content(picture, form="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def plain(mode="RGB", size=(6, 4), color=0):
    return Image.new(mode, size, color)


def rotated():
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held on its side
    return content(plain(size=(6, 4)), "JPEG", exif=exif)


def png(width, height, bits=8):
    """Return a PNG in RGB of which Pillow writes none: with 16 bits a colour, or with fewer pixels than it
    says."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(13))
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("file", "size", "corner"),
    [
        pytest.param(content(plain(color=(9, 8, 7))), (6, 4), (9, 8, 7), id="rgb"),
        pytest.param(content(plain("L", color=9)), (6, 4), (9, 9, 9), id="grey"),
        pytest.param(content(plain("1", color=1)), (6, 4), (255, 255, 255), id="one bit"),
        pytest.param(content(plain("RGBA", color=(9, 8, 7, 0))), (6, 4), (255, 255, 255), id="transparent"),
        pytest.param(content(plain("CMYK", color=(0, 0, 0, 255)), "TIFF"), (6, 4), (0, 0, 0), id="cmyk"),
        pytest.param(
            content(plain(color=(9, 9, 9)), "MPO", save_all=True, append_images=[plain()], quality=100),
            (6, 4),
            (9, 9, 9),
            id="a telephone's",
        ),
        pytest.param(rotated(), (4, 6), (0, 0, 0), id="on its side"),
    ],
)
def test_a_picture_is_upright_and_in_rgb(file, size, corner):
    picture = images.opened(file, None, "x")
    assert (picture.mode, picture.size, picture.getpixel((0, 0))) == ("RGB", size, corner)


def test_a_large_picture_keeps_its_proportions():
    assert images.opened(content(plain(size=(400, 100))), 10_000, "x").size == (200, 50)
    assert images.opened(content(plain(size=(100, 100))), 10_000, "x").size == (100, 100)
    # None is narrower than a pixel.
    assert images.opened(content(plain(size=(1, 4000))), 1_000, "x").size == (1, 1000)
    assert images.opened(content(plain(size=(4000, 1))), 1, "x").size == (1, 1)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        pytest.param(
            content(plain(size=(90, 90), color=(1, 2, 3)), "JPEG")[:-40], "cannot be read", id="cut"
        ),
        pytest.param(b"not an image", "cannot be read as an image", id="text"),
        pytest.param(b"", "cannot be read as an image", id="empty"),
        pytest.param(content(plain("I;16", color=900)), "more than 8 bits a channel", id="16 bits"),
        pytest.param(
            content(plain(), "GIF", save_all=True, append_images=[plain(color=(255, 0, 0))]),
            r"is animated, or has pages \(2 frames\)",
            id="animated",
        ),
        pytest.param(content(plain(), "EPS"), "cannot be read as an image", id="a program"),
        pytest.param(png(2, 1, bits=16), "more than 8 bits a channel", id="16 bits of colour"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(file, reason):
    with pytest.raises(DataError, match=rf"^row 3: a\.png: .*{reason}"):
        images.opened(file, None, "row 3: a.png")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_bomb_is_refused_before_it_is_opened():
    with pytest.raises(DataError, match="has 12,000 x 10,000 pixels, more than 100,000,000"):
        images.opened(png(12_000, 10_000), None, "x")


def test_a_stored_image_is_what_was_prepared(tmp_path):
    file = content(plain(color=(9, 8, 7)))
    digest = images.store(file, tmp_path)
    images.store(file, tmp_path)
    assert [path.name for path in (tmp_path / images.FOLDER).iterdir()] == [digest]
    (tmp_path / images.FOLDER / digest).write_bytes(content(plain()))

    class Any:
        max_pixels = None

    stored = images.StoredImages(tmp_path, Any())
    with pytest.raises(PreparedDataError, match="its content is not what was prepared"):
        stored.pictures({images.COLUMN: digest})
    with pytest.raises(PreparedDataError, match="No such file"):
        stored.pictures({images.COLUMN: "0" * 64})
