"""The heads of models: which class of transformers loads them, how they begin, and what compares them after
an export."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from flytune import json_core
from flytune.errors import ExportError
from flytune.models import towers, vectors, vocabulary
from flytune.models.safetensors_files import ParameterPart
from flytune.models.scoring import CLASSES, Row, evaluating, finite_loss, innermost, padded
from flytune.recipe import Classify, Embed, ObjectiveSection, Recipe, Reward
from training_estimates import meta_model
from training_estimates.sizes import Geometry

_SCORE = ("score",)
"""Module of a head whose weight has the shape (outputs, hidden size)."""
_OF_ENCODERS = dict.fromkeys(meta_model.ENCODERS, ("classifier",)) | {
    "bert": ("pooler", "classifier"),
    "deberta-v2": ("pooler", "classifier"),
    "distilbert": ("pre_classifier", "classifier"),
    "modernbert": ("head", "classifier"),
}
"""Modules of transformers' sequence classifiers that lie behind an encoder's last hidden state: a layer from
the hidden size to itself, and one to the outputs."""
_TYPES = (
    "arcee cohere_compass_text deepseek_v2 deepseek_v3 diffllama doge exaone4 gemma gemma2 gemma3_text "
    "glm glm4 gpt_oss helium hunyuan_v1_dense hunyuan_v1_moe jamba jetmoe llama minimax ministral "
    "ministral3 mistral mixtral nemotron olmo olmo2 olmo3 persimmon phi phi3 phimoe qwen2 qwen2_moe "
    "qwen3 qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 stablelm starcoder2"
)
TYPES = frozenset(_TYPES.split())
"""Model types of text whose sequence classifier in transformers 5 is GenericForSequenceClassification, with
that head."""
PROBABILITIES = "probabilities"
"""Answers of a classifier."""
VECTORS = "vectors"
"""Answers of an embedding model."""
THRESHOLD = 0.5
"""Probability from which on a text that may have several labels is given one."""
_SCALE = 0.02
"""Standard deviation of the first values where the configuration has no initializer_range, as in
transformers."""


def modules_of(model: Any) -> tuple[str, ...]:
    """Return the last parts of the names of a sequence classifier's modules behind the hidden states."""
    return _OF_ENCODERS.get(str(getattr(model.config, "model_type", None)), _SCORE)


@dataclass(frozen=True)
class Drawn:
    """Source of the first values of a parameter of the head where no file has them, also for sharded
    loading."""

    name: str
    shape: tuple[int, ...]
    scale: float
    """Standard deviation of a matrix."""
    seed: int

    @property
    def order(self) -> tuple[Path, str]:
        return Path(), self.name

    def values(self) -> Any:
        """Return the first values in float32: a matrix is drawn, biases are 0, the weights of a norm 1.

        They follow from these fields alone, so that they are equal on every process, with every sharding, and
        in every attempt.
        """
        import torch

        if len(self.shape) == 1:
            return torch.full(self.shape, 0.0 if self.name.endswith("bias") else 1.0)
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.shape, generator=generator, dtype=torch.float32) * self.scale

    def read(self, part: ParameterPart) -> None:
        """Fill `part` with this process's values."""
        if part.local.numel():
            part.local.copy_(self.values()[part.index])


def drawn(model: Any, seed: int) -> dict[str, Drawn]:
    """Return the sources of the first values of a head's parameters, by name. Each has a seed of its own, the
    first one that of the recipe."""
    modules = {*modules_of(model)}
    parameters = [(name, value) for name, value in model.named_parameters() if modules & {*name.split(".")}]
    scale = getattr(model.config.get_text_config(), "initializer_range", None) or _SCALE
    return {
        name: Drawn(name, tuple(getattr(value, "ds_shape", value.shape)), scale, seed + place)
        for place, (name, value) in enumerate(parameters)
    }


