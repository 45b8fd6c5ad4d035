"""Sequence parallelism: neighbouring processes each compute a part of the positions of the same samples.

All but attention computes each position by itself. Within attention, processes exchange their positions of
all heads for all positions of their heads, and back (Jacobs et al. 2023, DeepSpeed Ulysses, section 3), so
that the model's own attention computes them, with the masks of the complete samples.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from flytune import patches
from flytune.models.scoring import IGNORED

WHOLE = "whole_position_ids"
"""Key of a batch with the positions of all tokens of its samples: int64 [rows, length]."""
_DIVIDED = ("input_ids", "labels", "shift_labels", "position_ids")
_TYPES = (
    "apertus arcee aria_text bitnet cohere cohere2 cwm deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 "
    "ernie4_5_moe exaone4 flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt_neox granite "
    "granitemoe helium hunyuan_v1_dense hunyuan_v1_moe llama ministral ministral3 mistral mixtral "
    "nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe "
    "seed_oss smollm3 stablelm starcoder2 vaultgemma"
)
TYPES = frozenset(_TYPES.split())
"""Model types of which the processes of a group compute the logits of one process
(tests/models/test_sequence_parallel.py)."""


class SequencePart(NamedTuple):
    """The part of each sample's positions that a process computes."""

    number: int = 0
    parts: int = 1

    def rounded(self, tokens: int) -> int:
        """Return the tokens of a sample with the padding that makes all parts equally long."""
        return tokens + -tokens % self.parts

    def of(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this part of a batch of rounded length: input_ids, labels, shift_labels and position_ids are
        int64 [rows, length / parts]; all else is of the complete samples, with WHOLE.

        Labels are shifted before they are divided: the last position of a part predicts the first token of
        the next one.
        """
        import torch

        if self.parts == 1:
            return batch
        ids, labels = batch["input_ids"], batch["labels"]
        width = ids.shape[1]
        positions = batch.get("position_ids", torch.arange(width, device=ids.device).expand_as(ids))
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        batch = batch | {"position_ids": positions, "shift_labels": shifted, WHOLE: positions}
        return {
            name: values.chunk(self.parts, 1)[self.number].contiguous() if name in _DIVIDED else values
            for name, values in batch.items()
        }


COMPLETE = SequencePart()
"""All positions of each sample."""


class SequenceGroup:
    """The processes that share this process's samples: `parts` that follow each other."""

    def __init__(self, parts: int, timeout: Any) -> None:
        """Make the groups; every process calls it.

        Args:
            timeout: datetime.timedelta after which an exchange fails.
        """
        import torch.distributed

        self._group, _ = torch.distributed.new_subgroups(parts, timeout=timeout)
        self.part = SequencePart(torch.distributed.get_rank(self._group), parts)

    @contextmanager
    def computing(self, batch: dict[str, Any], device: Any) -> Iterator[None]:
        """Let a model on `device` that is given this process's part of a batch attend to the complete samples
        within the block.

        The backward pass belongs to it: layers that are recomputed exchange again. What the model is not
        given is taken out of the batch: WHOLE, and the attention_mask. Padding follows all tokens, so that
        none attends to it; with a mask, sdpa would make one of length x length.
        """
        whole = batch.pop(WHOLE).to(device)
        batch.pop("attention_mask", None)
        arguments = patches.transformers.MASK_ARGUMENTS.current()
        overlay = patches.transformers.PACKED_MASK.current()
        interface = patches.transformers.ATTENTION_OF_PARTS.current()

        def of_all(
            config: Any, embeds: Any, mask: Any, cache: Any, positions: Any, *args: Any, **kwargs: Any
        ) -> Any:
            embeds = embeds[:, :1].expand(-1, whole.shape[1], -1)
            return arguments(
                config, embeds, mask, cache, None if positions is None else whole, *args, **kwargs
            )

        def of_parts(registry: Any, name: Any, default: Any) -> Any:
            return functools.partial(self._attention, interface(registry, name, default), whole)

        with (
            patches.transformers.MASK_ARGUMENTS.replaced(of_all),
            patches.transformers.PACKED_MASK.replaced(lambda mask, _, packed: overlay(mask, whole, packed)),
            patches.transformers.ATTENTION_OF_PARTS.replaced(of_parts),
        ):
            yield

    def _attention(
        self,
        compute: Any,
        whole: Any,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Any, None]:
        """Call the attention `compute` of a model with all positions of this process's heads."""
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = whole
        inputs = [self._exchanged(values) for values in (query, key, value)]
        output, _ = compute(module, *inputs, attention_mask, **kwargs)
        return self._exchanged(output), None

    def _exchanged(self, values: Any) -> Any:
        """Send each process its part of dimension 1 of `values`; return what all have sent, joined along
        dimension 2."""
        import torch
        from torch.distributed._functional_collectives import all_to_all_single

        parts = torch.stack(values.chunk(self.part.parts, 1))
        return torch.cat(all_to_all_single(parts, None, None, self._group).unbind(), 2)

    def log_probs(self, model: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
        """Return the log-probabilities of the next tokens of this process's part of a batch, and which of
        them have a label: float32 and bool [rows, length / parts]."""
        batch = self.part.of(batch)
        with self.computing(batch, batch["input_ids"].device):
            log_probs = model(**batch, fused_lm_head=True).log_probs
        return log_probs, batch["shift_labels"] != IGNORED
