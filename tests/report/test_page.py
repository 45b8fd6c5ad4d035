import json
import re
import sys
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest

from flytune.objectives import objective_of
from flytune.records import Answer, Attempt, GpuUse, Metrics, Shard, SourceCounts, Wins
from flytune.report import charts, figure_charts, model_card
from flytune.report import page as report_page
from tests.support.reports import EVIL, Tags, metrics, run_of
from tests.support.stages import manifest, plan_for, recipe_for, training_result


@cache
def page(steps=40, method="qlora", **changes) -> str:
    recipe = recipe_for(Path("models/base"), method, description=EVIL, **changes)
    shards = {
        split: [Shard(file=f"{split}/00000.parquet", samples=count, tokens=count * 60, sha256="a")]
        for split, count in (("train", 6512), ("heldout", 133))
    }
    rows = [{"input_ids": [0] * (20 + number % 130)} for number in range(400)]
    data = manifest(rows, shards).model_copy(update={"source": EVIL, "sources": []})
    return report_page.render(*run_of(recipe, data, steps), broken=[])


def test_is_one_whole_page_without_anything_outside():
    text = page()
    tags = Tags(text)
    assert tags.open == []
    assert text.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags.tags}
    reached = [
        value
        for _, attrs in tags.tags
        for name, value in attrs.items()
        if name in ("src", "href", "xlink:href")
    ]
    assert all(value.startswith("#") for value in reached)
    assert re.findall(r"url\((?!#)|@import", text) == []


def test_ids_stand_once_and_labels_point_to_one():
    tags = Tags(page())
    ids = [attrs["id"] for _, attrs in tags.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {attrs["aria-labelledby"] for _, attrs in tags.tags if "aria-labelledby" in attrs} <= set(ids)


def test_what_users_wrote_is_escaped():
    tags = Tags(page())
    assert tags.all("script") == []
    # Description, data source, a part's, prompt, reference, the base's answer, and the recipe's YAML.
    assert tags.text.count("<script>alert('a')</script>") >= 7


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "<script>alert(1)</script> & ![a](http://x)",
            r"&lt;script&gt;alert(1)&lt;/script&gt; &amp; !\[a\](http://x)",
        ),
        ("# Title\n\n| a | b |", r"\# Title \| a \| b \|"),
        ("```\ncode", r"\`\`\` code"),
        ("---", r"\---"),
        ("Sums of two numbers (v2), 3 * 4.", r"Sums of two numbers (v2), 3 \* 4."),
    ],
)
def test_a_card_shows_the_description_as_it_is(text, shown):
    recipe = recipe_for(Path("models/base"), "lora").model_copy(update={"description": text})
    card = model_card.render(*run_of(recipe), broken=[])
    assert card.partition(f"# {recipe.name}\n\n")[2].startswith(f"{shown}\n\nA LoRA adapter")


def test_has_all_pictures_and_says_what_they_show():
    pictures = [attrs for attrs in Tags(page()).all("svg") if attrs.get("role") == "img"]
    labels = " | ".join(attrs["aria-label"] for attrs in pictures)
    assert len(pictures) == 7
    for shown in (
        "Training loss in nats per token over 40 steps, and held-out of the base model (3.680)",
        "held-out at 2 points during training; lower is better",
        "Learning rate",
        "Gradient norm",
        "Time of a step by part: data 1%, forward 27%",
        "Tokens per second",
        "process memory by phase, planned and measured",
        "Histogram of sample lengths",
    ):
        assert shown in labels
    assert all("viewbox" in attrs for attrs in pictures)


def test_pictures_are_xml_in_the_pages_colours():
    training = training_result(40)
    (loss,) = figure_charts.of_training(training, metrics())
    for svg in (loss.picture, charts.learning_rate(training), charts.throughput(training)):
        ET.fromstring(svg.replace("<svg", '<svg xmlns:xlink="http://www.w3.org/1999/xlink"', 1))
        assert "var(--blue)" in svg
        assert "DejaVu" not in svg
        assert not re.search(r"#0[1-5]0[1-5]0[1-5]", svg)


def test_figures_and_reasons_are_there():
    text = Tags(page()).text
    figures = (
        "39.6",
        "21.3",
        "36.6 to 43.4",
        "−0.620",
        "6,512",
        "2 x 2 accumulated",
        "1.06 GiB",
        "under $ 0.01",
    )
    for shown in (*figures, "(nothing)"):
        assert shown in text


