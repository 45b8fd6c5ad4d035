import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytune.evaluation import breakdown
from flytune.records import Answer, Wins


def rows_of(lengths):
    return [{"input_ids": [0] * length, "labels": [0] * length} for length in lengths]


def parts(lengths, sources=None):
    count = len(lengths)
    base, tuned = numpy.arange(count) + 2.0, numpy.arange(count) + 1.0
    return breakdown.parts(rows_of(lengths), sources or ["one"] * count, base, tuned, numpy.full(count, 2))


def test_one_source_and_one_length_are_no_parts():
    assert parts([5] * 8) == []


def test_parts_are_sources_and_four_ranges_of_lengths():
    found = parts([1, 2, 3, 4, 5, 6, 7, 8], ["a", "b"] * 4)
    assert [(part.kind, part.name, part.samples) for part in found] == [
        ("source", "a", 4),
        ("source", "b", 4),
        ("length", "1 to 2 tokens", 2),
        ("length", "3 to 4 tokens", 2),
        ("length", "5 to 6 tokens", 2),
        ("length", "7 to 8 tokens", 2),
    ]
    assert found[0].base_loss == pytest.approx((2 + 4 + 6 + 8) / 8)
    assert found[0].difference == pytest.approx(-0.5)
    assert found[2].tuned_loss == pytest.approx((1 + 2) / 4)


def test_a_range_of_one_length_has_one_number():
    names = [part.name for part in parts([1, 5, 5, 5, 5, 5, 6, 8], ["a"] * 8) if part.kind == "length"]
    assert names == ["1 to 5 tokens", "6 to 8 tokens"]
    assert [part.name for part in parts([5] * 4 + [6] * 4)] == ["5 tokens", "6 tokens"]


def test_a_part_of_one_sample_is_no_less_a_part():
    found = parts([5] * 4, ["a", "a", "a", "b"])
    assert [(part.name, part.samples) for part in found] == [("a", 3), ("b", 1)]
    assert found[1].difference_high > 1e300, "its interval is unknown"


def test_answers_of_both_labels_are_parts():
    found = breakdown.of_labels(
        numpy.array([2.0, 4.0, 6.0]), numpy.array([1.0, 4.0, 8.0]), numpy.array([1, 1, 2]), 2
    )
    assert [(part.kind, part.name, part.samples) for part in found] == [
        ("label", "desirable", 2),
        ("label", "undesirable", 1),
    ]
    assert [(part.base_loss, part.tuned_loss) for part in found] == [(3, 2.5), (3, 4)]
    assert breakdown.of_labels(numpy.ones(3), numpy.ones(3), numpy.ones(3, dtype=int), 3) == []


@given(st.lists(st.integers(1, 40), max_size=60))
def test_every_sample_is_in_one_range_of_lengths(lengths):
    chosen = [at for _, _, part in breakdown._by_length(lengths) for at in part]
    assert sorted(chosen) == (list(range(len(lengths))) if chosen else [])


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("The sum is 4.", "the sum is 4", 1.0),
        ("", "", 1.0),
        ("", "four", 0.0),
        ("four", "", 0.0),
        ("a b c", "a b", 0.8),
        ("a a a", "a", 0.5),
    ],
)
def test_f1(answer, reference, expected):
    assert breakdown.f1(answer, reference) == pytest.approx(expected)


def test_wins():
    found = breakdown.wins(numpy.array([-1.0, 0.0, 2.0, -0.5]))
    assert (found.tuned, found.base, found.ties, found.rate) == (2, 1, 1, 0.625)
    assert 0 <= found.rate_low < found.rate < found.rate_high <= 1
    assert breakdown.wins(numpy.array([-1.0])) == Wins(tuned=1, base=0, ties=0), (
        "one comparison has no interval"
    )
    answers = [
        Answer(prompt="p", reference="r", base="b", tuned="t", base_f1=base, tuned_f1=tuned)
        for base, tuned in ((0.1, 0.9), (0.5, 0.5), (1.0, 0.2), (0.0, 0.1))
    ]
    by_words = breakdown.answer_wins(answers)
    assert (by_words.tuned, by_words.base, by_words.ties) == (2, 1, 1)
