"""Names of layers as settings give them: which layers a quantization leaves alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from opgraft.errors import QuantizationError, QuantizationSettingError, near_matches


class Patterns:
    """Names of layers, or of modules that hold them; with ``*`` for anything, or ``re:`` and a regular expression.

    Args:
        patterns: of names.
        setting: which gives them, for errors; empty where a checkpoint does, or code.

    Attributes:
        patterns: as they were given.
        setting: likewise.
        used: those that a layer answered to so far.
        asked: the names of the layers so far, those that merged layers stand for with them.
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
        """Make the error about these patterns, which names the setting that gives them."""
        return (
            QuantizationSettingError(f"{self.setting}: {message}")
            if self.setting
            else QuantizationError(message)
        )

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
        self.asked |= {prefix, *parts}
        found = [part for part in parts if self._matches(part)]
        if found and not whole and len(found) < len(parts):
            raise self.error(
                f"{', '.join(found)} match a pattern and {', '.join(set(parts) - set(found))} none, but they are one "
                f"layer here, {prefix}: name all of them or none"
            )
        return whole or bool(found)

    def answered(self, prefix: str, merged: Mapping[str, Sequence[str]]) -> set[str]:
        """Return the patterns that the layer ``prefix``, or one that it stands for, answers to."""
        names = [prefix, *names_of(prefix, merged)]
        return {
            pattern for pattern in self.patterns for name in names if _compiled(pattern).match(name)
        }

    def expect_all_used(self) -> None:
        """Raise ``QuantizationError`` unless every pattern was answered to, once all layers have been made."""
        expect_used([self])

    def _matches(self, name: str) -> bool:
        found = {pattern for pattern in self.patterns if _compiled(pattern).match(name)}
        self.used |= found
        return bool(found)


def names_of(prefix: str, merged: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names of the layers that a merged layer stands for; none for any other."""
    holder, _, name = prefix.rpartition(".")
    return [f"{holder}.{part}" if holder else part for part in merged.get(name, ())]


def expect_used(several: Iterable[Patterns]) -> None:
    """Raise ``QuantizationError`` for patterns that are used in none of several, as parts of a model have each."""
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
                f"no layer of the model answers to {', '.join(repr(p) + _meant(p, names) for p in unused)}: give names "
                "as in checkpoints, such as 'model.layers.0.mlp.down_proj' or '*.down_proj', or take these out"
            )


def _spellings(name: str) -> Iterator[str]:
    """Yield the names of a layer and of all modules above it, and each of them with ``*`` for what is above it."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])
        yield f"*.{parts[end - 1]}"


def _meant(pattern: str, names: Iterable[str]) -> str:
    last = (
        "*." + pattern.rpartition(".")[2]
    )  # the same, below modules that are called otherwise here
    names = list(names)
    near = (
        []
        if pattern.startswith("re:")
        else [*near_matches(pattern, names, cutoff=0.8), *({last} & {*names})]
    )
    return (
        f" (did you mean {near[0]!r}?)" if near else ""
    )  # the next ones are the same in other layers


class _Glob:
    """A pattern with ``*``, which a name or that of a module above it answers to."""

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