def has_score(model: Any) -> bool:
    """Return whether a model, live or reloaded, has a head that scores a sequence: of rewards or classes."""
    inner = innermost(model)
    return hasattr(inner, modules_of(inner)[-1])


def scores(
    model: Any, sequences: Sequence[list[int]], pad_token_id: int, batch_size: int = 1, label: str = "scores"
) -> Any:
    """Return the head's outputs for each sequence of tokens, float64 of shape (sequences, outputs). The
    training mode is restored afterwards.

    Under ZeRO-3 and FSDP every process must call it with equally many sequences.
    """
    import numpy
    from tqdm import tqdm

    all_scores = numpy.zeros((len(sequences), innermost(model).config.num_labels))
    order = sorted(range(len(sequences)), key=lambda index: -len(sequences[index]))
    device = next(model.parameters()).device
    with evaluating(model), tqdm(total=len(order), desc=label, unit=" texts", delay=2) as bar:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            ids = padded([sequences[index] for index in batch], pad_token_id).to(device)
            mask = padded([[1] * len(sequences[index]) for index in batch], 0).to(device)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            all_scores[batch] = logits.double().cpu().numpy()
            bar.update(len(batch))
    return all_scores


def finite_scores(model: Any, rows: Sequence[Row], pad_token_id: int, batch_size: int, label: str) -> Any:
    """Return the `scores` of rows by the model that `label` names.

    Raises:
        ExportError: one is not finite.
    """
    import numpy

    all_scores = scores(
        model, [row["input_ids"] for row in rows], pad_token_id, batch_size, f"{label}: scores"
    )
    if bad := numpy.flatnonzero(~numpy.isfinite(all_scores).all(axis=1)).tolist():
        raise ExportError(
            f"{label}: the score of held-out sequence {bad[0]} is {all_scores[bad[0]].tolist()} ({len(bad)} "
            f"of {len(all_scores)} are not finite): its weights have diverged, or overflow in model.dtype; "
            "lower training.learning_rate, or use bfloat16"
        )
    return all_scores


def probabilities(logits: Any, has_several: bool) -> Any:
    """Return the probability of each label for logits (rows, labels): softmax, or sigmoid where a text may
    have several labels."""
    import numpy

    if has_several:
        return numpy.exp(-numpy.logaddexp(0.0, -logits))
    shifted = numpy.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def given_labels(logits: Any, has_several: bool) -> Any:
    """Return which labels a model gives each text, bool of the shape of logits (texts, labels): the most
    probable one, or all of at least THRESHOLD."""
    import numpy

    if has_several:
        return probabilities(logits, has_several) >= THRESHOLD
    return numpy.arange(logits.shape[1]) == logits.argmax(axis=1)[:, None]


def answers(model: Any, logits: Any) -> Any:
    """Return what a model with the head answers by its outputs: rewards as they are, or probabilities."""
    several = innermost(model).config.problem_type == "multi_label_classification"
    return logits if logits.shape[1] == 1 else probabilities(logits, several)


def targets(rows: Sequence[Row], labels: int) -> Any:
    """Return which labels each row has, bool of shape (rows, labels)."""
    import numpy

    is_class = numpy.zeros((len(rows), labels), dtype=bool)
    for number, row in enumerate(rows):
        is_class[number, row[CLASSES]] = True
    return is_class


def class_losses(logits: Any, wanted: Any, section: Classify) -> Any:
    """Return the loss of each row in nats, shape (rows,), of float64 logits (rows, labels).

    One label: minus its log-probability times its weight. Several: the mean over all labels of minus the
    log-probability of having the label or not, times the label's weight, as torch's BCEWithLogitsLoss.

    Args:
        wanted: which labels each row has, bool (rows, labels).
    """
    import numpy

    weights = numpy.asarray(section.weights)
    if section.has_several_labels:
        return (weights * numpy.logaddexp(0.0, numpy.where(wanted, -logits, logits))).mean(axis=1)
    highest = logits.max(axis=1, keepdims=True)
    log_probs = logits - highest - numpy.log(numpy.exp(logits - highest).sum(axis=1, keepdims=True))
    return -(weights * log_probs * wanted).sum(axis=1)


