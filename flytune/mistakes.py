"""Mistakes in what a person wrote, or in a record, as lines: where each is, what must be there."""

import difflib
import types
import typing
from typing import Annotated, Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Location = tuple[int | str, ...]


def mistakes(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return one line for each mistake that pydantic found while it read `model`, in the order of the file.

    Of a field that may have several types, pydantic reports each, and names it in the location; here they are
    one mistake.
    """
    errors: dict[Location, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        place = _followed(item["loc"], model)[0]
        if item["type"].startswith("union_tag"):  # a union is of sections with other names
            tag = item["ctx"]["discriminator"].strip("'")
            place = (*place, tag)
            if item["type"] == "union_tag_not_found":
                item["type"], item["loc"] = "missing", place
            else:
                item["input"] = item["input"][tag]
        errors.setdefault(place, []).append(item)
    # A list or mapping with mistakes inside was meant as one.
    outer = {place[:end] for place in errors for end in range(len(place))}
    lines: dict[str, str] = {}
    for place, items in errors.items():
        if place in outer:
            continue
        description = _describe(items, model)
        refusal, mark, known = description.partition("; known are: ")
        # A section's names are listed once.
        is_listed = mark and any(line.endswith(mark + known) for line in lines.values())
        lines[dotted(place)] = refusal if is_listed else description
    return [f"{place}: {line}" for place, line in lines.items()]


def dotted(loc: Location) -> str:
    """Return `('data', 'columns', 0)` as `data.columns[0]`."""
    parts = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return parts.lstrip(".") or "(top)"


def _describe(items: list[ErrorDetails], model: type[BaseModel]) -> str:
    """Return what is wrong with a value, which has one of several types if there are several `items`."""
    item = next((item for item in items if item["type"] in ("value_error", "assertion_error")), items[0])
    kind, loc = item["type"], item["loc"]
    if kind in ("value_error", "assertion_error"):
        return item["msg"].partition(", ")[2]
    if kind == "extra_forbidden":
        return _unknown_key(str(loc[-1]), _followed(loc, model)[1], model)
    if kind == "missing":
        return "missing; the recipe must say it" if model.__name__ == "Recipe" else "missing"
    first, *others = dict.fromkeys(map(_expected, items))
    is_key = loc[-1:] == ("[key]",) or kind == "invalid_key"
    wanted = " or ".join([first, *(other.removeprefix("be ") for other in others)])
    return f"{'the key ' if is_key else ''}must {wanted}; found {_shown(item['input'])}"


def _unknown_key(key: str, sections: list[Any], model: type[BaseModel]) -> str:
    if advice := getattr(model, "elsewhere", {}).get(key):
        return f"unknown key; {advice}"
    fields = [section.model_fields for section in sections if is_model(section)]
    known = list(dict.fromkeys(name for names in fields for name in names))
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)  # one or two other letters
    return (
        f"unknown key; did you mean {close[0]}?" if close else f"unknown key; known are: {', '.join(known)}"
    )


EXPECTED = {
    **dict.fromkeys(("model", "dict", "counter", "dataclass"), "be a mapping"),
    **dict.fromkeys(("string", "invalid"), "be a string"),
    **dict.fromkeys(("list", "tuple"), "be a list"),
    "bool": "be true or false",
    "int": "be an integer",
    "float": "be a number",
    "unexpected": "be left out",
    "finite": "be a finite number",
    "datetime": "be a date and time (2026-01-31T12:00:00Z)",
    "literal": "be {expected}",
    "union_tag_invalid": "be {expected_tags}",
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be {ge} or greater",
    "multiple_of": "be a multiple of {multiple_of}",
    "less_than": "be less than {lt}",
    "less_than_equal": "be {le} or less",
    "too_short": "have {min_length} or more entries",
    "too_long": "have {max_length} entries at most",
    "string_too_short": "have {min_length} or more characters",
    "string_too_long": "have {max_length} characters at most",
}
"""Predicates after "must", by the types of pydantic's errors, or by their first words."""
FORMS = {
    r"^[a-z0-9][a-z0-9-]{0,62}$": "be 1 to 63 lower-case letters, digits and dashes, and begin with no dash",
    r"^[a-z][a-z0-9-]{0,62}$": "be 1 to 63 lower-case letters, digits and dashes, and begin with a letter",
    r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$": "be 1 to 63 lower-case letters, digits and dashes, with no dash "
    "at its ends",
    r"^[A-Z][A-Z0-9_]*$": "be capital letters, digits and underscores, and begin with a letter",
    r"^[0-9a-f]{64}$": "be a SHA-256 of 64 hexadecimal digits",
    r"^([0-9a-f]{64})?$": "be empty or a SHA-256 of 64 hexadecimal digits",
    r"^(gaussian|pissa|pissa_niter_[1-9]\d{0,3})$": "be 'gaussian', 'pissa' or 'pissa_niter_NUMBER'",
    r"^\d{4}-\d\d-\d\d$": "be a day, as in 2026-11-30",
    "^/": "be an absolute path",
    r"^/[^\x00-\x1f]+$": "be an absolute path without control characters",
    r"^[^\x00-\x1f\x7f]+$": "be a text without control characters",
}
"""Predicates after "must", by the patterns of fields."""


def _expected(item: ErrorDetails) -> str:
    context = item.get("ctx", {})
    if item["type"] == "string_pattern_mismatch":
        return FORMS.get(context["pattern"], "have another form")
    shown = {
        key: f"{x:,.15g}" if isinstance(x, int | float) else str(x).replace("True", "true")
        for key, x in context.items()
    }
    wanted = EXPECTED.get(item["type"]) or EXPECTED.get(item["type"].partition("_")[0], "be another value")
    return " or ".join(wanted.format(**shown).rsplit(", ", item["type"] == "union_tag_invalid"))


def _shown(value: Any) -> str:
    """Return a value as its file has it, in 60 characters at most."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return (
        f"{value!r:.60}"
        if isinstance(value, str | int | float | list | dict | tuple)
        else type(value).__name__
    )


def _followed(loc: Location, model: type[BaseModel]) -> tuple[Location, list[Any]]:
    """Return a place without pydantic's names of a union's types, and the types that hold its last part."""
    holders: list[Any] = []
    types_here, place, is_chosen = [model], list[int | str](), False
    for part in loc:
        holders = [alternative for annotation in types_here for alternative in alternatives(annotation)]
        if len(holders) > 1 and not is_chosen:
            types_here, is_chosen = holders, True
        elif part != "[key]":
            types_here, is_chosen = [inner for holder in holders for inner in _inner(holder, part)], False
            place.append(part)
    return tuple(place), holders


def alternatives(annotation: Any) -> list[Any]:
    """Return the types that a value may have, apart from None."""
    if (origin := typing.get_origin(annotation)) is Annotated:
        return alternatives(typing.get_args(annotation)[0])
    if origin not in (typing.Union, types.UnionType):
        return [annotation]
    return [
        alternative
        for part in typing.get_args(annotation)
        if part is not type(None)
        for alternative in alternatives(part)
    ]


def _inner(annotation: Any, part: int | str) -> list[Any]:
    """Return the types of the value at a key or index of a value."""
    if is_model(annotation):
        field = annotation.model_fields.get(str(part))
        return [field.annotation] if field else []
    arguments = typing.get_args(annotation)
    return [arguments[-1]] if arguments and typing.get_origin(annotation) in (dict, list) else []


def is_model(annotation: Any) -> bool:
    """Return whether a type is one of these models."""
    return (
        isinstance(annotation, type) and not typing.get_args(annotation) and issubclass(annotation, BaseModel)
    )
