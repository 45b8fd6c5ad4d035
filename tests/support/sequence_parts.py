"""Models on two processes that divide the positions of samples, compared with one process."""

from datetime import timedelta

from tests.support import model_types

LENGTHS = ((13, 7), (1,))
"""Tokens of padded samples by batch: the longest of one is no multiple of two, the other's is shorter than
that."""
PACKED = (6, 1, 5)
"""Tokens of the samples in a packed row."""
ROOM = 13
"""Tokens of a packed row with its padding, no multiple of two."""


def batches(packed):
    """Yield padded batches and, where it is wanted, a packed one, all of rounded lengths."""
    import torch

    from flytune.data.packing import Collator
    from flytune.models.sequence_parallel import SequencePart

    def row(length, start, **more):
        ids = [start + place % 90 for place in range(length)]
        return {"input_ids": ids, "labels": ids, **more}

    rows = [[row(length, 5 + length) for length in lengths] for lengths in LENGTHS]
    rows += [[row(sum(PACKED), 7, seq_lengths=list(PACKED))]] * packed
    for one in rows:
        batch = Collator(0, ROOM, part=SequencePart(0, 2))._whole(one)
        width = batch["input_ids"].shape[1]
        assert width in (2, ROOM + 1)
        yield {"position_ids": torch.arange(width).expand_as(batch["input_ids"])} | batch


def distances(kind, attention, packed=True):
    """Return the largest distances of logits and of gradients from those of complete samples, relative to the
    largest, in float64. Both processes call it."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    from flytune.models.sequence_parallel import SequenceGroup

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = SequenceGroup(2, timedelta(seconds=60))
    torch.manual_seed(0)
    config = model_types.tiny_config(kind)
    # Grouped products of experts are not computed in float64.
    config.get_text_config()._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float64)
    model.eval()
    of_logits, of_gradients = [], []
    for batch in batches(packed):
        is_token = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[..., None] == 1
        vocabulary = config.get_text_config().vocab_size
        weights = torch.randn(*is_token.shape[:2], vocabulary, dtype=torch.float64) * is_token
        whole, expected = _computed(model, batch, weights)
        part = group.part.of(batch)
        with group.computing(part, "cpu"):
            mine, gradients = _computed(model, part, _mine(weights, group))
        seen, same = _mine(is_token, group), _mine(whole, group)
        of_logits.append(float((mine - same).masked_fill(~seen, 0).abs().max() / whole.abs().max()))
        for one, other in zip(gradients, expected, strict=True):
            dist.all_reduce(one)
            of_gradients.append(float((one - other).abs().max() / other.abs().max().clamp(min=1.0)))
    return max(of_logits), max(of_gradients)


def _computed(model, batch, weights):
    """Return logits, and the gradients of their weighted sum."""
    import torch

    model.zero_grad()
    inputs = {name: values for name, values in batch.items() if "labels" not in name}
    logits = model(**inputs, use_cache=False).logits
    (logits * weights).sum().backward()
    return logits.detach(), [
        torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in model.parameters()
    ]


def _mine(values, group):
    return values.chunk(2, 1)[group.part.number]
