"""Numbers, and texts of libraries, in sentences."""

import pytest

from flytune.sentences import counted, counted_of, one_line


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (1, ("file",), "1 file"),
        (0, ("file",), "0 files"),
        (2112, ("day",), "2,112 days"),
        (1, ("process", "processes"), "1 process"),
        (2, ("process", "processes"), "2 processes"),
        (1, ("row is", "rows are"), "1 row is"),
        (1, ("has", "have"), "1 has"),
    ],
)
def test_a_number_and_its_noun_agree(count, words, said):
    assert counted(count, *words) == said


def test_a_share_and_its_verb_agree():
    assert counted_of(1, 5, "row", "is", "are") == "1 of 5 rows is"
    assert counted_of(0, 1, "row", "is", "are") == "0 of 1 row are"


def test_a_librarys_text_is_one_line_without_pythons_classes():
    assert (
        one_line(TypeError("must be str,\n  got: <class 'float'> or <class 'numpy.float64'>"))
        == "must be str, got: float or float64"
    )
    assert one_line("x" * 400) == "x" * 300
