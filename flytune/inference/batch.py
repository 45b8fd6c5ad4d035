"""Batch inference: answers of a tuned model, or of several adapters on one base, in batches of similar length."""

import json
import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune.adapters import loading as adapters_loading
from flytune.artifacts import opening
from flytune.console import step_lines
from flytune.data import messages_of, tools_of
from flytune.errors import DataError, ExportError, RecipeError
from flytune.evaluation import score
from flytune.export import folder as export_folder
from flytune.inference.prompts import BASE, PromptPart, answers_name, read_part
from flytune.models import GeneratedAnswer, Generation, end_markers, loading, positions, vocabulary
from flytune.models.generation import answer
from flytune.models.library_errors import named
from flytune.recipe import Recipe
from flytune.sentences import counted
from flytune.storage import Storage

log = logging.getLogger(__name__)
_OWN = "artifact"
"""Name of the artifact's own adapter, next to the named ones."""


@dataclass(frozen=True)
class _PromptFormat:
    """The prompt format of an artifact, as in its training."""

    tokenizer: Any
    system_prompt: str | None
    ends: list[int]
    """Tokens that end an answer."""

    @classmethod
    def of(cls, folder: Path, recipe: Recipe, model: Any) -> "_PromptFormat":
        tokenizer = export_folder.tokenizer(folder)
        return cls(tokenizer, recipe.data.system_prompt, end_markers(tokenizer, model))

    def tokens(self, row: dict[str, Any], where: str) -> list[int]:
        """Return the tokens of a row's prompt."""
        if row.get("messages") is None:
            return list(self.tokenizer(row["prompt"])["input_ids"])
        messages = messages_of(row["messages"], where)
        if self.system_prompt and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if self.tokenizer.chat_template is None:
            raise DataError(f"{where}: messages, but the model's tokenizer has no chat template; give a prompt")
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools_of(row.get("tools"), where), add_generation_prompt=True, tokenize=False
            )
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        # The template has already written BOS.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class InferenceModel:
    """A model in memory that answers as the artifact, as other adapters on the same base, or as the base."""

    def __init__(self, artifact: Path, others: Mapping[str, Path], trust_remote_code: bool = False) -> None:
        """Load the artifacts as they were trained, over all GPUs of the machine; with code of their own only by consent.

        Raises:
            ExportError: an artifact cannot be read or loaded, was changed, or has code without consent; adapters are given for
                a complete model, or have different bases.
        """
        loading.import_libraries()
        self.is_adapter = loading.is_adapter(artifact)
        folders = {_OWN: artifact, **others}
        consent = opening.Consent(trust_remote_code, base_at_address=True)
        if self.is_adapter:
            self.model = adapters_loading.load(folders, consent)
        elif others:
            raise ExportError(
                f"{artifact}: a complete model; {', '.join(others)}: adapters need the base that they were trained on: give an "
                "adapter as the artifact"
            )
        else:
            recipe = opening.open_artifact(artifact, consent).recipe
            opening.require_language_model(recipe, artifact)
            self.model = score.tuned_model(recipe, artifact).eval()
        self.formats = {
            name: _PromptFormat.of(folder, Recipe.from_yaml(folder / "recipe.yaml"), self.model)
            for name, folder in folders.items()
        }
        # The base gets prompts in the artifact's format.
        self.formats[BASE] = self.formats[_OWN]

    def answers(self, rows: Sequence[dict[str, Any]], generation: Generation) -> list[GeneratedAnswer | DataError]:
        """Return the answer to each row of `flytune.inference.prompts.read_part`, in order, or the error of a bad row.

        Rows are answered adapter by adapter, so that each is switched on once.

        Raises:
            DataError: the first bad row, before any row is answered, if max_bad_fraction is 0.
        """
        found: dict[int, GeneratedAnswer | DataError] = {}
        by_adapter: dict[str, dict[int, list[int]]] = {}
        for index, line in enumerate(rows):
            name = line["row"].get("adapter") or _OWN
            try:
                tokens = self.formats[name].tokens(line["row"], line["where"])
                self._check(tokens, generation, line["where"])
                by_adapter.setdefault(name, {})[index] = tokens
            except DataError as error:
                if not generation.max_bad_fraction:
                    raise
                found[index] = error
        with tqdm(total=len(rows) - len(found), desc="answers", unit=" prompts", delay=2) as bar:
            for name, prompts in by_adapter.items():
                with self._active(name):
                    form = self.formats[name]
                    with named(f"{name}: its model cannot answer", ExportError, (OSError, RuntimeError)):
                        answers = answer(self.model, form.tokenizer, list(prompts.values()), generation, form.ends, bar, name)
                found |= dict(zip(prompts, answers, strict=True))
        return [found[index] for index in range(len(rows))]

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


def check_names(adapters: Collection[str], is_adapter: bool) -> None:
    """Check the names of adapters before a GPU is requested; `is_adapter` is True if the artifact is an adapter.

    Raises:
        RecipeError: a name is invalid or reserved; or there are adapters and the artifact is a complete model.
    """
    taken = (BASE, "__base__", _OWN)
    if bad := [name for name in adapters if name in taken or not re.fullmatch(r"[A-Za-z0-9_-]+", name)]:
        raise RecipeError(f"adapters: {bad[0]!r} cannot be a name: letters, digits, - and _, and not {', '.join(taken)}")
    if adapters and not is_adapter:
        raise RecipeError(
            f"adapters: {', '.join(adapters)}: the artifact is a complete model; adapters need the base that they were trained "
            "on: give an adapter as the artifact"
        )


def find_answers(part: PromptPart, scratch_folder: str, out: Path) -> bool:
    """Look for the answers of an earlier run at the address `scratch_folder`; if they are there, write them to the file `out`.

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
    out.parent.mkdir(parents=True, exist_ok=True)
    rows, started = read_part(file), time.perf_counter()
    answers = InferenceModel(artifact, others, trust_remote_code).answers(rows, part.generation)
    lines = []
    for row, found in zip(rows, answers, strict=True):
        lines.append(row | ({"reason": str(found)} if isinstance(found, DataError) else {"found": _columns(found)}))
    out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    Storage(scratch_folder, key="keep").write(answers_name(part), out.read_bytes())
    tokens = sum(found.answer_tokens for found in answers if isinstance(found, GeneratedAnswer))
    seconds = time.perf_counter() - started
    step_lines.show(f"{part.file}: {counted(len(rows), 'prompt')}, {counted(tokens, 'token')} answered in {seconds:.0f} s")
    return out


def _columns(found: GeneratedAnswer) -> dict[str, Any]:
    return {
        "answer": found.text,
        "prompt_tokens": found.prompt_tokens,
        "answer_tokens": found.answer_tokens,
        "finish_reason": found.finish_reason,
    }
