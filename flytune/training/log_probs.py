"""A reference model's log-probabilities of the prepared rows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flytune import data
from flytune.models import BaseRequest, Row, finite_loss, initial_adapter, loading
from flytune.models.scoring import sequences_of
from flytune.recipe import Recipe
from flytune.sharding import sharding_of
from flytune.training.frozen import SPLITS, FrozenModel

COLUMN = "ref_logps"
"""Column of the rows: log-probabilities of the chosen and of the rejected answer, each summed over its
trained tokens."""
ROWS_AT_A_TIME = 4096
"""Pairs that are held in memory, and sorted by length, at a time."""


class ReferenceModel(FrozenModel):
    """The model that training starts from; it computes in the precision that it has in training."""

    results = "the reference's log-probabilities"
    again = f"{FrozenModel.again}, or set objective.precompute_ref_log_probs: false"

    def requested(self, base: BaseRequest) -> tuple[Recipe, BaseRequest]:
        return self.recipe, base

    def key_parts(self) -> tuple[str, ...]:
        method, model = self.recipe.method, self.recipe.model
        return (
            model.model_dump_json(exclude={"revision"}),
            method.model_dump_json() if method.adapter or method.name == "qlora" else "",
            sharding_of(self.recipe).precision,
        )

    def compute(self, dataset: Path, out: Path) -> list[Path]:
        import numpy
        import torch
        from safetensors.numpy import save_file

        recipe, manifest = self.recipe, data.read_manifest(dataset)
        model, uses_autocast = self._model()
        pad = data.stored_tokenizer(dataset, recipe.model.trust_remote_code).pad_token_id
        device = next(model.parameters()).device.type
        files = []
        for split in SPLITS if manifest.heldout.samples else SPLITS[:1]:
            rows = data.load(dataset, split)
            column = numpy.empty((len(rows), 2))
            for start in range(0, len(rows), ROWS_AT_A_TIME):
                places = range(start, min(start + ROWS_AT_A_TIME, len(rows)))
                label = f"reference, {split}: pairs {start + 1:,} to {places.stop:,} of {len(rows):,}"
                with torch.autocast(device, getattr(torch, recipe.model.dtype), enabled=uses_autocast):
                    sequences = sequences_of([rows[place] for place in places])
                    nll, _ = finite_loss(model, sequences, pad, recipe.evaluation.batch_size, label)
                column[start : places.stop] = -nll.reshape(2, -1).T
            files.append(_file(out, split))
            save_file({COLUMN: column}, files[-1])
        return files

    def _model(self) -> tuple[Any, bool]:
        """Return the model, and whether it computes under autocast."""
        recipe, sharding = self.recipe, sharding_of(self.recipe)
        dtype = sharding.load_dtype if sharding.uses_autocast else recipe.model.dtype
        model = loading.base_model(recipe, dtype, device_map=loading.device_map())
        if recipe.method.adapter:
            from peft import get_peft_model

            config = loading.peft_config(recipe, model)
            model = get_peft_model(model, config)
            initial_adapter.load_weights(model, recipe.method)
        return model, sharding.uses_autocast

    def beside(self, rows: Any, folder: Path) -> Any:
        return rows.add_column(COLUMN, column(folder, "train").tolist())

    def beside_heldout(self, rows: Sequence[Row], folder: Path) -> list[Row]:
        stored = column(folder, "heldout").tolist()
        return [row | {COLUMN: value} for row, value in zip(rows, stored, strict=False)]


def column(folder: Path, split: str) -> Any:
    """Return the log-probabilities of the rows of a split: float64 of shape (rows, 2)."""
    from safetensors.numpy import load_file

    return load_file(_file(folder, split))[COLUMN]


def _file(folder: Path, split: str) -> Path:
    return folder / f"{split}.safetensors"
