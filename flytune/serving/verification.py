"""Verification of an endpoint: whether it answers as the model of an artifact, from its tokens to its next
tokens."""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from flytune.artifacts import fetch, opening
from flytune.artifacts.opening import Consent
from flytune.errors import ExportError, RecipeError
from flytune.models import chat_templates, probe, tokenizers
from flytune.recipe import Recipe
from flytune.records.contents import verify as verify_files
from flytune.schema import Record
from flytune.sentences import counted_of
from flytune.servers import Refusal
from flytune.serving import endpoint
from flytune.serving.endpoint import Endpoint
from flytune.serving.likeness import Likeness, likeness

BOUND = {"float32": 1e-2, "bfloat16": 5e-1, "float16": 1e-1}
"""Largest difference of a log-probability in nats, by the dtype of the artifact. Servers compute in the dtype
that they are started with, with kernels of their own. Measured: docs/serve.md."""
_TEXTS = (*tokenizers.PROBES[:-1], *probe.PROMPTS)
"""Texts whose tokens are compared. Servers may drop control characters, which the last of PROBES has."""
_USER = {"role": "user", "content": probe.PROMPTS[1]}
_SYSTEM = {"role": "system", "content": "Answer in one sentence."}
_TURNS = [_USER, {"role": "assistant", "content": "It is grey."}, {"role": "user", "content": "And in May?"}]
_CHATS = ([_USER], [_SYSTEM, _USER], _TURNS)
"""Chats whose prompts are compared."""
Compared = Literal["equal", "other", "unknown"]


class Verification(Record):
    """Result of asking an endpoint whether it answers as an artifact's model."""

    address: str
    model: str
    """Name of the model there."""
    server: Literal["vllm", "llama.cpp"]
    """API that was asked."""
    artifact: str
    """Name of the artifact's run."""
    identity: str
    """Identity of the artifact (flytune.artifacts.identity); empty before 0.2.0."""
    is_served: bool
    """True if the endpoint answers as the model that was trained."""
    difference: float
    """Largest difference of a next token's log-probability, in nats."""
    divergence: float
    """Mean divergence KL(trained || served) of the next token, in nats per token."""
    agreement: Annotated[float, Field(ge=0, le=1)]
    """Share of prompts after which both models predict the same next token."""
    bounded: Literal["difference", "divergence"]
    """Figure that has a bound: `divergence` if one was given, and `difference` otherwise."""
    bound: float
    """Bound of that figure."""
    prompts: int
    """Number of prompts."""
    tokenizer: Compared
    """Comparison of the tokens of texts; `unknown` if the server does not say."""
    chat: Compared
    """Comparison of the prompts of chats; `unknown` too if the artifact has no chat template."""
    problems: list[str]
    """Differences from the trained model, each with its likeness."""
    doubts: list[str]
    """Limits of this verification, as far as they matter for its result."""

    @property
    def sentence(self) -> str:
        """Result in a line."""
        equal = counted_of(round(self.agreement * self.prompts), self.prompts, "next token", "equal", "equal")
        bounds = {self.bounded: f" (bound {self.bound:g})"}
        figures = (
            f"largest difference {self.difference:.2g} nats{bounds.get('difference', '')}, "
            f"{self.divergence:.2g} nats per token{bounds.get('divergence', '')}, {equal}"
        )
        doubts = "".join(f"; {doubt}" for doubt in self.doubts)
        if self.is_served:
            return f"{self.address}: {self.model} is {self.artifact} ({figures}){doubts}"
        return (
            f"{self.address}: {self.model} is not {self.artifact}: {'; '.join(self.problems)} "
            f"({figures}){doubts}"
        )


def verify(
    address: str,
    artifact: str | Path,
    model: str | None = None,
    bound: float | None = None,
    consent: Consent = opening.NONE,
) -> Verification:
    """Ask an endpoint the gate's prompts, and compare its answers with those of the artifact's live model.

    Args:
        address: http://HOST:PORT of vLLM or of llama.cpp's server. A key is taken from the environment
            variable of flytune.servers.client.KEY.
        artifact: a folder, an fsspec address, or hf://owner/name@REVISION. Its weights are not read.
        model: name of the model at the endpoint; by default the only one, or the name of the run.
        bound: largest divergence in nats per token, for a model that is quantized on purpose; by default the
            largest difference of a log-probability is bounded (BOUND).
        consent: what the person allows, of the tokenizer's code.

    Returns: the comparison, also of an endpoint that answers as another model.

    Raises:
        ExportError: the artifact is damaged, has no record of answers, or is no language model.
        ServingError: the endpoint cannot be asked.
    """
    if bound is not None and not 0 < bound < float("inf"):
        raise RecipeError(f"bound {bound!s:.30}: must be above 0, in nats per token")
    folder = fetch.local_folder(artifact, weights=False)
    contents = verify_files(folder, weights=False)
    recipe = Recipe.from_yaml(folder / "recipe.yaml")
    opening.check_code(folder, recipe, consent.trust_remote_code)
    opening.require_language_model(recipe, folder)
    server = endpoint.connect(address, model, likely=recipe.name)
    answers = _answers(folder)
    tokenizer = tokenizers.load(folder, trust_remote_code=consent.trust_remote_code)
    served = [server.next_tokens(prompt) for prompt in answers.prompts]
    bounded: Literal["difference", "divergence"] = "difference" if bound is None else "divergence"
    least = BOUND[recipe.model.dtype]
    measured = likeness(answers, served, bound or least, of=bounded)
    tokens = _compared(_token_pairs(server, tokenizer))
    chat = _compared(_chat_pairs(server, tokenizer))
    problems = [*_problem(measured, bound)]
    if tokens == "other":
        problems.append("it makes other tokens of texts: another tokenizer")
    elif chat == "other":
        problems.append("it makes another prompt of a chat: another chat template")
    return Verification(
        address=server.client.address,
        model=server.model,
        server=server.server,
        artifact=recipe.name,
        identity=contents.identity,
        is_served=not problems,
        difference=measured.difference,
        divergence=measured.divergence,
        agreement=measured.agreement,
        bounded=bounded,
        bound=bound or least,
        prompts=len(answers.prompts),
        tokenizer=tokens,
        chat=chat,
        problems=problems,
        doubts=[*_doubts(measured, tokenizer, tokens, chat, least)],
    )