def pair_losses(both: Any, center: float | None) -> Any:
    """Return the loss of each pair in nats, as TRL's RewardTrainer computes it.

    Args:
        both: rewards of the chosen sequences, then of the rejected ones.
        center: objective.center_rewards_coefficient.
    """
    import numpy

    chosen, rejected = numpy.split(both, 2)
    return numpy.logaddexp(0.0, rejected - chosen) + (center or 0.0) * (chosen + rejected) ** 2


class Head:
    """The head of a language model: logits of the vocabulary."""

    name: ClassVar[str] = "language_model"
    outputs: int | None = None
    """Outputs for each token; None for the vocabulary."""
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    """Class of transformers that loads the model."""
    arguments: Mapping[str, Any] = MappingProxyType({})
    """Arguments of from_pretrained."""
    task_type: ClassVar[str] = "CAUSAL_LM"
    """PEFT's name of the task of an adapter."""
    pipeline_tag: ClassVar[str] = "text-generation"
    """The hub's name of the task."""
    library: ClassVar[str] = ""
    """Library that loads it as the hub names it; empty for transformers, or PEFT of an adapter."""
    loss_unit: ClassVar[str] = "nats per token"
    """Unit of `loss`."""
    answers_in: ClassVar[str] = "logits"
    """Answers that the gate compares: logits, probabilities, or vectors."""
    reads_images: ClassVar[bool] = False
    """True if a chat may have images."""
    auto_reader: ClassVar[str] = "AutoTokenizer"
    """Class of transformers that makes the model's inputs."""
    tokenizer: ClassVar[str] = "tokenizer"
    """Tokenizer, as the card's code names it."""
    no_words: ClassVar[str] = ""
    """Reason that a model with it cannot answer in words; empty where it can."""

    def bound(self, section: ObjectiveSection) -> "Head":
        """Return the head with what a recipe's objective says of it."""
        return self

    def loader(self) -> Any:
        """Return the class of transformers that loads the model."""
        import transformers

        return getattr(transformers, self.auto_class)

    def geometry(self, geometry: Geometry) -> Geometry:
        """Return the sizes of a base model with this head."""
        return geometry

    def loss_problem(self, geometry: Geometry) -> str | None:
        """Return why a model's loss cannot be trained."""
        return geometry.loss_problem

    def own_logits(self, geometry: Geometry) -> str | None:
        """Return why the loss is computed of all of the model's logits; None where TRL's chunked loss is its
        own."""
        return geometry.own_logits

    def trained_beside(self, model: Any) -> list[str]:
        """Return the modules that are trained completely beside an adapter (PEFT's modules_to_save)."""
        return []

    def sources(self, model: Any, seed: int) -> dict[str, Drawn]:
        """Return the sources of first values that a base model's files may lack, by parameter."""
        return {}

    def draw(self, model: Any, missing: Iterable[str], seed: int) -> set[str]:
        """Give parameters their first values that a loaded base model's files have no values for; return
        their names.

        Every process calls it: under ZeRO-3 parameters are gathered, by all in the same order.
        """
        import torch

        missing = {*missing}
        sources = {name: source for name, source in self.sources(model, seed).items() if name in missing}
        for name, source in sources.items():
            parameter = model.get_parameter(name)
            with torch.no_grad(), vocabulary.gathered(parameter):
                parameter.data.copy_(source.values().to(parameter))
        return {*sources}

    def companions(self, recipe: Recipe, size: int) -> dict[str, Any]:
        """Return the content of the files beside the weights, by name, by which other programs know what its
        answers are; `size` is that of a hidden state."""
        return {}

    def freeze(self, model: Any, recipe: Recipe) -> None:
        """Freeze what a full fine-tune of a base model does not train."""

    def frozen(self, geometry: Geometry, recipe: Recipe) -> int:
        """Return the number of parameters that `freeze` freezes."""
        return 0

    def complete(self, model: Any, pad_token_id: Callable[[], int]) -> None:
        """Set what a base model's configuration may lack, before its adapter is loaded."""

    def loss(self, model: Any, sequences: Sequence[Row], pad_token_id: int, recipe: Recipe) -> float:
        """Return the loss that the gate compares: of a language model over all sequences.

        Raises:
            ExportError: it is not finite.
        """
        nll, tokens = finite_loss(model, sequences, pad_token_id, recipe.evaluation.batch_size, "tuned model")
        return float(nll.sum() / tokens.sum())


