"""Stop strings in text that comes in pieces of any size."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """A search for the first stop string that the pieces of a text complete.

    The result is that of a search after every single character, so it does not depend on where the
    pieces end. Text that could be the beginning of a stop string is held back. Of stop strings that
    end at the same place the longest counts.

    Attributes:
        found: the stop string, once there is one.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = sorted(stop, key=len, reverse=True)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """Take a piece of text and return what is now certain to be shown: up to a stop string, if it is complete.

        A piece after the end changes nothing.
        """
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text
        ]
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[: end if self._include else end - len(self.found)]
        held = self._beginning(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return the text that was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _beginning(self, text: str) -> int:
        """Return the length of the longest end of a text that a stop string begins with."""
        longest = min(len(self._stop[0]) - 1, len(text)) if self._stop else 0
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
