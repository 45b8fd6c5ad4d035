"""Images of samples: files to pictures, and pictures to the text and the tensors that a vision-language model
reads."""

import copy
import hashlib
import importlib
import io
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from flytune import json_core, limits, patches
from flytune.errors import DataError, PreparedDataError
from flytune.files import written_atomically
from flytune.models import published
from flytune.models.library_errors import reason
from flytune.recipe import Model

COLUMN = "image_hashes"
"""Stored column of a sample's images: their hashes in order, with a space between them."""
FOLDER = "images"
"""Folder of a prepared data set that has each image once, as it was read, named by its SHA-256."""
FILES = ("preprocessor_config.json", "processor_config.json")
"""Files of a base model that its processor is made of, beside those of the tokenizer."""
TEMPLATE = "chat_template.json"
"""File of older processors with the chat template, which is read before that of the tokenizer."""
STORED = "stored_images"
"""Key of a held-out row whose value is the StoredImages of its data set."""
_TEXTS = ("input_ids", "attention_mask", "text_replacement_offsets")
"""Results of a processor that belong to its text."""
TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names that models have for the kind of each token: 1 of an image's."""
_NAMING = ("preprocessor_config.json", "tokenizer_config.json")
"""Other files that may name the class of a processor."""
_WITH_WORDS = "SmolVLMProcessor"
"""Processor that asks for a library which writes numbers as words, for videos alone."""
_WITH_TORCHVISION = "PixtralProcessor"
"""Processor that imports torchvision whatever reads the images."""
_FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's names of the kinds of files that are read. Of the others, some are programs: EPS is run."""
_DEEP = ("I", "F")
"""First letters of Pillow's modes with more than 8 bits a channel."""


def opened(content: bytes, max_pixels: int | None, where: str) -> Any:
    """Return an image file as a Pillow image in RGB, upright, with at most `max_pixels` pixels.

    Transparent pixels are white. A larger image is reduced to `max_pixels`, with its proportions.

    Raises:
        DataError: it is cut short or no image, is animated, or has more than 8 bits a channel or too many
            pixels.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as picture:
            if picture.width * picture.height > limits.PIXELS:
                raise DataError(
                    f"{where}: has {picture.width:,} x {picture.height:,} pixels, more than "
                    f"{limits.PIXELS:,}; make it smaller"
                )
            frames = getattr(picture, "n_frames", 1)
            # Photos of telephones have a second one, a reduced copy or a map of depth.
            if frames > 1 and picture.format != "MPO":
                raise DataError(f"{where}: is animated, or has pages ({frames} frames); name one picture")
            if picture.mode[0] in _DEEP or any(";16" in str(tile) for tile in picture.tile):
                raise DataError(
                    f"{where}: has more than 8 bits a channel (mode {picture.mode}); convert it to 8 bits"
                )
            upright = ImageOps.exif_transpose(picture)
            if "transparency" in upright.info or upright.mode in ("RGBA", "LA", "PA"):
                solid = upright.convert("RGBA")
                white = Image.new("RGBA", solid.size, "white")
                upright = Image.alpha_composite(white, solid)
            result = upright.convert("RGB")
    except DataError:
        raise
    except UnidentifiedImageError:
        raise DataError(f"{where}: cannot be read as an image: it is none of {', '.join(_FORMATS)}") from None
    except Exception as error:  # noqa: BLE001 (Pillow's decoders may raise any)
        raise DataError(f"{where}: cannot be read as an image: {reason(error)}") from None
    pixels = result.width * result.height
    if max_pixels is not None and pixels > max_pixels:
        share = (max_pixels / pixels) ** 0.5
        # Where one side is a single pixel, the other alone has to have no more.
        width, height = (max(1, min(int(side * share), max_pixels)) for side in result.size)
        result = result.resize((width, height), Image.Resampling.LANCZOS)
    return result


def fixed() -> Any:
    """Return the picture of the gate's prompt about an image, 256 x 256: three gradients, one a channel."""
    from PIL import Image

    down, round_ = Image.linear_gradient("L"), Image.radial_gradient("L")
    return Image.merge("RGB", (down, round_, down.rotate(90)))


