"""Names of vLLM without a counterpart in opgraft.

A plugin may import such a name and hold it. An error is raised only when the plugin uses the name.
So a missing name in a function that nobody calls costs nothing.
"""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from opgraft.errors import PluginError

from opgraft_vllm_bridge.counterparts import hint

PLUGINS: dict[str, str] = {}
"""Top-level package → the name of its plugin."""

_OWN = __name__.partition(".")[0]
_NOT_PLUGINS = frozenset({_OWN, "importlib", "abc", "typing", "functools"})
_ADVICE = "'opgraft-vllm-bridge names {}' lists the names that it uses"


class MissingNameError(PluginError):
    """A plugin uses a name of vLLM without a counterpart in opgraft."""


class MissingAttributeError(MissingNameError, AttributeError):
    """A missing name as an ``AttributeError``, so that ``hasattr`` answers False."""


def frames_above(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, without frames of imports and of this package."""
    while frame is not None:
        is_import = "importlib" in frame.f_code.co_filename
        if not is_import and _package_of(frame) not in _NOT_PLUGINS:
            yield frame
        frame = frame.f_back


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def caller() -> FrameType:
    """Return the frame of the plugin that called into this package."""
    own = sys._getframe(1)
    return next(frames_above(own), own)


def place_of(frame: FrameType) -> str:
    """Return ``file:line`` of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def plugin_of(frame: FrameType) -> str:
    """Return the name of the plugin whose code a frame runs, or of the frame's package."""
    package = _package_of(frame)
    return PLUGINS.get(package, package)


def absence(
    name: str, does: str, imported: str = "", kind: type[MissingNameError] = MissingNameError
) -> MissingNameError:
    """Return an error about the use of a missing name.

    Args:
        name: the qualified name.
        does: the use as a verb, such as ``calls``.
        imported: ``file:line`` of the import, if the use is another statement.
        kind: the class of the error.
    """
    frame = caller()
    place = place_of(frame)
    plugin = plugin_of(frame)
    where = f" (imported at {imported})" if imported and imported != place else ""
    next_steps = [step for step in (hint(name), _ADVICE.format(plugin)) if step]
    return kind(
        f"the vLLM plugin {plugin!r} {does} {name} at {place}{where}, which opgraft has no "
        f"counterpart of: {'; '.join(next_steps)}",
        place,
    )


class Missing:
    """Stands for a name of vLLM without a counterpart.

    A plugin may import and hold the object, derive classes from it, and write it in annotations,
    also as ``name[...]`` and ``name | None``. Every other use raises a ``MissingNameError``.
    """

    _name: str
    _imported: str

    def __init__(self, name: str, imported: str) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_imported", imported)

    def __repr__(self) -> str:
        return f"<{self._name}, missing in opgraft>"

    def _refuse(self, does: str) -> NoReturn:
        raise absence(self._name, does, self._imported)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        members = {"__module__": "vllm", "_missing": self}
        return (_MissingClass(self._name.rpartition(".")[2], (), members),)

    # Python evaluates annotations when a function is defined.
    def __or__(self, other: Any) -> Missing:
        return self

    __ror__ = __or__

    def __getitem__(self, key: Any) -> Missing:
        return self

    # Modules such as typing compare annotations with their own forms.
    def __eq__(self, other: object) -> bool:
        is_form = type(other).__module__ in ("typing", "types")
        if not (is_form or isinstance(other, (type, Missing))):
            self._refuse("compares")
        return self is other

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        self._refuse(f"takes {name!r} of")

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse(f"sets {name!r} of")

    def __delattr__(self, name: str) -> None:
        self._refuse(f"deletes {name!r} of")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("calls")

    def __bool__(self) -> bool:
        self._refuse("asks the truth of")

    def __iter__(self) -> Iterator[Any]:
        self._refuse("iterates over")

    def __len__(self) -> int:
        self._refuse("takes the length of")

    def __contains__(self, item: object) -> bool:
        self._refuse("looks into")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._refuse("changes")

    def __enter__(self) -> Any:
        self._refuse("enters")

    def __exit__(self, *raised: object) -> None:
        self._refuse("leaves")

    def __instancecheck__(self, instance: object) -> bool:
        self._refuse("asks for instances of")

    def __subclasscheck__(self, cls: type) -> bool:
        self._refuse("asks for subclasses of")

    def _compute(self, other: Any) -> Any:
        self._refuse("computes with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _compute
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _compute
    __lt__ = __le__ = __gt__ = __ge__ = __and__ = __rand__ = _compute


class _MissingClass(ABCMeta):
    """The metaclass of classes that derive from a missing name. Every use of a class raises."""

    _missing: Missing

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise cls._refusal(f"makes an instance of {cls.__name__}, a class that derives from")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        does = f"takes {name!r} of {cls.__name__}, a class that derives from"
        raise cls._refusal(does, MissingAttributeError)

    # A plugin may change what its own class defines, as decorators such as dataclass do.
    def __setattr__(cls, name: str, value: Any) -> None:
        if not (name.startswith("_") or name in vars(cls)):
            raise cls._refusal(f"sets {name!r} of {cls.__name__}, a class that derives from")
        super().__setattr__(name, value)

    def _refusal(cls, does: str, kind: type[MissingNameError] = MissingNameError) -> Exception:
        """Return an error about the use of a class that derives from a missing name."""
        missing = cls._missing
        return absence(missing._name, does, missing._imported, kind)
