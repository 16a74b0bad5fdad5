"""Names of layers as settings give them: which layers a quantization leaves alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from opgraft.errors import QuantizationError


class Patterns:
    """Names of layers, or of modules that hold them; with ``*`` for anything, or ``re:`` and a regular expression.

    Attributes:
        patterns: as they were given.
        used: those that a layer answered to so far.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
            raise QuantizationError(f"patterns of layers are {patterns!r:.80}, expected a list of names")
        self.patterns = tuple(patterns)
        self.used: set[str] = set()
        for pattern in self.patterns:
            _compiled(pattern)

    def match(self, prefix: str, merged: Mapping[str, Sequence[str]]) -> bool:
        """Say whether the layer ``prefix`` answers to a pattern.

        Args:
            prefix: its name in the checkpoint.
            merged: name of a merged layer → names of those that it stands for, by any of which it is called too.

        Raises:
            QuantizationError: only some of those that a merged layer stands for answer to a pattern.
        """
        whole = self._matches(prefix)
        parts = names_of(prefix, merged)
        found = [part for part in parts if self._matches(part)]
        if found and not whole and len(found) < len(parts):
            raise QuantizationError(
                f"{', '.join(found)} match a pattern and {', '.join(set(parts) - set(found))} none, but they are one "
                f"layer here, {prefix}: name all of them or none"
            )
        return whole or bool(found)

    def answered(self, prefix: str, merged: Mapping[str, Sequence[str]]) -> set[str]:
        """Return the patterns that the layer ``prefix``, or one that it stands for, answers to."""
        names = [prefix, *names_of(prefix, merged)]
        return {pattern for pattern in self.patterns for name in names if _compiled(pattern).match(name)}

    def expect_all_used(self) -> None:
        """Raise ``QuantizationError`` unless every pattern was answered to, once all layers have been made."""
        expect_used([self])

    def _matches(self, name: str) -> bool:
        found = {pattern for pattern in self.patterns if _compiled(pattern).match(name)}
        self.used |= found
        return bool(found)


def names_of(prefix: str, merged: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the names of the layers that a merged layer stands for; none for any other."""
    holder, _, name = prefix.rpartition(".")
    return [f"{holder}.{part}" if holder else part for part in merged.get(name, ())]


def expect_used(several: Iterable[Patterns]) -> None:
    """Raise ``QuantizationError`` for patterns that are used in none of several, as parts of a model have each."""
    known = list(several)
    used = {pattern for patterns in known for pattern in patterns.used}
    unused = [pattern for patterns in known for pattern in patterns.patterns if pattern not in used]
    if unused:
        raise QuantizationError(
            f"no layer of the model answers to {', '.join(map(repr, dict.fromkeys(unused)))}: give names as in "
            "checkpoints, such as 'model.layers.0.mlp.down_proj' or '*.down_proj', or take these out"
        )


class _Glob:
    """A pattern with ``*``, which a name or that of a module above it answers to."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def match(self, name: str) -> bool:
        parts = name.split(".")
        return any(fnmatchcase(".".join(parts[:end]), self.pattern) for end in range(1, len(parts) + 1))


def _compiled(pattern: str) -> re.Pattern[str] | _Glob:
    if not pattern.startswith("re:"):
        return _Glob(pattern)
    try:
        return re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise QuantizationError(f"{pattern!r} is no regular expression: {error}") from error