def with_sources(count: int) -> tuple[str, str]:
    """Report and card of data of so many sources, the first of which is called EVIL."""
    names = [EVIL, "s3://bucket/a-very-long-name-of-a-folder/with-chats-and-more/2026|11"][:count]
    counts = {"rows": 1200, "bad": 0, "samples": 3000, "tokens": 90_000, "trained_tokens": 30_000}
    sources = [
        SourceCounts(name=name, format="messages", weight=2.5 - index, **counts)
        for index, name in enumerate(names)
    ]
    recipe = recipe_for(Path("models/base"), "lora")
    shard = {split: [Shard(file="a", samples=9, tokens=60, sha256="a")] for split in ("train", "heldout")}
    data = manifest([{"input_ids": [0] * 9}], shard).model_copy(
        update={"sources": sources, "source": EVIL, "split": 4321}
    )
    made = run_of(recipe, data)
    return report_page.render(*made, broken=[]), model_card.render(*made, broken=[])


def test_several_sources_are_told_apart():
    page, text = with_sources(2)
    tags = Tags(page)
    assert (tags.open, tags.all("script")) == ([], [])
    assert all(attrs.get("scope") in ("row", "col") for attrs in tags.all("th"))
    rows = re.sub(r"\s+", " ", tags.text)
    assert "2 sources, read as messages" in rows
    assert f"{EVIL} messages 2.51,2003,00090,000 33.3 %50 %" in rows
    assert "2026|11 messages 1.51,200" in rows
    assert "| data | 2 sources (below), messages: 4 rows read |" in text
    assert "2026\\|11, messages | 1.5 | 1,200 | 3,000 | 90,000 | 33.3 % |" in text
    for text in with_sources(1):
        assert "Sources of the samples" not in text
        assert "| weight |" not in text


def test_rows_that_were_split_are_counted():
    page, text = with_sources(1)
    assert "Split into several samples4,321" in re.sub(r"\s+", " ", Tags(page).text)
    assert "4,321 split into several" in text


def test_tables_have_scoped_heads():
    heads = Tags(page()).all("th")
    assert len(heads) > 20
    assert all(attrs.get("scope") in ("row", "col") for attrs in heads)


def test_is_the_same_each_time_and_small():
    assert page() == page.__wrapped__()
    assert len(page(steps=5000).encode()) < 300_000


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_short_runs_have_a_report_too(steps):
    assert Tags(page(steps=steps)).open == []


@pytest.mark.parametrize(
    ("difference", "samples", "words"),
    [
        ((-0.6, -0.7, -0.5), 133, "falls from 39.6 to 21.3, a significant improvement."),
        ((0.6, 0.5, 0.7), 133, ", significantly worse."),
        ((-0.1, -0.3, 0.1), 133, ", which is not a significant difference."),
        (
            (-0.1, -sys.float_info.max, sys.float_info.max),
            1,
            "a single held-out sample is no evidence, and has no interval.",
        ),
    ],
)
def test_verdict(difference, samples, words):
    assert report_page.verdict(metrics(difference, samples)).endswith(words)


def test_the_doubt_stands_beside_the_improvement():
    doubtful = metrics((-0.6, -0.7, -0.5)).model_copy(
        update={"doubts": ["13 of 19 held-out samples nearly equal a training sample"]}
    )
    words = (
        "a significant improvement, but doubtful. In doubt: 13 of 19 held-out samples nearly equal a "
        "training sample."
    )
    run = run_of(recipe_for(Path("models/base"), "lora"), measured=doubtful)
    text = Tags(report_page.render(*run, broken=[], warnings=["truncated: <b>200 of 200</b>"])).text
    assert words in text
    assert text.index("truncated: <b>200 of 200</b>") < text.index("Difference is tuned minus base")
    assert words in model_card.render(*run, broken=[])


def test_an_interval_that_cannot_be_known():
    loss = metrics((-0.1, -sys.float_info.max, sys.float_info.max)).figure("loss")
    assert report_page.shown(loss, loss.difference) == "unknown"


def test_the_interval_of_a_share_is_in_its_unit():
    wins = Wins(tuned=8, base=0, ties=0, rate=1.0, rate_low=0.625, rate_high=1.0)
    assert report_page.share_interval(wins, "rate") == "62.5 % to 100 %"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (21.34, "21.3"),
        (0.01234, "0.0123"),
        (-0.62, "−0.620"),
        (12345.6, "12,346"),
        (1.79e308, "1.79e+308"),
        (0, "0.00"),
    ],
)
def test_numbers(value, text):
    assert report_page.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.25, "4.2 s"), (47, "47 s"), (357, "5 min 57 s"), (7650, "2 h 7 min")]
)
def test_durations(seconds, text):
    assert report_page.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(512, "512 bytes"), (3 * 2**20, "3 MiB"), (1.42 * 2**30, "1.42 GiB"), (2**41, "2,048 GiB")],
)
def test_sizes(count, text):
    assert charts.size(count) == text


