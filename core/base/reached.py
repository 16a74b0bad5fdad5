"""Lines of code that calls have run, and lines that no call has run, as ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

Places: TypeAlias = "dict[str, set[int]]"
"""File → numbers of lines."""


@dataclass(frozen=True)
class ReachedLines:
    """The lines of a kernel in Python, as ranges such as ``acme/ops.py:31-33``.

    Attributes:
        run: lines that a call ran.
        never_run: lines that no call ran, of functions that calls entered.
        unknown: the reason why branches are not known, or only in part; empty if all are.
    """

    run: tuple[str, ...] = ()
    never_run: tuple[str, ...] = ()
    unknown: str = ""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> ReachedLines:
        """Return the same as in the plain data of an answer."""
        run, never_run = (tuple(map(str, told[name])) for name in ("run", "never_run"))
        return cls(run, never_run, str(told["unknown"]))

    def count(self) -> int:
        """Return the number of lines.

        Raises:
            ValueError: the texts are no ranges of lines.
        """
        return sum(len(_lines_of(text)[1]) for text in (*self.run, *self.never_run))


def united(found: Iterable[ReachedLines]) -> ReachedLines | None:
    """Return the lines of several answers about a kernel; ``None`` without an answer.

    A line that one answer has run is no line that never ran.
    """
    every = list(found)
    if not every:
        return None
    run: Places = {}
    known: Places = {}
    for each in every:
        _add(run, each.run)
        _add(known, (*each.run, *each.never_run))
    unknown = "; ".join(dict.fromkeys(each.unknown for each in every if each.unknown))
    return ReachedLines(*split(known, run), unknown)


def _add(places: Places, ranges: Iterable[str]) -> None:
    for text in ranges:
        file, lines = _lines_of(text)
        places.setdefault(file, set()).update(lines)


def _lines_of(text: str) -> tuple[str, range]:
    """Return the file and the lines of a range."""
    file, _, lines = text.rpartition(":")
    first, _, last = lines.partition("-")
    return file, range(int(first), int(last or first) + 1)


def split(known: Places, run: Places) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the known lines that ran, and those that did not, as ranges."""
    found: tuple[list[str], list[str]] = ([], [])
    for file, lines in sorted(known.items()):
        ran = run.get(file, set())
        for is_run, group in groupby(sorted(lines), key=ran.__contains__):
            found[not is_run].extend(_ranges(file, list(group)))
    return tuple(found[0]), tuple(found[1])


def _ranges(file: str, lines: Sequence[int]) -> Iterator[str]:
    """Yield ranges of lines without a gap."""
    for _, group in groupby(enumerate(lines), key=lambda pair: pair[1] - pair[0]):
        numbers = [line for _, line in group]
        first, last = numbers[0], numbers[-1]
        yield f"{file}:{first}" if first == last else f"{file}:{first}-{last}"
