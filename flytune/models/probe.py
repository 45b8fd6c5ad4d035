"""The probe: a model's logits for 16 fixed prompts, recorded from the live model and compared with those of
every copy."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flytune.models import chat_templates, heads, images, vectors
from flytune.models.experts import fingerprints
from flytune.models.scoring import evaluating, padded, tiles_of_logits

PROBE = "gate/probe.safetensors"
"""Path of the record, in a folder of its own: servers load every *.safetensors next to a config.json as
weights."""
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea in winter.",
    "Explain to a child why the sky is blue.",
    "17 + 25 =",
    "def fibonacci(n):\n    ",
    "Translate into German: The train leaves at eight.",
    "List three uses of a paper clip:\n1.",
    '{"name": "Ada", "year": ',
    "Once upon a time there was a miller who had",
    "Summarize in five words: The committee met, talked for hours, and decided nothing.",
    "Is 91 a prime number? Answer yes or no.",
    "Die Würde des Menschen ist",
    "SELECT name FROM customers WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "水は何度で沸騰しますか。",
    "The opposite of hot is cold. The opposite of early is",
)
PICTURED = "What is in this picture?"
"""Question about the fixed picture (images.fixed), which models that read images answer too."""
MAX_TOKENS = 48
"""Maximum tokens of a prompt; the last ones are used."""
HALF = 0.5
"""Share of an adapter's scale with which it is recorded too."""
LONG_ENDS = 8
"""Last tokens of the long prompt whose logits are recorded."""
_BATCH = 4


@dataclass(frozen=True)
class Answers:
    """Record of the answers to all prompts: tensors in host memory."""

    input_ids: Any
    """Tokens, int64 (prompts, longest prompt), padded on the right."""
    lengths: Any
    """Number of tokens of each prompt, int64 (prompts,)."""
    logits: Any
    """Logits after the last token of each prompt, float32 (prompts, vocabulary); of a reward model (prompts,
    1); of a classifier the probabilities (prompts, labels); of an embedding model the vectors (prompts,
    size), of length 1."""
    loss: Any
    """Mean loss over the tokens of each prompt after its first, float32 (prompts,) in nats; 0 of a model that
    has no head of words."""

    experts: Any = None
    """Numbers of each expert's adapter (expert_probe.fingerprints), float64; None without adapters on
    experts."""
    base: Any = None
    """Logits of the base alone, float16 (prompts, vocabulary); None where all weights are trained, and in
    records of earlier versions."""
    scaled: Any = None
    """Logits with the adapter at HALF of its scale, float16 (prompts, vocabulary); None as `base`."""
    long_ids: Any = None
    """Tokens of a prompt beyond the positions of the unscaled base, int64 (tokens,); None where the recipe
    scales none, or its samples are shorter."""
    long_logits: Any = None
    """Logits after its last tokens, float32 (LONG_ENDS at most, vocabulary); of a reward model (1, 1)."""
    image_ids: Any = None
    """Tokens of PICTURED with those of the fixed picture, int64 (tokens,); None of a model of text, and in
    records of earlier versions."""
    image_logits: Any = None
    """Logits after its last token, float32 (1, vocabulary)."""

    def write(self, file: Path) -> None:
        from safetensors.torch import save_file

        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor for name, tensor in vars(self).items() if tensor is not None}, str(file))

    @classmethod
    def read(cls, file: Path) -> "Answers":
        """Read a record; SafetensorError, OSError or TypeError if it is missing or incomplete."""
        from safetensors.torch import load_file

        return cls(**load_file(str(file)))

    @property
    def prompts(self) -> list[list[int]]:
        return [
            row[:length] for row, length in zip(self.input_ids.tolist(), self.lengths.tolist(), strict=True)
        ]


def tokenized(tokenizer: Any) -> list[list[int]]:
    """Return the tokens of PROMPTS: as a user's turn in the chat template if there is one, as plain text
    otherwise."""
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        prompts = [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            for chat in chats
        ]
    else:
        prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    # The answer depends on the end of a rendered chat, so tokens are cut from its beginning.
    return [list(ids[-MAX_TOKENS:]) for ids in prompts]


