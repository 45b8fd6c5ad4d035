"""The interface of an objective: TRL's trainer and its arguments, the batches, and the score of held-out
rows."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from flytune.models import Row
from flytune.objectives.heldout import HeldoutRows
from flytune.recipe import Model, Recipe
from flytune.records import Manifest
from flytune.records.figures import Figure
from flytune.sharding import ShardingBase, sharding_of
from training_estimates import Contrast
from training_estimates.sizes import Geometry

ReferenceKind = Literal["none", "adapter", "copy", "precomputed"]
"""Reference model that a step also runs. none: there is none; adapter: the model with its adapter switched
off; copy: a second, frozen model; precomputed: none, the rows have its log-probabilities."""
FILLER = "filler"
"""Key of a row that `measure` gets only to make as many forward passes as the other processes."""


class Draws(NamedTuple):
    """Answers that the model draws itself before it trains them."""

    tokens: int
    """Most tokens of an answer."""
    at_a_time: int | None
    """Answers that a process draws together; None: as many as a micro batch has."""
    by_vllm: bool = False
    """True if a server of vLLM draws them."""
    gpu_share: float | None = None
    """Share of a GPU's memory of a server that the run starts; None without one."""
    own_gpus: int = 0
    """GPUs of each node that such servers have alone; 0 where each is on a GPU that trains."""
    share: float = 1.0
    """Share of the rows of a step whose answers are drawn."""
    teacher: Model | None = None
    """Frozen model that each process holds beside the trained one, and that scores the drawn answers; none
    are drawn to held-out rows then. None without one."""


def tables_beside_adapter(recipe: Recipe) -> list[str]:
    """Return the keys by which a recipe trains rows of tables beside an adapter."""
    tables = {
        "model.extra_special_tokens": recipe.model.extra_special_tokens,
        "method.modules_to_save": recipe.method.modules_to_save,
        "method.trainable_token_indices": recipe.method.trainable_token_indices,
    }
    return [] if recipe.method.name == "full" else [name for name, value in tables.items() if value]


