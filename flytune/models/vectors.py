"""Vectors of texts: a hidden state of the last layer, and the loss and ranks of queries among documents.

The loss is InfoNCE (van den Oord et al. 2018, arXiv 1807.03748) of cosine similarities: minus the
log-probability of a query's own document among all documents of a step. A document with the text of the own
one, and the own document of a query with the same text, are left out: they are no negatives.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from flytune import files, json_core
from flytune.errors import ExportError
from flytune.models import base, config_json
from flytune.models.scoring import Row, innermost, padded
from flytune.recipe import Embed, Model
from training_estimates import meta_model

ALL = slice(None)
SIMILARITIES = 2**24
"""Similarities of queries with documents that are in memory at a time: 64 MiB in float32, and as much again
for each step of their loss."""


def are_made_by(model: Any) -> bool:
    """Return whether a model, live or reloaded, has no head, so that its results are vectors."""
    inner = innermost(model)
    has_score = hasattr(inner, "score") or hasattr(inner, "classifier")
    return not (has_score or inner.can_generate() or inner.get_output_embeddings() is not None)


@cache
def loader(pooling: str) -> Any:
    """Return the class of transformers that loads models of vectors, without a layer behind the last hidden
    state; each model's attribute `pooling` says which state is the vector (`pooled`)."""
    from transformers import AutoConfig, AutoModel

    class VectorModel(AutoModel):
        @classmethod
        def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Any:
            config = AutoConfig.from_pretrained(
                pretrained_model_name_or_path,
                revision=kwargs.get("revision"),
                trust_remote_code=kwargs.get("trust_remote_code", False),
            )
            kwargs.update(meta_model.ENCODERS.get(config.model_type, {}))
            loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            model.pooling = pooling
            return loaded

        @classmethod
        def from_config(cls, config: Any, **kwargs: Any) -> Any:
            model = super().from_config(config, **kwargs, **meta_model.ENCODERS.get(config.model_type, {}))
            model.pooling = pooling
            return model

    return VectorModel


def pooled(model: Any, hidden: Any, mask: Any) -> Any:
    """Return the vector of each text by the `pooling` of a model, whatever side is padded: (texts, size).

    Args:
        hidden: states of the last layer (texts, length, size).
        mask: attention mask (texts, length), int64.
    """
    import torch

    pooling, mask = innermost(model).pooling, mask.to(hidden.device)
    if pooling == "mean":
        weights = mask.unsqueeze(-1).float()
        return (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1)
    first = mask.argmax(dim=1)
    places = first if pooling == "cls" else mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), places]


