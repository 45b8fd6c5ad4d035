"""Parts of samples: labels across their borders, and the logits and gradients of each type in the list."""

import pytest

from flytune.data.packing import Collator, tokens_of
from flytune.models import model_types, sequence_parallel
from flytune.models.sequence_parallel import SequencePart
from tests.support import ranks, sequence_parts

QUICK = ("llama", "mistral", "gemma2")
BOUND = 1e-6
"""Norms and routers that compute in float32 differ by 3e-7, all else by 2e-15."""


def measured(kinds):
    rows = model_types.table()
    return {
        (kind, attention): sequence_parts.distances(kind, attention, attention in rows[kind]["packing"])
        for kind in kinds
        for attention in ("sdpa", "eager")
        if attention in rows[kind].get("attention", ("sdpa", "eager"))
    }


@pytest.mark.parametrize(
    "kinds", [QUICK, pytest.param(tuple(sorted(sequence_parallel.TYPES)), marks=pytest.mark.slow)]
)
def test_two_processes_compute_the_logits_and_gradients_of_one(kinds):
    found = ranks.run(2, measured, kinds)
    assert {key: distances for key, distances in found.items() if max(distances) > BOUND} == {}


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "bloom", "gpt_oss"])
def test_types_that_mix_positions_otherwise_are_not_in_the_list(kind):
    assert kind not in sequence_parallel.TYPES


def test_a_position_predicts_the_first_token_of_the_next_part():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [-100]}]
    parts = [Collator(0, 8, part=SequencePart(number, 2))(rows) for number in range(2)]
    assert [part["input_ids"].tolist() for part in parts] == [[[5, 6], [8, 0]], [[7, 0], [0, 0]]]
    assert [part["shift_labels"].tolist() for part in parts] == [
        [[6, 7], [-100, -100]],
        [[-100, -100], [-100, -100]],
    ]
    assert [part["position_ids"].tolist() for part in parts] == [[[0, 1]] * 2, [[2, 3]] * 2]
    assert all(part["attention_mask"].shape == (2, 4) and tokens_of(part) == 4 for part in parts)


def test_tokens_of_packed_parts_are_those_of_the_row():
    rows = [{"input_ids": [5] * 6, "labels": [5] * 6, "seq_lengths": [3, 3]}]
    for number in range(2):
        batch = Collator(0, 7, part=SequencePart(number, 2))(rows)
        assert batch["position_ids"].tolist() == [[0, 1, 2, 0], [1, 2, 0, 0]][number : number + 1]
        assert tokens_of(batch) == 6
