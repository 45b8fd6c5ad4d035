"""A teacher's most probable tokens for the trained tokens of prepared rows, computed once before training."""

import itertools
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flytune import data
from flytune.errors import DataError
from flytune.files import sha256_of
from flytune.models import BaseRequest, Row, base_identity, loading, tokenizers
from flytune.models import base as models_base
from flytune.objectives import teacher_tokens
from flytune.recipe import Distill, Recipe
from flytune.sentences import counted
from flytune.training.frozen import SPLITS, FrozenModel

log = logging.getLogger(__name__)
ROWS_AT_A_TIME = 64
"""Rows that are held in memory, and sorted by length, at a time."""
COMPARED = 256
"""First rows whose texts both tokenizers must make the same tokens of."""


class Teacher(FrozenModel):
    """The teacher that a recipe names, complete and in one process."""

    results = "the teacher's tokens"

    @property
    def section(self) -> Distill:
        """Return its section of a recipe."""
        assert isinstance(self.recipe.objective, Distill)
        return self.recipe.objective

    @property
    def own_recipe(self) -> Recipe:
        """The recipe of which it is the base model."""
        return teacher_tokens.recipe_of(self.recipe)

    @property
    def _share(self) -> float:
        """Return the share of drawn answers as far as its results follow from it: 0, 1, or between."""
        return self.section.on_policy if self.section.on_policy in (0, 1) else 0.5

    def requested(self, base: BaseRequest) -> tuple[Recipe, BaseRequest]:
        recipe = self.own_recipe
        own_base = models_base.request(recipe.model)
        # Its task loads the commit that is part of the key, also where a branch has moved on.
        changes = {"teacher_model_revision": own_base.commit, "on_policy": self._share}
        section = self.section.model_copy(update=changes)
        return recipe.model_copy(update={"objective": section}), own_base

    def key_parts(self) -> tuple[str, ...]:
        section = self.section.model_dump_json(include={"loss_top_k", "temperature"})
        parts = (self.own_recipe.model.model_dump_json(exclude={"revision"}), section)
        return (*parts, f"on_policy {self._share}") if self._share else parts

    def commit(self) -> str | None:
        return loading.commit(self.own_recipe.model, local=True)

    def identity(self) -> str:
        return base_identity.identity_of(self.own_recipe.model)

    def compute(self, dataset: Path, out: Path) -> list[Path]:
        from pyarrow import parquet

        recipe, own_recipe = self.recipe, self.own_recipe
        tokenizer = data.stored_tokenizer(dataset, recipe.model.trust_remote_code)
        manifest = data.read_manifest(dataset)
        first = data.load(dataset, "train")
        check_tokenizer(own_recipe, tokenizer, first.select(range(min(COMPARED, len(first)))))
        model = loading.base_model(own_recipe, recipe.model.dtype, device_map=loading.device_map()).eval()
        has_rows = {"train": self._share < 1, "heldout": manifest.heldout.samples > 0}
        files = self._copied(out / teacher_tokens.FOLDER) if self._share else []
        for split in (split for split in SPLITS if has_rows[split]):
            rows, file = data.load(dataset, split), _file(out, split)
            with parquet.ParquetWriter(file, _schema()) as writer:
                for start in range(0, len(rows), ROWS_AT_A_TIME):
                    places = range(start, min(start + ROWS_AT_A_TIME, len(rows)))
                    batch = [rows[place] for place in places]
                    writer.write_table(_table(model, batch, recipe, tokenizer.pad_token_id, len(tokenizer)))
            files.append(file)
        return files

    def _copied(self, folder: Path) -> list[Path]:
        """Copy the teacher's weights and configuration to a new folder, for a run that also has it beside the
        student: pods that train have no token of the hub."""
        folder.mkdir()
        source = loading.local_folder(self.own_recipe.model)
        copies = []
        for file in sorted([*source.glob("*.safetensors"), *source.glob("*.json")]):
            copies.append(folder / file.name)
            try:
                os.link(file.resolve(), copies[-1])
            except OSError:  # another file system
                shutil.copyfile(file, copies[-1])
        return copies

    def beside(self, rows: Any, folder: Path) -> Any:
        import tempfile

        from datasets import Dataset, concatenate_datasets

        file = _file(folder, "train")
        if not file.is_file():
            return rows  # the student draws all answers
        cache = Path(tempfile.gettempdir()) / "flytune-datasets" / f"teacher-{sha256_of(file)[:16]}"
        stored = Dataset.from_parquet(str(file), cache_dir=str(cache))
        return concatenate_datasets([rows, stored], axis=1)

    def beside_heldout(self, rows: Sequence[Row], folder: Path) -> list[Row]:
        from pyarrow import parquet

        groups = parquet.ParquetFile(_file(folder, "heldout")).iter_batches(batch_size=ROWS_AT_A_TIME)
        stored = itertools.chain.from_iterable(group.to_pylist() for group in groups)
        return [row | columns for row, columns in zip(rows, stored, strict=False)]


