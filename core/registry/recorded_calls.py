"""The recorded calls of opgraft's own classes.

``recorded_calls.json`` lists the calls of each constructor and method: the number of arguments by
position, and the names of the others. ``tools/record_calls.py`` writes the file. The tool runs the
written families, models of transformers, grafted models with composites and quantized layers, with
every class replaced. An op without a call in these models has the call of its spec's example.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Signature
from pathlib import Path

from opgraft.registry.signatures import BY_POSITION, bound_call

FILE = Path(__file__).with_name("recorded_calls.json")
FORWARD = "forward"
"""The name of an op's call in the file, for any ``forward_<key>``."""

FUNCTIONAL = "functional"
"""The word in the file between an op and the name of a form that layers call directly."""


@dataclass(frozen=True, order=True)
class RecordedCall:
    """The shape of a call.

    Attributes:
        positional: the number of arguments by position.
        keywords: the names of the other arguments.
    """

    positional: int
    keywords: tuple[str, ...]

    def failure(self, target: Signature, replacement: Signature) -> str | None:
        """Return the reason why ``replacement`` refuses this call of ``target``, or ``None``."""
        names = [p.name for p in target.parameters.values() if p.kind in BY_POSITION]
        # Further values go to *args of the target, where they have no names.
        unnamed = [f"argument {index}" for index in range(len(names), self.positional)]
        by_position = [*names, *unnamed][: self.positional]
        return bound_call(by_position, self.keywords, target, replacement)


def recorded_calls(cls: type, method: str) -> Sequence[RecordedCall] | None:
    """Return the recorded calls of a constructor or method, or ``None`` if there are none.

    Calls of a base class count too, since callers do not know variants. A constructor
    has the record of the class that defines the constructor.
    """
    table = _table()
    if method == "__init__":
        owner = next(base for base in cls.__mro__ if method in vars(base))
        return table.get(_key_of_call(owner, method)) or table.get(_key_of_call(cls, method))
    found: set[RecordedCall] = set()
    for base in cls.__mro__:
        found.update(table.get(_key_of_call(base, method), ()))
    # None, not an empty list: without a record, callers may make any call.
    return sorted(found) or None


def is_constructed(cls: type) -> bool:
    """Return True if a recorded call constructs the class itself."""
    return _key_of_call(cls, "__init__") in _table()


def forms_called(cls: type) -> Sequence[str]:
    """List the functional forms of an op that layers of opgraft call in place of the op."""
    prefix = _key_of_call(cls, f"{FUNCTIONAL}.")
    return sorted(key.removeprefix(prefix) for key in _table() if key.startswith(prefix))


def written(calls: Mapping[str, Sequence[RecordedCall]]) -> str:
    """Return the text of the file for ``calls``: a line for each constructor and method."""
    rows = []
    # Sorted, so that a new call changes one line of the file.
    for key in sorted(calls):
        shapes = [[call.positional, list(call.keywords)] for call in sorted(calls[key])]
        rows.append(f"  {json.dumps(key)}: {json.dumps(shapes)}")
    return "{\n" + ",\n".join(rows) + "\n}\n"


def read() -> Mapping[str, Sequence[RecordedCall]]:
    """Return every recorded call, by ``module:Class.method``."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        key: [RecordedCall(positional, tuple(keywords)) for positional, keywords in shapes]
        for key, shapes in rows.items()
    }


# Read late: only a replacement with another signature needs the table.
_table = functools.cache(read)


def _key_of_call(cls: type, method: str) -> str:
    return f"{cls.__module__}:{cls.__qualname__}.{method}"
