"""Rows of the process to compare before and after a step of a plugin, and to set back."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol

from opgraft.base.text import described

Awaited = threading.Thread | BaseProcess
"""A thread or a child process, which Python waits for at the end of the process."""

ABSENT = object()
"""Stands for the value of a key that is not there."""

ALONE = ""
"""The key of a row that has one value."""

_THOROUGH: ContextVar[bool] = ContextVar("opgraft_thorough", default=False)


@contextmanager
def thorough() -> Iterator[None]:
    """Compare every row, as the doctor and the conformance kit do, instead of the most harmful."""
    # A variable of the context: another thread may load plugins in a server meanwhile.
    token = _THOROUGH.set(True)
    try:
        yield
    finally:
        _THOROUGH.reset(token)


def is_thorough() -> bool:
    """Return True within ``thorough``."""
    return _THOROUGH.get()


@dataclass(frozen=True)
class Change:
    """A change of the process.

    Attributes:
        what: the change in words.
        undo: sets the former value.
        stays: the change stays as long as the plugin does.
        patch: a change of torch. The plugin of a device may need the change.
        harmless: the change is set back without a message.
        started: a thread or process that must end before this process does.
        new: the function or class in the place of the former one.
    """

    what: str
    undo: Callable[[], object]
    stays: bool = False
    patch: bool = False
    harmless: bool = False
    started: Awaited | None = None
    new: object = None

    def set_back(self) -> str:
        """Undo the change; returns the outcome in words."""
        try:
            self.undo()
        except KeyboardInterrupt:
            raise
        # The system may refuse, and an object of a plugin may raise anything.
        except BaseException as error:
            return f"it cannot be set back: {described(error)}"
        return "it was set back"


class Aspect(Protocol):
    """A part of the process: the way to read the part, and the changes between two readings."""

    def read(self) -> Any: ...

    def changes(self, before: Any, after: Any) -> Iterator[Change]: ...


class Addition(NamedTuple):
    """A new key: the words behind the key in the message, and True if the key stays."""

    words: str
    stays: bool


STAYS = Addition(" (new)", stays=True)


def equal(one: Any, other: Any) -> bool:
    """Return True if two values are equal, False if the comparison raises."""
    try:
        return one is other or bool(one == other)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return False


def _ignored(key: Any, value: Any) -> Addition | None:
    return None


def _never(before: Any, after: Any) -> bool:
    return False


@dataclass(frozen=True)
class GuardedValue:
    """One value of the process, or several by key.

    Attributes:
        name: stands before the key in messages.
        values: returns the values by key, ``ALONE`` for a single value.
        write: sets the value of a key, and removes the key for ``ABSENT``.
        shown: quotes a value in the message; ``None`` leaves the values out.
        same: compares two values.
        added: judges a new key with its value; ``None`` ignores the key.
        harmless: returns True if a change from one value to the other needs no message.
        patch: a change is one of torch.
    """

    name: str
    values: Callable[[], Mapping[Any, Any]]
    write: Callable[[Any, Any], object]
    shown: Callable[[Any], str] | None = None
    same: Callable[[Any, Any], bool] = operator.is_
    added: Callable[[Any, Any], Addition | None] = _ignored
    harmless: Callable[[Any, Any], bool] = _never
    patch: bool = False

    def read(self) -> Mapping[Any, Any]:
        return self.values()

    def changes(self, before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Iterator[Change]:
        for key, old in before.items():
            new = after.get(key, ABSENT)
            # Identity first: a comparison by equality may run code of a plugin.
            if new is old or self.same(old, new):
                continue
            yield Change(
                self._words(key, old, new),
                partial(self.write, key, old),
                patch=self.patch,
                harmless=self.harmless(old, new),
            )
        for key, value in after.items():
            if key in before:
                continue
            addition = self.added(key, value)
            if addition is not None:
                yield self._addition(key, value, addition)

    def _addition(self, key: Any, value: Any, addition: Addition) -> Change:
        return Change(
            f"{self.name} {key}{addition.words}",
            partial(self.write, key, ABSENT),
            stays=addition.stays,
            patch=self.patch,
            started=value if isinstance(value, Awaited) else None,
        )

    def _words(self, key: Any, old: Any, new: Any) -> str:
        subject = f"{self.name} {key}".rstrip()
        if self.shown is None:
            return subject
        return f"{subject} from {self._quoted(old)} to {self._quoted(new)}"

    def _quoted(self, value: Any) -> str:
        if self.shown is None or value is ABSENT:
            return "nothing"
        return self.shown(value)


def value(
    name: str,
    get: Callable[[], Any],
    write: Callable[[Any], object],
    shown: Callable[[Any], str] | None = str,
    same: Callable[[Any, Any], bool] = equal,
    harmless: Callable[[Any, Any], bool] = _never,
) -> GuardedValue:
    """Return the row of one value."""

    def values() -> dict[str, Any]:
        try:
            return {ALONE: get()}
        # The row goes on without a value, and the change to a folder is still named.
        except OSError:  # the working folder is gone
            return {ALONE: ABSENT}

    def write_it(_: Any, former: Any) -> None:
        write(former)

    return GuardedValue(name, values, write_it, shown, same, harmless=harmless)


def attribute(
    owner: Any,
    name: str,
    shown: Callable[[Any], str] = str,
    same: Callable[[Any, Any], bool] = equal,
) -> GuardedValue:
    """Return the row of an attribute of a module."""
    read, write = partial(getattr, owner, name), partial(setattr, owner, name)
    return value(f"{owner.__name__}.{name}", read, write, shown, same)


def entries(
    name: str,
    mapping: MutableMapping[Any, Any],
    added: Callable[[Any, Any], Addition | None],
    same: Callable[[Any, Any], bool] = operator.is_,
) -> GuardedValue:
    """Return the row of a mapping."""

    def write(key: Any, former: Any) -> None:
        if former is ABSENT:
            mapping.pop(key, None)
        else:
            mapping[key] = former

    return GuardedValue(name, partial(dict, mapping), write, same=same, added=added)


class Item(NamedTuple):
    """The key of an item in a list: the words for the item, and its identity."""

    words: str
    identity: int | str

    def __str__(self) -> str:
        return self.words


def search_order(
    owner: Any,
    attr: str,
    shown: Callable[[Any], str],
    added: Callable[[Any, Any], Addition | None],
) -> tuple[GuardedValue, GuardedValue]:
    """Return two rows of a list with an order of search: the order, and the items.

    New items go behind the former ones.
    """
    name = f"{owner.__name__}.{attr}"
    items = partial(getattr, owner, attr)

    def key_of(item: Any) -> Item:
        return Item(shown(item), _identity(item))

    def by_key() -> dict[Item, Any]:
        return {key_of(item): item for item in items()}

    def begins(before: list[Any], after: list[Any]) -> bool:
        former = list(map(_identity, before))
        return list(map(_identity, after[: len(before)])) == former

    def put_behind(before: list[Any]) -> None:
        # Another step may have added items since, which stay in their order.
        now = items()
        now[:] = [*before, *_others(now, before)]

    def remove(key: Item, _: Any) -> None:
        now = items()
        now[:] = [item for item in now if key_of(item) != key]

    order = value(f"the order of {name}", lambda: list(items()), put_behind, None, begins)
    return order, GuardedValue(name, by_key, remove, same=lambda old, new: True, added=added)


def rebinding(owner: Any, attr: str) -> GuardedValue:
    """Return the row of the list itself: another one in its place leaves its new items behind.

    The rows of ``search_order`` read and judge these items afterwards.
    """

    def put_back(former: Any) -> None:
        other = getattr(owner, attr, None)
        setattr(owner, attr, former)
        # A plugin may write sys.path = [folder, *sys.path], and needs the folder.
        if isinstance(other, list) and isinstance(former, list):
            former.extend(_others(other, former))

    now = partial(getattr, owner, attr, None)
    return value(f"the list {owner.__name__}.{attr}", now, put_back, None, operator.is_)


def _identity(item: Any) -> int | str:
    # Equal strings are one entry. Other items may belong to a plugin: nothing asks them.
    return item if type(item) is str else id(item)


def _others(items: Iterable[Any], known: Iterable[Any]) -> list[Any]:
    """Return the items that are not among the known ones."""
    identities = set(map(_identity, known))
    return [item for item in items if _identity(item) not in identities]


def very_same(one: list[Any], other: list[Any]) -> bool:
    """Return True if two lists hold the very same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))
