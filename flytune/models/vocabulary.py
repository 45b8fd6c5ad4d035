"""Tokens added to a base model's vocabulary: their ids, their rows of embedding and head, and PEFT's layers
that train rows."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from flytune import patches
from flytune.errors import ExportError, RecipeError
from flytune.models import base, tokenizers
from flytune.models.safetensors_files import ParameterPart, StoredParameter
from flytune.recipe import Method, Model
from flytune.sentences import counted

MULTIPLE = 8
"""Rows of a table that grows are a multiple of it: PEFT's own example of added tokens (examples/sft,
pad_to_multiple_of=8); 16-bit products of GPUs need it for their fastest kernels (NVIDIA's guide to matrix
multiplication)."""
CHUNK_ROWS = 4096
"""Rows whose sum is computed at a time."""


def add_tokens(tokenizer: Any, model: Model) -> None:
    """Add the recipe's tokens to a tokenizer as special tokens; a token that exists keeps its id."""
    if model.extra_special_tokens:
        tokenizer.add_special_tokens(
            {"extra_special_tokens": model.extra_special_tokens}, replace_extra_special_tokens=False
        )


def load_ids(model: Model) -> tuple[list[int], int]:
    """Return the ids of the recipe's added tokens, and the number of ids of the tokenizer with them; reads
    the tokenizer."""
    tokenizer = tokenizers.from_pretrained(
        base.local_name(model, weights=False), model.revision, model.trust_remote_code
    )
    add_tokens(tokenizer, model)
    return [int(tokenizer.convert_tokens_to_ids(token)) for token in model.extra_special_tokens], len(
        tokenizer
    )


def rows_for(rows: int, tokens: int) -> int:
    """Return the rows of a table of `rows` that has to hold `tokens`: unchanged where padding has room for
    them."""
    return rows if tokens <= rows else math.ceil(tokens / MULTIPLE) * MULTIPLE


def check_ids(loaded: Any, ids: Collection[int], where: object) -> None:
    """Compare tokens with the rows of a loaded model's embedding; a GPU would end the process at one that has
    none.

    Raises:
        ExportError: a token has no row: tokenizer and model are not of one artifact.
    """
    rows = loaded.config.get_text_config().vocab_size
    if (largest := max(ids, default=0)) >= rows:
        raise ExportError(
            f"{where}: its tokenizer makes token {largest:,}, and the model has rows for {rows:,}; they do "
            "not belong together"
        )


def wanted_rows(model: Model, rows: int) -> int:
    """Return the rows that embedding and head of the recipe's model have, `rows` of which are in the base's
    files."""
    return rows_for(rows, load_ids(model)[1]) if model.extra_special_tokens else rows


def grow(loaded: Any, model: Model) -> None:
    """Give a loaded base model rows for the recipe's tokens, in place; each new row is the mean of the base's
    rows.

    With the mean, a new token's logit is the mean of all (Hewitt 2021, "Initializing New Word Embeddings for
    Pretrained Language Models"), and every load of the base has the same rows, which adapters need.
    """
    import torch

    config = loaded.config.get_text_config()
    before, after = config.vocab_size, wanted_rows(model, config.vocab_size)
    if after == before:
        return
    with torch.random.fork_rng(devices=[]):  # transformers draws values, which are replaced
        loaded.resize_token_embeddings(after, mean_resizing=False)
    with torch.no_grad():
        for table in {id(layer.weight): layer for layer in _tables(loaded)}.values():
            for tensor in (table.weight, getattr(table, "bias", None)):
                if tensor is not None:
                    with gathered(tensor):
                        tensor.data[before:] = mean_row((tensor.data[:before],)).to(tensor)


def _tables(loaded: Any) -> list[Any]:
    """Return the embedding, and the head if there is one."""
    return [
        layer
        for layer in (loaded.get_input_embeddings(), loaded.get_output_embeddings())
        if layer is not None
    ]


def mean_row(parts: Iterable[Any]) -> Any:
    """Return the mean row, float64, of a table that is given in parts of rows."""
    total, count = 0, 0
    for part in parts:
        for rows in part.split(CHUNK_ROWS):
            total, count = total + rows.double().sum(dim=0), count + len(rows)
    return total / count


def gathered(tensor: Any) -> Any:
    """Return a context in which a parameter that ZeRO-3 has partitioned is complete, and may be changed by
    all processes."""
    from peft.utils.integrations import gather_params_ctx

    # The first process's values are kept, and all processes compute the same.
    return gather_params_ctx([tensor], modifier_rank=0)


