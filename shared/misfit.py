"""Finds place and reason of each value of a document that does not fit its type. Places name
tables, as msgspec's do not.
"""

import re
from collections.abc import Iterable, Sequence
from copy import copy
from difflib import SequenceMatcher
from itertools import takewhile
from typing import Any

import msgspec

STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")

SHA256 = "^[0-9a-f]{64}$"
IN_WORDS = {
    f"Expected `str` matching regex '{SHA256}'": "Expected the SHA-256 that `slackline key` prints"
}
UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
MISSING = re.compile(r"Object missing required field `([^`]*)`")
ALIKE = 0.6  # the least likeness of a mistyped name to the one that is meant; 1 for equal names
UNKNOWN_FIELD = "unknown field"  # the reason for a field that does not exist


def misfit(raw: Any, kind: Any, error: msgspec.ValidationError) -> tuple[str, str]:
    """The place within `raw`, such as `nightly.slo.ttlt` (empty: all of it), and the reason."""
    place, why = _misfit(raw, kind, str(error))
    return ".".join(map(str, place)), _in_words(why)


def misfits(raw: Any, kind: Any) -> list[tuple[str, str]]:
    """Each place within `raw` that does not fit, and its reason; only the first place of a list."""
    found: list[tuple[str, str]] = []
    taken: list[Sequence[str | int]] = []  # places that did not fit and have been left out of `raw`
    while error := _fault(raw, kind):
        place, why = _misfit(raw, kind, error)
        missing = MISSING.fullmatch(why)
        if missing is None or [*place, missing[1]] not in taken:
            found.append((".".join(map(str, place)), _in_words(why)))
        table = list(takewhile(lambda step: isinstance(step, str), place))
        if not table:
            break
        taken.append(table)
        raw = _without(raw, table)
    return found


def all_misfits(raw: Any, kind: Any) -> str:
    """The places and the reasons in one line."""
    return "; ".join(f"{place and f'{place}: '}{why}" for place, why in misfits(raw, kind))


def _misfit(raw: Any, kind: Any, error: str) -> tuple[list[str | int], str]:
    why, _, path = error.partition(" - at `$")
    place: list[str | int] = []
    for name, item in STEP.findall(path):
        here = _at(raw, place)
        if item != "...":
            place.append(name or int(item))
        elif isinstance(here, dict):
            place.append(
                next(key for key in here if _fault(_with_one(raw, place, key), kind) == error)
            )
        else:
            break
    if (unknown := UNKNOWN.fullmatch(why)) is not None:
        place.append(unknown[1])
        why = UNKNOWN_FIELD
    return place, why


def _in_words(why: str) -> str:
    return IN_WORDS.get(why, why).removeprefix("Object ")


def there_are(unknown: str, known: Iterable[str]) -> str:
    """A text with the known name that is most like the unknown one, then all known names."""
    names = sorted(known)
    name = nearest(unknown, names)
    return f"{name and f'the nearest is {name}; '}there are: {', '.join(names)}"


def nearest(unknown: str, known: Iterable[str]) -> str:
    """The known name that is most like the unknown one, of equals the first; empty if none is."""

    def likeness(name: str) -> float:
        return SequenceMatcher(None, name, unknown).ratio()

    name = max(known, key=likeness, default="")
    return name if likeness(name) >= ALIKE else ""


def _at(raw: Any, place: Sequence[str | int]) -> Any:
    for step in place:
        raw = raw[step]
    return raw


def _with_one(raw: Any, place: Sequence[str | int], key: str) -> Any:
    """The value with one key alone in the table at `place`."""
    if not place:
        return {key: raw[key]}
    changed = copy(raw)
    changed[place[0]] = _with_one(raw[place[0]], place[1:], key)
    return changed


def _without(raw: Any, place: Sequence[str | int]) -> Any:
    changed = copy(raw)
    if len(place) == 1:
        del changed[place[0]]
    else:
        changed[place[0]] = _without(raw[place[0]], place[1:])
    return changed


def _fault(raw: Any, kind: Any) -> str:
    try:
        msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return ""
