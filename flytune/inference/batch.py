"""Batch inference: answers of a tuned model, or of several adapters on one base, in batches of similar
length."""

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from flytune import yaml_core
from flytune.adapters import loading as adapters_loading
from flytune.adapters import merging
from flytune.artifacts import opening
from flytune.console import step_lines
from flytune.data import image_rows
from flytune.data.labels import encode
from flytune.data.render import Rendered
from flytune.errors import DataError, ExportError, RecipeError
from flytune.evaluation import language_models
from flytune.export import folder as export_folder
from flytune.inference.labels import Classifier, LabelledText
from flytune.inference.prompts import BASE, Columns, PromptPart, Summary, answers_name, join, read_part, split
from flytune.inference.texts import is_classifier
from flytune.models import GeneratedAnswer, Generation, end_markers, loading, positions, vocabulary
from flytune.models.chat_templates import IMAGE, in_parts
from flytune.models.generation import answer
from flytune.models.images import COLUMN, STORED, Processor, StoredImages, has_files
from flytune.models.library_errors import named
from flytune.models.scoring import Row
from flytune.recipe import Recipe
from flytune.records.lineage import LINEAGE, Lineage
from flytune.sentences import counted
from flytune.storage import Storage

log = logging.getLogger(__name__)
_OWN = "artifact"
"""Name of the artifact's own adapter, next to the named ones."""


class Prompt(NamedTuple):
    """A row's prompt, as a model reads it."""

    tokens: list[int]
    images: Row
    """Row of its images (flytune.models.images); empty of a model that reads text alone."""


