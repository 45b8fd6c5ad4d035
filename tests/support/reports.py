"""Sample metrics with text that attempts HTML injection, and a parser that detects it."""

import math
from html.parser import HTMLParser

from flytune.records import Answer, Metrics, Part, Score, Shard, Wins
from tests.support.stages import manifest, plan_for, training_result

EVIL = "<script>alert('a')</script> & \"quotes\""


def _side(loss, low, high) -> Score:
    perplexities = {
        "perplexity": math.exp(loss),
        "perplexity_low": math.exp(low),
        "perplexity_high": math.exp(high),
    }
    return Score(loss=loss, loss_low=low, loss_high=high, **perplexities)


def metrics(difference=(-0.62, -0.66, -0.58), samples=133, answers=1) -> Metrics:
    part = {"difference": -0.5, "difference_low": -0.7, "difference_high": -0.3}
    return Metrics(
        base=_side(3.68, 3.6, 3.77),
        tuned=_side(3.06, 2.99, 3.13),
        loss_difference=difference[0],
        loss_difference_low=difference[1],
        loss_difference_high=difference[2],
        samples=samples,
        tokens=4312,
        loaded_as="nf4",
        answers=[Answer(prompt=EVIL, reference=EVIL, base=EVIL, tuned="", tuned_stopped=False)] * answers,
        seconds=74.0,
        parts=[Part(kind="source", name=EVIL, samples=7, tokens=90, base_loss=3.5, tuned_loss=3.0, **part)],
        sample_wins=Wins(tuned=101, base=30, ties=2),
        answer_wins=Wins(tuned=1, base=0, ties=0),
    )


def run_of(recipe, data=None, steps=4, training=None, measured=None):
    """Return what report and card are rendered from: recipe, plan, manifest, training and metrics of a
    run."""
    shards = {
        split: [Shard(file=f"{split}/00000.parquet", samples=9, tokens=540, sha256="a")]
        for split in ("train", "heldout")
    }
    data = data or manifest([{"input_ids": [0] * 60}] * 18, shards)
    return recipe, plan_for(recipe), data, training or training_result(steps), measured or metrics()


class Tags(HTMLParser):
    """Parsed HTML: start tags, text, and tags that are not closed."""

    VOID = ("meta", "path", "use", "rect", "link", "img", "br")

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, name: str) -> list[dict]:
        return [attrs for tag, attrs in self.tags if tag == name]
