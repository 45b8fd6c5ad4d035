"""Questions about one field: answers are exact at their edge."""

import json

import pytest

from flytune.cli import main
from flytune.errors import DoesNotFit, RecipeError
from flytune.hardware import load_shapes, shape_named
from flytune.planning import candidates, planner, ranking, solving
from flytune.planning.largest import LAYERS, MAX_LENGTH, MICRO_BATCH, RANK
from flytune.planning.solving import GPUS, HOURS, PRICE
from flytune.recipe import Recipe
from tests.support.plans import GEOMETRY, LLAMA_8B, recipe_of
from training_estimates import config_sizes

BASE = {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}
SHAPES = ["l4-1", "a100-80gb-1", "a100-80gb-8"]
WAYS = [
    ("qlora", "none", SHAPES[:2]),
    ("lora", "none", SHAPES[:2]),
    ("lora", "fsdp", SHAPES[2:]),
    ("full", "fsdp", ["a100-80gb-8", "h100-8x8"]),
    ("full", "zero3", ["a100-80gb-8"]),
    ("qlora", "ddp", SHAPES),
]


def asked(method="qlora", sharding="none", batch=64, **training):
    training = {"learning_rate": 1e-4, "global_batch_size": batch, **training}
    data = {"path": "x.jsonl", "max_length": 2048}
    return recipe_of(model=BASE, method=method, sharding=sharding, training=training, data=data)


def with_field(recipe, field, value):
    section, name = field.split(".")
    changed = recipe.model_dump()
    changed[section][name] = value
    return Recipe.model_validate(changed)


def fits(recipe, shapes, geometry=GEOMETRY):
    """Return whether a plan of the recipe can be made, without the search."""
    try:
        planner.make(recipe, shapes, geometry)
    except (DoesNotFit, RecipeError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("field", [MAX_LENGTH, RANK])
@pytest.mark.parametrize(("method", "sharding", "names"), WAYS)
def test_the_next_value_does_not_fit_and_the_value_does(field, method, sharding, names):
    if method == "full" and field == RANK:
        pytest.skip("full has no rank")
    recipe, shapes = asked(method, sharding), [shape_named(name) for name in names]
    answer = solving.solve(recipe, field, GEOMETRY, shapes=shapes)
    assert fits(with_field(recipe, field, answer.value), shapes)
    if answer.next_value is None:
        assert "as wide as the widest layer" in answer.beyond
    else:
        assert answer.next_value == answer.value + 1
        assert not fits(with_field(recipe, field, answer.next_value), shapes)
        assert "missing" in answer.beyond
    # The plan is that of the recipe with the value.
    plan = planner.make(with_field(recipe, field, answer.value), [answer.fit.shape], GEOMETRY)
    # Notes on other settings are those of a plan alone.
    others = ("tight: ", "sharding.replicas: ")
    reasons = [reason for reason in plan.reasons if not reason.startswith(others)]
    assert planner.plan_of(answer.fit) == plan.model_copy(update={"reasons": reasons})


@pytest.mark.parametrize("headroom", [None, 0.2])
@pytest.mark.parametrize(
    ("method", "names", "length"), [("qlora", ["l4-1"], 8192), ("lora", ["a100-80gb-1"], 16384)]
)
def test_the_next_micro_batch_that_divides_the_batch_does_not_fit(method, names, length, headroom):
    recipe = with_field(asked(method, batch=48), MAX_LENGTH, length)
    recipe = recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={"headroom": headroom})})
    shape = shape_named(names[0])
    answer = solving.solve(recipe, MICRO_BATCH, GEOMETRY, shapes=[shape])
    sizes = {
        fit.workload.micro_batch: fit.share <= 1 and fit.needs[0].share <= 1 - (headroom or 0)
        for fit in candidates.each(with_field(recipe, MICRO_BATCH, 48), shape, GEOMETRY)
    }
    assert sorted(sizes) == [size for size in range(1, 49) if 48 % size == 0]
    assert answer.value == max(size for size, does in sizes.items() if does)
    assert answer.next_value == min(size for size in sizes if size > answer.value)
    assert answer.fit.workload.micro_batch == answer.value