@dataclass(frozen=True)
class PromptFormat:
    """The prompt format of an artifact, as in its training."""

    tokenizer: Any
    columns: Columns
    ends: list[int]
    """Tokens that end an answer."""
    processor: Processor | None = None
    """Processor of images; None of a model that reads text alone."""

    @classmethod
    def of(cls, folder: Path, model: Any) -> "PromptFormat":
        """Return that of an artifact, or of a merged model, whose files do not tell columns and system
        prompt."""
        tokenizer, columns = export_folder.tokenizer(folder), columns_in(folder)
        processor = None
        if columns.with_images:
            processor = Processor(str(folder), None, tokenizer, columns.max_pixels)
        return cls(tokenizer, columns, end_markers(tokenizer, model), processor)

    def prompt(self, line: Mapping[str, Any]) -> Prompt:
        """Return the prompt of a line of `flytune.inference.prompts.read_part`.

        Raises:
            DataError: the template refuses it, or it has images and the model reads text alone.
        """
        row, where, digests = line["row"], line["where"], line.get("images", [])
        if self.processor is None:
            if digests:
                raise DataError(f"{where}: has images, and this adapter was trained on text alone")
            return Prompt(self.tokens(row, where), {})
        stored = StoredImages(Path(line.get("folder", "")), self.processor)
        images = {STORED: stored, COLUMN: " ".join(digests)}
        return Prompt(self.tokens(row, where, stored.pictures(images)), images)

    def tokens(self, row: dict[str, Any], where: str, pictures: Sequence[Any] = ()) -> list[int]:
        """Return the tokens of a row's prompt, with those of its pictures."""
        question = self.columns.question(self.columns.with_marks(row, where), where)
        if isinstance(question, str):
            rendered = Rendered(question, [], add_special_tokens=True, append_eos=False)
            ((ids, _),) = encode([rendered], self.tokenizer, self.columns.add_bos_token)
            return list(ids)
        if self.tokenizer.chat_template is None:
            raise DataError(f"{where}: a chat, but the model's tokenizer has no chat template; give a prompt")
        chat = [in_parts(turn) if IMAGE in str(turn.get("content")) else turn for turn in question]
        try:
            text = self.tokenizer.apply_chat_template(
                chat, tools=self.columns.tools(row, where), add_generation_prompt=True, tokenize=False
            )
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        if self.processor is not None:
            text = image_rows.expanded(text, pictures, self.processor, where).text
        # The template has already written BOS.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class InferenceModel:
    """A model in memory that answers as the artifact, as other adapters on the same base, or as the base."""

    def __init__(
        self, artifact: Path, others: Mapping[str, Path], consent: opening.Consent = opening.NONE
    ) -> None:
        """Load the artifacts as they were trained, over all GPUs of the machine; `artifact` may be a merged
        model's folder.

        Raises:
            ExportError: an artifact cannot be read or loaded, was changed, or has code without consent;
                adapters are given for a complete model, or have different bases.
        """
        loading.import_libraries()
        self.is_adapter = loading.is_adapter(artifact)
        folders = {_OWN: artifact, **others}
        if self.is_adapter:
            self.model = adapters_loading.load(folders, consent)
        elif others:
            raise ExportError(
                f"{artifact}: a complete model; {', '.join(others)}: adapters need the base that they were "
                "trained on: give an adapter as the artifact"
            )
        elif merging.is_merged(artifact):
            self.model = merging.load(artifact, consent).eval()
        else:
            recipe = opening.open_artifact(artifact, consent).recipe
            opening.require_language_model(recipe, artifact)
            self.model = language_models.tuned_model(recipe, artifact).eval()
        self.formats = {name: PromptFormat.of(folder, self.model) for name, folder in folders.items()}
        # The base gets prompts in the artifact's format.
        self.formats[BASE] = self.formats[_OWN]

    @property
    def own_format(self) -> PromptFormat:
        """Return the prompt format of the artifact."""
        return self.formats[_OWN]

    def answers(
        self, rows: Sequence[dict[str, Any]], generation: Generation
    ) -> list[GeneratedAnswer | DataError]:
        """Return the answer to each row of `flytune.inference.prompts.read_part`, in order, or the error of a
        bad row.

        Rows are answered adapter by adapter, so that each is switched on once.

        Raises:
            DataError: the first bad row, before any row is answered, if max_bad_fraction is 0.
        """
        by_row: dict[int, GeneratedAnswer | DataError] = {}
        by_adapter: dict[str, dict[int, Prompt]] = {}
        for index, line in enumerate(rows):
            name = line["row"].get("adapter") or _OWN
            try:
                prompt = self.formats[name].prompt(line)
                self._check(prompt.tokens, generation, line["where"])
                by_adapter.setdefault(name, {})[index] = prompt
            except DataError as error:
                if not generation.max_bad_fraction:
                    raise
                by_row[index] = error
        with tqdm(total=len(rows) - len(by_row), desc="answers", unit=" prompts", delay=2) as bar:
            for name, prompts in by_adapter.items():
                with self._active(name):
                    form = self.formats[name]
                    with named(f"{name}: its model cannot answer", ExportError, (OSError, RuntimeError)):
                        answers = answer(
                            self.model,
                            form.tokenizer,
                            [prompt.tokens for prompt in prompts.values()],
                            generation,
                            form.ends,
                            bar,
                            name,
                            [prompt.images for prompt in prompts.values()],
                        )
                by_row |= dict(zip(prompts, answers, strict=True))
        return [by_row[index] for index in range(len(rows))]

    def _active(self, name: str) -> AbstractContextManager[Any]:
        """Switch to an adapter, or to the base while the context is open."""
        if name == BASE:
            if not self.is_adapter:
                raise ExportError(f"{BASE}: the artifact is a complete model, without its base")
            return self.model.disable_adapter()
        if self.is_adapter:
            self.model.set_adapter(name)
        return nullcontext()

    def _check(self, tokens: list[int], generation: Generation, where: str) -> None:
        vocabulary.check_ids(self.model, tokens, where)
        limit = positions.of_model(self.model)
        if limit and len(tokens) + generation.max_new_tokens > limit.tokens:
            raise DataError(
                f"{where}: {counted(len(tokens), 'token')} and {generation.max_new_tokens} of an answer "
                "(max_new_tokens) are more than "
                f"the model's context of {limit.tokens:,}"
            )


def model_of(
    artifact: Path, others: Mapping[str, Path], consent: opening.Consent = opening.NONE
) -> InferenceModel | Classifier:
    """Return the model of an artifact in memory: one that answers in words, or a classifier.

    Raises:
        ExportError: as InferenceModel and Classifier; or adapters are given for a classifier.
    """
    recipe = artifact / "recipe.yaml"
    if not recipe.is_file() or not is_classifier(Recipe.from_yaml(recipe)):
        return InferenceModel(artifact, others, consent)
    if others:
        raise ExportError(
            f"{', '.join(others)}: adapters beside a classifier, which has a head of its own: label texts "
            "with one artifact after the other"
        )
    return Classifier(artifact, consent)


def columns_in(folder: Path) -> Columns:
    """Return the columns of an artifact's training; of a merged model, only what begins a text, and whether
    it reads images, and how large."""
    recipe = folder / "recipe.yaml"
    if recipe.is_file():
        return Columns.of(Recipe.from_yaml(recipe))
    lineage = folder / LINEAGE
    runs = Lineage.read(lineage).runs if lineage.is_file() else []
    columns = Columns(with_images=has_files(folder))
    for run in runs[-1:]:
        data = Recipe.from_content(yaml_core.load(run.recipe), lineage).data
        columns = replace(columns, add_bos_token=data.add_bos_token, max_pixels=data.max_pixels)
    return columns


