"""Stop strings in text that comes in pieces of any size."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """A search for the first complete stop string in a text of pieces.

    The result is the same for any pieces, as if every character were a piece. A possible beginning
    of a stop string is held back. If several stop strings end at the same place, the longest
    counts.

    For example, with the stop string "end", the piece "the e" returns "the ", and "nd" completes
    the stop string.

    Attributes:
        found: the stop string, or None before.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        self._stop = sorted(stop, key=len, reverse=True)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """Add a piece of text, and return the text to show, up to a stop string.

        Pieces after the stop string change nothing.
        """
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = []
        for stop in self._stop:
            if stop in text:
                end = text.find(stop) + len(stop)
                # The first end counts, and the longest of equal ends.
                ends.append((end, -len(stop), stop))
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[:end] if self._include else text[: end - len(self.found)]
        certain = len(text) - self._beginning(text)
        self._held = text[certain:]
        return text[:certain]

    def rest(self) -> str:
        """Return the held-back text, after the last piece."""
        held = self._held
        self._held = ""
        return held

    def _beginning(self, text: str) -> int:
        """Return the length of the longest end of a text at the beginning of a stop string."""
        if not self._stop:
            return 0
        longest = min(len(self._stop[0]) - 1, len(text))
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