def test_the_report_tells_where_the_model_is_better_and_whether_it_stops():
    text = " ".join(Tags(page()).text.split())
    assert "Of 133 samples, 101 have a lower loss with the tuned model and 30 with the base model." in text
    assert (
        "(F1), the tuned model's answer is closer in 1 of 1 cases, the base model's in 0, with 0 ties."
        in text
    )
    assert "Answers that did not end within 8 tokens: base 0 %, tuned 100 %." in text
    assert "Tuned (cut off)" in text
    assert metrics().never_stops
    assert "The tuned model does not stop: check that the end of answers was trained" in text


def test_a_model_that_stops_as_its_base_does_is_no_alarm():
    cut = Answer(prompt="p", reference="r", base="b", tuned="t", base_stopped=False, tuned_stopped=False)
    assert not metrics().model_copy(update={"answers": [cut] * 4}).never_stops


def test_the_use_of_gpus_is_their_mean_over_the_time_that_was_sampled():
    samples = (
        (30.0, GpuUse(utilization=90, power_watts=600, temperature_max=70)),
        (10.0, GpuUse(utilization=50, temperature_max=74)),
        (10.0, None),
    )
    training = training_result(3)
    steps = [
        step.model_copy(update={"seconds": seconds, "gpu": gpu})
        for step, (seconds, gpu) in zip(training.steps, samples, strict=True)
    ]
    assert report_page.gpu_use(training.model_copy(update={"steps": steps})) == "80 %, 600 W, at most 74 °C"
    assert report_page.gpu_use(training) == ""
    assert "GPU use" not in page()


def test_only_attempts_as_planned_are_compared_with_the_plan():
    recipe = recipe_for(Path("base"), "lora")
    plan, training = plan_for(recipe), training_result(4)
    batches = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "world_size": 2,
        "price_per_hour": 3.6,
    }
    batches |= {"seconds": 9.0, "held_seconds": 1000.0}
    first = Attempt(
        number=1, resumed_from_step=0, last_step=2, shape="cpu-1", peaks={"load": 7 * 2**30}, **batches
    )
    last = Attempt(
        number=2, resumed_from_step=2, last_step=4, shape="cpu-2", peaks={"load": 2**30}, **batches
    )
    steps = [
        step.model_copy(update={"memory_bytes": (9 if step.step <= 2 else 1) * 2**30})
        for step in training.steps
    ]
    training = training.model_copy(
        update={"attempts": [first, last], "steps": steps, "peaks": {"load": 7 * 2**30}}
    )
    assert training.as_planned(plan).peaks == {"load": 2**30}
    assert training.as_planned(plan.model_copy(update={"shape": "another"})) is training
    made = run_of(recipe, training=training)
    text = report_page.render(*made, broken=[])
    assert "load 957 MiB and 1 GiB" in text
    assert "those beside the plan's are of the attempts with its machines and batches" in text
    assert "of the attempts with these machines and batches" in text
    assert "<td>$ 2.00</td>" in text
    assert (
        "host memory (RSS) 1 GiB in the attempts with these machines and batches, available"
        in model_card.render(*made, broken=[])
    )


def card(**method):
    return model_card.render(
        *run_of(recipe_for(Path("models/base"), {"name": "lora", "r": 8} | method)), broken=[]
    )


def test_the_card_tells_vllm_how_the_adapters_of_experts_are_stored():
    """Its LoRARequest.is_3d_lora_weight (vllm/lora/request.py) is not found out, and the numbers are read in
    another order."""
    text = card(experts=True)
    module = """'{"name": "tiny", "path": ".", "is_3d_lora_weight": true}'"""
    assert f"--max-lora-rank 8 --enable-mixed-moe-lora-format --lora-modules {module}" in text
    assert "text-generation-launcher" not in text
    for merged_first in ({"r": 1024}, {"rank_pattern": {"experts.down_proj": 4}}):
        assert "--max-lora-rank" not in (text := card(experts=True, **merged_first))
        assert "`flytune merge` makes one model of both" in text


