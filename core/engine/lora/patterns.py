"""``NamePattern``: a pattern of module names from an adapter's config, matched in a bounded time.

Configs come from strangers, and ``re`` may take for ever for a pattern such as ``(.|.)(.|.)…x``.
So a match walks the pattern once, with all positions that the beginning of the pattern can reach.
A set of positions is an integer, with a bit for each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

LONGEST = 300
"""Characters of a pattern, and of a module's name."""

_PARTS = re.compile(r"\.\*|\\d\+|\\[.d]|\[[\w-]+\]|[\w.^$|()-]")


class NamePattern:
    """A pattern of names: letters, ``.``, ``.*``, digits, sets, groups and alternatives.

    Raises:
        ValueError: the pattern has other parts, is too long, or its parentheses do not fit.
    """

    def __init__(self, text: str) -> None:
        self._parts: Sequence[str] = _PARTS.findall(text)
        if not text or len(text) > LONGEST or "".join(self._parts) != text:
            raise ValueError("it is not read here")
        open_groups = 0
        for part in self._parts:
            open_groups += (part == "(") - (part == ")")
            if open_groups < 0:
                break
            if part.startswith("["):
                _characters_of(part)
        if open_groups:
            raise ValueError("its parentheses do not fit")

    def matches(self, name: str) -> bool:
        """Return True if the pattern is the whole name, or its end behind a dot, as in PEFT."""
        places = _places(name)
        starts = 1 | places.get(".", 0) << 1
        ends = self._walk(list(reversed(self._parts)), starts, places, len(name))
        return bool(ends >> len(name) & 1)

    def _walk(self, left: list[str], starts: int, places: Mapping[str, int], length: int) -> int:
        """Return the positions behind the alternatives at the end of ``left``, and take them off."""
        ends = 0
        reached = starts
        while left:
            part = left.pop()
            if part == ")":
                break
            if part == "|":
                ends |= reached
                reached = starts
            elif part == "(":
                reached = self._walk(left, reached, places, length)
            elif part == "^":
                reached &= 1
            elif part == "$":
                reached &= 1 << length
            else:
                reached = _behind(part, reached, places, length)
        return ends | reached


def _behind(part: str, reached: int, places: Mapping[str, int], length: int) -> int:
    """Return the positions behind a part without groups."""
    everywhere = (1 << length) - 1
    if part == ".*":
        lowest = reached & -reached
        return (everywhere << 1 | 1) & -lowest
    if part == ".":
        return (reached & everywhere) << 1
    if part == r"\.":
        return (reached & places.get(".", 0)) << 1
    if part in (r"\d", r"\d+"):
        fitting = sum(places.get(digit, 0) for digit in "0123456789")
    elif part.startswith("["):
        fitting = sum(places.get(character, 0) for character in _characters_of(part))
    else:
        fitting = places.get(part, 0)
    found = 0
    while reached := (reached & fitting) << 1:
        found |= reached
        if part != r"\d+":
            break
    return found


@functools.lru_cache(maxsize=1)
def _places(name: str) -> Mapping[str, int]:
    """Return the positions of each character of a name."""
    places: dict[str, int] = {}
    for index, character in enumerate(name):
        places[character] = places.get(character, 0) | 1 << index
    return places


@functools.lru_cache(maxsize=64)
def _characters_of(part: str) -> Sequence[str]:
    """Return the characters that a set in brackets takes.

    Raises:
        ValueError: the set has a range in the wrong order.
    """
    try:
        pattern = re.compile(part)
    except re.error:
        raise ValueError(f"{part:.40} is no set of characters") from None
    return [character for character in map(chr, range(128)) if pattern.match(character)]
