"""Answers that a model draws, which depend on nothing but the weights, the prompt and their own random
numbers."""

import pytest

from flytune.rollouts import Drawing, draw, numbers
from tests.support.tiny import tiny_base

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11], [30, 31, 32, 33]]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        tiny_base(tmp_path_factory.mktemp("base")), dtype="float32"
    ).eval()


def drawn(model, prompts, count=10, **settings):
    drawing = Drawing(**({"ends": (2,), "pad": 0} | settings))
    return draw(model, prompts, [numbers(0, 1, prompt, 0, count) for prompt in prompts], drawing)


def test_the_random_numbers_of_an_answer_never_change():
    found = numbers(3, 7, [1, 2], 0, 3)
    assert found.tolist() == [0.56847080963985, 0.8092842242865054, 0.15618509449485163]
    assert numbers(3, 7, [1, 2], 0, 5)[:3].tolist() == found.tolist()
    others = [
        numbers(4, 7, [1, 2], 0, 3),
        numbers(3, 8, [1, 2], 0, 3),
        numbers(3, 7, [12], 0, 3),
        numbers(3, 7, [1, 2], 1, 3),
    ]
    assert len({other[0] for other in [found, *others]}) == 5


def test_answers_are_equal_however_prompts_are_divided_over_batches(model):
    together = drawn(model, PROMPTS)
    alone = [drawn(model, [prompt])[0] for prompt in PROMPTS]
    backwards = drawn(model, PROMPTS[::-1])[::-1]
    for one, other, third in zip(together, alone, backwards, strict=True):
        assert one.tokens == other.tokens == third.tokens
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_log_probabilities_are_those_of_the_model(model):
    import torch

    (found,) = drawn(model, PROMPTS[:1], temperature=0.7)
    logits = model(torch.tensor([PROMPTS[0] + found.tokens])).logits[0, len(PROMPTS[0]) - 1 : -1].float()
    wanted = (logits / 0.7).log_softmax(-1).gather(-1, torch.tensor(found.tokens)[:, None])[:, 0]
    assert found.log_probs == pytest.approx(wanted.tolist(), abs=1e-4)


def test_without_a_temperature_the_answer_is_the_most_probable_one(model):
    import torch

    tokens = list(PROMPTS[1])
    for _ in range(5):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert drawn(model, PROMPTS[1:2], 5, temperature=0.0, ends=())[0].tokens == tokens[len(PROMPTS[1]) :]
    assert drawn(model, PROMPTS[1:2], 5, top_k=1, ends=())[0].tokens == tokens[len(PROMPTS[1]) :]


def test_an_answer_ends_with_an_end_marker_or_is_truncated(model):
    (whole,) = drawn(model, PROMPTS[:1], 8, ends=())
    assert len(whole.tokens) == 8
    assert whole.is_truncated
    end = whole.tokens[3]
    cut = drawn(model, PROMPTS, 8, ends=(end,))[0]
    at = whole.tokens.index(end)
    assert cut.tokens == whole.tokens[: at + 1]
    assert not cut.is_truncated
    assert len(cut.log_probs) == len(cut.tokens)


def test_all_processes_make_equally_many_passes(model):
    asked = list[bool]()

    def goes_on(mine):
        asked.append(mine)
        return len(asked) <= 6

    found = draw(model, PROMPTS[:1], [numbers(0, 1, PROMPTS[0], 0, 3)], Drawing((), 0), goes_on)
    assert asked == [True] * 3 + [False] * 4
    assert len(found[0].tokens) == 3
