"""Trial of all that is saved at the end of a run, at its beginning: on a CPU, as soon as base and tokenizer
are there."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flytune.errors import DataError
from flytune.models import base, published, rope, tokenizers
from flytune.models.generation import end_markers
from flytune.models.library_errors import named
from flytune.recipe import Model


def save_all(model: Model, tokenizer: Any) -> None:
    """Save a base model's configurations and tokenizer into a folder that is removed, as checkpoints and
    exports do, and read them again.

    Raises:
        FlytuneError: one of them cannot be saved or read: the run would end with its first checkpoint, or
            after its last step.
    """
    from transformers import AutoConfig, GenerationConfig

    code, where = model.trust_remote_code, f"model.name_or_path: {model.name_or_path}"
    advice = "correct this file of the base, or use another model"
    with tempfile.TemporaryDirectory(prefix="flytune-trial-") as scratch:
        folder = Path(scratch)
        with named(f"{where}: its tokenizer cannot be saved; {advice}", DataError):
            tokenizers.write_files(tokenizer, model, folder)
        tokenizers.load(
            folder, DataError, f"it was saved of {model.name_or_path}, so an artifact would have it", code
        )
        if published.cached(published.base_name(model), model.revision, published.CONFIG) is None:
            return  # a folder of a tokenizer alone
        with named(f"{where}: its {published.CONFIG} cannot be saved; {advice}", DataError):
            config = base.configuration(model)
            rope.put(config, model)
            config.get_text_config().pad_token_id = tokenizer.pad_token_id
            config.save_pretrained(folder)
            architecture = next(iter(config.architectures or ()), type(config).__name__)
            published.write_config(config, model, model.dtype, architecture, folder)
            AutoConfig.from_pretrained(folder, trust_remote_code=code)
        with named(f"{where}: its {published.GENERATION_CONFIG} cannot be saved; {advice}", DataError):
            content = published.content_of(model, published.GENERATION_CONFIG)
            generation = (
                GenerationConfig.from_model_config(config)
                if content is None
                else GenerationConfig.from_dict(content)
            )
            generation.pad_token_id = tokenizer.pad_token_id
            published.savable(generation).save_pretrained(folder)
            published.write_generation_config(generation, model, folder)
            read = GenerationConfig.from_pretrained(folder)
            end_markers(tokenizer, SimpleNamespace(generation_config=read))
