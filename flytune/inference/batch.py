"""Answers to a file of prompts, by a tuned model or by several adapters on one base, in batches of like length."""

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
from flytune.data.messages import messages_of, tools_of
from flytune.errors import DataError, ExportError, RecipeError
from flytune.evaluation import score
from flytune.export import gate
from flytune.inference.prompts import BASE, Part, kept_name, read_part
from flytune.models import loading
from flytune.models.generation import Answer, Generation, answer, end_markers
from flytune.recipe.recipe import Recipe
from flytune.storage import Storage

log = logging.getLogger(__name__)
_OWN = "artifact"
"""The adapter of the artifact itself, beside those that have names."""


@dataclass(frozen=True)
class _Voice:
    """How one artifact is spoken to: as it was trained."""

    tokenizer: Any
    system_prompt: str | None
    ends: list[int]
    """Tokens that end an answer."""

    @classmethod
    def of(cls, folder: Path, recipe: Recipe, model: Any) -> "_Voice":
        tokenizer = gate.tokenizer(folder)
        return cls(tokenizer, recipe.data.system_prompt, end_markers(tokenizer, model))

    def tokens(self, row: dict[str, Any], where: str) -> list[int]:
        """A row's prompt."""
        if row.get("messages") is None:
            return list(self.tokenizer(row["prompt"])["input_ids"])
        messages = messages_of(row["messages"], where)
        if self.system_prompt and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if self.tokenizer.chat_template is None:
            raise DataError(f"{where}: messages, but the model's tokenizer has no chat template; give a prompt")
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools_of(row.get("tools"), where), add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            raise DataError(f"{where}: the chat template refuses the messages: {error}") from None
        # The template has written BOS.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class Speakers:
    """A model in memory, and who speaks through it: the artifact, further adapters on the same base, or the base."""

    def __init__(self, artifact: Path, others: Mapping[str, Path]) -> None:
        """Loads them as they were trained, over all GPUs of the machine.

        Raises:
            ExportError: an artifact cannot be read or loaded; adapters beside a whole model, or of different bases.
        """
        loading.quiet()
        self.is_adapter = loading.is_adapter(artifact)
        folders = {_OWN: artifact, **others}
        if self.is_adapter:
            self.model = adapters_loading.load(folders)
        elif others:
            raise ExportError(
                f"{artifact}: a model that was trained whole; {', '.join(others)}: adapters go onto the base that they were "
                "trained on: give an adapter as the artifact"
            )
        else:
            self.model = score.tuned_model(Recipe.from_yaml(artifact / "recipe.yaml"), artifact).eval()
        self.voices = {
            name: _Voice.of(folder, Recipe.from_yaml(folder / "recipe.yaml"), self.model) for name, folder in folders.items()
        }
        # What the base is asked is put as to the artifact.
        self.voices[BASE] = self.voices[_OWN]

    def answers(self, rows: Sequence[dict[str, Any]], generation: Generation) -> list[Answer | DataError]:
        """To each row of `flytune.inference.prompts.read_part`, in order: the answer, or why there is none.

        Adapter by adapter, so that each is switched on once.

        Raises:
            DataError: the first bad row, before any is answered, where max_bad_fraction is 0.
        """
        found: dict[int, Answer | DataError] = {}
        asked: dict[str, dict[int, list[int]]] = {}
        for index, line in enumerate(rows):
            name = line["row"].get("adapter") or _OWN
            try:
                tokens = self.voices[name].tokens(line["row"], line["where"])
                self._check_length(tokens, generation, line["where"])
                asked.setdefault(name, {})[index] = tokens
            except DataError as error:
                if not generation.max_bad_fraction:
                    raise
                found[index] = error
        with tqdm(total=len(rows) - len(found), desc="answers", unit=" prompts", delay=2) as bar:
            for name, prompts in asked.items():
                with self._speaking(name):
                    voice = self.voices[name]
                    said = answer(self.model, voice.tokenizer, list(prompts.values()), generation, voice.ends, bar, name)
                found |= dict(zip(prompts, said, strict=True))
        return [found[index] for index in range(len(rows))]

    def _speaking(self, name: str) -> AbstractContextManager[Any]:
        if name == BASE:
            if not self.is_adapter:
                raise ExportError(f"{BASE}: a model that was trained whole has no base beside it")
            return self.model.disable_adapter()
        if self.is_adapter:
            self.model.set_adapter(name)
        return nullcontext()

    def _check_length(self, tokens: list[int], generation: Generation, where: str) -> None:
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest and len(tokens) + generation.max_new_tokens > longest:
            raise DataError(
                f"{where}: {len(tokens):,} tokens and {generation.max_new_tokens} of an answer (max_new_tokens) are more than "
                f"the {longest:,} that the model can see"
            )


def check_names(adapters: Collection[str], is_adapter: bool) -> None:
    """Refuses, before a GPU is asked for, adapters that could not be loaded; `is_adapter` says what the artifact is.

    Raises:
        RecipeError: a name is none, or stands for something else; or the artifact is a whole model.
    """
    taken = (BASE, "__base__", _OWN)
    if bad := [name for name in adapters if name in taken or not re.fullmatch(r"[A-Za-z0-9_-]+", name)]:
        raise RecipeError(f"adapters: {bad[0]!r} cannot be a name: letters, digits, - and _, and not {', '.join(taken)}")
    if adapters and not is_adapter:
        raise RecipeError(
            f"adapters: {', '.join(adapters)}: the artifact is a model that was trained whole; adapters go onto the base that "
            "they were trained on: give an adapter as the artifact"
        )


def answered(part: Part, keep: str, out: Path) -> bool:
    """Whether an earlier run has left the answers to one part at the address `keep`; they are then in the file `out`.

    Raises:
        StorageError: it cannot be read.
    """
    storage, name = Storage(keep, key="keep"), kept_name(part)
    try:
        kept = storage.read(name)
    except FileNotFoundError:
        return False
    log.info("%s: answered before; taken from %s", part.file, storage.path(name))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(kept)
    return True


def answer_part(part: Part, file: Path, artifact: Path, others: Mapping[str, Path], keep: str, out: Path) -> Path:
    """The answers to one part, in the file `out` and at the address `keep`.

    Raises:
        DataError: a prompt is longer than the model can see, or its template refuses it, and max_bad_fraction is 0.
        ExportError, OutOfMemory, StorageError: as Speakers, `answer` and the storage have them.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    rows, started = read_part(file), time.perf_counter()
    said = Speakers(artifact, others).answers(rows, part.generation)
    lines = []
    for row, found in zip(rows, said, strict=True):
        lines.append(row | ({"reason": str(found)} if isinstance(found, DataError) else {"found": _columns(found)}))
    out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    Storage(keep, key="keep").write(kept_name(part), out.read_bytes())
    tokens = sum(found.answer_tokens for found in said if isinstance(found, Answer))
    log.info("%s: %d prompts, %d tokens answered in %.0f s", part.file, len(rows), tokens, time.perf_counter() - started)
    return out


def _columns(found: Answer) -> dict[str, Any]:
    return {
        "answer": found.text,
        "prompt_tokens": found.prompt_tokens,
        "answer_tokens": found.answer_tokens,
        "finish_reason": found.finish_reason,
    }
