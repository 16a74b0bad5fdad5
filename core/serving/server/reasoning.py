"""``ReasoningReader``: tells the reasoning of an answer from the answer proper."""

from __future__ import annotations

from types import MappingProxyType

from opgraft.serving.server.call_reader import overlap

OPENING = "<think>"
"""Qwen, DeepSeek, GLM, SmolLM3 and others write this before their reasoning."""

CLOSINGS = MappingProxyType({OPENING: "</think>", "[THINK]": "[/THINK]"})
"""Openings of reasoning with their closings. Mistral's models write the second pair."""


def opening_of_template(template: str) -> str | None:
    """Return the opening of reasoning that a chat template has, or None."""
    return next((opening for opening in CLOSINGS if opening in template), None)


class ReasoningReader:
    """Splits a growing answer. Nothing that was told is taken back.

    Args:
        opened: the prompt ends with the opening, so that the answer begins with reasoning.
        opening: the text before reasoning.
    """

    def __init__(self, opened: bool, opening: str = OPENING) -> None:
        self._opened = opened
        self._opening = opening
        self._closing = CLOSINGS[opening]
        # Place of the closing, and the place up to which no closing stands.
        self._closed: int | None = None
        self._searched = 0

    def split(self, text: str, ended: bool) -> tuple[str, str]:
        """Return the reasoning and the rest of an answer so far.

        Args:
            text: of the answer so far.
            ended: the text is whole.
        """
        # The answer may still come to begin with the opening.
        if not ended and self._opening.startswith(text.lstrip()):
            return "", ""
        start = self._start(text)
        if start is None:
            return "", text
        if self._closed is None:
            found = text.find(self._closing, max(start, self._searched))
            self._searched = max(start, len(text) - len(self._closing) + 1)
            if found < 0:
                held = 0 if ended else overlap(text, self._closing)
                return text[start : len(text) - held].strip(), ""
            self._closed = found
        rest = text[self._closed + len(self._closing) :]
        return text[start : self._closed].strip(), rest.lstrip("\n")

    def _start(self, text: str) -> int | None:
        """Return the place behind the opening, or None if the answer has no reasoning so far."""
        begun = text.lstrip()
        if begun.startswith(self._opening):
            return len(text) - len(begun) + len(self._opening)
        return 0 if self._opened else None