def _answers(folder: Path) -> probe.Answers:
    """Return the record of the live model's answers, of shapes that fit."""
    from safetensors import SafetensorError

    file = folder / probe.PROBE
    if not file.is_file():
        raise ExportError(
            f"{folder}: no {probe.PROBE}, the answers of the trained model, as one of `flytune combine` has "
            "none; name an artifact of a run"
        )
    try:
        answers = probe.Answers.read(file)
        prompts, size = answers.input_ids.shape
        count, width = answers.logits.shape
        others = [logits for logits in (answers.base, answers.scaled) if logits is not None]
        lengths = answers.lengths.tolist()
        is_whole = (
            prompts == count == len(lengths) > 0
            and width > 1
            and all(0 < length <= size for length in lengths)
            and 0 <= int(answers.input_ids.min()) <= int(answers.input_ids.max())
            and len(others) in (0, 2)
            and all(logits.shape == answers.logits.shape for logits in others)
            and all(bool(logits.isfinite().all()) for logits in (answers.logits, *others))
        )
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise ExportError(f"{file}: damaged ({error}); do not use it") from None
    if not is_whole:
        raise ExportError(f"{file}: its tensors are not the answers of a model; do not use it")
    return answers


def _token_pairs(server: Endpoint, tokenizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the artifact's tokens of each text, and the server's."""
    for text in _TEXTS:
        yield tokenizer(text, add_special_tokens=False)["input_ids"], server.tokens(text)


def _chat_pairs(server: Endpoint, tokenizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the artifact's prompt of each chat that its template takes, as tokens, and the server's."""
    for chat in _CHATS if tokenizer.chat_template else ():
        try:
            prompts = [*_prompts(tokenizer, chat)]
        except chat_templates.TemplateError:
            continue
        answer = server.chat_tokens(chat)
        served = [] if isinstance(answer, Refusal) else answer
        yield (served if served in prompts else prompts[0]), served


def _prompts(tokenizer: Any, chat: list[dict[str, str]]) -> Iterator[list[int]]:
    """Yield the tokens of a chat's prompt: of today, and of the days beside it where the template writes the
    date, which is another one at a server in another time zone."""
    today = datetime.date.today()
    days: list[dict[str, str]] = [{}]
    if "strftime_now" in tokenizer.get_chat_template():
        days += [{"template_date": str(today + datetime.timedelta(days=shift))} for shift in (-1, 0, 1)]
    for day in days:
        yield list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, **day))


def _compared(pairs: Iterator[tuple[Any, Any]]) -> Compared:
    """Return how pairs compare, of which the second is None where it is not known."""
    result: Compared = "unknown"
    for trained, served in pairs:
        if served is None:
            return "unknown"
        if trained != served:
            return "other"
        result = "equal"
    return result


def _problem(measured: Likeness, bound: float | None) -> Iterator[str]:
    """Yield what the next tokens look like, unless it is the trained model."""
    if measured.kind == "base":
        yield (
            "it answers as the base does: the adapter is not applied; load it, and ask for its name (--model)"
        )
    elif measured.kind == "scaled":
        # Above 1 the scale is extrapolated, and rough.
        scale = f"some {measured.scale:g} of its scale" if (measured.scale or 0) < 1 else "a larger scale"
        yield f"it answers as the adapter does at {scale}: lora_alpha or r is another, or is not read"
    elif measured.kind != "trained" and bound is not None:
        yield "it is further from the trained model than the bound"
    elif measured.kind == "rounded":
        yield (
            "it is near to the trained model, but not equal: a quantized build, another dtype, or another "
            "revision; if it is quantized on purpose, give --bound in nats per token"
        )
    elif measured.kind == "other":
        yield "it answers as another model does: another adapter, another revision, or a build of few bits"


def _doubts(
    measured: Likeness, tokenizer: Any, tokens: Compared, chat: Compared, bound: float
) -> Iterator[str]:
    """Yield what was not compared, or cannot be told apart."""
    if measured.apart is not None and measured.apart <= bound:
        yield f"the base's own answers are as near ({measured.apart:.2g}): training has changed little"
    if tokens == "unknown":
        yield "its tokenizer is not known: the server has no /tokenize"
    if chat == "unknown" and tokenizer.chat_template:
        yield "its chat template is not known"
