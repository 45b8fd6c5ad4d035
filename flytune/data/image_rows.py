"""Images of rows, in the forms that people have them: the place of each in a chat, and its file.

In the contents of messages a character stands for each image (chat_templates.IMAGE); chat_template.py
writes what the base's template has for one in its place.
"""

import base64
import os
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from flytune import limits, names
from flytune.data.columns import TURNS, NamedRow
from flytune.data.render import Rendered
from flytune.errors import DataError
from flytune.models import base, images, tokenizers
from flytune.models.chat_templates import IMAGE
from flytune.recipe import DataRequest, Source
from flytune.sentences import counted
from flytune.storage import Storage

COLUMNS = ("images", "image")
"""Columns of a row's images: a list of them, or one."""
WORD = "<image>"
"""Text in whose place LLaVA's, LLaMA-Factory's and ShareGPT's rows have an image of the column."""
READ, PIXELS, TOKENS = "images read", "pixels of images", "tokens of images"
"""Names of notes in a manifest: sums over the images of all rows that were read."""
_CHATS = (*TURNS, "prompt", "completion")
_QUESTIONS = ("instruction", "prompt", "question")
_READ_IN_ORDER = (*_CHATS, "history", "instruction", "input", "question")
"""Columns that a chat is made of, in the order in which it has them."""
_TYPES = ("image", "image_url", "input_image")
"""Types of content parts that are images: transformers', OpenAI's two."""
_OF_PART = ("image", "image_url", "url", "path", "bytes", "base64")
"""Keys of such a part that hold the image."""
_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{64,}={0,2}\s*")
_BASE64_OF_IMAGES = re.compile(r"/9j/|iVBORw|R0lGOD|Qk|SUkq|TU0A|UklGR|AAAADGpQ|/0//UQ|UD[A-Za-z]")
"""Beginnings of images.FORMATS in base64. A path may be of the same characters: files are named by hashes."""
_STORAGES = ("s3://", "gs://")
"""Beginnings of addresses that an image may have wherever its data are."""
_FOLDERS = re.compile(r"[^/]*[*?\[].*")


class Picture(NamedTuple):
    """An image of a row."""

    digest: str
    """SHA-256 of its file."""
    image: Any
    """Pillow's image, as the model sees it."""


def extracted(
    row: dict[str, Any], columns: Mapping[str, str], where: str
) -> tuple[dict[str, Any], list[Any]]:
    """Return a row with IMAGE in the place of each image, and the images in their order, as the row has them.

    Images of a column that nothing in the text stands for come before the first question.

    Raises:
        DataError: the text has another number of places than the column has images.
    """
    return _Extraction(NamedRow(row, columns, where)).run()