class SequenceHead(Head):
    """A head of a few outputs for a sequence, a decoder's `score`, in the place of that of words."""

    auto_class = "AutoModelForSequenceClassification"
    task_type = "SEQ_CLS"
    pipeline_tag = "text-classification"

    def geometry(self, geometry: Geometry) -> Geometry:
        return geometry.with_head_of(self.outputs or 1)

    def loss_problem(self, geometry: Geometry) -> str | None:
        return None

    def own_logits(self, geometry: Geometry) -> str | None:
        return None

    def trained_beside(self, model: Any) -> list[str]:
        return [*modules_of(model)]

    def sources(self, model: Any, seed: int) -> dict[str, Drawn]:
        return drawn(model, seed)

    def complete(self, model: Any, pad_token_id: Callable[[], int]) -> None:
        # Its output is that of the last token that is not padding; the base's configuration may name none.
        model.config.get_text_config().pad_token_id = pad_token_id()


class ScalarHead(SequenceHead):
    """One number for a sequence: that of a reward model."""

    name = "scalar"
    outputs = 1
    arguments: Mapping[str, Any] = MappingProxyType({"num_labels": 1})
    loss_unit = "nats per pair"
    no_words = (
        "a reward model, which has no head of words; load it with transformers, as the README.md of "
        "the artifact shows"
    )

    def loss(self, model: Any, sequences: Sequence[Row], pad_token_id: int, recipe: Recipe) -> float:
        assert isinstance(recipe.objective, Reward)
        pair_scores = finite_scores(
            model, sequences, pad_token_id, recipe.evaluation.batch_size, "tuned model"
        )
        return float(pair_losses(pair_scores[:, 0], recipe.objective.center_rewards_coefficient).mean())


class ClassHead(SequenceHead):
    """One output for each named label, whose names are in the model's config.json."""

    name = "classes"
    answers_in = PROBABILITIES
    loss_unit = "nats per text"
    no_words = (
        "a classifier, which has no head of words; flytune infer gives labels with their probabilities, and "
        "the README.md of the artifact shows how transformers loads it"
    )

    def __init__(self, section: Classify | None = None) -> None:
        """Bind it to the labels of an objective."""
        if section is None:
            return
        self.section = section
        self.outputs = len(section.labels)
        self.arguments = {
            "num_labels": len(section.labels),
            "id2label": dict(enumerate(section.labels)),
            "label2id": {label: place for place, label in enumerate(section.labels)},
            "problem_type": section.problem_type,
        }

    def bound(self, section: ObjectiveSection) -> Head:
        assert isinstance(section, Classify)
        return type(self)(section)

    def answers(self, logits: Any) -> list[tuple[str | list[str], dict[str, float]]]:
        """Return the label of each row of logits (rows, labels), or all its labels where it may have several,
        and the probability of each label by name."""
        section = self.section
        answers = list[tuple[str | list[str], dict[str, float]]]()
        of_rows = probabilities(logits, section.has_several_labels).tolist()
        given_to_rows = given_labels(logits, section.has_several_labels).tolist()
        for of_row, is_given in zip(of_rows, given_to_rows, strict=True):
            names = [label for label, given in zip(section.labels, is_given, strict=True) if given]
            by_name = dict(zip(section.labels, of_row, strict=True))
            answers.append((names if section.has_several_labels else names[0], by_name))
        return answers

    def loss(self, model: Any, sequences: Sequence[Row], pad_token_id: int, recipe: Recipe) -> float:
        assert isinstance(recipe.objective, Classify)
        logits = finite_scores(model, sequences, pad_token_id, recipe.evaluation.batch_size, "tuned model")
        wanted = targets(sequences, len(recipe.objective.labels))
        return float(class_losses(logits, wanted, recipe.objective).mean())


