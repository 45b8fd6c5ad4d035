"""Regular expressions that name layers: only those whose matching ends soon, whatever the layer's name.

PEFT matches them with Python's `re`, which tries one way after the other and has no limit: `(.*)*x` takes
years. The ways are counted on the parsed expression, from above, before any of them is tried.
"""

import re
from collections.abc import Iterable, Sequence
from re import _parser  # type: ignore[attr-defined]  # the only parser of Python's own expressions
from typing import Any

WHOLE = "{}"
"""Expression that PEFT makes of target_modules and exclude_modules; `{}` is the person's text."""
END = r"(.*\.)?({})$"
"""The same of a key of rank_pattern and alpha_pattern (peft 0.21, utils/other.py: get_pattern_key)."""
SAVED = r"(^|.*\.){}($|\..*)"
"""The same of an entry of modules_to_save (tuners_utils.py: check_target_module_exists)."""
NUMBERED = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
"""The same of an entry of layers_pattern (tuners_utils.py: check_target_module_exists)."""
CONVERTED = r"(?:{})(?:(?<=\.)|(?=\.|$))"
"""Expression that transformers makes of the layers that config.json excludes from quantization
(should_convert_module)."""

MOST_KEYS = 1_000
"""Expressions of a field: each is matched with each layer."""
LONGEST = 5_000
"""Characters of an expression."""
DEEPEST = 40
"""Groups and alternatives inside each other."""
MOST_WAYS = 1_000_000
"""Ways of matching that are allowed; Python tries some hundred million a second."""
_NAME = 64
"""Characters of a layer's name over which a repetition ends at any."""
_PLACES = (_NAME, 10, 5, 3)
"""Places in a name where a text of 0, 1, 2, and 3 or more given characters can be."""
_NARROW = 4
"""Characters that one place may have to count as given: both cases of two letters."""
_PLAIN = re.compile(r"[\w.-]*", re.ASCII)
_OTHER = 1 << 128
_ANY = (1 << 129) - 1
"""Set of characters: a bit for each of ASCII, and one for all others."""
_SLOW = (
    "may try too many ways, for hours; repeat no group with repetitions or similar alternatives in it, and "
    r"write text between repetitions, as in .*\.layers\.\d+\..*_proj"
)


class _TooManyWays(Exception):
    pass


def problem(pattern: str, within: str = WHOLE) -> str | None:
    """Return why a regular expression is refused; None if it is not.

    Args:
        within: the expression that PEFT makes of it.
    """
    if len(pattern) > LONGEST:
        return (
            f"{pattern!r:.60}: a regular expression of {len(pattern):,} characters; write {LONGEST:,} at most"
        )
    if _PLAIN.fullmatch(pattern):
        return None
    try:
        # Alone too: a key such as "a)|(b" is not an expression, but makes one within PEFT's.
        re.compile(pattern)
        whole = within.replace("{}", pattern)
        re.compile(whole)
        _Counter().ways(_parser.parse(whole), 0, 0)
    except re.error as error:
        return (
            f"{pattern!r:.60} is not a regular expression: {error}; write a layer's name, or escape its "
            "special characters"
        )
    except OverflowError:
        return f"{pattern!r:.60} is not a regular expression: the number of a repetition is too large"
    except RecursionError:
        return f"{pattern!r:.60}: groups are nested deeper than {DEEPEST}; write fewer brackets"
    except _TooManyWays:
        return f"{pattern!r:.60}: {_SLOW}"
    return None


def require(written: Iterable[str], within: str = WHOLE) -> None:
    """Raise a ValueError about the first of these expressions that is refused, as `problem` says."""
    if reason := next(filter(None, (problem(expression, within) for expression in written)), None):
        raise ValueError(reason)