def store(content: bytes, dataset: Path | None) -> str:
    """Write an image file below a prepared data set, if there is one, once; return its SHA-256."""
    digest = hashlib.sha256(content).hexdigest()
    if dataset is None:
        return digest
    file = dataset / FOLDER / digest
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with written_atomically(file) as temporary:
            temporary.write_bytes(content)
    return digest


def has_files(folder: Path) -> bool:
    """Return whether a folder has the files of a processor of images."""
    return any((folder / file).is_file() for file in FILES)


def write_files(model: Model, folder: Path, with_template: bool) -> None:
    """Write the files of a base model's processor into a folder, byte for byte; `with_template`, also the one
    of its chat template."""
    for file in (*FILES, *([TEMPLATE] if with_template else [])):
        if (path := published.cached(published.base_name(model), model.revision, file)) is not None:
            (folder / file).write_bytes(path.read_bytes())


class Processor:
    """The processor of a vision-language model, with Pillow's arithmetic wherever it runs.

    transformers' own loading needs torchvision for the videos that a processor may read too; here it is made
    without its part for videos.
    """

    def __init__(
        self, name: str, revision: str | None, tokenizer: Any, max_pixels: int | None = None
    ) -> None:
        """Make the processor of a base model, or of the tokenizer's folder of a prepared data set.

        Raises:
            DataError: it has none, or one that needs a library that is missing.
        """
        self.max_pixels = max_pixels
        try:
            self._processor = _made(name, revision, tokenizer)
        except (OSError, ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
            raise DataError(
                f"model.name_or_path: {name}: its processor, which data.images needs, cannot be made: "
                f"{reason(error)}; name a vision-language model with a preprocessor_config.json"
            ) from None
        self.token = str(self._processor.image_token)
        """Text that stands for an image in a rendered chat, before `replacement`."""
        self.token_ids = frozenset(self._processor.image_token_ids)
        """Tokens in whose places the model reads an image."""

    def replacements(self, pictures: Sequence[Any], where: str = "an image") -> list[str]:
        """Return the text that takes the place of `token` for each picture of a sample.

        Raises:
            DataError: the processor refuses one, as some do where one side is many times the other.
        """
        try:
            processed = self._processor(
                text=[self.token * len(pictures)],
                images=[list(pictures)],
                return_text_replacement_offsets=True,
                return_tensors=None,
            )
        except Exception as error:  # noqa: BLE001 (each processor raises its own)
            sizes = ", ".join(f"{picture.width:,} x {picture.height:,}" for picture in pictures)
            raise DataError(
                f"{where}: the model's processor refuses an image ({sizes} pixels): {reason(error)}; change "
                "its proportions, or remove the row"
            ) from None
        return [str(place["replacement"]) for place in processed["text_replacement_offsets"][0]]

    def tokens_of(self, pictures: Sequence[Any]) -> list[int]:
        """Return the number of `token_ids` that stand for each picture of a sample."""
        return [self.tokens_in(text) for text in (self.replacements(pictures) if pictures else [])]

    def tokens_in(self, replacement: str) -> int:
        """Return the number of `token_ids` in the text of an image."""
        words = self._processor.tokenizer.convert_ids_to_tokens(sorted(self.token_ids))
        return sum(replacement.count(word) for word in words)

    def inputs(self, pictures: Sequence[Sequence[Any]], input_ids: Any) -> dict[str, Any]:
        """Return what a model reads beside tokens, of the pictures of each row of a batch.

        Args:
            input_ids: int64 tensor (rows, length) on the CPU.
        """
        import torch

        filled = [list(row) for row in pictures if row]
        if not filled:
            return {}
        processed = self._processor(
            text=[self.token * len(row) for row in filled], images=filled, return_tensors=None, padding=False
        )
        types = {name: torch.tensor(self._kinds(input_ids)) for name in TYPES if name in processed}
        values = {name: value for name, value in processed.items() if name not in (*_TEXTS, *TYPES)}
        return {name: _tensor(value) for name, value in values.items()} | types

    def _kinds(self, input_ids: Any) -> list[list[int]]:
        return [[int(token in self.token_ids) for token in row] for row in input_ids.tolist()]


def inputs_of(rows: Sequence[Mapping[str, Any]], input_ids: Any) -> dict[str, Any]:
    """Return what a model reads of the images of held-out rows, beside their tokens, int64 (rows, length) on
    the CPU; empty of rows of text."""
    return rows[0][STORED].inputs(rows, input_ids) if STORED in rows[0] else {}


class StoredImages:
    """The images of a prepared data set, as its model reads them."""

    def __init__(self, dataset: Path, processor: Processor) -> None:
        self._dataset, self.processor = dataset, processor

    def inputs(self, rows: Sequence[Mapping[str, Any]], input_ids: Any) -> dict[str, Any]:
        """Return what a model reads of the images of stored rows, beside their tokens, int64 (rows, length).

        Raises:
            PreparedDataError: an image is missing, or was changed.
        """
        return self.processor.inputs([self.pictures(row) for row in rows], input_ids)

    def of_tokens(self, row: Mapping[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
        """Return the part of a stored row that its first tokens are of, with the images that are in it."""
        pictures = self.pictures(row)
        sizes = self.processor.tokens_of(pictures)
        left = sum(token in self.processor.token_ids for token in tokens)
        digests = []
        for digest, size in zip(row[COLUMN].split(), sizes, strict=True):
            if size > left:
                break
            left -= size
            digests.append(digest)
        return {**row, "input_ids": list(tokens), COLUMN: " ".join(digests)}

    def pictures(self, row: Mapping[str, Any]) -> list[Any]:
        """Return the pictures of a stored row."""
        return [self._picture(digest) for digest in row[COLUMN].split()]

    def _picture(self, digest: str) -> Any:
        file = self._dataset / FOLDER / os.path.basename(digest)
        try:
            content = file.read_bytes()
        except OSError as error:
            raise PreparedDataError(f"{file}: {error.strerror or error}; prepare the data again") from None
        if hashlib.sha256(content).hexdigest() != digest:
            raise PreparedDataError(f"{file}: its content is not what was prepared; prepare the data again")
        return opened(content, self.processor.max_pixels, str(file))


def _tensor(value: Any) -> Any:
    import numpy
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list) and value and isinstance(value[0], torch.Tensor):
        return torch.stack(value)
    return torch.from_numpy(numpy.asarray(value))


def _made(name: str, revision: str | None, tokenizer: Any) -> Any:
    """Return transformers' processor of a model, without its part for videos, on a tokenizer of its own."""
    from transformers import AutoImageProcessor

    settings = _content(name, revision, "processor_config.json")
    contents = (settings, *(_content(name, revision, file) for file in _NAMING))
    classes = [content["processor_class"] for content in contents if "processor_class" in content]
    if not classes:
        raise ValueError("no file of it names a processor_class")
    kind = _class_named(classes[0])

    class Processor(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return argument and super().check_argument_for_proper_class(argument_name, argument)

    # Without its part for videos, a processor calls nothing that writes numbers as words.
    words = patches.transformers.NUMBER_WORDS.replaced(str) if kind.__name__ == _WITH_WORDS else nullcontext()
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(
            name, revision=revision, backend="pil", trust_remote_code=False
        ),
        "tokenizer": copy.deepcopy(tokenizer),
    }
    with words:
        return Processor.from_args_and_dict([parts.get(part) for part in kind.get_attributes()], settings)


def _class_named(name: str) -> Any:
    """Return transformers' class of processors of a name."""
    from transformers.models.auto.processing_auto import processor_class_from_name

    if name != _WITH_TORCHVISION:
        return processor_class_from_name(name)
    images_by_pillow = importlib.import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    with patches.transformers.PIXTRAL_IMAGES.replaced(images_by_pillow):
        return importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor


def _content(name: str, revision: str | None, file: str) -> dict[str, Any]:
    """Return the content of a JSON file of a model; empty if there is none."""
    path = published.cached(name, revision, file)
    return {} if path is None else json_core.load_object(path.read_bytes(), published.LARGEST)
