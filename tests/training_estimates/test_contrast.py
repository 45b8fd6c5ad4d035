"""Memory of the vectors of a whole step, compared with what torch allocates for them on a CPU."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flytune.dryrun.allocations import AllocationLedger
from flytune.models import vectors
from flytune.objectives import embed, objective_of
from tests.support.plans import GEOMETRY, recipe_of, workload_of
from training_estimates import Contrast, contrast, memory_of

SIZE = 512


class Table(torch.nn.Module):
    """A model whose last hidden states are rows of a table."""

    pooling = "last"

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, SIZE)

    def forward(self, input_ids, attention_mask, use_cache):
        return SimpleNamespace(last_hidden_state=self.table(input_ids))


def first_pass(section, rows, accumulation):
    """Run the first pass of a step of one process; return the ledger of its allocations, and the batches,
    which keep the gradient."""
    texts = 2 + section.negatives
    batches = [
        {
            "input_ids": torch.randint(8, (rows * texts, 1)),
            "attention_mask": torch.ones(rows * texts, 1, dtype=torch.long),
            embed.KEYS: torch.randint(2**40, (rows, texts)),
        }
        for _ in range(accumulation)
    ]
    trainer = SimpleNamespace(
        run=SimpleNamespace(recipe=SimpleNamespace(objective=section)),
        args=SimpleNamespace(device=torch.device("cpu"), process_index=0, world_size=1),
        accelerator=SimpleNamespace(gather=lambda values: values),
        _prepare_inputs=dict,
        compute_loss_context_manager=nullcontext,
    )
    with (ledger := AllocationLedger()).watch():
        embed.OBJECTIVE.trainer_class()._run_first_pass(trainer, Table(), batches)
    return ledger, batches


@pytest.mark.parametrize(
    ("negatives", "dims", "similarities"),
    [
        pytest.param(7, [], 2**8, id="vectors"),
        pytest.param(0, [], 2**8, id="vectors of pairs"),
        pytest.param(7, [256, 64], 2**8, id="lengths"),
        pytest.param(7, [256, 64], 2**20, id="similarities"),
    ],
)
def test_the_vectors_of_a_step_take_what_is_estimated(negatives, dims, similarities, monkeypatch):
    monkeypatch.setattr(vectors, "SIMILARITIES", similarities)
    micro_batch, accumulation = 16, 8
    recipe = recipe_of(objective={"name": "embed", "negatives": negatives, "matryoshka_dims": dims})
    work = replace(
        workload_of(recipe, micro_batch=micro_batch),
        accumulation=accumulation,
        gpus=1,
        nodes=1,
        contrast=objective_of(recipe).contrast(SIZE),
    )
    ledger, _batches = first_pass(recipe.objective, micro_batch, accumulation)
    totals, estimated = ledger.totals(), contrast.loss_bytes(work)
    # Of a single block of similarities no earlier gradient is there.
    assert 0.8 * estimated < max(totals) < 1.01 * estimated
    assert totals[-1] == pytest.approx(contrast.kept_bytes(work), rel=0.001)


def test_the_plan_of_many_rows_counts_them():
    recipe = recipe_of(objective={"name": "embed", "negatives": 7})
    few, many = (
        memory_of(replace(workload_of(recipe), accumulation=accumulation)) for accumulation in (1, 8192)
    )
    work = workload_of(recipe)
    assert work.contrast == Contrast((GEOMETRY.hidden_size,), vectors.SIMILARITIES)
    kept = 8192 * 9 * GEOMETRY.hidden_size * 4
    assert many.phases["evaluate"]["vectors"] == kept
    assert "vectors" not in many.phases["load"]
    whole = kept * work.degrees.world
    assert many.phases["steady step"]["loss of the vectors"] > 7 * whole
    assert "loss of the vectors" not in few.phases["steady step"], "less than a micro batch takes"
    assert "vectors" not in memory_of(workload_of(recipe_of())).phases["steady step"]