class _Counter:
    """Upper bounds of the ways in which a parsed expression matches from one place of a name on."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], int] = {}
        self._kept: list[Any] = []

    def ways(self, items: Sequence[Any], after: int, depth: int) -> int:
        """Return the ways of a sequence after which a character of the set `after` follows, or the end.

        Ways that end at the next character are not counted: `[a-z]+` before `\\.` has one.
        """
        if depth > DEEPEST:
            raise RecursionError
        key = (id(items), after)
        if key not in self._known:
            self._kept.append(items)  # so that its id stays its own
            total = 1
            for index, item in enumerate(items):
                rest = items[index + 1 :]
                total *= self._of_item(item[0], item[1], rest, _first(rest, after), depth + 1)
                if total > MOST_WAYS:
                    raise _TooManyWays
            self._known[key] = total
        return self._known[key]

    def _of_item(self, kind: Any, value: Any, rest: Sequence[Any], after: int, depth: int) -> int:
        name = str(kind)
        if name.endswith("_REPEAT"):
            least, most, body = value
            return self._of_repeat(least, most, body, rest, after, depth)
        if name == "BRANCH":
            counts = [self.ways(branch, after, depth) for branch in value[1]]
            return max(counts) if _exclude_each_other(value[1]) else sum(counts)
        if name == "SUBPATTERN":
            return self.ways(value[3], after, depth)
        if name == "ATOMIC_GROUP":
            return self.ways(value, after, depth)
        if name.startswith("ASSERT"):
            return self.ways(value[1], _ANY, depth)
        if name == "GROUPREF_EXISTS":
            return sum(self.ways(branch, after, depth) for branch in value[1:] if branch is not None) + 1
        return 1

    def _of_repeat(
        self, least: int, most: int, body: Sequence[Any], rest: Sequence[Any], after: int, depth: int
    ) -> int:
        first, is_optional = _start(body)
        once = self.ways(body, after, depth)
        goes_on = first & after  # a next character with which the repetition may end or go on
        if most <= 1:
            return once if least or (not goes_on and not is_optional) else once + 1
        if not is_optional and self.ways(body, first, depth) == 1:
            # Each repetition is matched in one way, so only the places where the last one ends are counted.
            return once * (min(most - least + 1, _NAME, _places(rest)) if goes_on else 1)
        total, of_body = 0, self.ways(body, _ANY, depth)
        for number in range(least, most + 1):
            total += max(of_body, 2) ** min(number, 64)
            if total > MOST_WAYS:
                raise _TooManyWays
        return total


def _start(items: Sequence[Any]) -> tuple[int, bool]:
    """Return the characters that a sequence can begin with, and whether it can match no character."""
    first = 0
    for kind, value in items:
        characters, is_optional = _start_of(str(kind), kind, value)
        first |= characters
        if not is_optional:
            return first, False
    return first, True


def _start_of(name: str, kind: Any, value: Any) -> tuple[int, bool]:
    if name in _SETS:
        return _characters(kind, value), False
    if name.endswith("_REPEAT"):
        characters, is_optional = _start(value[2])
        return characters, is_optional or value[0] == 0
    if name == "BRANCH":
        starts = [_start(branch) for branch in value[1]]
        merged = 0
        for characters, _ in starts:
            merged |= characters
        return merged, any(is_optional for _, is_optional in starts)
    if name == "SUBPATTERN":
        return _start(value[3])
    if name == "ATOMIC_GROUP":
        return _start(value)
    if name == "AT" or name.startswith("ASSERT"):
        return 0, True
    return _ANY, True  # references to groups


def _first(items: Sequence[Any], after: int) -> int:
    """Return the characters that may follow: those that a sequence begins with, or those after it."""
    first, is_optional = _start(items)
    return first | after if is_optional else first


def _places(items: Sequence[Any]) -> int:
    """Return the number of places in a name where a sequence can begin, by the given characters at its
    start."""
    length = 0
    for kind, value in items:
        name = str(kind)
        if name in _SETS and _characters(kind, value).bit_count() <= _NARROW:
            length += 1
        elif not length and name == "SUBPATTERN":
            return _places(value[3])
        elif not length and name == "BRANCH":
            return min(sum(map(_places, value[1])), _NAME)
        elif name != "AT":
            break
    return _PLACES[min(length, len(_PLACES) - 1)]


def _exclude_each_other(branches: Sequence[Any]) -> bool:
    """Return whether no text begins two alternatives: some character of their starts differs, for each
    pair."""
    if len(branches) > 50:
        return False
    starts = []
    for items in branches:
        sets = []
        for kind, value in items:
            if str(kind) not in _SETS:
                break
            sets.append(_characters(kind, value))
        starts.append(sets)
    return all(
        any(not mine & theirs for mine, theirs in zip(start, other, strict=False))
        for index, start in enumerate(starts)
        for other in starts[:index]
    )


_SETS = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}


def _characters(kind: Any, value: Any) -> int:
    """Return the set of characters of an item that matches one character, in both cases (flags are not looked
    at)."""
    name = str(kind)
    if name == "ANY":
        return _ANY
    if name == "LITERAL":
        return _both_cases(_bit(value))
    if name == "NOT_LITERAL":
        return _both_cases(_ANY & ~_bit(value) | _OTHER)
    characters, negated = 0, False
    for inner, content in value:
        part = str(inner)
        if part == "NEGATE":
            negated = True
        elif part == "LITERAL":
            characters |= _bit(content)
        elif part == "RANGE":
            low, high = content
            characters |= ((1 << min(high, 127) + 1) - 1) & ~((1 << min(low, 128)) - 1) | (
                _OTHER if high > 127 else 0
            )
        else:
            characters |= _CATEGORIES[str(content)]
    return _both_cases(_ANY & ~characters | _OTHER if negated else characters)


def _bit(code: int) -> int:
    return 1 << min(code, 128)


def _both_cases(characters: int) -> int:
    upper, lower = characters >> 65 & _LETTERS, characters >> 97 & _LETTERS
    return characters | upper << 97 | lower << 65


_LETTERS = (1 << 26) - 1


def _category(pattern: str) -> int:
    return sum(1 << code for code in range(128) if re.match(pattern, chr(code))) | _OTHER


_CATEGORIES = {
    f"CATEGORY_{negated}{name}": _category(f"\\{letter.upper() if negated else letter}")
    for name, letter in (("DIGIT", "d"), ("SPACE", "s"), ("WORD", "w"))
    for negated in ("", "NOT_")
}