def key_of(ids: Sequence[int]) -> int:
    """Return a number of 64 bits, signed, that equal texts have in common, of the tokens of a text."""
    digest = hashlib.blake2b(array("q", ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def by_row(values: Any, sequences: int) -> Any:
    """Return values of texts, first those of all queries, then of all positives ..., by row: of shape (rows,
    sequences, ...)."""
    return values.unflatten(0, (sequences, -1)).transpose(0, 1)


def keys_of(rows: Sequence[Row], sequences: int) -> Any:
    """Return the keys of rows of so many sequences, which `sequences_of` has taken apart: int64 (rows,
    sequences)."""
    import torch

    return by_row(torch.tensor([key_of(row["input_ids"]) for row in rows]), sequences)


def of_texts(
    model: Any, texts: Sequence[list[int]], pad_token_id: int, batch_size: int = 1, label: str = "vectors"
) -> Any:
    """Return the vector of each text of tokens, not normalized: float64 of shape (texts, size), in host
    memory. The training mode is restored afterwards.

    Under ZeRO-3 and FSDP every process must call it with equally many texts.
    """
    import torch

    size = innermost(model).config.get_text_config().hidden_size
    vectors = torch.zeros(len(texts), size, dtype=torch.float64)
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        with torch.no_grad(), tqdm(total=len(order), desc=label, unit=" texts", delay=2) as bar:
            for start in range(0, len(order), batch_size):
                batch = order[start : start + batch_size]
                ids = padded([texts[index] for index in batch], pad_token_id).to(device)
                mask = padded([[1] * len(texts[index]) for index in batch], 0).to(device)
                hidden = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
                vectors[batch] = pooled(model, hidden, mask).double().cpu()
                bar.update(len(batch))
    finally:
        model.train(was_training)
    return vectors


def finite_of_texts(model: Any, rows: Sequence[Row], pad_token_id: int, batch_size: int, label: str) -> Any:
    """Return the `of_texts` of rows by the model that `label` names.

    Raises:
        ExportError: one is not finite, or is zero, which has no direction.
    """
    texts = [row["input_ids"] for row in rows]
    vectors = of_texts(model, texts, pad_token_id, batch_size, f"{label}: vectors")
    usable = vectors.isfinite().all(dim=1) & (vectors != 0).any(dim=1)
    if bad := (~usable).nonzero().flatten().tolist():
        raise ExportError(
            f"{label}: the vector of held-out text {bad[0]} is not finite, or zero ({len(bad)} of "
            f"{len(vectors)} are): its weights have diverged, or overflow in model.dtype; lower "
            "training.learning_rate, or use bfloat16"
        )
    return vectors


def of_rows(
    model: Any, sequences: Sequence[Row], count: int, pad_token_id: int, batch_size: int, label: str
) -> tuple[Any, Any]:
    """Return the vectors and the keys of rows of `count` sequences, which `sequences_of` has taken apart.

    Returns: float64 (rows, count, size), and int64 (rows, count).

    Raises:
        ExportError: as `finite_of_texts`.
    """
    of_sequences = finite_of_texts(model, sequences, pad_token_id, batch_size, label)
    return by_row(of_sequences, count), keys_of(sequences, count)


def losses(
    vectors: Any, keys: Any, temperature: float, dims: Sequence[int] = (), queries: slice = ALL
) -> Any:
    """Return the loss of queries among the documents of all rows, in nats, shape (queries,): the sum over the
    complete vectors and their first `dims` dimensions (Kusupati et al. 2022, arXiv 2205.13147).

    Args:
        vectors: those of each row's query, own document and negatives, not normalized: (rows, sequences,
            size).
        keys: keys of their texts, int64 (rows, sequences).
        queries: rows whose queries' losses are returned.
    """
    import torch
    from torch.nn.functional import cross_entropy, normalize

    left_out, own = _left_out(keys, queries), torch.arange(len(keys), device=keys.device)[queries]
    total = vectors.new_zeros(len(own))
    for dim in sorted({*dims, vectors.shape[-1]}):
        units = normalize(vectors[..., :dim], dim=-1)
        similarities = units[queries, 0] @ _documents(units).T / temperature
        total = total + cross_entropy(similarities.masked_fill(left_out, -torch.inf), own, reduction="none")
    return total


def ranks(vectors: Any, keys: Any, queries: slice = ALL) -> Any:
    """Return the rank of queries' own documents among the documents of all rows by cosine similarity, from 1
    on: int64 (queries,). Equally near documents come first, and equal texts count once.

    Args: as those of `losses`.
    """
    import torch
    from torch.nn.functional import normalize

    units, texts = normalize(vectors, dim=-1), _documents(keys)
    own = torch.arange(len(keys), device=keys.device)[queries]
    similarities = units[queries, 0] @ _documents(units).T
    _, numbers = texts.unique(return_inverse=True)
    first = torch.full((int(numbers.max()) + 1,), len(texts), device=keys.device)
    places = torch.arange(len(texts), device=keys.device)
    is_first = first.scatter_reduce(0, numbers, places, "amin")[numbers] == places
    others = is_first & ~_left_out(keys, queries)
    others[torch.arange(len(own), device=keys.device), own] = False
    mine = similarities.gather(1, own.unsqueeze(1))
    return 1 + ((similarities >= mine) & others).sum(dim=1)


def blocks_of(keys: Any) -> Iterator[slice]:
    """Yield the places of all queries in blocks of about SIMILARITIES.

    Args:
        keys: as those of `losses`.
    """
    rows = len(keys)
    size = max(1, SIMILARITIES // (rows * (keys.shape[1] - 1)))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def in_blocks(function: Callable[[slice], Any], keys: Any) -> Any:
    """Return a function's results of all queries, which it gets in blocks: those of a held-out part with all
    of its documents may be more than a machine's memory."""
    import torch

    return torch.cat([function(queries) for queries in blocks_of(keys)])


def _documents(values: Any) -> Any:
    """Return what is known of each document: first of all positives, then of all first negatives ..."""
    return values[:, 1:].transpose(0, 1).flatten(0, 1)


def _left_out(keys: Any, queries: slice) -> Any:
    """Return which documents are no negatives of a query, nor its own: bool (queries, documents)."""
    import torch

    rows = len(keys)
    own = torch.arange(rows, device=keys.device)[queries]
    left_out = _documents(keys).unsqueeze(0) == keys[queries, 1].unsqueeze(1)
    left_out[:, :rows] |= keys[:, 0].unsqueeze(0) == keys[queries, 0].unsqueeze(1)
    left_out[torch.arange(len(own), device=keys.device), own] = False
    return left_out


_POOLING = "1_Pooling/config.json"
_MODES = {
    "cls_token": "cls",
    "mean_tokens": "mean",
    "max_tokens": None,
    "mean_sqrt_len_tokens": None,
    "weightedmean_tokens": None,
    "lasttoken": "last",
}
"""Ways of pooling, of which sentence-transformers' configuration says each by itself, with the name that
objective.pooling has for it."""


def published_pooling(model: Model) -> str | None:
    """Return the way of pooling that a base model's own files of sentence-transformers name; None where it
    has none, or another than objective.pooling's, or the hub does not answer.

    Of a model whose sizes Flytune knows nothing is read: its plan needs no network.
    """
    if config_json.shipped_config(model) or config_json.known_config(model):
        return None
    # published.content_of needs transformers, which a plan's pod lacks.
    try:
        name = base.local_name(model, weights=False)
        if Path(name).is_dir():
            file = Path(name) / _POOLING
        else:
            from huggingface_hub import hf_hub_download

            is_offline = not base.hub_answers()
            file = Path(hf_hub_download(name, _POOLING, revision=model.revision, local_files_only=is_offline))
        content = json_core.load_object(files.read_regular(file, config_json.LARGEST))
    except Exception:  # noqa: BLE001 (the hub's errors have no common class; it is a hint alone)
        return None
    return next((name for mode, name in _MODES.items() if content.get(f"pooling_mode_{mode}") is True), None)


def companions(section: Embed, size: int, max_length: int) -> dict[str, Any]:
    """Return the content of the files, by name, by which sentence-transformers, and servers that read them
    (vLLM, TEI), make a model's vectors: by its pooling, divided by their length, with the prompts.

    Without them a program takes its own pooling, or leaves the division out, and nothing says so.

    Args:
        size: numbers of a vector.
        max_length: most tokens of a text.
    """
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    pooling = {f"pooling_mode_{mode}": name == section.pooling for mode, name in _MODES.items()}
    return {
        "modules.json": [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for place, (path, kind) in enumerate(kinds.items())
        ],
        _POOLING: {"word_embedding_dimension": size, **pooling, "include_prompt": True},
        "2_Normalize/config.json": {},
        "sentence_bert_config.json": {"max_seq_length": max_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": {"query": section.query_prompt, "document": section.document_prompt},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