class _Extraction:
    """Extraction of the images of one row, whose text is read in the order in which a chat has it."""

    def __init__(self, row: NamedRow) -> None:
        self._row = row
        # Images of the column, and how many of its places the text had so far.
        self._listed = [image for name in COLUMNS for image in _as_list(row.get(name))]
        self._places = 0
        self._images: list[Any] = []

    def run(self) -> tuple[dict[str, Any], list[Any]]:
        """Return the row with IMAGE in the place of each image, and the images."""
        of_images = [self._row.name(name) for name in COLUMNS]
        values = {name: value for name, value in self._row.values.items() if name not in of_images}
        for theirs in dict.fromkeys(map(self._row.name, _READ_IN_ORDER)):
            if isinstance(values.get(theirs), list):
                values[theirs] = [self._turn(turn) for turn in values[theirs]]
            elif isinstance(values.get(theirs), str):
                values[theirs] = self._text(values[theirs])
        if self._listed and not self._places:
            self._put_first(values, IMAGE * len(self._listed))
            self._images = [*self._listed, *self._images]
        elif len(self._listed) != self._places:
            raise DataError(
                f"{self._row.where}: {counted(len(self._listed), 'image')} in the column, and "
                f"{counted(self._places, 'place')} for them in the text ({WORD}, or a part of type image "
                "without an image of its own)"
            )
        return values, self._images

    def _turn(self, turn: Any) -> Any:
        if isinstance(turn, list | tuple):  # a question and its answer, of the column history
            return [self._text(text) if isinstance(text, str) else text for text in turn]
        if not isinstance(turn, dict):
            return turn
        key = self._content_key(turn)
        content = turn.get(key)
        if isinstance(content, str):
            return {**turn, key: self._text(content)}
        if isinstance(content, list):
            return {**turn, key: [self._part(part) for part in content]}
        return turn

    def _content_key(self, turn: dict[str, Any]) -> str | None:
        return next((key for key in map(self._row.name, ("content", "value")) if key in turn), None)

    def _part(self, part: Any) -> Any:
        if isinstance(part, str):
            return {"type": "text", "text": self._text(part)}
        if not _is_image(part):
            for text in part.values() if isinstance(part, dict) else ():
                self._check(text)
            return part
        value = next((part[key] for key in _OF_PART if part.get(key)), None)
        if isinstance(value, dict):
            value = value.get("url", value)
        if value is None:
            self._take()
        else:
            self._images.append(value)
        return {"type": "text", "text": IMAGE}

    def _text(self, text: str) -> str:
        self._check(text)
        if not self._listed or WORD not in text:
            return text
        for _ in range(text.count(WORD)):
            self._take()
        return text.replace(WORD, IMAGE)

    def _check(self, text: Any) -> None:
        if isinstance(text, str) and IMAGE in text:
            raise DataError(f"{self._row.where}: the text has U+10FF7F, which is not a character; remove it")

    def _take(self) -> None:
        """Let the next place in the text be that of the column's next image."""
        if self._places < len(self._listed):
            self._images.append(self._listed[self._places])
        self._places += 1

    def _put_first(self, values: dict[str, Any], marks: str) -> None:
        """Put `marks` before the first question of a row."""
        for name in (*_CHATS, *_QUESTIONS):
            theirs = self._row.name(name)
            value = values.get(theirs)
            if isinstance(value, str) and name in _QUESTIONS:
                values[theirs] = marks + value
                return
            if not isinstance(value, list):
                continue
            for place, turn in enumerate(value):
                if isinstance(turn, dict) and self._is_question(turn):
                    values[theirs] = [*value[:place], self._with_marks(turn, marks), *value[place + 1 :]]
                    return
        raise DataError(f"{self._row.where}: has images, and no question that they belong to")

    def _is_question(self, turn: dict[str, Any]) -> bool:
        keys = ("role", "from", self._row.name("role"), self._row.name("from"))
        return any(turn.get(key) in ("user", "human") for key in keys)

    def _with_marks(self, turn: Any, marks: str) -> dict[str, Any]:
        """Return a question with `marks` before its text."""
        key = self._content_key(turn)
        content = turn.get(key)
        if isinstance(content, str):
            return {**turn, key: marks + content}
        if isinstance(content, list):
            return {**turn, key: [{"type": "text", "text": marks}, *content]}
        raise DataError(
            f"{self._row.where}: has images, and the question that they belong to has no content (text, or a "
            f"list of parts), but {type(content).__name__}; write it, or remove the row"
        )


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and (
        part.get("type") in _TYPES or (not part.get("type") and "image" in part)
    )


def _as_list(value: Any) -> list[Any]:
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def content_of(image: Any, source: str | None, where: str) -> bytes:
    """Return the bytes of an image's file.

    Args:
        image: bytes; `{bytes, path}` of datasets; a path relative to the folder of the data; an address; or
            base64, with or without `data:image/...;base64,`.
        source: path, pattern or address of the data; None of a data set on the hub.

    Raises:
        DataError: there is no such file, or it may not be read.
    """
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if not isinstance(image, str):
        raise DataError(
            f"{where}: an image must be a path, an address, bytes or base64, found {type(image).__name__} "
            f"{image!r:.60}"
        )
    prefix = _DATA_URL.match(image)
    if prefix or _is_base64(image):
        try:
            return base64.b64decode(image[prefix.end() if prefix else 0 :], validate=False)
        except ValueError as error:
            raise DataError(f"{where}: an image is not base64: {error}") from None
    return _read(image, source, where)


