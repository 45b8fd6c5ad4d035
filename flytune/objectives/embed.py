"""Embedding models: queries and documents as vectors that are near where they belong together.

The loss of a query (flytune/models/vectors.py) compares it with the documents of all rows of an optimizer
step, on all processes: more negatives make a harder task and a better model, and the loss of one micro batch
would be another one for each layout. All texts of a step are run first without gradients; the loss and its
gradient with regard to their vectors follow at once; then each micro batch is run again, and its vectors are
multiplied by that gradient, whose backward pass is the loss's own (GradCache: Gao et al. 2021, arXiv
2101.06983). Both passes of a micro batch have the same dropout.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from flytune.models import Row, vectors
from flytune.models.scoring import sequences_of
from flytune.objectives import sequence_heads
from flytune.objectives.base import FILLER
from flytune.objectives.heldout import HeldoutFigures, HeldoutRows, intervals
from flytune.objectives.sequence_heads import SequenceHeadObjective
from flytune.recipe import Embed
from flytune.records.figures import LOSS, Figure
from flytune.sentences import counted
from training_estimates import Contrast
from training_estimates.meta_model import ENCODERS
from training_estimates.sizes import Geometry

NEAREST = (1, 10)
"""Numbers of nearest documents among which a query's own is looked for."""
KEYS, PASS = "keys", "first_pass"
"""Keys of a batch: the texts' keys, and what its first pass has shown."""


class VectorRows(HeldoutRows):
    """Queries by the ranks of their own documents among those of all held-out rows."""

    def of_both(self, models: Any) -> HeldoutFigures:
        """Return the figures of an embedding model and of its base, whose vectors are taken at the same
        place.

        Raises:
            ExportError: a vector is not finite.
        """
        import numpy

        tuned = self._values(models.tuned, "tuned model")
        with models.base() as base_model:
            base = self._values(base_model, "base model")
        weights = numpy.ones(len(self.rows), dtype=int)
        figures = {
            name: intervals(
                {"base": base[name], "tuned": values, "difference": values.astype(float) - base[name]},
                weights,
            )
            for name, values in tuned.items()
        }
        return HeldoutFigures(figures, weights, tuned)

    def _values(self, model: Any, label: str) -> dict[str, Any]:
        """Return the values of each query by the name of their figure, (queries,)."""
        section = self.recipe.objective
        assert isinstance(section, Embed)
        pad, batch_size = self.tokenizer.pad_token_id, self.recipe.evaluation.batch_size
        count = 2 + section.negatives
        of_rows, keys = vectors.of_rows(model, self.sequences, count, pad, batch_size, label)
        ranks = vectors.in_blocks(lambda queries: vectors.ranks(of_rows, keys, queries), keys).numpy()
        losses = vectors.in_blocks(functools.partial(_losses, section, of_rows, keys), keys).numpy()
        found_among = {f"recall_at_{most}": ranks <= most for most in NEAREST}
        return {"mrr": 1 / ranks, **found_among, "loss": losses}


_DOCUMENTS = "all held-out documents (in a step of training, among its documents alone)"
"""Documents among which a figure finds a query's own: fewer in training, where that is easier."""
_SEARCHED = ["objective.negatives"]
"""Fields that say how many documents a query's own one is found among."""


_POOLED = {
    "last": "the hidden state after its last token, the end token",
    "mean": "the mean of the hidden states of all its tokens",
    "cls": "the hidden state of its first token",
}
"""Vector of a text by objective.pooling."""