def test_the_largest_model_is_counted_layer_by_layer():
    recipe, shapes = asked("full", "fsdp"), [shape_named("a100-80gb-8")]
    answer = solving.solve(recipe, LAYERS, GEOMETRY, shapes=shapes)
    held, more = (
        config_sizes.geometry(LLAMA_8B | {"num_hidden_layers": answer.value + one}, "a/b") for one in (0, 1)
    )
    assert fits(recipe, shapes, held)
    assert not fits(recipe, shapes, more)
    assert answer.fit.workload.geometry.num_hidden_layers == answer.value > 32


def test_a_tight_answer_names_the_largest_value_that_leaves_a_tenth():
    recipe, shape = asked("qlora"), shape_named("l4-1")
    answer = solving.solve(recipe, MAX_LENGTH, GEOMETRY, shapes=[shape])
    assert answer.fit.is_tight
    shares = [
        min(fit.share for fit in candidates.each(with_field(recipe, MAX_LENGTH, length), shape, GEOMETRY))
        for length in (answer.well, answer.well + 1)
    ]
    assert shares[0] <= 0.9 < shares[1]
    assert f"{answer.well:,} leaves a tenth of each free" in solving.described(answer)[-1]


def test_a_length_ends_with_the_positions_of_a_base_that_has_no_further_ones():
    few, shapes = GEOMETRY.model_copy(update={"positions": 4000}), [shape_named("l4-1")]
    bound = solving.solve(
        asked(), MAX_LENGTH, few.model_copy(update={"bounds_positions": True}), shapes=shapes
    )
    assert (bound.value, bound.next_value, bound.beyond) == (4000, None, "the base has no further positions")
    assert solving.solve(asked(), MAX_LENGTH, few, shapes=shapes).value > 4000


def all_ways(recipe):
    for layout in ranking.layouts(recipe, GEOMETRY):
        for shape in candidates.wished(layout, load_shapes()):
            for fit in candidates.each(layout, shape, GEOMETRY):
                if not isinstance(fit, str) and fit.share <= 1:
                    yield fit


def test_no_shape_with_fewer_gpus_fits():
    for length in (2048, 65536):
        recipe = with_field(asked("full", "fsdp"), MAX_LENGTH, length)
        answer = solving.solve(recipe, GPUS, GEOMETRY)
        assert answer.value == min(fit.shape.world_size for fit in all_ways(recipe))
        assert answer.fit.shape.world_size == answer.value
        assert f"hardware.shape: {answer.fit.shape.name}" in answer.changes
        assert solving.described(answer)[0].startswith(
            f"fewest GPUs: {answer.value} on {answer.fit.shape.name} with "
        )