def check_names(adapters: Collection[str], is_adapter: bool) -> None:
    """Check the names of adapters before a GPU is requested; `is_adapter` is True if the artifact is an
    adapter.

    Raises:
        RecipeError: a name is invalid or reserved; or there are adapters and the artifact is a complete
            model.
    """
    taken = (BASE, "__base__", _OWN)
    if bad := [name for name in adapters if name in taken or not re.fullmatch(r"[A-Za-z0-9_-]+", name)]:
        raise RecipeError(
            f"adapters: {bad[0]!r} cannot be a name: letters, digits, - and _, and not {', '.join(taken)}"
        )
    if adapters and not is_adapter:
        raise RecipeError(
            f"adapters: {', '.join(adapters)}: the artifact is a complete model; adapters need the base that "
            "they were trained on: give an adapter as the artifact"
        )


def find_answers(part: PromptPart, scratch_folder: str, out: Path) -> bool:
    """Look for the answers of an earlier run at the address `scratch_folder`; if they are there, write them
    to the file `out`.

    Returns: True if they were found.

    Raises:
        StorageError: the address cannot be read.
    """
    storage, name = Storage(scratch_folder, key="keep"), answers_name(part)
    try:
        answers = storage.read(name)
    except FileNotFoundError:
        return False
    step_lines.show(f"{part.file}: answered before; taken from {storage.path(name)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(answers)
    return True


def answer_part(
    part: PromptPart,
    file: Path,
    artifact: Path,
    others: Mapping[str, Path],
    scratch_folder: str,
    out: Path,
    trust_remote_code: bool = False,
) -> Path:
    """Answer one part, and write the answers to the file `out` and to the address `scratch_folder`.

    Raises:
        DataError: a prompt is too long for the model, or its template refuses it, and max_bad_fraction is 0.
        ExportError, OutOfMemory, StorageError: raised by InferenceModel, `answer` and the storage.
    """
    consent = opening.Consent(trust_remote_code, base_at_address=True)
    started = time.perf_counter()
    tokens = _write_answers(part, file, lambda: model_of(artifact, others, consent), out)
    seconds = time.perf_counter() - started
    step_lines.show(
        f"{part.file}: {counted(part.rows, 'prompt')}, {counted(tokens, 'token')} answered in {seconds:.0f} s"
    )
    Storage(scratch_folder, key="keep").write(answers_name(part), out.read_bytes())
    return out


def answer_file(
    file: Path,
    artifact: Path,
    others: Mapping[str, Path],
    generation: Generation,
    out: Path,
    consent: opening.Consent = opening.NONE,
) -> Summary:
    """Answer a file of prompts on this machine, and write what `flytune.inference.prompts.join` writes to the
    folder `out`.

    Args:
        file: the prompts, in any form that `flytune.inference.prompts.split` reads.
        artifact: the folder of an artifact, or of a merged model.
        others: folders of other adapters on the same base, by name.
        generation: settings.
        out: a folder that does not exist.
        consent: what the person allows, of code and base.

    Raises:
        DataError, RecipeError: raised by `split`, `check_names` and InferenceModel.answers.
        ExportError, OutOfMemory: raised by InferenceModel and `answer`.
    """
    check_names(others, loading.is_adapter(artifact))
    work = out.with_name(f"{out.name}.parts")
    models = hashlib.sha256(str(artifact).encode()).hexdigest()
    # The prompts are read before the model: a mistake in them is reported in a second.
    (part,) = split(file, 1, others, generation, models, work, columns_in(artifact))
    answered = work / "answered.jsonl"
    _write_answers(part, work / part.file, lambda: model_of(artifact, others, consent), answered)
    return join(work, [part], [answered], out)


def _write_answers(
    part: PromptPart, file: Path, load: Callable[[], InferenceModel | Classifier], out: Path
) -> int:
    """Answer one part with the model that `load` returns, write the answers to the file `out`, and return
    their tokens."""
    rows = read_part(file)
    answers = load().answers(rows, part.generation)
    lines = []
    for row, answered in zip(rows, answers, strict=True):
        kept = {name: row[name] for name in ("where", "number", "row")}
        if isinstance(answered, DataError):
            lines.append(kept | {"reason": str(answered)})
        else:
            of_answer = answered.columns() if isinstance(answered, LabelledText) else _columns(answered)
            lines.append(kept | {"found": of_answer})
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return sum(answered.answer_tokens for answered in answers if isinstance(answered, GeneratedAnswer))


def _columns(generated: GeneratedAnswer) -> dict[str, Any]:
    return {
        "answer": generated.text,
        "prompt_tokens": generated.prompt_tokens,
        "answer_tokens": generated.answer_tokens,
        "finish_reason": generated.finish_reason,
    }
