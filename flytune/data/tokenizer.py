"""The base model's tokenizer, with a pad token and the recipe's chat template."""

import importlib
import json
import re
from pathlib import Path
from typing import Any

from flytune import process_setup
from flytune.data.hub import advice
from flytune.data.shards import AGAIN
from flytune.data.sources import read_chat_template, shipped_templates
from flytune.errors import DataError, PreparedDataError, RecipeError
from flytune.models import base, chat_templates, config_json, tokenizers, vocabulary
from flytune.models.library_errors import reason
from flytune.recipe import Data, Model
from flytune.sentences import counted
from training_estimates.meta_model import ENCODERS

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
"""Files of which a tokenizer has at least one."""
_PADDING = re.compile(r"(?<![a-z])(pad|padding)(?![a-z])", re.IGNORECASE)
_MEDIA = re.compile(r"image|vision|video|audio|speech|fim", re.IGNORECASE)
"""Words of tokens that fill the place of something else than text."""


def load_tokenizer(model: Model, data: Data) -> Any:
    """Return a fast tokenizer with EOS, a pad token, and the recipe's chat template if it has one.

    Raises:
        DataError: it does not exist, access is denied, or it lacks a token or the fast implementation.
    """
    name = f"the tokenizer of {model.name_or_path}"
    tokenizer = chat_templates.limited(_from_pretrained(model), f"model.name_or_path: {name}")
    if not tokenizer.is_fast:
        raise DataError(
            f"model.name_or_path: {name} is a slow one ({type(tokenizer).__name__}), which does not report "
            "the positions of tokens in the text; it needs a tokenizer.json: convert it once to a fast one, "
            "or choose another model"
        )
    _try(tokenizer, name)
    vocabulary.add_tokens(tokenizer, model)
    for field, token in (("pad_token", data.pad_token), ("eos_token", data.eos_token)):
        if token is not None and token not in tokenizer.get_vocab():
            is_pad = field == "pad_token"
            choices = _candidates(tokenizer) if is_pad else ", or that model.extra_special_tokens adds"
            raise DataError(
                f"data.{field}: {token!r} is not one of the tokens of {name}; it must be a single token that "
                f"exists{choices}"
            )
        if token is not None:
            setattr(tokenizer, field, token)
    # The id, because an empty token has none.
    if tokenizer.eos_token_id is None and config_json.model_type(model) in ENCODERS:
        # BERT's tokenizers end each text with it, and name no EOS.
        tokenizer.eos_token = tokenizer.sep_token
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"model.name_or_path: {name} has no EOS token, so no answer could end; set data.eos_token to one "
            "of its tokens"
        )
    if data.add_bos_token and tokenizer.bos_token is None:
        raise DataError(f"data.add_bos_token: {name} has no BOS token; remove this line")
    if tokenizer.pad_token_id is None:
        # Padding is masked by its place, and labels are stored: an end token in the text is still read and
        # trained.
        rows = config_json.table_rows(model)
        usable = [token for token, number in _padding_tokens(tokenizer) if rows is None or number < rows]
        tokenizer.pad_token = usable[0] if usable else tokenizer.eos_token
    if data.chat_template is not None:
        tokenizer.chat_template = read_chat_template(data.chat_template)
        chat_templates.check(tokenizer.chat_template, f"data.chat_template: {data.chat_template}")
    return tokenizer


