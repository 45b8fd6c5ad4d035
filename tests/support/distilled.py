"""Runs of a tiny student, and the losses that TRL's own trainer of distillation has on the same rows."""

from flytune import data
from tests.support import objective_runs
from tests.support.objective_runs import TEACHER


def losses_of_gkd(recipe, rows, inputs, out):
    """Return the losses and gradient norms of three steps of TRL's own trainer on `rows`, as they are."""
    from transformers import AutoModelForCausalLM
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    pad = data.stored_tokenizer(inputs / "dataset", False).pad_token_id

    def make_config(section, **arguments):
        return GKDConfig(beta=section.beta, lmbda=0.0, disable_dropout=False, **arguments)

    def make_trainer(model, **arguments):
        teacher = AutoModelForCausalLM.from_pretrained(inputs / TEACHER, dtype="float32")
        return GKDTrainer(model, teacher, data_collator=data.Collator(pad, 128), **arguments)

    logs = objective_runs.logs_of_trl(make_config, make_trainer, recipe, rows, out)
    return [(log["loss"], log["grad_norm"]) for log in logs]


def rows_of(recipe, inputs):
    """Return the rows of three steps in their order."""
    stored = data.order.Stream(
        data.load(inputs / "dataset", "train"), recipe.training, data.row_kind("answers")
    )
    return [stored[place] for place in range(3 * recipe.training.global_batch_size)]