class VectorHead(Head):
    """No head: a hidden state of the last layer is the vector of a text."""

    name = "vectors"
    outputs = 0
    auto_class = "AutoModel"
    task_type = "FEATURE_EXTRACTION"
    pipeline_tag = "sentence-similarity"
    library = "sentence-transformers"
    answers_in = VECTORS
    loss_unit = "nats per query"
    no_words = (
        "an embedding model, which has no head of words; load it with sentence-transformers, as the "
        "README.md of the artifact shows"
    )
    pooling: str = "last"
    """Hidden state that is the vector of a text (objective.pooling)."""

    def bound(self, section: ObjectiveSection) -> Head:
        assert isinstance(section, Embed)
        bound = type(self)()
        bound.pooling = section.pooling
        return bound

    def loader(self) -> Any:
        return vectors.loader(self.pooling)

    def geometry(self, geometry: Geometry) -> Geometry:
        return geometry.with_head_of(0)

    def loss_problem(self, geometry: Geometry) -> str | None:
        return None

    def own_logits(self, geometry: Geometry) -> str | None:
        return None

    def companions(self, recipe: Recipe, size: int) -> dict[str, Any]:
        assert isinstance(recipe.objective, Embed)
        return vectors.companions(recipe.objective, size, recipe.data.max_length)

    def loss(self, model: Any, sequences: Sequence[Row], pad_token_id: int, recipe: Recipe) -> float:
        section = recipe.objective
        assert isinstance(section, Embed)
        of_rows, keys = vectors.of_rows(
            model,
            sequences,
            2 + section.negatives,
            pad_token_id,
            recipe.evaluation.batch_size,
            "tuned model",
        )
        return float(vectors.losses(of_rows, keys, section.temperature, section.matryoshka_dims).mean())


class VisionHead(Head):
    """The head of a language model that reads images too."""

    name = "vision_language_model"
    auto_class = "AutoModelForImageTextToText"
    pipeline_tag = "image-text-to-text"
    reads_images = True
    auto_reader = "AutoProcessor"
    tokenizer = "processor.tokenizer"

    def freeze(self, model: Any, recipe: Recipe) -> None:
        if recipe.model.vision != "train":
            towers.freeze(model)

    def frozen(self, geometry: Geometry, recipe: Recipe) -> int:
        return 0 if recipe.model.vision == "train" else geometry.outside


LANGUAGE_MODEL, VISION_LANGUAGE_MODEL = Head(), VisionHead()
_HEADS = (LANGUAGE_MODEL, VISION_LANGUAGE_MODEL, ScalarHead(), ClassHead(), VectorHead())
HEADS: dict[str, Head] = {head.name: head for head in _HEADS}


def loader_of(folder: Path) -> Any:
    """Return the class of transformers that loads the language model in a folder, which may read images."""
    content = json_core.load_object((folder / "config.json").read_bytes())
    return meta_model.loader_of(str(content.get("model_type"))) or LANGUAGE_MODEL.loader()


def head_of(recipe: Recipe) -> Head:
    """Return the head that a recipe's objective trains."""
    if recipe.data.images:
        return VISION_LANGUAGE_MODEL
    return HEADS[recipe.objective.head].bound(recipe.objective)