def _is_base64(image: str) -> bool:
    could_be_path = len(image) <= names.LONGEST
    return bool(_BASE64.fullmatch(image)) and (
        not could_be_path or _BASE64_OF_IMAGES.match(image.lstrip()) is not None
    )


def _read(name: str, source: str | None, where: str) -> bytes:
    if name.startswith(("http://", "https://")):
        raise DataError(
            f"{where}: {name:.80}: images are not read from the web, where they change and vanish; download "
            "them, and name their paths"
        )
    if source is None:
        raise DataError(
            f"{where}: {name:.80}: a data set on the hub has its images in its rows, not in files"
        )
    if name.startswith(_STORAGES) and "::" not in name:
        folder, below = name, ""
    else:
        folder, below = _below(name, source, where)
        problem = names.problem(below)
        if problem:
            raise DataError(f"{where}: the image's name {ascii(name)[:80]} {problem}; correct it")
    storage = Storage(folder, "", error=DataError, failed=f"{where}: image cannot be read", retry=False)
    try:
        return storage.read(below, largest=limits.IMAGE_BYTES)
    except FileNotFoundError:
        raise DataError(f"{where}: {storage.path(below)}: no such image") from None


def _below(name: str, source: str, where: str) -> tuple[str, str]:
    """Return the folder of the data, or its address, and the name of an image below it.

    Raises:
        DataError: the name leads out of the folder, or is an address of another kind.
    """
    folder = _folder_of(source)
    path = name.removeprefix("file://")
    if "://" not in folder:
        folder = os.path.abspath(folder)
        if os.path.isabs(path):
            path = os.path.relpath(path, folder)
    below = os.path.normpath(path)
    if "://" in path or "::" in path or os.path.isabs(below) or below.split(os.sep)[0] == os.pardir:
        place = "address" if "://" in folder else "folder"
        raise DataError(f"{where}: {name:.80}: not below the data's {place} {folder}; put the images there")
    return folder, below


def _folder_of(source: str) -> str:
    """Return the folder, or its address, that the images of a file, a pattern or a folder are named in."""
    if "://" in source:
        folder = _FOLDERS.sub("", source)
        is_file = "." in folder.rpartition("/")[2]
        return folder.rpartition("/")[0] if is_file else folder
    path = Path(source).expanduser()
    if not path.exists():
        path = Path(_FOLDERS.sub("", str(path)))
    return str(path if path.is_dir() else path.parent)


def read(
    row: dict[str, Any],
    columns: Mapping[str, str],
    source: str | None,
    max_pixels: int | None,
    out: Path | None,
    where: str,
) -> tuple[dict[str, Any], list[Picture]]:
    """Return a row with IMAGE in the place of each image, and its pictures in their order.

    Args:
        columns: data's names of the columns that have others than ours.
        source: path, pattern or address of the rows; None of a data set on the hub.
        max_pixels: pixels that a larger image is reduced to.
        out: folder below which the images' files are stored; None to only check them.

    Raises:
        DataError: a file is missing, or no image that a model can read.
    """
    row, listed = extracted(row, columns, where)
    pictures = []
    for number, image in enumerate(listed):
        named = image if isinstance(image, str) and len(image) < limits.NAME else f"images[{number}]"
        content = content_of(image, source, where)
        picture = images.opened(content, max_pixels, f"{where}: {named}")
        pictures.append(Picture(images.store(content, out), picture))
    return row, pictures


class Expanded(NamedTuple):
    """A rendered chat with the text of each image in the place of the processor's token."""

    text: str
    places: list[int]
    """Places of the tokens in the text before."""
    texts: list[str]
    """Text of each image."""


