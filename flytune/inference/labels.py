"""Batch inference of a classifier: labels with their probabilities."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flytune.artifacts import opening
from flytune.errors import DataError, ExportError
from flytune.evaluation import language_models
from flytune.export import folder as export_folder
from flytune.inference.texts import Texts
from flytune.models import Generation, heads, loading
from flytune.models.library_errors import named
from flytune.sentences import counted


class LabelledText(NamedTuple):
    """The labels that a classifier gives a text."""

    answer: str | list[str]
    """The most probable label; or all of at least one half where a text may have several."""
    probabilities: dict[str, float]
    """Probability of each label, by name."""
    tokens: int
    """Number of tokens of the text."""

    def columns(self) -> dict[str, Any]:
        """Return the columns that are added to the row."""
        return {
            "answer": self.answer,
            "probabilities": self.probabilities,
            "prompt_tokens": self.tokens,
            "answer_tokens": 0,
            "finish_reason": "stop",
        }


class Classifier:
    """A classifier in memory."""

    def __init__(self, artifact: Path, consent: opening.Consent = opening.NONE) -> None:
        """Load an artifact as it was trained.

        Raises:
            ExportError: it cannot be read or loaded, was changed, or has code without consent.
        """
        loading.import_libraries(*(("peft",) if loading.is_adapter(artifact) else ()))
        self.recipe = opening.open_artifact(artifact, consent).recipe
        self.model = language_models.tuned_model(self.recipe, artifact).eval()
        self._tokenizer = export_folder.tokenizer(loading.weights_folder(artifact))
        self._texts = Texts(self.recipe, self._tokenizer)

    def answers(
        self, rows: Sequence[dict[str, Any]], generation: Generation
    ) -> list[LabelledText | DataError]:
        """Return the labels of each row of `flytune.inference.prompts.read_part`, in order, or the error of a
        bad row.

        Raises:
            DataError: the first bad row, before any row is labelled, if max_bad_fraction is 0.
        """
        by_row: dict[int, LabelledText | DataError] = {}
        texts: dict[int, list[int]] = {}
        for index, line in enumerate(rows):
            try:
                texts[index] = self._tokens(line["row"], line["where"])
            except DataError as error:
                if not generation.max_bad_fraction:
                    raise
                by_row[index] = error
        with named("the model cannot label texts", ExportError, (OSError, RuntimeError)):
            logits = heads.scores(
                self.model,
                [*texts.values()],
                self._tokenizer.pad_token_id,
                generation.batch_size,
                "labels",
            )
        head = heads.head_of(self.recipe)
        assert isinstance(head, heads.ClassHead)
        for (index, tokens), (answer, probabilities) in zip(texts.items(), head.answers(logits), strict=True):
            by_row[index] = LabelledText(answer, probabilities, len(tokens))
        return [by_row[index] for index in range(len(rows))]

    def _tokens(self, row: dict[str, Any], where: str) -> list[int]:
        if row.get("adapter") is not None:
            raise DataError(
                f"{where}: adapter {row['adapter']!r:.60}: a classifier has a head of its own, and no other "
                "adapters; remove the column"
            )
        if not (tokens := self._texts.tokens(row, where)):
            most = counted(self.recipe.data.max_length, "token")
            raise DataError(f"{where}: the text is empty, or longer than {most} (data.max_length)")
        return tokens
