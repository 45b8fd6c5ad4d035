"""Fixtures of several files of this folder, and one that other folders use too."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flytune.data import load_tokenizer
from tests.support.chats import CHATML, request, tokenizer_folder
from tests.support.data_hub import hub

__all__ = ["hub"]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer with ChatML as its template."""
    return tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), CHATML)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A loaded tokenizer by template and options; kept, since hypothesis asks often."""

    @cache
    def get(template: str, **options: Any) -> Any:
        asked = request(
            tokenizer_folder(tmp_path_factory.mktemp("tokenizer"), template, **options), path="unread"
        )
        return load_tokenizer(asked.model, asked.data)

    return get


@pytest.fixture(scope="session")
def loaded(tokenizers: Any) -> Any:
    """The tokenizer with ChatML, loaded."""
    return tokenizers(CHATML)
