"""Parts of the process to look at before and after a step of a plugin: a value, entries of a mapping, an order.

Each tells the changes that lead from a former state to that of now, and how each of them is undone.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from opgraft.base.text import described

ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A change of the process: ``what`` in words, ``undo``, and whether it stays as long as the plugin does.

    ``patch``: it is one of torch, as which the plugin of a device may have to make it.
    ``harmless``: there is nothing to tell once it is set back. ``thread``: one that was started.
    """

    what: str
    undo: Callable[[], object]
    stays: bool = False
    patch: bool = False
    harmless: bool = False
    thread: threading.Thread | None = None

    def set_back(self) -> str:
        """Undo it; returns what came of that, in words."""
        try:
            self.undo()
        except KeyboardInterrupt:
            raise
        except (
            BaseException
        ) as error:  # of a system that does not let it, or of what a plugin has put there
            return f"it cannot be set back: {described(error)}"
        return "it was set back"


def equal(one: Any, other: Any) -> bool:
    """Return True if two values are equal; objects of a plugin, whose comparison may raise, are not."""
    try:
        return one is other or bool(one == other)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return False


class Aspect(Protocol):
    """A part of the process that can be looked at, and the changes that led from one state of it to another."""

    def read(self) -> Any: ...

    def changes(self, before: Any, after: Any) -> Iterator[Change]: ...


@dataclass(frozen=True)
class Value:
    """One value, which ``write`` sets, and which words may quote as ``shown`` has it."""

    name: str
    get: Callable[[], Any]
    write: Callable[[Any], object]
    shown: Callable[[Any], str] = str
    same: Callable[[Any, Any], bool] = equal

    def read(self) -> Any:
        try:
            return self.get()
        except OSError:  # a working folder that is not there any more
            return ABSENT

    def changes(self, before: Any, after: Any) -> Iterator[Change]:
        if before is not after and not self.same(before, after):
            old, new = (
                "nothing" if value is ABSENT else self.shown(value) for value in (before, after)
            )
            yield Change(f"{self.name} from {old} to {new}", partial(self.write, before))


@dataclass(frozen=True)
class Entries:
    """The entries of a mapping. What others had put there is put back; what is new counts where ``additions`` do."""

    name: str
    mapping: MutableMapping[Any, Any]
    same: Callable[[Any, Any], bool] = operator.is_
    additions: bool = True

    def read(self) -> dict[Any, Any]:
        return dict(self.mapping)

    def changes(self, before: dict[Any, Any], after: dict[Any, Any]) -> Iterator[Change]:
        # Most come behind those that were there, which are compared without a loop of Python's.
        begins = [*before] == [*after][: len(before)] and all(
            map(self.same, before.values(), after.values())
        )
        if not begins:
            for key in [
                key for key, value in before.items() if not self.same(after.get(key, ABSENT), value)
            ]:
                yield Change(
                    f"{self.name} {key}", partial(operator.setitem, self.mapping, key, before[key])
                )
        for key in sorted(after.keys() - before.keys()) if self.additions else ():
            yield Change(
                f"{self.name} {key} (new)", partial(self.mapping.pop, key, None), stays=True
            )


@dataclass(frozen=True)
class Order:
    """A list that is searched from its beginning: what a plugin adds goes behind what others have, and with it.

    ``fault`` returns what is wrong with an item, which is then removed, or ``None``.
    """

    name: str
    items: list[Any]
    shown: Callable[[Any], str] = str
    fault: Callable[[Any], str | None] = lambda item: None

    def read(self) -> list[Any]:
        return list(self.items)

    def changes(self, before: list[Any], after: list[Any]) -> Iterator[Change]:
        if very_same(before, after):
            return
        added = [item for item in after if not any(is_same(item, known) for known in before)]
        if len(after) < len(before) or not all(map(is_same, before, after)):
            ordered = [*before, *added]
            yield Change(
                f"the order of {self.name}",
                partial(operator.setitem, self.items, slice(None), ordered),
            )
        for item in added:
            fault = self.fault(item)
            words = f", which {fault}" if fault else " (new)"
            what = f"{self.name} {self.shown(item)}{words}"
            yield Change(what, partial(self._remove, item), stays=fault is None)

    def _remove(self, item: Any) -> None:
        self.items[:] = [each for each in self.items if each is not item]


def is_same(one: Any, other: Any) -> bool:
    """Tell whether two are the same, without asking what a plugin may have put there."""
    return one is other or (type(one) is type(other) is str and one == other)


def very_same(one: list[Any], other: list[Any]) -> bool:
    """Return True if two lists hold the very same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return what reads an attribute, and what sets it."""
    return partial(getattr, owner, name), partial(setattr, owner, name)
