"""Held-out losses: of tiles of logits, from one pass through the layers."""

import pytest
import torch

from flytune.models import own_logits, scoring
from tests.support.model_types import tiny_config

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.numerical]

DRAW = torch.Generator().manual_seed(0)
TOKENS = [torch.randint(3, 120, (length,), generator=DRAW).tolist() for length in (23, 17, 9)]
ROWS = [{"input_ids": ids, "labels": [scoring.IGNORED] * 4 + ids[4:]} for ids in TOKENS]
# Plain; with a cap on the logits; with the decoder inside of the base model; with a head of the name decoder.
TYPES = ["llama", "gemma2", "opt", "modernbert-decoder"]


def built(model_type):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(model_type)).eval()


@pytest.mark.parametrize("model_type", TYPES)
def test_tiles_have_the_loss_of_the_whole_and_the_layers_run_once(model_type, monkeypatch):
    model = built(model_type)
    whole, tokens = scoring.heldout_loss(model, ROWS, 0, batch_size=3)
    assert tokens.tolist() == [19, 13, 5]
    heads, layers = [], []
    model.get_output_embeddings().register_forward_hook(
        lambda *call: heads.append(call[-1].shape[:2].numel())
    )
    run_layers = model.base_model.get_decoder().forward

    def forward(*args, **kwargs):
        layers.append(None)
        return run_layers(*args, **kwargs)

    monkeypatch.setattr(model.base_model.get_decoder(), "forward", forward)
    monkeypatch.setattr(scoring, "TILE", 6)
    tiles, _ = scoring.heldout_loss(model, ROWS, 0, batch_size=3)
    # 19 positions of 3 rows, 6 of them at a time.
    assert (max(heads), len(heads), len(layers)) == (6, 10, 1)
    assert tiles == pytest.approx(whole, rel=1e-5)
    again, _ = scoring.heldout_loss(model, ROWS[:1], 0, batch_size=1)
    assert len(layers) == 2
    assert again == pytest.approx(whole[:1], rel=1e-5)


@pytest.mark.parametrize("model_type", TYPES)
def test_the_head_of_training_has_the_same_loss(model_type):
    model = built(model_type)
    whole, tokens = scoring.heldout_loss(model, ROWS, 0, batch_size=2)
    own_logits.add_head(model)
    fused, counted = scoring.heldout_loss(model, ROWS, 0, batch_size=2, fused_head=True)
    assert fused == pytest.approx(whole, rel=1e-5)
    assert counted.tolist() == tokens.tolist()