def record(
    trainer: Any,
    tokenizer: Any,
    file: Path,
    sharding: Any,
    on_base: bool,
    tokens_beyond: int = 0,
    processor: images.Processor | None = None,
) -> None:
    """Record the answers of a trainer's live model in `file`. Every process calls it; the first one writes.

    All processes run the same forward passes, which gather parameters under ZeRO-3 and FSDP.

    Args:
        sharding: what gathers its parameters.
        on_base: whether the model is an adapter on the base as it was published, so that the base's answers
            and those of a scaled adapter are recorded too.
        tokens_beyond: tokens of a prompt beyond the positions of the unscaled base (rope.tokens_beyond); 0
            for none.
        processor: that of a model which reads images.
    """
    prompts = tokenized(tokenizer)
    answers = ask(trainer.model_wrapped, prompts)
    if tokens_beyond:
        words = [token for prompt in prompts for token in prompt]
        long = (words * (tokens_beyond // len(words) + 1))[:tokens_beyond]
        answers = dataclasses.replace(answers, **ask_long(trainer.model_wrapped, long))
    if processor is not None:
        answers = dataclasses.replace(answers, **ask_image(trainer.model_wrapped, tokenizer, processor))
    model = trainer.accelerator.unwrap_model(trainer.model)
    if on_base and not heads.has_score(model):
        answers = dataclasses.replace(answers, **_without_adapter(trainer.model_wrapped, model, prompts))
    sharding.before_gather(trainer.model_wrapped)
    answers = dataclasses.replace(answers, experts=fingerprints(model, sharding.gather))
    if trainer.is_world_process_zero():
        answers.write(file)


def _without_adapter(wrapped: Any, model: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the logits of an adapter's base, and of the base with the adapter at HALF of its scale, fields
    of Answers by their names."""
    from peft.helpers import rescale_adapter_scale

    with model.disable_adapter():
        base = ask(wrapped, prompts).logits.half()
    with rescale_adapter_scale(model, HALF):
        return {"base": base, "scaled": ask(wrapped, prompts).logits.half()}


def ask(model: Any, prompts: list[list[int]]) -> Answers:
    """Return the answers of a model, live or reloaded. Batches are fixed, because padding changes
    rounding."""
    import torch

    lengths = torch.tensor([len(prompt) for prompt in prompts])
    wordless = _wordless(model, prompts)
    if wordless is not None:
        return Answers(padded(prompts, 0), lengths, wordless, torch.zeros(len(prompts)))
    last = []
    losses = torch.zeros(len(prompts))
    for place, (ids, logits) in enumerate(logits_of(model, prompts)):
        last.append(logits[-1])
        if len(ids) > 1:
            losses[place] = torch.nn.functional.cross_entropy(logits[:-1], ids[1:])
    return Answers(padded(prompts, 0), lengths, torch.stack(last), losses)


def ask_long(model: Any, prompt: list[int]) -> dict[str, Any]:
    """Return a long prompt and a model's answers after its last tokens, fields of Answers by their names."""
    import torch

    ids = torch.tensor([prompt])
    logits = _wordless(model, [prompt])
    if logits is None:
        logits = _last_logits(model, {"input_ids": ids}, LONG_ENDS)
    return {"long_ids": ids[0], "long_logits": logits}


def _wordless(model: Any, prompts: list[list[int]]) -> Any:
    """Return the answers of a model without a head of words, float32 (prompts, outputs), vectors of length 1;
    None of a model that has such a head."""
    import torch
    from torch.nn.functional import normalize

    if heads.has_score(model):
        return torch.from_numpy(heads.answers(model, heads.scores(model, prompts, 0))).float()
    if vectors.are_made_by(model):
        return normalize(vectors.of_texts(model, prompts, 0, _BATCH), dim=-1).float()
    return None


def ask_image(model: Any, tokenizer: Any, processor: images.Processor) -> dict[str, Any]:
    """Return the prompt about the fixed picture and a model's answer after its last token, fields of Answers
    by their names."""
    import torch

    picture = images.fixed()
    message = chat_templates.in_parts({"role": "user", "content": chat_templates.IMAGE + PICTURED})
    text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    text = text.replace(processor.token, *processor.replacements([picture]))
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    inputs = {"input_ids": ids, **processor.inputs([[picture]], ids)}
    return {"image_ids": ids[0], "image_logits": _last_logits(model, inputs, 1)}


def _last_logits(model: Any, inputs: dict[str, Any], count: int) -> Any:
    """Return the logits after the last `count` tokens of one prompt, float32 (count, vocabulary), in host
    memory. The training mode is restored afterwards."""
    import torch

    device = next(model.parameters()).device
    inputs = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}
    inputs = {name: values.to(device) for name, values in inputs.items()}
    length = inputs["input_ids"].shape[1]
    ends = torch.arange(max(0, length - count), length, device=device)
    with evaluating(model):
        tiles = [logits[0] for _, logits in tiles_of_logits(model, inputs | {"use_cache": False}, ends)]
    return torch.cat(tiles).float().cpu()


def logits_of(model: Any, prompts: list[list[int]]) -> Any:
    """Yield the tokens (n,) of each prompt and the logits after each token, float32 (n, vocabulary), in host
    memory.

    One batch of prompts is in memory at a time. The model's training mode is restored afterwards.
    """
    import torch

    device = next(model.parameters()).device
    for start in range(0, len(prompts), _BATCH):
        batch = prompts[start : start + _BATCH]
        mask = padded([[1] * len(prompt) for prompt in batch], 0).to(device)
        # Not around the yield: of two models in turn, the second to end would leave gradients off.
        with evaluating(model):
            logits = model(input_ids=padded(batch, 0).to(device), attention_mask=mask, use_cache=False).logits
        for ids, row in zip(batch, logits, strict=True):
            yield torch.tensor(ids), row[: len(ids)].float().cpu()


def distance(logits: Any, others: Any) -> Any:
    """Return the distance of two models' logits (n, vocabulary): RMS difference relative to the spread of the
    first, (n,).

    A shift common to all tokens has no effect, as in softmax. It shows differences that a KL divergence
    misses for flat distributions, and unlike the maximum difference it does not depend on one token of a
    hundred thousand. Rewards (n, 1) have no spread of their own: their difference is relative to the RMS of
    all rewards of the first.
    """
    if logits.shape[-1] == 1:
        size = logits.double().square().mean().sqrt().clamp_min(1e-12)
        return ((logits.double() - others.double()).abs() / size).squeeze(-1)
    centered = logits.double() - logits.double().mean(dim=-1, keepdim=True)
    moved = others.double() - others.double().mean(dim=-1, keepdim=True)
    return (centered - moved).norm(dim=-1) / centered.norm(dim=-1).clamp_min(1e-12)


def divergence(logits: Any, others: Any) -> Any:
    """Return KL(first || second) in nats of two models' distributions, for logits (n, vocabulary): (n,)."""
    first, second = logits.double().log_softmax(dim=-1), others.double().log_softmax(dim=-1)
    return (first.exp() * (first - second)).sum(dim=-1)
