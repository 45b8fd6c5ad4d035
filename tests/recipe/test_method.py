"""Adapters on experts in a recipe: what they cannot be combined with, and the keys of recipes without
them."""

import pytest

from flytune.errors import RecipeError
from tests.support.plans import TRAINING, recipe_of


def test_experts_have_no_dropout_unless_it_is_written():
    recipe = recipe_of(method={"name": "lora", "experts": True})
    assert recipe.method.lora_dropout == 0
    assert type(recipe).model_validate_json(recipe.model_dump_json()).method == recipe.method
    assert recipe_of(method={"name": "lora"}).method.lora_dropout == 0.05


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"lora_dropout": 0.1}, "experts: lora_dropout: PEFT adds an expert's adapter to its weight"),
        ({"use_dora": True}, "experts: use_dora: .* no DoRA; remove use_dora"),
        ({"init_lora_weights": "pissa"}, "experts: init_lora_weights: .* no PiSSA"),
        ({"name": "qlora"}, "experts: bitsandbytes quantizes nn.Linear and no fused experts"),
        ({"name": "full"}, "experts.*only for lora and qlora"),
    ],
)
def test_what_experts_cannot_be_combined_with_is_refused(method, said):
    with pytest.raises(RecipeError, match=said):
        recipe_of(method={"name": "lora", "experts": True} | method)


def test_a_recipe_without_experts_keeps_its_key():
    old = recipe_of(method={"name": "lora"})
    assert recipe_of(method={"name": "lora", "experts": False}).key() == old.key()
    assert recipe_of(method={"name": "lora", "lora_dropout": 0, "experts": True}).key() != old.key()
    assert (
        recipe_of(training=TRAINING | {"router_aux_loss_coef": None}).key()
        == recipe_of(training=TRAINING).key()
    )
