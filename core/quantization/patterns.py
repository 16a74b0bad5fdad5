"""Names of layers in settings, such as the plain layers of a quantization."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from opgraft.errors import QuantizationError, QuantizationSettingError, near_matches


class Patterns:
    """Names of layers, or of modules with layers.

    ``*`` stands for anything. ``re:`` precedes a regular expression.

    Args:
        patterns: the names.
        setting: the setting with the names, for errors; empty for names from a checkpoint or code.

    Attributes:
        patterns: the names.
        setting: the setting with the names.
        used: patterns with a matching layer so far.
        asked: the names of the layers so far, also inside merged layers.
    """

    def __init__(self, patterns: Sequence[str], setting: str = "") -> None:
        self.setting = setting
        are_names = isinstance(patterns, (list, tuple)) and all(
            isinstance(pattern, str) for pattern in patterns
        )
        if not are_names:
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
        if self.setting:
            return QuantizationSettingError(f"{self.setting}: {message}")
        return QuantizationError(message)

    def match(self, prefix: str, merged: Mapping[str, Sequence[str]]) -> bool:
        """Return True if the layer ``prefix`` matches a pattern.

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
        others = set(parts) - set(found)
        if found and others and not whole:
            raise self.error(
                f"{', '.join(found)} match a pattern and {', '.join(others)} none, but they are "
                f"one layer here, {prefix}: name all of them or none"
            )
        return whole or bool(found)

    def answered(self, prefix: str, merged: Mapping[str, Sequence[str]]) -> set[str]:
        """Return the patterns that match the layer ``prefix``, or a layer inside."""
        names = [prefix, *names_of(prefix, merged)]
        found = set()
        for pattern in self.patterns:
            compiled = _compiled(pattern)
            if any(compiled.match(name) for name in names):
                found.add(pattern)
        return found

    def _matches(self, name: str) -> bool:
        found = {pattern for pattern in self.patterns if _compiled(pattern).match(name)}
        self.used |= found
        return bool(found)


def names_of(prefix: str, merged: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the names of the layers inside a merged layer; none for any other."""
    holder, _, name = prefix.rpartition(".")
    return [f"{holder}.{part}" if holder else part for part in merged.get(name, ())]


def expect_used(several: Iterable[Patterns]) -> None:
    """Refuse patterns without a match in any part of a model.

    Args:
        several: the patterns of all parts. Parts with a common setting have common patterns.

    Raises:
        QuantizationError: a pattern matches no layer.
    """
    known = list(several)
    used = {(patterns.setting, pattern) for patterns in known for pattern in patterns.used}
    names: set[str] = set()
    for patterns in known:
        for layer in patterns.asked:
            names.update(_spellings(layer))
    for first in known:
        unused: dict[str, str] = {}
        for patterns in known:
            if patterns.setting != first.setting:
                continue
            for pattern in patterns.patterns:
                if (first.setting, pattern) not in used:
                    unused[pattern] = repr(pattern) + _hint(pattern, names)
        if unused:
            raise first.error(
                f"no layer of the model answers to {', '.join(unused.values())}: give names as in "
                "checkpoints, such as 'model.layers.0.mlp.down_proj' or '*.down_proj', or take "
                "these out"
            )


def _spellings(name: str) -> Iterator[str]:
    """Yield the names of a layer and of all modules above, also with ``*`` for the parents."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])
        yield f"*.{parts[end - 1]}"


def _hint(pattern: str, names: Collection[str]) -> str:
    """Return a question with the name that was probably meant; empty without such a name."""
    if pattern.startswith("re:"):
        return ""
    near = near_matches(pattern, list(names), cutoff=0.8)
    # The layer may be below modules with other names.
    last = "*." + pattern.rpartition(".")[2]
    if last in names:
        near = [*near, last]
    # Further names are those of other layers.
    return f" (did you mean {near[0]!r}?)" if near else ""


class _Glob:
    """A pattern with ``*``, for names of layers or modules above."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def match(self, name: str) -> bool:
        parts = name.split(".")
        modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return any(fnmatchcase(module, self.pattern) for module in modules)


def _compiled(pattern: str) -> re.Pattern[str] | _Glob:
    if not pattern.startswith("re:"):
        return _Glob(pattern)
    return re.compile(pattern.removeprefix("re:"))