class ObjectiveBase:
    """The goal of training of one recipe. Subclasses contain only what differs."""

    name: ClassVar[str]
    """Value of `objective` in recipes."""
    references: ClassVar[tuple[ReferenceKind, ...]] = ("none",)
    """Reference models that its recipes may have."""

    logged: ClassVar[Mapping[str, str]] = {}
    """Name in TRL's logs of each field of a logged step that has a figure beside the loss."""
    reads_logits: ClassVar[str] = ""
    """Part of its loss that TRL's chunked loss lacks, so that all logits of a micro batch are made; or
    empty."""
    head_outputs: ClassVar[tuple[str, ...]] = ()
    """Results of TRL's chunked loss for each token; none where the model has no head of the vocabulary."""

    def __init__(self, recipe: Recipe) -> None:
        """Bind it to a recipe that names it."""
        self.recipe = recipe
        self.section: Any = recipe.objective
        """The recipe's section of the objective."""

    @cached_property
    def sharding(self) -> ShardingBase:
        """Return how the recipe's model is divided."""
        return sharding_of(self.recipe)

    def log_counts(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what means in TRL's logs are taken over: the trained tokens or rows of a micro batch, by
        name, int64 ()."""
        return {}

    def logged_rewards(self) -> dict[str, str]:
        """Return the name in TRL's logs of each reward, by its name; none where nothing is drawn."""
        return {}

    heldout_rows: ClassVar[type[HeldoutRows]] = HeldoutRows
    """Held-out rows as it evaluates them, which measure its figures."""

    def figures(self) -> list[Figure]:
        """List its figures, the most important first; models are compared by the first one that is paired."""
        raise NotImplementedError

    def frozen_passes(self) -> int:
        """Return the forward passes of a row without gradients, beside that of training."""
        return int(self.reference() not in ("none", "precomputed"))

    def run_passes(self, trained: Callable[[], Any], frozen: Callable[[], Any]) -> tuple[Any, Any]:
        """Run the forward pass of training and those without gradients in the order of a step; return both
        results.

        The second is None if there are no frozen passes; here they come between the forward and the backward
        pass of training.
        """
        return trained(), frozen() if self.frozen_passes() else None

    def problems(self) -> list[str]:
        """List what no shape solves: parts of the recipe that cannot work with it, with the reason, a line
        each."""
        return []

    def model_problem(self, model_type: str) -> str | None:
        """Return why a type of base model cannot be trained for it; None if it can."""
        return None

    def base_problems(self, geometry: Geometry) -> list[str]:
        """List what no shape solves of the recipe with its base model, a line each."""
        problems = []
        if reason := self.model_problem(geometry.model_type):
            problems.append(reason)
        if geometry.experts > 1 and self._loses_balance():
            problems.append(
                f"training.router_aux_loss_coef: objective {self.name} with method "
                f"{self.recipe.method.name} and sharding {self.sharding.name} has wrong gradients of the "
                "balance loss with activation checkpointing, which TRL makes reentrant there; write 0, or "
                "training.activation_checkpointing: false, or use fsdp"
            )
        if geometry.unsupported and self.draws():
            problems.append(
                f"model.name_or_path: {self.recipe.model.name_or_path}: to draw answers, objective "
                f"{self.name} caches keys and values, whose memory and time are not modelled for "
                f"{geometry.unsupported}; train a model whose layers are those of Llama, Mistral or Qwen2 "
                "(docs/plan.md), or prefer answers with objective: dpo"
            )
        return problems

    def _loses_balance(self) -> bool:
        """Return whether gradients of the balance loss differ from plain training's (by 5 to 30 % in the
        self-test)."""
        training, method = self.recipe.training, self.recipe.method
        is_reentrant = (
            self.sharding.layout.zero3 and method.name != "full" and training.activation_checkpointing
        )
        return is_reentrant and "adapter" in self.references and training.router_aux_loss_coef != 0

    def reference(self) -> ReferenceKind:
        """Return the reference model of each step."""
        return "none"

    def teacher(self) -> Model | None:
        """Return the model whose distributions are computed before training; None where none is needed."""
        return self.recipe.objective.teacher(self.recipe.model)

    def _switches_dropout_off(self) -> bool:
        """Return whether dropout, the adapter's too, is off in training."""
        return False

    def lora_dropout(self) -> float:
        """Return the dropout of the adapter in training."""
        return 0.0 if self._switches_dropout_off() else self.recipe.method.lora_dropout

    def set_dropout(self, model: Any) -> None:
        """Switch the dropout of a model off if it is off in training, as TRL's trainer does."""
        from trl.trainer.utils import disable_dropout_in_model

        if self._switches_dropout_off():
            disable_dropout_in_model(model)

    def reasons(self) -> list[str]:
        """List what the plan says about its cost, a line each."""
        return []

    def warnings(self, manifest: Manifest) -> list[str]:
        """List what prepared data says against the recipe, a line each, without stopping the run."""
        return []

    def dropout_reasons(self) -> list[str]:
        """List the line of the plan about an adapter's dropout that is switched off."""
        if (
            self.recipe.method.name == "full"
            or not self.recipe.method.lora_dropout
            or not self._switches_dropout_off()
        ):
            return []
        return ["objective.disable_dropout: method.lora_dropout has no effect in training"]

    def arguments_class(self) -> Any:
        """Return TRL's class of training arguments."""
        raise NotImplementedError

    def arguments(self) -> dict[str, Any]:
        """Return its own keyword arguments of that class."""
        raise NotImplementedError

    @classmethod
    def trainer_class(cls) -> Any:
        """Return TRL's trainer, for rows that are prepared."""
        raise NotImplementedError

    def trainer_arguments(self, load: Callable[[], Any]) -> dict[str, Any]:
        """Return its own keyword arguments of the trainer; `load` returns another copy of the base model."""
        return {}

    def collator(self, pad_token_id: int) -> Callable[[list[Row]], dict[str, Any]] | None:
        """Return the maker of its batches; None for flytune.data.Collator."""
        return None

    def joined(self) -> Callable[[Row, Row], Row] | None:
        """Return what makes a row to train of it and the row before it in its step; None if rows are trained
        as they are."""
        return None

    def repeats(self) -> int:
        """Return the samples that a step has of each stored row."""
        return 1

    def draws(self) -> Draws | None:
        """Return what the model draws before each step; None if it draws nothing."""
        return None

    def contrast(self, size: int) -> Contrast | None:
        """Return which vectors, of `size` numbers, the loss of a whole step compares; None if it compares
        none."""
        return None

    def temperature(self) -> float:
        """Return the divisor of the logits whose log-probabilities are trained."""
        return 1.0

    def finish(self, trainer: Any, out: Path) -> None:
        """Add what the artifact has of the training to the folder `out`. The first process calls it at the
        end."""

    def clear(self, address: str) -> None:
        """Delete what training has recorded beside the checkpoints at an address, once its artifact is
        stored."""

    def model_inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return what the model gets of a batch of its collator."""
        return batch

    def row_numbers(self, outputs: Any) -> Any:
        """Return the number of each row that TRL makes the loss of; None where it is the loss of the
        tokens."""
        return None

    def card_text(self) -> str:
        """Return what the model card says about the training; empty for a language model's own loss."""
        return ""

    def measure(self, trainer: Any, rows: Sequence[Row]) -> tuple[Any, Any]:
        """Return the live model's loss on each row times the row's weight, and the weight: arrays of shape
        (rows,).

        All processes call it with equally many rows.
        """
        raise NotImplementedError
