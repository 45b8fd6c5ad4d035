"""Messages of errors: printable, whatever the names and texts in them."""

import pickle

from flytune.errors import DataError, RecipeError, printable


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
