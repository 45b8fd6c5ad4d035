"""Messages of errors: printable, whatever the names and texts in them."""

import pickle
from itertools import islice

from flytune.errors import DataError, RecipeError, chain, printable


def test_a_message_has_no_character_that_a_terminal_obeys_or_cannot_print():
    said = str(DataError("a\x1b[31mb\udcff\x00\r\u202e\nnext\tline"))
    assert said == "a\\x1b[31mb\\udcff\\x00\\r\\u202e\nnext\tline"
    said.encode()
    again = pickle.loads(pickle.dumps(RecipeError.of("x\x07", ["y"])))
    assert str(again) == "x\\x07: 1 mistake\n  y"


def test_a_message_of_megabytes_is_cut_in_the_middle():
    said = printable("a" * 10**6 + "end")
    assert len(said) < 16_000
    assert said.endswith("end")
    assert "985,003 characters left out" in said


def test_the_chain_of_an_error_that_is_its_own_cause_ends():
    first, second = ValueError("first"), OSError("second")
    first.__cause__ = first
    assert list(islice(chain(first), 9)) == [first]
    first.__cause__, second.__context__ = second, first
    assert list(islice(chain(first), 9)) == [first, second]
    hidden = KeyError("hidden")
    hidden.__context__, hidden.__suppress_context__ = first, True
    assert [len(list(islice(chain(hidden, contexts), 9))) for contexts in ("all", "shown", "none")] == [
        3,
        1,
        1,
    ]
