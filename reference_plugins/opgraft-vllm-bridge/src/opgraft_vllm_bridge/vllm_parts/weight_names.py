"""Names of weights in checkpoints of a plugin's model: ``WeightsMapper`` of vLLM's models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from opgraft import models

Changes = Mapping[str, str | None]


@dataclass
class WeightsMapper:
    """Changes of names: patterns, then substrings, then prefixes, then suffixes.

    All matching changes are made, in order, each at one place. A change to ``None`` drops the
    weight.

    Attributes:
        orig_to_new_stacked: part of a merged layer → the merged layer and the shard. Example:
            ``{".up_proj": (".gate_up_proj", 1)}``.
    """

    orig_to_new_regex: Mapping[re.Pattern[str], str | None] = field(default_factory=dict)
    orig_to_new_substr: Changes = field(default_factory=dict)
    orig_to_new_stacked: Mapping[str, tuple[str, int | str]] = field(default_factory=dict)
    orig_to_new_prefix: Changes = field(default_factory=dict)
    orig_to_new_suffix: Changes = field(default_factory=dict)

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        return WeightsMapper(
            {**self.orig_to_new_regex, **other.orig_to_new_regex},
            {**self.orig_to_new_substr, **other.orig_to_new_substr},
            {**self.orig_to_new_stacked, **other.orig_to_new_stacked},
            {**self.orig_to_new_prefix, **other.orig_to_new_prefix},
            {**self.orig_to_new_suffix, **other.orig_to_new_suffix},
        )

    def merged(self) -> dict[str, dict[str, int | str]]:
        """Return merged layer → its part in a checkpoint → shard, of ``orig_to_new_stacked``."""
        found: dict[str, dict[str, int | str]] = {}
        for part, (layer, shard) in self.orig_to_new_stacked.items():
            found.setdefault(layer.strip("."), {})[part.strip(".")] = shard
        return found

    def map_name(self, key: str) -> str | None:
        """Return the name of a weight in the model, or None for a dropped weight."""
        for pattern, new, count in self._changes():
            if pattern.search(key):
                if new is None:
                    return None
                key = pattern.sub(new, key, count)
        return key

    def _changes(self) -> Iterator[tuple[re.Pattern[str], str | None, int]]:
        """Yield pattern, replacement, and the number of places, 0 for all."""
        for pattern, new in self.orig_to_new_regex.items():
            yield pattern, new, 0
        plain = (
            ("{}", self.orig_to_new_substr),
            (r"\A{}", self.orig_to_new_prefix),
            (r"{}\Z", self.orig_to_new_suffix),
        )
        for form, changes in plain:
            for old, new in changes.items():
                # A replacement has backslashes for groups, and these texts have no groups.
                text = None if new is None else new.replace("\\", r"\\")
                yield re.compile(form.format(re.escape(old))), text, 1


@dataclass(frozen=True)
class InnerNames(models.WeightsMapper):
    """The names of a plugin's model in the model of opgraft that has it as ``inner``."""

    theirs: WeightsMapper | None = None

    def map(self, name: str) -> str | None:
        mapped = self.theirs.map_name(name) if self.theirs else name
        return None if mapped is None else super().map(mapped)
