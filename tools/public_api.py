"""Write down the public names of this version, each with its parameters, since when it is there, and what ends it.

``opgraft plugins compat`` compares plugins with these listings, so that of a former version stays.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from inspect import Parameter
from pathlib import Path
from types import ModuleType
from typing import Any

import opgraft.ops
from opgraft.binding.functional import register_functional
from opgraft.moved import MOVED
from opgraft.plugins import hookspecs
from opgraft.plugins.listing import FOLDER, SCHEMA, Listing, kept_versions, read_listing
from opgraft.version import __version__

FILE = Path(__file__).parents[1] / "plugins" / FOLDER / f"{__version__}.json"
_FAMILIES = tuple(
    f"opgraft.ops.{each.name}" for each in pkgutil.iter_modules(opgraft.ops.__path__) if each.ispkg
)
MODULES = (
    "opgraft",
    "opgraft.ops",
    "opgraft.functional",
    "opgraft.errors",
    "opgraft.models",
    "opgraft.distributed",
    *_FAMILIES,
    "opgraft.ops.linear.weight_cache",
    "opgraft.ops.spec",
    "opgraft.testing.checks",
    "opgraft.testing.contracts",
    "opgraft.testing.proof",
    hookspecs.__name__,
)
"""The modules whose names plugins may use, the one by which a name is known first."""
_NAMES = {
    "opgraft.ops.linear.weight_cache": (
        "WeightCache",
        "declaration",
        "fits",
        "requires_gradient",
        "watched",
    ),
    hookspecs.__name__: tuple(hookspecs.RESULT_TYPES),
}
"""Public names of modules where they are neither in ``__all__`` nor all that the module defines."""
_DEPRECATED = {
    **{
        former: f"import {present}; it goes with the next minor version"
        for former, present in MOVED.items()
    },
    "opgraft.binding.functional.form": f"use opgraft.{register_functional.__name__}; it goes with the next minor "
    "version",
}


def main() -> None:
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text(), encoding="utf-8")


def text() -> str:
    """Return the listing as it must be, a name a line."""
    earlier = [read_listing(version) for version in kept_versions() if version != __version__]
    names = {**dict(_names()), **{name: {"deprecated": why} for name, why in _DEPRECATED.items()}}
    rows = [
        f"    {json.dumps(name)}: {json.dumps({**row, 'since': _since(name, earlier)}, ensure_ascii=False)}"
        for name, row in sorted(names.items())
    ]
    head = f'  "schema": "{SCHEMA}",\n  "version": "{__version__}",\n  "modules": {json.dumps(sorted(MODULES))},\n'
    return "{\n" + head + '  "names": {\n' + ",\n".join(rows) + "\n  }\n}\n"


def _since(name: str, earlier: list[Listing]) -> str:
    return next(
        (str(listing.names[name]["since"]) for listing in earlier if name in listing.names),
        __version__,
    )


def _names() -> Iterator[tuple[str, dict[str, Any]]]:
    known: dict[int, str] = {}
    for module in map(importlib.import_module, MODULES):
        for name in _public(module):
            value = getattr(module, name)
            row = _row(value, known)
            same = (
                known.setdefault(id(value), f"{module.__name__}.{name}") if callable(value) else ""
            )
            aliased = same not in ("", f"{module.__name__}.{name}")
            yield f"{module.__name__}.{name}", {"is": same} if aliased else row
            if isinstance(value, type) and not aliased:
                members = _members(value, known).items()
                yield from ((f"{module.__name__}.{name}.{member}", row) for member, row in members)


def _public(module: ModuleType) -> list[str]:
    """List the public names of a module: as the table or ``__all__`` says, else those that it defines."""
    listed = _NAMES.get(module.__name__) or getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    own = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    ]
    return [name for name in own if not name.startswith("_")]


def _row(value: Any, known: dict[int, str]) -> dict[str, Any]:
    row: dict[str, Any] = {"signature": _signature(value)} if callable(value) else {}
    if isinstance(value, type):
        bases = [known[id(base)] for base in value.__mro__[1:] if id(base) in known]
        row |= {"bases": bases} if bases else {}
    return row


def _members(cls: type, known: dict[int, str]) -> dict[str, dict[str, Any]]:
    """Return the public members that a class defines itself, or has of a base that is not public."""
    public = [base for base in cls.__mro__[1:] if id(base) in known]
    told = {each for base in public for each in base.__mro__}
    own = [base for base in _ours(cls) if base not in told]
    found: dict[str, dict[str, Any]] = {}
    for name, value in (
        (name, value) for base in reversed(own) for name, value in vars(base).items()
    ):
        if not name.startswith("_") and not isinstance(value, type):
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            found[name] = (
                {"signature": _signature(function)} if inspect.isfunction(function) else {}
            )
    return found


def _ours(cls: type) -> list[type]:
    return [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "opgraft"]


def _signature(value: Any) -> str:
    """Write parameters down without annotations and values of defaults, alike on every Python."""
    if isinstance(value, type):  # of others a constructor is another one on another Python
        ours = any({"__init__", "__new__"} & vars(base).keys() for base in _ours(value))
        if issubclass(value, enum.Enum) or not ours:
            return ""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return ""
    empty = Parameter.empty
    shown = [
        p.replace(annotation=empty, default=empty if p.default is empty else _DEFAULT)
        for p in parameters
    ]
    return str(inspect.Signature(shown))


class _Default:
    def __repr__(self) -> str:
        return "..."


_DEFAULT = _Default()


if __name__ == "__main__":
    main()