def stored_tokenizer(dataset: Path, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer that is stored with prepared data.

    Raises:
        DataError: it cannot be read.
    """
    return tokenizers.load(dataset / "tokenizer", PreparedDataError, AGAIN, trust_remote_code)


def check_rows(tokenizer: Any, rows: int | None, model: Model) -> None:
    """Check that the tokens which pad and end samples have rows in the model's embedding; `rows` is None
    where unknown.

    Raises:
        DataError: one of them has none: training would end with its first batch, on hardware that is paid
            for.
    """
    for field in ("pad_token", "eos_token"):
        number = getattr(tokenizer, f"{field}_id")
        if rows is not None and number is not None and number >= rows:
            token = getattr(tokenizer, field)
            raise DataError(
                f"data.{field}: {token!r} has the id {number:,}, and the embedding of {model.name_or_path} "
                f"has {counted(rows, 'row')}; "
                "set a token that the model has, or list it in model.extra_special_tokens, for which rows "
                "are added"
            )


class Encoder:
    """The attributes of a tokenizer that making samples uses; a process that receives it need not import
    torch."""

    def __init__(self, tokenizer: Any) -> None:
        self.backend_tokenizer = tokenizer.backend_tokenizer
        self.chat_template = None if tokenizer.chat_template is None else tokenizer.get_chat_template()
        self.special_tokens_map = dict(tokenizer.special_tokens_map)
        self.added_tokens_decoder = dict(tokenizer.added_tokens_decoder)
        self.bos_token, self.bos_token_id = tokenizer.bos_token, tokenizer.bos_token_id
        self.eos_token, self.eos_token_id = tokenizer.eos_token, tokenizer.eos_token_id
        self._length = len(tokenizer)

    def __len__(self) -> int:
        return self._length

    def get_chat_template(self) -> str | None:
        return self.chat_template

    def added_end(self) -> int | None:
        """Return the end token that the tokenizer adds to a text; None if it adds none."""
        last = self.backend_tokenizer.encode("a").ids[-1:]
        return self.eos_token_id if last == [self.eos_token_id] else None


def require_chat_template(tokenizer: Any, model: Model, form: str) -> None:
    """Check that the tokenizer has a chat template, for a format that uses one.

    Raises:
        DataError: it has none; the message names those that Flytune ships.
    """
    if tokenizer.chat_template is None:
        raise DataError(
            f"data.chat_template: the tokenizer of {model.name_or_path} has no chat template, and the format "
            f"{form} needs one; set a Jinja file, or one that is shipped: {', '.join(shipped_templates())}"
        )
    chat_templates.check(tokenizer.get_chat_template(), f"the chat template of {model.name_or_path}")


def _from_pretrained(model: Model) -> Any:
    with process_setup.paused():
        importlib.import_module("transformers.models.auto.tokenization_auto")
    where = f"model.name_or_path: {model.name_or_path}"
    try:
        folder = Path(name := base.local_name(model, weights=False))
    except RecipeError as error:
        raise DataError(str(error)) from None
    if folder.is_dir() and (refused := tokenizers.problem_in_steps(folder)):
        raise DataError(f"{where}: its tokenizer is not loaded: {refused}; use another model")
    try:
        return tokenizers.from_pretrained(name, model.revision, model.trust_remote_code)
    except tokenizers.TokensDiffer as error:
        raise DataError(f"{where}: {error}; use another model") from None
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, and what the hub raises
        if folder.is_dir() and not any((folder / file).is_file() for file in _FILES):
            raise DataError(
                f"{where}: the folder has no tokenizer: none of {', '.join(_FILES)}; copy them from where "
                "its weights come from"
            ) from None
        if folder.is_dir():
            names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
            raise DataError(
                f"{where}: no tokenizer can be read from this folder, which has {names}: {reason(error)}"
            ) from error
        if "trust_remote_code" in str(error):
            raise DataError(
                f"{where}: its tokenizer is custom code; to run it set model.trust_remote_code: true"
            ) from error
        raise DataError(f"{where}: {advice(error, 'model')}") from error


def _try(tokenizer: Any, name: str) -> None:
    """Encode and decode a text, which fails with files that could be read and make no sense."""
    try:
        tokenizers.try_out(tokenizer)
    except (
        Exception
    ) as error:  # TypeError, KeyError, OverflowError and those of tokenizers, which are plain Exceptions
        raise DataError(
            f"model.name_or_path: {name} is damaged: it encodes no text ({reason(error)}); copy its files "
            "again"
        ) from error
    try:
        json.dumps([tokenizer.init_kwargs, tokenizer.chat_template], default=str, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"model.name_or_path: {name} has text that is not Unicode ({error.reason}: "
            f"{error.object[error.start]!a}) and could not be stored with the data; remove it from "
            "tokenizer_config.json"
        ) from None


def _padding_tokens(tokenizer: Any) -> list[tuple[str, int]]:
    """Return the special tokens that are named as padding, such as Llama 3's <|finetune_right_pad_id|>, with
    their ids.

    Others are text: to pad with one would make it special. <|image_pad|> and its like have the place of
    something else.
    """
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(
        (token, number)
        for token, number in added.items()
        if _PADDING.search(token) and not _MEDIA.search(token)
    )


def _candidates(tokenizer: Any) -> str:
    names = [token for token, _ in _padding_tokens(tokenizer)] + (
        [tokenizer.unk_token] if tokenizer.unk_token else []
    )
    if not names:
        return (
            f", for example {tokenizer.eos_token} (labels are stored, so an EOS in the text is still trained)"
        )
    return f", for example {' or '.join(dict.fromkeys(names[:4]))}"