def test_the_cheapest_within_a_deadline_and_the_fastest_within_a_budget():
    recipe = asked("lora", "fsdp")
    plans = [planner.plan_of(fit, 100_000) for fit in all_ways(recipe)]
    timed = [plan for plan in plans if plan.hours]
    hours, prices = sorted(plan.hours[2] for plan in timed), sorted(plan.price[2] for plan in timed)
    for place in (0, len(hours) // 20, len(hours) // 3):
        limit = hours[place] * 1.0001
        limited = recipe.model_copy(
            update={"hardware": recipe.hardware.model_copy(update={"max_hours": limit})}
        )
        answer = solving.solve(limited, PRICE, GEOMETRY, 100_000)
        assert answer.value == pytest.approx(min(plan.price[1] for plan in timed if plan.hours[2] <= limit))
        assert solving.described(answer)[0].startswith(f"least price: ${answer.value:,.2f} on ")
        limit = prices[place] * 1.0001
        limited = recipe.model_copy(
            update={"hardware": recipe.hardware.model_copy(update={"max_price": limit})}
        )
        answer = solving.solve(limited, HOURS, GEOMETRY, 100_000)
        assert answer.value == pytest.approx(min(plan.hours[1] for plan in timed if plan.price[2] <= limit))
        assert solving.described(answer)[0].startswith(f"least time: {answer.value:.3g} hours on ")
    limited = recipe.model_copy(
        update={"hardware": recipe.hardware.model_copy(update={"max_hours": hours[0] * 0.9})}
    )
    with pytest.raises(DoesNotFit, match=r"no shape keeps hardware.max_hours .*; the nearest is h100-8x8"):
        solving.solve(limited, PRICE, GEOMETRY, 100_000)


@pytest.mark.parametrize(
    ("field", "change", "error", "said"),
    [
        ("data.max_lenght", {}, RecipeError, "did you mean data.max_length?"),
        ("color", {}, RecipeError, "it can be one of data.max_length, "),
        ("r", {"method": "full"}, RecipeError, "method full has no adapter"),
        ("price", {}, RecipeError, "Set hardware.max_hours, or --max-hours"),
        ("hours", {}, RecipeError, "Set hardware.max_price, or --max-price"),
        ("max_length", {"method": "full"}, DoesNotFit, "l4-1: data.max_length 1: "),
        ("gpus", {"method": "full"}, DoesNotFit, "no shape can hold it"),
        (
            "micro_batch",
            {"batch": 63, "sharding": "ddp"},
            DoesNotFit,
            "global_batch_size 63 is not a multiple",
        ),
    ],
)
def test_what_cannot_be_answered_says_why(field, change, error, said):
    shapes = [shape_named("a100-80gb-8" if "sharding" in change else "l4-1")]
    with pytest.raises(error) as caught:
        solving.solve(asked(**change), solving.named(field), GEOMETRY, 100, shapes)
    assert said in str(caught.value)


def test_a_refusal_that_names_another_machine_names_the_exact_length_too():
    recipe = with_field(asked(), MAX_LENGTH, 16_000)
    shape = shape_named("l4-1")
    recipe = recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={"shape": "l4-1"})})
    with pytest.raises(DoesNotFit) as caught:
        planner.make(recipe, None, GEOMETRY)
    answer = solving.solve(recipe, MAX_LENGTH, GEOMETRY, shapes=[shape])
    assert str(caught.value).endswith(
        f"; with no other change, with data.max_length: {answer.value} (on l4-1, $0.81 an hour)"
    )
    assert "it would fit with hardware.shape: a100-80gb-1" in str(caught.value)


def test_hours_need_samples_and_a_model_that_the_closed_form_knows():
    limited = asked().model_copy(update={"hardware": asked().hardware.model_copy(update={"max_hours": 1.0})})
    with pytest.raises(RecipeError, match="say it \\(--samples\\)"):
        solving.solve(limited, PRICE, GEOMETRY)
    with pytest.raises(
        RecipeError, match="--solve asks the closed form, which does not know latent attention"
    ):
        solving.solve(asked(), MAX_LENGTH, GEOMETRY.model_copy(update={"unsupported": "latent attention"}))


def test_the_command_prints_the_answer_as_text_and_as_json(tmp_path, capsys):
    path = tmp_path / "recipe.yaml"
    data = {"dataset_name": "a/b", "max_length": 2048}
    path.write_text(json.dumps(asked().model_dump(exclude_defaults=True) | {"data": data}))
    assert main(["plan", str(path), "--solve", "max_length", "--shape", "l4-1"]) == 0
    text = capsys.readouterr().out
    assert main(["plan", str(path), "--solve", "data.max_length", "--shape", "l4-1", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["version"] == 1
    assert content["next_value"] == content["value"] + 1
    assert content["plan"]["shape"] == "l4-1"
    assert f"largest data.max_length that fits: {content['value']:,} on l4-1" in " ".join(text.split())
    assert main(["plan", str(path), "--solve", "gpus", "--shape", "l4-1"]) == 1
    assert "answered by all shapes" in capsys.readouterr().err
    for option in ("--solve", "--shape", "--data"):
        assert main(["plan", str(path), option, ""]) == 1
        assert f"{option}: it is empty" in capsys.readouterr().err
    assert main(["plan", str(path), "--by", "time"]) == 1
    assert "it orders what --shape auto ranks" in capsys.readouterr().err