def _file(folder: Path, split: str) -> Path:
    return folder / f"{split}.parquet"


def heldout_loss(rows: Sequence[Row]) -> float | None:
    """Return the teacher's own loss in nats per trained token, of rows with its columns; None without any."""
    losses = [loss for row in rows for loss in row.get(teacher_tokens.NLL, [])]
    return sum(losses) / len(losses) if losses else None


def check_tokenizer(of_teacher: Recipe, tokenizer: Any, rows: Any) -> None:
    """Check that the teacher's tokenizer is that of the data: the same token for each number, and the same
    numbers for the texts of rows.

    Raises:
        DataError: it is another one; with the first token or row that differs.
    """
    name = of_teacher.model.name_or_path
    where = f"objective.teacher_model_name_or_path: {name}: its tokenizer is not that of the data"
    teacher = tokenizers.load(loading.local_folder(of_teacher.model), trust_remote_code=False)
    theirs, ours = teacher.get_vocab(), tokenizer.get_vocab()
    if different := sorted((theirs.items() ^ ours.items()), key=lambda item: item[1]):
        token, number = different[0]
        raise DataError(
            f"{where}: token {number} is {token!r:.40} in one of them alone "
            f"({counted(len(different), 'entry', 'entries')} differ); name a teacher with the student's "
            "tokenizer"
        )
    if teacher.chat_template != tokenizer.chat_template:
        log.warning(
            "objective.teacher_model_name_or_path: %s has another chat template than the student, whose "
            "texts it gets; its distributions may be worse than with its own",
            name,
        )
    for row in rows:
        text = tokenizer.decode(row["input_ids"])
        ids_of_data, ids_of_teacher = (
            tokenize(text, add_special_tokens=False)["input_ids"] for tokenize in (tokenizer, teacher)
        )
        if ids_of_data != ids_of_teacher:
            raise DataError(
                f"{where}: they make other tokens of {text[:60]!r}; name a teacher with the student's "
                "tokenizer"
            )


def _schema() -> Any:
    import pyarrow

    return pyarrow.schema(
        {
            teacher_tokens.IDS: pyarrow.list_(pyarrow.int32()),
            teacher_tokens.LOG_PROBS: pyarrow.list_(pyarrow.float32()),
            teacher_tokens.NLL: pyarrow.list_(pyarrow.float32()),
        }
    )


def _table(model: Any, rows: list[Row], recipe: Recipe, pad: int, vocabulary: int) -> Any:
    """Return the columns of some rows, in their order."""
    import pyarrow

    order = sorted(range(len(rows)), key=lambda place: -len(rows[place]["input_ids"]))
    by_place: dict[int, dict[str, Any]] = {}
    for start in range(0, len(order), recipe.evaluation.batch_size):
        places = order[start : start + recipe.evaluation.batch_size]
        of_rows = teacher_tokens.columns(model, [rows[place] for place in places], recipe, pad, vocabulary)
        by_place |= dict(zip(places, of_rows, strict=True))
    columns = {name: [by_place[place][name] for place in range(len(rows))] for name in teacher_tokens.COLUMNS}
    return pyarrow.table(columns, schema=_schema())
