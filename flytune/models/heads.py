"""The heads of models: which class of transformers loads them, how they begin, and what compares them after
an export."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from flytune.models import reward_head
from flytune.models.scoring import Row, finite_loss
from flytune.recipe import Recipe, Reward
from training_estimates.sizes import Geometry


class Head:
    """The head of a language model: logits of the vocabulary."""

    name: ClassVar[str] = "language_model"
    outputs: ClassVar[int | None] = None
    """Outputs for each token; None for the vocabulary."""
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    """Class of transformers that loads the model."""
    arguments: ClassVar[Mapping[str, Any]] = {}
    """Arguments of from_pretrained."""
    task_type: ClassVar[str] = "CAUSAL_LM"
    """PEFT's name of the task of an adapter."""
    trained_beside: ClassVar[tuple[str, ...]] = ()
    """Modules that are trained completely beside an adapter (PEFT's modules_to_save)."""
    drawn: ClassVar[tuple[str, ...]] = ()
    """Parameters that a base model's files have no values for."""
    pipeline_tag: ClassVar[str] = "text-generation"
    """The hub's name of the task."""
    loss_unit: ClassVar[str] = "nats per token"
    """Unit of `loss`."""
    no_words: ClassVar[str] = ""
    """Reason that a model with it cannot answer in words; empty where it can."""

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

    def draw(self, model: Any, missing: Iterable[str], seed: int) -> None:
        """Give parameters their first values that a loaded base model's files have no values for."""

    def sources(self, config: Any, seed: int) -> dict[str, Any]:
        """Return the sources of those first values for sharded loading, by parameter."""
        return {}

    def complete(self, model: Any, pad_token_id: Callable[[], int]) -> None:
        """Set what a base model's configuration may lack, before its adapter is loaded."""

    def loss(self, model: Any, sequences: Sequence[Row], pad_token_id: int, recipe: Recipe) -> float:
        """Return the loss that the gate compares: of a language model over all sequences.

        Raises:
            ExportError: it is not finite.
        """
        nll, tokens = finite_loss(model, sequences, pad_token_id, recipe.evaluation.batch_size, "tuned model")
        return float(nll.sum() / tokens.sum())


class ScalarHead(Head):
    """One number for a sequence, `score`: that of a reward model (models/reward_head.py)."""

    name = "scalar"
    outputs = 1
    auto_class = "AutoModelForSequenceClassification"
    arguments: ClassVar[Mapping[str, Any]] = {"num_labels": 1}
    task_type = "SEQ_CLS"
    trained_beside = ("score",)
    drawn = (reward_head.NAME,)
    pipeline_tag = "text-classification"
    loss_unit = "nats per pair"
    no_words = (
        "a reward model, which has no head of words; load it with transformers, as the README.md of "
        "the artifact shows"
    )

    def geometry(self, geometry: Geometry) -> Geometry:
        return geometry.with_reward_head()

    def loss_problem(self, geometry: Geometry) -> str | None:
        return None

    def own_logits(self, geometry: Geometry) -> str | None:
        return None

    def draw(self, model: Any, missing: Iterable[str], seed: int) -> None:
        if reward_head.NAME in missing:
            reward_head.draw(model, seed)

    def sources(self, config: Any, seed: int) -> dict[str, Any]:
        return {reward_head.NAME: reward_head.Drawn(config, seed)}

    def complete(self, model: Any, pad_token_id: Callable[[], int]) -> None:
        # Its reward is that of the last token that is not padding; the base's configuration may name none.
        model.config.get_text_config().pad_token_id = pad_token_id()

    def loss(self, model: Any, sequences: Sequence[Row], pad_token_id: int, recipe: Recipe) -> float:
        assert isinstance(recipe.objective, Reward)
        found = reward_head.finite_rewards(
            model, sequences, pad_token_id, recipe.evaluation.batch_size, "tuned model"
        )
        return float(reward_head.pair_losses(found, recipe.objective.center_rewards_coefficient).mean())


LANGUAGE_MODEL = Head()
HEADS: dict[str, Head] = {head.name: head for head in (LANGUAGE_MODEL, ScalarHead())}


def head_of(recipe: Recipe) -> Head:
    """Return the head that a recipe's objective trains."""
    return HEADS[recipe.objective.head]