def expanded(text: str, pictures: Sequence[Any], processor: images.Processor, where: str) -> Expanded:
    """Return a rendered chat with the text that the processor writes for each of its pictures, in order.

    Raises:
        DataError: the template did not write each image once, the row's own text has a token of images, or
            the processor refuses one.
    """
    token = processor.token
    places = [match.start() for match in re.finditer(re.escape(token), text)]
    if len(places) != len(pictures):
        raise DataError(
            f"{where}: {counted(len(pictures), 'image')}, and the rendered text has {token} "
            f"{counted(len(places), 'time')}: the row's own text may not have it, and the chat template "
            "must write it for each image (data.chat_template)"
        )
    texts = processor.replacements(pictures, where) if pictures else []
    pieces, at = [], 0
    for place, replacement in zip(places, texts, strict=True):
        pieces += [text[at:place], replacement]
        at = place + len(token)
    whole = "".join([*pieces, text[at:]])
    if processor.tokens_in(whole) != processor.tokens_in("".join(texts)):
        raise DataError(
            f"{where}: the row's own text has a token that stands for a part of an image; remove it"
        )
    return Expanded(whole, places, texts)


class ImageReader:
    """Reader of the images of one request's rows: their files, and the text that stands for them."""

    def __init__(self, request: DataRequest, out: Path | None) -> None:
        """Make one that stores images below the prepared data set `out`, or only checks them."""
        self._request, self._out = request, out

    @cached_property
    def _processor(self) -> images.Processor:
        model = self._request.model
        name = base.local_name(model, weights=False)
        tokenizer = tokenizers.from_pretrained(name, model.revision, model.trust_remote_code)
        return images.Processor(name, model.revision, tokenizer, self._request.data.max_pixels)

    def read(self, row: dict[str, Any], source: Source, where: str) -> tuple[dict[str, Any], list[Picture]]:
        """Return a row with IMAGE in the place of each image, and its pictures in their order.

        Raises:
            DataError: a file is missing, or no image that can be trained on.
        """
        max_pixels = self._request.data.max_pixels
        row, pictures = read(row, source.columns, source.path, max_pixels, self._out, where)
        if pictures:
            # A base that reads no images is refused here, with the reason; its chat template would only fail.
            _ = self._processor
        return row, pictures

    def expanded(
        self, rendered: Rendered, pictures: Sequence[Picture], where: str
    ) -> tuple[Rendered, Mapping[str, int]]:
        """Return a rendered sample with the text that the model's processor writes for each of its images,
        and the numbers of images, of their pixels, and of their tokens.

        No character of that text is trained.

        Raises:
            DataError: the template did not write each image once, or the row's own text has a token of
                images.
        """
        if not pictures and self._request.data.split_special_tokens is not False:
            return rendered, {}  # special tokens of its own text stay text
        if rendered.is_renamed:
            raise DataError(
                f"{where}: the text has a special token, and a row's own text may not have it beside images; "
                "remove it"
            )
        pictured = [picture.image for picture in pictures]
        text, places, texts = expanded(rendered.text, pictured, self._processor, where)
        token = self._processor.token
        grown = list(accumulate((len(written) - len(token) for written in texts), initial=0))

        def moved(position: int) -> int:
            return position + grown[bisect_left(places, position)]

        spans = []
        for start, end in rendered.spans:
            for place in [place for place in places if start <= place < end]:
                spans.append((start, place))
                start = place + len(token)
            spans.append((start, end))
        expanded_one = replace(
            rendered,
            text=text,
            spans=[(moved(start), moved(end)) for start, end in spans if start < end],
        )
        pixels = sum(picture.width * picture.height for picture in pictured)
        counts = {READ: len(pictured), PIXELS: pixels, TOKENS: self._processor.tokens_in("".join(texts))}
        return expanded_one, counts