@dataclass(frozen=True)
class Grown(StoredParameter):
    """Table that is stored without the rows of added tokens, which get the mean of its rows."""

    rows: int = 0
    """Rows in the file."""
    means: dict[Any, Any] = field(default_factory=dict, compare=False)
    """Mean row by dtype, once it was computed."""

    def read(self, part: ParameterPart) -> None:
        local, start = part.local, part.index[0].start or 0
        kept = min(max(0, self.rows - start), len(local))
        stored, rest = (self.rows, *part.shape[1:]), part.index[1:]
        if kept:
            index = (slice(start, start + kept), *rest)
            super().read(replace(part, shape=stored, index=index, local=local[:kept]))
        if kept < len(local):
            if local.dtype not in self.means:
                self.means[local.dtype] = mean_row(self._parts(local.dtype))
            local[kept:] = self.means[local.dtype].to(local)

    def _parts(self, dtype: Any) -> Iterator[Any]:
        """Yield the stored rows in the dtype that they are loaded in, as `grow` sees them."""
        table = self.files[self.key]
        for start in range(0, self.rows, CHUNK_ROWS):
            yield table[start : min(start + CHUNK_ROWS, self.rows)].to(dtype)


def grown_sources(sources: Mapping[str, Any], tensors: Mapping[str, Any], rows: int | None) -> dict[str, Any]:
    """Return the sources of a model's tensors with those of tables that have more than their `rows` in the
    files.

    Args:
        sources: source of each tensor, by name.
        tensors: the model's tensors, by name.
        rows: rows in the files, where the model has more (`meta_model`); None where it has not.
    """
    return {
        name: Grown(source.files, source.key, rows=rows)
        if rows is not None
        and type(source) is StoredParameter
        and tuple(source.files[source.key].get_shape()) == (rows, *tensors[name].shape[1:])
        and len(tensors[name]) > rows
        else source
        for name, source in sources.items()
    }


def peft_fields(method: Method, model: Model, built: Any, ids: list[int] | None = None) -> dict[str, Any]:
    """Return the fields of PEFT's configuration that train embedding and head: completely, or rows of them.

    Rows of added tokens are trained wherever the table is not trained completely. Head and embedding that are
    one tensor stay one (`ensure_weight_tying`).

    Args:
        built: the base model, whose modules are looked up; may be on the meta device.
        ids: ids of the added tokens; by default, the tokenizer's.

    Raises:
        RecipeError: the head is the embedding, or has a bias, which PEFT's layer would leave out.
    """
    embedding, head = built.get_input_embeddings(), built.get_output_embeddings()
    names = {id(module): name for name, module in built.named_modules()}
    tied = head is None or head.weight is embedding.weight
    tables = {"embed_tokens": names[id(embedding)]} | ({} if tied else {"lm_head": names[id(head)]})
    if unknown := [name for name in method.modules_to_save if name not in tables]:
        raise RecipeError(
            f"method.modules_to_save: {unknown[0]}: head and embedding of {model.name_or_path} are one "
            "tensor; write embed_tokens"
        )
    if ids is None:
        ids = load_ids(model)[0] if model.extra_special_tokens else []
    rows = sorted({*ids, *method.trainable_token_indices})
    if rows and rows[-1] >= built.config.get_text_config().vocab_size:
        raise RecipeError(
            f"method.trainable_token_indices: {rows[-1]}: the model has "
            f"{counted(built.config.get_text_config().vocab_size, 'token')}"
        )
    by_row = (
        {name: rows for table, name in tables.items() if table not in method.modules_to_save} if rows else {}
    )
    if by_row and "lm_head" not in method.modules_to_save and getattr(head, "bias", None) is not None:
        raise RecipeError(
            f"model.extra_special_tokens: the head of {model.name_or_path} has a bias, which PEFT leaves out "
            "where it trains rows; write method.modules_to_save: [lm_head]"
        )
    complete = [tables[name] for name in method.modules_to_save]
    return (
        ({"modules_to_save": complete} if complete else {})
        | ({"trainable_token_indices": by_row} if by_row else {})
        | ({"ensure_weight_tying": True} if tied and complete else {})
    )


def row_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield PEFT's layers that train rows, with their names; of tied tables only the embedding's."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for name, module in model.named_modules():
        if isinstance(module, TrainableTokensLayer) and module.tied_adapter is None:
            yield name, module


def allow_loss(model: Any) -> None:
    """Let TRL's loss read a head of which PEFT trains rows: its weight is computed, and it has no bias.

    `peft_fields` refuses a head with a bias.
    """
    from peft.utils.other import TrainableTokensWrapper

    wrappers: list[Any] = [module for module in model.modules() if isinstance(module, TrainableTokensWrapper)]
    for wrapper in wrappers:
        wrapper.bias = None
    if wrappers:
        # A weight that was computed is complete, and ZeRO-3 has nothing to gather.
        gather = patches.trl.GATHERED_HEAD.original()
        patches.trl.GATHERED_HEAD.install(
            lambda *tensors: gather(*(tensor for tensor in tensors if hasattr(tensor, "ds_status")))
        )


@contextmanager
def collected_rows() -> Iterator[None]:
    """Let PEFT read rows of a table that ZeRO-3 has partitioned on any device within the block."""

    def collect(self: Any, weight: Any, rows: list[int], embed_dim: int) -> Any:
        with gathered(weight):
            return weight.detach()[rows].clone()

    with patches.peft.TOKEN_ROWS.replaced(collect):
        yield
