"""JSON from outside: values that are read, and texts that are refused."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flytune import json_core
from flytune.json_core import JSONError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
REFUSED = {
    '{"a": 1, "b": 2, "a": 3}': "the key 'a' is there twice, in columns 2 and 18; keep one",
    '{"a": 1,\n"b": {"c": [":", {"d": "}"}],\n"c": 2}}': "the key 'c' is there twice, in lines 2 and 3; keep "
    "one",
    '{"a\\u0062": 1, "ab": 2}': "the key 'ab' is there twice, in columns 2 and 16; keep one",
    '{"a": NaN}': "NaN is not JSON; numbers are finite",
    "[-Infinity]": "-Infinity is not JSON; numbers are finite",
    "[1e400]": "1e400 is too large for a number",
    "[" * 2000: "objects and lists are nested deeper than 100",
    "[" * 200 + "]" * 200: "objects and lists are nested deeper than 100",
    '{"a":' * 101 + "1" + "}" * 101: "objects and lists are nested deeper than 100",
    "9" * 5000: "an integer of thousands of digits",
    '{"\\ud800": 1}': "a key has half of a surrogate pair, which is not a character",
    "[1] 2": "Extra data at column 5",
    "": "Expecting value at column 1",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(JSONError, match=f"^{re.escape(REFUSED[text])}$"):
        json_core.load(text)


def test_bytes_are_utf_8_of_a_limited_size() -> None:
    assert json_core.load(b'\xef\xbb\xbf{"a": "\xc3\xb6"}') == {"a": "ö"}
    with pytest.raises(JSONError, match="not UTF-8: byte 0xff at 0"):
        json_core.load(b"\xff\xfe[\x00]\x00")
    with pytest.raises(JSONError, match="11 bytes, more than the 10 that are read"):
        json_core.load(b'"123456789"', 10)


@given(VALUES)
def test_values_are_read_as_they_were_written(value: object) -> None:
    assert json_core.load(json.dumps(value)) == value


@given(st.text(alphabet='{}[]":,\\ "a1eu\n.-tN') | st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = json_core.load(text)
    except JSONError:
        return
    assert found == json.loads(text)