ROPE = {
    "rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0},
    "max_position_embeddings": 131072,
}


def test_a_card_tells_servers_how_the_base_is_scaled():
    scaling = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}
    recipe = recipe_for(Path("models/base"), {"name": "lora", "r": 8}, **{"model.rope_scaling": scaling})
    training = training_result(4).model_copy(update={"rope": ROPE})
    text = model_card.render(*run_of(recipe, training=training), broken=[])
    assert f"--hf-overrides '{json.dumps(ROPE)}' --enable-lora" in text
    assert "    max_position_embeddings=131072," in text
    assert "text-generation-launcher" not in text
    assert "make one model of\nboth with `flytune merge`, whose config.json has it" in text


def test_the_card_serves_no_adapter_with_several_scales():
    """vllm/lora/peft_helper.py (PEFTHelper) reads r and lora_alpha alone."""
    assert "--max-lora-rank 8 --lora-modules" in card()
    for pattern in ({"rank_pattern": {"q_proj": 4}}, {"alpha_pattern": {"q_proj": 4}}):
        assert "Servers take LoRA of one rank and scale alone" in card(**pattern)


def preferred(low, high, objective="dpo"):
    """Metrics of pairs, with the ends of their first figure."""
    sides = {"tuned": {"value": (low + high) / 2, "low": low, "high": high}}
    share = {"tuned": {"value": 0.75, "low": 0.6, "high": 0.85}}
    recipe = recipe_for(Path("models/base"), "lora", objective=objective)
    figures = {figure.name: figure for figure in objective_of(recipe).figures()}
    made = [figures["preference_loss"].measured(sides), figures["reward_accuracy"].measured(share)]
    found = metrics().model_dump() | {"figures": made, "base": None, "tuned": None}
    return Metrics.model_validate(found)


@pytest.mark.parametrize(
    ("low", "high", "words", "better"),
    [
        (0.4, 0.6, ", a significant improvement. Reward accuracy: 75 % of pairs (60 % to 85 %).", True),
        (0.8, 0.9, ", significantly worse. Reward accuracy: 75 % of pairs (60 % to 85 %).", False),
        (
            0.6,
            0.8,
            ", which is not a significant difference. Reward accuracy: 75 % of pairs (60 % to 85 %).",
            False,
        ),
    ],
)
def test_the_verdict_on_pairs(low, high, words, better):
    found = preferred(low, high)
    value = report_page.number((low + high) / 2)
    start = (
        f"Held-out preference loss is {value} nats per pair, and that of a model that prefers nothing 0.693"
    )
    assert report_page.verdict(found) == start + words
    assert found.is_better is better


def test_report_and_card_show_the_figures_of_the_objective_each_on_its_own_axis():
    recipe = recipe_for(Path("models/base"), "lora", objective="dpo")
    training = training_result(steps=4)
    steps = [
        step.model_copy(update={"reward_accuracy": 0.5, "reward_margin": 0.1}) for step in training.steps
    ]
    figures = [figure for figure in objective_of(recipe).figures() if figure.step]
    training = training.model_copy(update={"steps": steps, "figures": figures})
    found = preferred(0.4, 0.6)
    made = figure_charts.of_training(training, found)
    assert [chart.title for chart in made] == ["Preference loss", "Reward accuracy", "Reward margin"]
    assert "held-out of the tuned model (0.500)" in made[0].picture
    assert [chart.text.split(";")[0] for chart in made] == ["nats per pair", "share of pairs", "nats"]
    run = run_of(recipe, training=training, measured=found)
    html = report_page.render(*run, broken=[])
    assert "Preference loss" in html
    assert "perplexity" not in html.lower()
    card = model_card.render(*run, broken=[])
    assert "| preference loss, nats per pair | lower | – | 0.500 (0.400 to 0.600) | – |" in card
    assert "Trained with DPO (sigmoid, beta 0.1) on pairs of answers" in card


def test_the_loss_of_tokens_is_not_drawn_beside_the_loss_of_pairs():
    """Held-out tokens of the chosen answers are another quantity than the loss that dpo trains."""
    recipe = recipe_for(Path("models/base"), "lora", objective={"name": "dpo", "loss_type": "ipo"})
    figures = [figure for figure in objective_of(recipe).figures() if figure.step == "loss"]
    (chart,) = figure_charts.of_training(
        training_result(4).model_copy(update={"figures": figures}), metrics()
    )
    assert "model (" not in chart.picture
    assert chart.text.startswith("per pair; ipo of a pair")