class Embedding(SequenceHeadObjective):
    """TRL's RewardTrainer with the loss of queries among documents; all queries have the same weight."""

    name = "embed"
    section: Embed
    head_of = "vectors"
    answers_with = "an embedding model gives vectors"
    why_no_adapter = "an adapter of a language model has other names of layers"
    why_no_lm_head = "an embedding model has neither lm_head nor score"
    why_no_code = "code of the model's own may have no hidden states to take"
    heldout_rows = VectorRows
    logged: ClassVar[Mapping[str, str]] = {"accuracy": "accuracy"}

    def figures(self) -> list[Figure]:
        mrr = Figure(
            name="mrr",
            title="mean reciprocal rank",
            better="higher",
            meaning="mean of 1 / the rank of a query's own document among all held-out documents",
            is_paired=True,
            scaled_by=_SEARCHED,
        )
        recalls = [
            Figure(
                name=f"recall_at_{most}",
                title=f"recall at {most}",
                unit="share of queries",
                better="higher",
                meaning=f"queries whose own document is among the {most} nearest",
                is_paired=True,
                scaled_by=_SEARCHED,
            )
            for most in NEAREST
        ]
        nearest = f"queries whose own document is the nearest one of {_DOCUMENTS}"
        recalls[0] = recalls[0].model_copy(update={"meaning": nearest, "step": "accuracy"})
        among = f"minus the log-probability of a query's own document among {_DOCUMENTS}"
        if self.section.matryoshka_dims:
            among += ", summed over the lengths of vectors"
        scaled_by = ["objective.temperature", "objective.matryoshka_dims", *_SEARCHED]
        loss = {"unit": "nats per query", "meaning": among, "scaled_by": scaled_by}
        return [mrr, *recalls, LOSS.model_copy(update=loss)]

    def frozen_passes(self) -> int:
        return 1

    def run_passes(self, trained: Callable[[], Any], frozen: Callable[[], Any]) -> tuple[Any, Any]:
        # The pass without gradients leaves vectors alone, and needs less than that of training.
        return trained(), None

    def contrast(self, size: int) -> Contrast | None:
        sizes = sorted({*self.section.matryoshka_dims, size})
        return Contrast(sizes=tuple(sizes), similarities=vectors.SIMILARITIES)

    def problems(self) -> list[str]:
        sentences, method = super().problems(), self.recipe.method
        named = [method.target_modules] if isinstance(method.target_modules, str) else method.target_modules
        if method.name != "full" and (
            whole := [
                name
                for name in (*named, *method.rank_pattern, *method.alpha_pattern)
                if re.match(r"[\^(?:]*model\\?\.", name)
            ]
        ):
            sentences.append(
                f"objective: {self.name} with {whole[0]}, a name of layers: without a head they begin with "
                "layers., not with model.layers.; leave model. out"
            )
        return sentences

    def base_problems(self, geometry: Geometry) -> list[str]:
        sentences, size = super().base_problems(geometry), geometry.hidden_size
        kind, pooling = geometry.model_type, self.section.pooling
        if kind in ENCODERS and pooling == "last":
            own = vectors.published_pooling(self.recipe.model)
            advice = f"{own}, as its own vectors are" if own else "mean, or cls where its model card says so"
            sentences.append(
                f"objective.pooling: last, but {self.recipe.model.name_or_path} is an encoder ({kind}), "
                f"whose last token is not made to stand for the text; write {advice}"
            )
        if kind not in ENCODERS and pooling == "cls":
            sentences.append(
                f"objective.pooling: cls, but the first token of a decoder ({kind}) sees none of the others; "
                "write last, or leave it out"
            )
        if large := [dim for dim in self.section.matryoshka_dims if dim > size]:
            sentences.append(
                f"objective.matryoshka_dims: {large[0]}: a vector of {self.recipe.model.name_or_path} has "
                f"{counted(size, 'number')}, which are trained in any case; name fewer"
            )
        return sentences

    def model_problem(self, model_type: str) -> str | None:
        if model_type in ENCODERS or super().model_problem(model_type) is None:
            return None
        return (
            f"objective: {self.name}: the vector of a text is a hidden state of the last layer, and "
            f"{model_type} is not one of the types that are known; choose a decoder (llama, mistral, qwen3, "
            f"gemma3_text ...) or an encoder ({', '.join(ENCODERS)}) as the base model"
        )

    def reasons(self) -> list[str]:
        rows, texts = self.recipe.training.global_batch_size, 2 + self.section.negatives
        others = counted(rows * (texts - 1) - 1, "other document")
        lines = [
            f"objective: {self.name}: each row is {texts} sequences of up to "
            f"{counted(self.recipe.data.max_length, 'token')} in one forward pass, and has one more without "
            f"gradients: a query is compared with {others}, those of all rows of a step, whatever the micro "
            "batch; there are no logits of the vocabulary"
        ]
        own = vectors.published_pooling(self.recipe.model)
        if own not in (None, self.section.pooling):
            lines.append(
                f"objective.pooling: {self.section.pooling}, but the base's own vectors are by {own} "
                "(1_Pooling/config.json in its files): training begins with others than the published ones"
            )
        if self.recipe.evaluation.sample_answers:
            lines.append("evaluation.sample_answers: an embedding model answers nothing, so none are sampled")
        return lines

    def arguments(self) -> dict[str, Any]:
        # The columns of prepared rows are not TRL's.
        return {"disable_dropout": False, "remove_unused_columns": False}

    @classmethod
    def trainer_class(cls) -> Any:
        return _trainer_class()

    def collator(self, pad_token_id: int) -> Callable[[list[Row]], dict[str, Any]]:
        return functools.partial(batch, pad_token_id)

    def model_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in batch.items() if name not in (KEYS, PASS)}

    def log_counts(self, batch: dict[str, Any]) -> dict[str, Any]:
        import torch

        return {"accuracy": torch.tensor(len(batch[KEYS]), device=batch[KEYS].device)}

    def row_numbers(self, outputs: Any) -> Any:
        return outputs.last_hidden_state[:, -1].float().logsumexp(dim=-1)

    def card_text(self) -> str:
        return (
            f"An embedding model: the vector of a text is {_POOLED[self.section.pooling]}, divided by its "
            "length; texts that belong together\nhave near vectors, by cosine similarity."
        )

    def measure(self, trainer: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
        import numpy
        import torch

        section, count, device = self.section, 2 + self.section.negatives, trainer.args.device
        sequences = sequences_of(rows)
        texts = [sequence["input_ids"] for sequence in sequences]
        with trainer.compute_loss_context_manager():
            mine = vectors.of_texts(trainer.model_wrapped, texts, trainer.processing_class.pad_token_id)
        is_row = torch.tensor([FILLER not in row for row in rows], device=device)
        gather = trainer.accelerator.gather
        is_row, of_all, keys = (
            gather(values.contiguous().to(device))
            for values in (is_row, vectors.by_row(mine, count), vectors.keys_of(sequences, count))
        )
        losses = torch.zeros(len(is_row), dtype=torch.float64, device=device)
        of_rows, keys = of_all[is_row], keys[is_row]
        losses[is_row] = vectors.in_blocks(functools.partial(_losses, section, of_rows, keys), keys)
        first = trainer.args.process_index * len(rows)
        return losses[first : first + len(rows)].cpu().numpy(), numpy.ones(len(rows))


OBJECTIVE = Embedding


def batch(pad_token_id: int, rows: list[Row]) -> dict[str, Any]:
    """Return a batch of the texts of rows, int64 [texts, longest]: all queries, then all positives, then all
    first negatives ...; with their `keys` by row, int64 [rows, sequences]."""
    keys = vectors.keys_of(sequences_of(rows), len(rows[0]["seq_lengths"]))
    return sequence_heads.batch(pad_token_id, rows) | {KEYS: keys.contiguous()}


@dataclass(frozen=True)
class FirstPass:
    """Results of a step's first pass for one micro batch."""

    gradient: Any
    """Gradient of the step's loss with regard to the batch's vectors, times the number of batches whose mean
    the trainer takes: float32 (rows, sequences, size)."""
    loss: Any
    """Loss of the step, float32 ()."""
    accuracy: float
    """Share of the step's queries whose own document is the nearest one."""
    states: list[Any]
    """States of the random numbers before the pass: of the CPU, and of the GPU if there is one."""


def step_gradient(of_rows: Any, keys: Any, section: Embed) -> tuple[Any, float, Any]:
    """Return the loss of a step (), the share of queries whose own document is the nearest one, and the
    loss's gradient with regard to the vectors.

    Args:
        of_rows: vectors of all rows of the step, float32 (rows, sequences, size).
        keys: keys of their texts, int64 (rows, sequences).
    """
    import torch

    leaf = of_rows.detach().requires_grad_(True)
    total, right = torch.zeros((), device=leaf.device), 0
    for queries in vectors.blocks_of(keys):
        with torch.enable_grad():
            losses = _losses(section, leaf, keys, queries)
            part = losses.sum() / len(leaf)
            part.backward()
        total += part.detach()
        with torch.no_grad():
            right += int((vectors.ranks(leaf, keys, queries) == 1).sum())
    return total, right / len(leaf), leaf.grad


def _losses(section: Embed, of_rows: Any, keys: Any, queries: slice) -> Any:
    return vectors.losses(of_rows, keys, section.temperature, section.matryoshka_dims, queries)


@functools.cache
def _trainer_class() -> Any:
    """Return VectorTrainer. TRL is imported here."""
    import torch

    class VectorTrainer(sequence_heads.prepared_trainer()):  # type: ignore[misc]
        """RewardTrainer on prepared rows of queries, whose loss is that of the whole optimizer step."""

        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self._step: list[dict[str, Any]] = []

        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            self._step, items = super().get_batch_samples(*args, **kwargs)
            return self._step, items

        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if self._step:
                model.train()
                # These are the dictionaries that the following calls get.
                self._run_first_pass(model, self._step)
                self._step = []
            return super().training_step(model, inputs, *args, **kwargs)

        def _run_first_pass(self, model: Any, batches: list[dict[str, Any]]) -> None:
            """Add the gradient of the step's loss to its micro batches. Every process calls it with equally
            many."""
            section, device = self.run.recipe.objective, self.args.device
            states, of_batches, keys = [], [], []
            for micro_batch in batches:
                inputs = self._prepare_inputs(dict(micro_batch))
                keys.append(inputs.pop(KEYS))
                states.append(_random_states(device))
                with torch.no_grad(), self.compute_loss_context_manager():
                    of_batches.append(_vectors(model, inputs, keys[-1].shape[1]))
            mine = torch.cat(of_batches).contiguous()
            of_all, all_keys = self.accelerator.gather((mine, torch.cat(keys)))
            loss, accuracy, gradient = step_gradient(of_all, all_keys, section)
            first = self.args.process_index * len(mine)
            # The Trainer divides by the micro batches, and gradients are the mean over processes.
            gradient = gradient[first : first + len(mine)] * (len(batches) * self.args.world_size)
            parts = gradient.split([len(of_batch) for of_batch in of_batches])
            for micro_batch, part, state in zip(batches, parts, states, strict=True):
                micro_batch[PASS] = FirstPass(part, loss, accuracy, state)

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            first, keys = inputs.pop(PASS), inputs.pop(KEYS)
            with _random_numbers_of(first.states, self.args.device):
                of_rows = _vectors(model, inputs, keys.shape[1])
            product = (of_rows * first.gradient).sum()
            self._metrics["train"]["accuracy"].append(first.accuracy)
            # Its value is the loss of the step, and its gradient this batch's part of that of the loss.
            loss = first.loss + product - product.detach()
            return (loss, {"vectors": of_rows}) if return_outputs else loss

    return VectorTrainer


def _vectors(model: Any, inputs: dict[str, Any], sequences: int) -> Any:
    """Return the vectors of a batch's texts, float32 (rows, sequences, size)."""
    hidden = model(**inputs, use_cache=False).last_hidden_state
    return vectors.by_row(vectors.pooled(model, hidden, inputs["attention_mask"]).float(), sequences)


def _random_states(device: Any) -> list[Any]:
    import torch

    is_gpu = device.type == "cuda"
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if is_gpu else [])]


@contextmanager
def _random_numbers_of(states: list[Any], device: Any) -> Iterator[None]:
    """Draw random numbers from these states within the block, and go on after it as if none had been
    drawn."""
    import torch

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        if len(states) > 1:
            torch.cuda.set_rng_state(states[1], device)
        yield
