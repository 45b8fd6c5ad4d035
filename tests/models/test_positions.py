"""Tests of the positions of base models, on a tiny model of each type."""

import pytest

from flytune.models import Generation, positions
from flytune.models.generation import answer
from tests.support import model_types
from tests.support.tiny import tiny_base

COUNT = 48
QUICK = ("gpt2", "opt", "roberta", "mpt", "bloom", "llama")
KEYS = {
    "max_position_embeddings",
    "original_max_position_embeddings",
    "context_length",
    *(key for key, _ in positions.BOUND.values()),
}


@pytest.fixture
def few(monkeypatch):
    for key in KEYS:
        monkeypatch.setitem(model_types.SIZES, key, COUNT)


def read(model, length):
    import torch

    with torch.no_grad():
        model(input_ids=torch.full((1, length), 5))


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow)
        for kind in model_types.MODEL_TYPES
    ],
)
def test_a_model_reads_as_many_positions_as_its_config_json_says(kind, few):
    from transformers import AutoModelForCausalLM

    config = model_types.tiny_config(kind)
    config.is_decoder = True
    model = AutoModelForCausalLM.from_config(config).eval()
    found = positions.of_model(model)
    if found is None or not found.is_bound:
        read(model, 4 * COUNT)
        return
    read(model, found.tokens)
    with pytest.raises((IndexError, RuntimeError)):
        read(model, found.tokens + 1)


@pytest.mark.parametrize("kind", ["deberta-v2", "distilbert", "mpnet"])
def test_an_encoder_reads_as_many_positions_as_its_config_json_says(kind, few):
    from transformers import AutoModel

    model = AutoModel.from_config(model_types.tiny_config(kind)).eval()
    read(model, positions.of_model(model).tokens)
    with pytest.raises((IndexError, RuntimeError)):
        read(model, positions.of_model(model).tokens + 1)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2"}, (1024, True)),
        ({"model_type": "gpt2", "n_positions": 64}, (64, True)),
        ({"model_type": "gpt2", "max_position_embeddings": 64}, (64, True)),
        (
            {"model_type": "deberta-v2", "max_position_embeddings": 64, "position_biased_input": False},
            (64, False),
        ),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, (512, True)),
        (
            {
                "model_type": "gemma3",
                "text_config": {"model_type": "gemma3_text", "max_position_embeddings": 64},
            },
            (64, False),
        ),
        ({"model_type": "llama"}, None),
        ({"model_type": "llama", "max_position_embeddings": -1}, None),
        ({"model_type": "mistral", "max_position_embeddings": 64, "sliding_window": 8}, (64, False)),
        ({"model_type": "falcon", "max_position_embeddings": 64, "alibi": True}, None),
        (
            {
                "model_type": "llama",
                "max_position_embeddings": 64,
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            (128, False),
        ),
        (
            {
                "model_type": "qwen2",
                "max_position_embeddings": 64,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            (256, False),
        ),
        (
            {
                "model_type": "llama",
                "max_position_embeddings": 64,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            },
            (64, False),
        ),
    ],
)
def test_positions_of_a_config_json(config, expected):
    assert positions.of(config, "base") == expected


def test_code_of_the_model_s_own_may_read_more_than_its_type():
    assert positions.of({"model_type": "gpt2"}, "base", trust_remote_code=True) is None


def test_an_answer_ends_where_there_are_no_further_positions(tmp_path):
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(tiny_base(tmp_path))
    sizes = {"vocab_size": len(tokenizer), "n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    long, short = answer(
        model, tokenizer, [[5] * 20, [5] * 3], Generation(max_new_tokens=16, batch_size=1), ends=[]
    )
    assert (long.answer_tokens, long.finish_reason) == (4, "length")
    assert short.answer_tokens == 16
