"""Names of layers in settings, such as the plain layers of a quantization."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from opgraft.errors import QuantizationError, QuantizationSettingError, near_matches


class Patterns:
    """Names of layers, or of modules with layers; with ``*`` for anything, or ``re:`` and a
    regular expression.

    Args:
        patterns: of names.
        setting: with the names, for errors; empty where a checkpoint does, or code.

    Attributes:
        patterns: as given.
        setting: likewise.
        used: patterns with a matching layer so far.
        asked: the names of the layers so far, also inside merged layers.
    """

    def __init__(self, patterns: Sequence[str], setting: str = "") -> None:
        self.setting = setting
        if not isinstance(patterns, (list, tuple)) or not all(
            isinstance(pattern, str) for pattern in patterns
        ):
            raise self.error(f"patterns of layers are {patterns!r:.80}, expected a list of names")

        self.patterns = tuple(patterns)
        self.used: set[str] = set()
        self.asked: set[str] = set()

        for pattern in self.patterns:
            try:
                _compiled(pattern)
            except re.error as error:
                raise self.error(f"{pattern!r} is no regular expression: {error}") from error

    def error(self, message: str) -> QuantizationError:
        """Make the error about these patterns, with the name of the setting."""
        return (
            QuantizationSettingError(f"{self.setting}: {message}")
            if self.setting
            else QuantizationError(message)
        )

    def match(self, prefix: str, merged: Mapping[str, Sequence[str]]) -> bool:
        """Say whether the layer ``prefix`` answers to a pattern.

        Args:
            prefix: the name in the checkpoint.
            merged: name of a merged layer → names of the layers inside, which also match.

        Raises:
            QuantizationError: only some layers inside a merged layer match a pattern.
        """
        whole = self._matches(prefix)
        parts = names_of(prefix, merged)
        self.asked |= {prefix, *parts}
        found = [part for part in parts if self._matches(part)]
        if found and not whole and len(found) < len(parts):
            raise self.error(
                f"{', '.join(found)} match a pattern and {', '.join(set(parts) - set(found))} "
                f"none, but they are one layer here, {prefix}: name all of them or none"
            )

        return whole or bool(found)

    def answered(self, prefix: str, merged: Mapping[str, Sequence[str]]) -> set[str]:
        """Return the patterns that match the layer ``prefix``, or a layer inside."""
        names = [prefix, *names_of(prefix, merged)]
        return {
            pattern for pattern in self.patterns for name in names if _compiled(pattern).match(name)
        }

    def expect_all_used(self) -> None:
        """Raise ``QuantizationError`` for a pattern without a layer, at the end."""
        expect_used([self])

    def _matches(self, name: str) -> bool:
        found = {pattern for pattern in self.patterns if _compiled(pattern).match(name)}
        self.used |= found
        return bool(found)


def names_of(prefix: str, merged: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names of the layers inside a merged layer; none for any other."""
    holder, _, name = prefix.rpartition(".")
    return [f"{holder}.{part}" if holder else part for part in merged.get(name, ())]


def expect_used(several: Iterable[Patterns]) -> None:
    """Raise ``QuantizationError`` for patterns without a match in any part of a model."""
    known = list(several)
    used = {(patterns.setting, pattern) for patterns in known for pattern in patterns.used}
    names = {name for patterns in known for layer in patterns.asked for name in _spellings(layer)}

    for first in known:
        alike = [
            pattern
            for patterns in known
            if patterns.setting == first.setting
            for pattern in patterns.patterns
        ]
        unused = [
            pattern for pattern in dict.fromkeys(alike) if (first.setting, pattern) not in used
        ]
        if unused:
            raise first.error(
                "no layer of the model answers to "
                f"{', '.join(repr(p) + _meant(p, names) for p in unused)}: give names as in "
                "checkpoints, such as 'model.layers.0.mlp.down_proj' or '*.down_proj', or take "
                "these out"
            )


def _spellings(name: str) -> Iterator[str]:
    """Yield the names of a layer and of all modules above, also with ``*`` for the parents."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])
        yield f"*.{parts[end - 1]}"


def _meant(pattern: str, names: Iterable[str]) -> str:
    # The same, below modules that are called otherwise here.
    last = "*." + pattern.rpartition(".")[2]
    names = list(names)
    near = (
        []
        if pattern.startswith("re:")
        else [*near_matches(pattern, names, cutoff=0.8), *({last} & {*names})]
    )
    # The next ones are the same in other layers.
    return f" (did you mean {near[0]!r}?)" if near else ""


class _Glob:
    """A pattern with ``*``, for names of layers or modules above."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def match(self, name: str) -> bool:
        parts = name.split(".")
        return any(
            fnmatchcase(".".join(parts[:end]), self.pattern) for end in range(1, len(parts) + 1)
        )


def _compiled(pattern: str) -> re.Pattern[str] | _Glob:
    if not pattern.startswith("re:"):
        return _Glob(pattern)
    return re.compile(pattern.removeprefix("re:"))
